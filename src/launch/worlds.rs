//! A run's plans in the worlds that it may move to.

use super::{LaunchError, RunDir, history};
use crate::plan::{self, Plan, PlanRequest, Reached, Worlds};
use crate::train::Run;

/// The worlds of a run whose recipe is not read again.
fn of_setup(run: &Run) -> Worlds {
    let request = PlanRequest {
        model_config: run.model_config.clone(),
        data_samples: run.data_samples,
        ..PlanRequest::of(run.runner(), 1)
    };
    Worlds::new(run.recipe(), request, run.device_memory)
}

/// The formula of a run at `world` ranks, with its current progress.
pub fn formula_of_run(run_dir: &RunDir, world: u64) -> Result<String, LaunchError> {
    let run = run_dir.run()?;
    let state = run_dir.state()?.unwrap_or_default();
    let reached = Reached {
        batch: history::current_batch(run_dir, &state),
        ..state.reached(&run)
    };
    Ok(of_setup(&run)
        .plan(world, reached)?
        .formula_at(reached.batch))
}

/// An untrained run whose micro-batch of `failed` did not fit, restarted as upstream would: a
/// smaller micro-batch and the same accumulation. Its global batch, and all lengths counted in
/// steps, shrink.
pub fn shrunk(run: &Run, failed: &Plan, per_device_batch_size: u64) -> Run {
    let passes = failed.gradient_accumulation_steps;
    let global_batch_size = failed.data_parallel_size * per_device_batch_size * passes;
    let horizon = plan::horizon(&run.spec, global_batch_size, run.data_samples);
    Run {
        global_batch_size,
        horizon,
        ..run.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::RunState;
    use crate::launch::testing::Launched;

    #[test]
    fn a_run_is_planned_again_as_it_was_launched() {
        let numbers = "batch: {per_device_batch_size: 2, accumulation: 3, gpus: 2}";
        for (batch, overrides, global) in [
            (numbers, vec![], 12),
            (numbers, vec!["batch.global=24"], 24),
            ("batch: {global: 12, per_device_batch_size: 2}", vec![], 12),
            (
                "batch: {global: 12, per_device_batch_size: 2}",
                vec!["batch.remainder=uneven"],
                12,
            ),
        ] {
            let place = tempfile::tempdir().unwrap();
            let launched = Launched::at(place.path(), batch, &overrides);
            let planned = &launched.planned.plan;
            assert_eq!(planned.global_batch_size, global);
            let run = &launched.prepared.run;
            let reached = RunState::default().reached(run);
            let world = planned.facts.world_size;
            let mut again = of_setup(run).plan(world, reached).unwrap();
            // The warnings were already shown at the launch.
            again.facts.diagnostics = planned.facts.diagnostics.clone();
            assert_eq!(&again, planned, "{overrides:?}");
        }
    }

    #[test]
    fn a_shrunk_run_is_planned_with_the_smaller_micro_batch_and_the_same_accumulation() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(
            place.path(),
            "batch: {global: 64, per_device_batch_size: 16}",
            &[],
        );
        let failed = &launched.planned.plan;
        assert_eq!(failed.formula, "2 × 16 × 2 = 64");
        let run = shrunk(&launched.prepared.run, failed, 14);
        let reached = Reached {
            per_device_batch_size_limit: Some(14),
            ..RunState::default().reached(&run)
        };
        let worlds = of_setup(&run);
        let again = worlds.plan(failed.facts.world_size, reached).unwrap();
        assert_eq!(again.formula, "2 × 14 × 2 = 56");
    }

    #[test]
    fn a_world_with_one_group_is_refused_with_that_reason() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(
            place.path(),
            "batch: {global: 12, per_device_batch_size: 2}\nschedule: {kind: norm-test, groups: workers}",
            &[],
        );
        let worlds = &launched.prepared.worlds;
        let reached = RunState::default().reached(&launched.prepared.run);
        assert!(worlds.is_feasible(2, reached));
        assert_eq!(
            worlds.refused_split(1, reached).as_deref(),
            Some("`groups: workers` compares workers, and this world has 1")
        );
        assert!(!worlds.is_feasible(5, reached));
        assert_eq!(worlds.refused_split(5, reached), None);
    }
}
