//! Schedules that do not use gradients: stages by samples, and the replay of a recorded run.

use crate::recipe::schema::spec::{ReplayRun, Stage};

/// The batch of the step that starts after `samples` of the `budget`: that of the first stage whose share is
/// not used up, or of the last stage after the end.
pub(super) fn stage_batch(stages: &[Stage], budget: u64, samples: u64) -> Option<u64> {
    let mut share = 0.0;
    stages
        .iter()
        .find(|stage| {
            share += stage.share;
            (samples as f64) < share * budget as f64
        })
        .or(stages.last())
        .map(|stage| stage.batch)
}

/// The batch of the step after `steps` steps; after the last run its batch remains.
pub(super) fn replayed_batch(runs: &[ReplayRun], steps: u64) -> Option<u64> {
    let mut end = 0u64;
    runs.iter()
        .find(|run| {
            end = end.saturating_add(run.steps);
            steps < end
        })
        .or(runs.last())
        .map(|run| run.batch)
}
