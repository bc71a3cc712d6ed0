//! `evenkeel cancel`: deletes a TrainingJob.

use std::process::ExitCode;

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

/// Delete a TrainingJob and its pods. Its committed checkpoints stay on the volume.
#[derive(clap::Args)]
pub struct Args {
    /// Name of the TrainingJob
    job: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let job = args
        .cluster
        .run(async |cluster| Ok(change::cancel(cluster, &args.job).await?))?;
    let checkpoint_ref = job.status.and_then(|status| status.checkpoint);
    let kept = match checkpoint_ref {
        Some(checkpoint_ref) => format!(
            "its newest checkpoint, {}, stays on the volume",
            checkpoint_ref.path
        ),
        None => "it has no checkpoint".into(),
    };
    line(format_args!("{} is being deleted; {kept}", args.job))?;
    Ok(ExitCode::SUCCESS)
}
