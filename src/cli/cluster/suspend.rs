//! `evenkeel suspend` and `evenkeel resume`: a TrainingJob's GPUs given back and taken again.

use std::process::ExitCode;

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

/// Which job.
#[derive(clap::Args)]
pub struct Args {
    /// The TrainingJob
    job: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub fn suspend(args: Args) -> anyhow::Result<ExitCode> {
    set(args, true, "commits a checkpoint and gives its GPUs back")
}

pub fn resume(args: Args) -> anyhow::Result<ExitCode> {
    set(args, false, "goes on from its newest checkpoint")
}

fn set(args: Args, suspend: bool, what: &str) -> anyhow::Result<ExitCode> {
    args.cluster
        .run(async |cluster| Ok(change::suspend(cluster, &args.job, suspend).await?))?;
    line(format_args!("{} {what}", args.job))?;
    Ok(ExitCode::SUCCESS)
}
