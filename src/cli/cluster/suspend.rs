//! `evenkeel suspend` and `evenkeel resume`: release the GPUs of a TrainingJob and acquire them
//! again.

use std::process::ExitCode;

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

/// The job to suspend or resume.
#[derive(clap::Args)]
pub struct Args {
    /// Name of the TrainingJob
    job: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub fn suspend(args: Args) -> anyhow::Result<ExitCode> {
    set(args, true, "commits a checkpoint and releases its GPUs")
}

pub fn resume(args: Args) -> anyhow::Result<ExitCode> {
    set(args, false, "resumes from its newest checkpoint")
}

fn set(args: Args, suspend: bool, what: &str) -> anyhow::Result<ExitCode> {
    args.cluster
        .run(async |cluster| Ok(change::suspend(cluster, &args.job, suspend).await?))?;
    line(format_args!("{} {what}", args.job))?;
    Ok(ExitCode::SUCCESS)
}
