//! Progress of a TrainingJob, or the output of one of its ranks.

use std::process::ExitCode;

use super::ClusterArgs;
use super::submit::{self, Watching};
use crate::cli::output::line;
use crate::client;
use crate::telemetry::{Display, Mode};

/// What to show of a job, and how long.
pub struct Shown {
    /// The output of this rank of the newest generation; `None`: the progress.
    pub rank: Option<u64>,
    /// Until the job ends.
    pub follow: bool,
}

pub fn run(job: &str, cluster: &ClusterArgs, shown: &Shown) -> anyhow::Result<ExitCode> {
    match (shown.rank, shown.follow) {
        (Some(rank), follow) => {
            let mut unprinted = None;
            cluster.run(async |cluster| {
                let mut each = |text: &str| match line(text) {
                    Ok(()) => true,
                    Err(error) => {
                        unprinted = Some(error);
                        false
                    }
                };
                Ok(client::rank(cluster, job, rank, follow, &mut each).await?)
            })?;
            unprinted.map_or(Ok(ExitCode::SUCCESS), |error| Err(error.into()))
        }
        (None, true) => submit::watch(&Watching {
            job,
            cluster,
            mode: Mode::detect(),
        }),
        (None, false) => {
            let mut display = Display::new(Mode::Plain);
            cluster.run(async |cluster| {
                let mut each = |event: &_| display.event(event);
                Ok(client::training(cluster, job, &mut each).await?)
            })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
