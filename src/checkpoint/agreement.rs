//! Agreement of the ranks on a checkpoint: all of them have it, or none.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::commit::{Contents, abandon, commit};
use super::manifest::Part;
use super::names::{Committed, Target};
use super::{CheckpointError, Writer};
use crate::comm::Collective;

/// Waits for the files of every rank; rank 0, the coordinator, commits them and reports the result to all.
/// Collective: every rank calls it with its own writer and the same target and contents. If one rank fails,
/// all ranks return an error; the failed rank returns its own.
pub fn finish_together(
    writer: Writer,
    target: &Target,
    contents: Contents<'_>,
    world: &dyn Collective,
) -> Result<Committed, CheckpointError> {
    let own = writer.finish();
    let reports: Vec<Report<Part>> = exchange(world, &Report::of(&own))?;
    let parts: Result<Vec<Part>, CheckpointError> = reports
        .into_iter()
        .enumerate()
        .map(|(rank, report)| report.of_rank(rank))
        .collect();
    let coordinator = world.rank() == 0;
    if parts.is_err() {
        if coordinator {
            // The first error is the one to report.
            let _ = abandon(target);
        }
        own?;
    }
    let parts = parts?;

    let own = coordinator.then(|| commit(target, &parts, contents));
    let report = own.as_ref().map(Report::of);
    let reports: Vec<Option<Report<Committed>>> = exchange(world, &report)?;
    if let Some(own) = own {
        return own;
    }
    let report = reports.into_iter().next().flatten();
    let missing = Report::Failed("it sent no result".to_string());
    report.unwrap_or(missing).of_rank(0)
}

/// A rank's result, as the other ranks receive it.
#[derive(Serialize, Deserialize)]
enum Report<T> {
    Done(T),
    Failed(String),
}

impl<T: Clone> Report<T> {
    fn of(result: &Result<T, CheckpointError>) -> Self {
        match result {
            Ok(done) => Report::Done(done.clone()),
            Err(error) => Report::Failed(error.to_string()),
        }
    }

    fn of_rank(self, rank: usize) -> Result<T, CheckpointError> {
        match self {
            Report::Done(done) => Ok(done),
            Report::Failed(reason) => Err(CheckpointError::OtherRank { rank, reason }),
        }
    }
}

/// The messages of all ranks, in rank order.
fn exchange<T: Serialize + DeserializeOwned>(
    world: &dyn Collective,
    message: &T,
) -> Result<Vec<T>, CheckpointError> {
    let garbled =
        |error: serde_json::Error| CheckpointError::Misuse(format!("garbled report: {error}"));
    let message = serde_json::to_vec(message).map_err(garbled)?;
    let messages = world.exchange(&message)?;
    messages
        .iter()
        .map(|message| serde_json::from_slice(message).map_err(garbled))
        .collect()
}
