//! A run's plans in the worlds that it may move to, before and during training.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::{LaunchError, RunDir, history};
use crate::plan::{self, DeviceMemory, Plan, PlanRequest, Reached, Refused, Runner};
use crate::train::Setup;

/// The plan request for a world on this machine, whose devices have this memory.
pub fn request(
    world: u64,
    reached: Reached,
    runner: Runner,
    memory: Option<DeviceMemory>,
) -> PlanRequest {
    PlanRequest {
        device_memory: memory.map(|memory| memory.of_rank(world)),
        ..PlanRequest::of(runner, world)
    }
    .after(reached)
}

/// The formula of a run at `world` ranks, with its current progress.
pub fn formula_of_run(run: &RunDir, world: u64) -> Result<String, LaunchError> {
    let setup = run.setup()?;
    let state = run.state()?.unwrap_or_default();
    let reached = Reached {
        batch: history::current_batch(run, &state),
        ..state.reached(&setup)
    };
    Ok(plan(&setup, world, reached)?.formula_at(reached.batch))
}

/// The plan of a setup at `world` ranks.
pub fn plan(setup: &Setup, world: u64, reached: Reached) -> Result<Plan, Refused> {
    plan::plan(
        &setup.recipe(),
        &PlanRequest {
            model_config: setup.model_config.clone(),
            data_samples: setup.data_samples,
            ..request(world, reached, setup.runner(), setup.device_memory)
        },
    )
}

/// The next micro-batch after out-of-memory: the largest below that of `failed` for which this
/// world has an accepted plan.
pub fn descend(setup: &Setup, failed: &Plan, reached: Reached) -> Option<u64> {
    let current = reached.batch.unwrap_or(failed.global_batch_size);
    plan::descend(failed, current).find(|&per_device_batch_size| {
        let reached = Reached {
            per_device_batch_size_limit: Some(per_device_batch_size),
            ..reached
        };
        plan(setup, failed.outline.world_size, reached).is_ok()
    })
}

/// An untrained run whose micro-batch of `failed` did not fit, restarted as upstream would: a
/// smaller micro-batch and the same accumulation. Its global batch, and all lengths counted in
/// steps, shrink.
pub fn shrunk(setup: &Setup, failed: &Plan, per_device_batch_size: u64) -> Setup {
    let passes = failed.gradient_accumulation_steps;
    let global_batch_size = failed.data_parallel_size * per_device_batch_size * passes;
    let horizon = plan::horizon(&setup.spec, global_batch_size, setup.data_samples);
    Setup {
        global_batch_size,
        budget_samples: horizon.budget_samples.or(setup.budget_samples),
        horizon,
        ..setup.clone()
    }
}

/// Whether the run can use a world.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Feasible,
    /// The world does not split the batch.
    Indivisible,
    /// A rule refuses the world although it splits the batch.
    Refused(String),
}

impl Verdict {
    fn of(planned: Result<Plan, Refused>) -> Verdict {
        let Err(refused) = planned else {
            return Verdict::Feasible;
        };
        let mut errors = refused.diagnostics.iter();
        let first = errors.find(|diagnostic| diagnostic.is_error());
        match (refused.draft.split, first) {
            (Some(_), Some(error)) => Verdict::Refused(error.message.clone()),
            _ => Verdict::Indivisible,
        }
    }
}

/// The feasible worlds. Each is planned once and cached across passes.
#[derive(Default)]
pub struct Feasible(RefCell<(Reached, BTreeMap<u64, Verdict>)>);

impl Feasible {
    /// Whether the run has a plan at `world` ranks.
    pub fn at(&self, setup: &Setup, world: u64, reached: Reached) -> bool {
        self.verdict(setup, world, reached) == Verdict::Feasible
    }

    /// Why a world that splits the batch is not feasible; `None` for all others.
    pub fn refusal(&self, setup: &Setup, world: u64, reached: Reached) -> Option<String> {
        match self.verdict(setup, world, reached) {
            Verdict::Refused(message) => Some(message),
            Verdict::Feasible | Verdict::Indivisible => None,
        }
    }

    fn verdict(&self, setup: &Setup, world: u64, reached: Reached) -> Verdict {
        let verdict = || Verdict::of(plan(setup, world, reached));
        self.remember(world, reached, verdict)
    }

    fn remember(&self, world: u64, reached: Reached, plan: impl FnOnce() -> Verdict) -> Verdict {
        let mut known = self.0.borrow_mut();
        if known.0 != reached {
            *known = (reached, BTreeMap::new());
        }
        known.1.entry(world).or_insert_with(plan).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

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
            let reached = RunState::default().reached(&launched.prepared.setup);
            let mut again = plan(
                &launched.prepared.setup,
                planned.outline.world_size,
                reached,
            )
            .unwrap();
            // The warnings were already shown at the launch.
            again.outline.diagnostics = planned.outline.diagnostics.clone();
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
        let setup = shrunk(&launched.prepared.setup, failed, 14);
        let reached = Reached {
            per_device_batch_size_limit: Some(14),
            ..RunState::default().reached(&setup)
        };
        let again = plan(&setup, failed.outline.world_size, reached).unwrap();
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
        let setup = &launched.prepared.setup;
        let feasible = Feasible::default();
        let reached = RunState::default().reached(setup);
        assert!(feasible.at(setup, 2, reached));
        let refusal = |world| feasible.refusal(setup, world, reached);
        assert_eq!(
            refusal(1).as_deref(),
            Some("`groups: workers` compares workers, and this world has 1")
        );
        assert!(!feasible.at(setup, 5, reached));
        assert_eq!(refusal(5), None);
    }

    #[test]
    fn a_world_is_planned_once_until_the_run_progresses() {
        let planned = Cell::new(0);
        let feasible = Feasible::default();
        let ask = |world: u64, reached| {
            feasible.remember(world, reached, || {
                planned.set(planned.get() + 1);
                if world.is_multiple_of(2) {
                    Verdict::Feasible
                } else {
                    Verdict::Indivisible
                }
            }) == Verdict::Feasible
        };
        let start = Reached::default();
        assert!(ask(4, start) && ask(4, start) && !ask(3, start) && !ask(3, start));
        assert_eq!(planned.get(), 2);
        let grown = Reached {
            batch: Some(24),
            ..start
        };
        assert!(ask(4, grown) && ask(4, grown));
        assert_eq!(planned.get(), 3);
        let starved = Reached {
            per_device_batch_size_limit: Some(2),
            ..grown
        };
        assert!(ask(4, starved));
        assert_eq!(planned.get(), 4);
    }
}
