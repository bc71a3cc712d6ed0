//! `evenkeel logs`: progress of a TrainingJob, or the output of one of its ranks.

use std::process::ExitCode;

use super::ClusterArgs;
use super::submit::{self, Watching};
use crate::cli::output::line;
use crate::client;
use crate::telemetry::{Display, Mode};

/// Show the progress of a TrainingJob, or the output of a rank.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel logs first              training progress, from the pod of rank 0
  evenkeel logs -f first           follow it with progress bars
  evenkeel logs first --rank 3     output of rank 3")]
pub struct Args {
    /// Name of the TrainingJob
    job: String,
    /// Show the output of this rank of the newest generation
    #[arg(long, value_name = "R")]
    rank: Option<u64>,
    /// Follow until the job ends; Ctrl-C leaves it running
    #[arg(short, long)]
    follow: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match (args.rank, args.follow) {
        (Some(rank), follow) => {
            let mut unprinted = None;
            args.cluster.run(async |cluster| {
                let mut each = |text: &str| match line(text) {
                    Ok(()) => true,
                    Err(error) => {
                        unprinted = Some(error);
                        false
                    }
                };
                Ok(client::rank(cluster, &args.job, rank, follow, &mut each).await?)
            })?;
            unprinted.map_or(Ok(ExitCode::SUCCESS), |error| Err(error.into()))
        }
        (None, true) => submit::watch(&Watching {
            job: &args.job,
            cluster: &args.cluster,
            mode: Mode::detect(),
        }),
        (None, false) => {
            let mut display = Display::new(Mode::Plain);
            args.cluster.run(async |cluster| {
                let mut each = |event: &_| display.event(event);
                Ok(client::training(cluster, &args.job, &mut each).await?)
            })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
