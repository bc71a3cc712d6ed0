//! A run's committed history: of every generation what counts, in the order of training.

use super::{LaunchError, RunDir, RunState};
use crate::telemetry::metrics::{self, History};

/// The steps and evaluations of the lineage that counts.
pub fn committed(run: &RunDir, state: &RunState) -> Result<History, LaunchError> {
    let mut generations = Vec::new();
    for row in &state.generations {
        let path = run.metrics(row.number);
        generations.push(metrics::Generation {
            start_samples: row.start_samples,
            // A generation that ended before its first step has no file.
            metrics: match path.exists() {
                true => metrics::read(&path)?.metrics,
                false => Vec::new(),
            },
        });
    }
    Ok(metrics::committed(&generations))
}
