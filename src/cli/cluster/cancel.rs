//! `evenkeel cancel`: the end of a TrainingJob before its time.

use std::process::ExitCode;

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

/// End a TrainingJob and delete it with its pods. What it has committed stays on its volume.
#[derive(clap::Args)]
pub struct Args {
    /// The TrainingJob
    job: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let job = args
        .cluster
        .run(async |cluster| Ok(change::cancel(cluster, &args.job).await?))?;
    let pin = job.status.and_then(|status| status.checkpoint);
    let kept = match pin {
        Some(pin) => format!("its newest checkpoint, {}, stays on the volume", pin.path),
        None => "it had no checkpoint yet".into(),
    };
    line(format_args!("{} is being deleted; {kept}", args.job))?;
    Ok(ExitCode::SUCCESS)
}
