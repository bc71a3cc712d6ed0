//! Progress of a TrainingJob, or the output of one of its ranks.

use std::process::ExitCode;

use super::ClusterArgs;
use super::submit::{self, Watching};
use crate::cli::output::print_as_is;
use crate::client;
use crate::telemetry::{Display, Mode};

/// What to show of a run or job.
#[derive(Clone, Copy)]
pub enum Asked {
    Rank(u64),
    Steps,
    /// The steps of the built-in trainer; what rank 0 of an external one prints.
    WhatTheTrainerHas,
}

impl Asked {
    /// The rank whose output is shown; `None`: the steps are.
    pub fn rank_of(self, external: bool) -> Option<u64> {
        match self {
            Asked::Rank(rank) => Some(rank),
            Asked::WhatTheTrainerHas if external => Some(0),
            Asked::Steps | Asked::WhatTheTrainerHas => None,
        }
    }
}

/// Shows a job, with `follow` until it ends.
pub fn run(
    job: &str,
    cluster: &ClusterArgs,
    asked: Asked,
    follow: bool,
) -> anyhow::Result<ExitCode> {
    // A job is followed to its end, over all generations, by its steps.
    let external = match asked {
        Asked::WhatTheTrainerHas if !follow => {
            let job = cluster.run(async |cluster| Ok(cluster.job(job).await?))?;
            let status = job.status.unwrap_or_default();
            !status.command(&job.spec).is_empty()
        }
        _ => false,
    };
    match (asked.rank_of(external), follow) {
        (Some(rank), follow) => {
            let mut unprinted = None;
            cluster.run(async |cluster| {
                let mut each = |text: &str| match print_as_is(format_args!("{text}\n")) {
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
