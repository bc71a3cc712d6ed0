//! The history of a run: committed steps of the current lineage, and the current batch.

use super::{LaunchError, RunDir, RunState};
use crate::telemetry::metrics::{self, History};
use crate::telemetry::{Metric, StepRecord};

/// Steps and evaluations of the current lineage.
pub fn committed(run_dir: &RunDir, state: &RunState) -> Result<History, LaunchError> {
    let mut generations = Vec::new();
    for row in &state.generations {
        let path = run_dir.metrics(row.number);
        // A generation that ended before its first step wrote no file.
        let metrics = if path.exists() {
            metrics::read(&path)?.metrics
        } else {
            Vec::new()
        };
        // An external trainer tells only by its first report from where it continues.
        let first = metrics.iter().find_map(|metric| match metric {
            Metric::Step(step) => Some(step.samples.saturating_sub(1)),
            Metric::Evaluation(_) => None,
        });
        generations.push(metrics::Generation {
            start_samples: row.start_samples.or(first).unwrap_or(u64::MAX),
            metrics,
        });
    }
    Ok(metrics::committed(&generations))
}

/// The newest recorded steps of the newest generation that has any, committed or not; the newest first.
pub fn last_steps(run_dir: &RunDir, state: &RunState) -> Vec<StepRecord> {
    let generations = state.generations.iter().rev();
    let mut steps = generations.map(|row| metrics::last_steps(&run_dir.metrics(row.number)));
    steps.find(|steps| !steps.is_empty()).unwrap_or_default()
}

/// The run's current batch: that of its checkpoint's next step, or of a later step.
pub fn current_batch(run_dir: &RunDir, state: &RunState) -> Option<u64> {
    let row = state.generations.last();
    let step = row.and_then(|row| metrics::last_step(&run_dir.metrics(row.number)));
    match (step, &state.checkpoint_ref) {
        (Some(step), _) if step.samples > state.committed_samples() => Some(step.batch),
        (_, checkpoint_ref) => Some(checkpoint_ref.as_ref()?.batch),
    }
}

/// The formula of that batch in the newest generation.
pub fn current_formula(run_dir: &RunDir, state: &RunState) -> Option<String> {
    let row = state.generations.last()?;
    Some(match run_dir.record(row.number) {
        Ok(record) => record.plan.formula_at(current_batch(run_dir, state)),
        // Fall back to the formula at the generation's start.
        Err(_) => row.formula.clone(),
    })
}
