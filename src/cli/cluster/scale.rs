//! `evenkeel scale`: changes the number of nodes of a TrainingJob.

use std::process::ExitCode;

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

/// Move a TrainingJob to another number of nodes. Its global batch stays the same.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel scale first 4            to 4 nodes, or the largest feasible number below
  kubectl scale tj first --replicas 4    the same
  evenkeel suspend first            0 nodes: commit a checkpoint and wait for `resume`")]
pub struct Args {
    /// Name of the TrainingJob
    job: String,
    /// New number of nodes
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    nodes: u32,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let job = args
        .cluster
        .run(async |cluster| Ok(change::scale(cluster, &args.job, args.nodes).await?))?;
    let feasible = job.status.and_then(|status| status.plan);
    let feasible = feasible.map(|plan| plan.feasible_nodes).unwrap_or_default();
    let will = feasible.iter().filter(|nodes| **nodes <= args.nodes).max();
    let note = match will {
        Some(nodes) if *nodes != args.nodes => {
            format!(
                "; {} nodes do not split its batch exactly, so it uses {nodes}",
                args.nodes
            )
        }
        _ => String::new(),
    };
    line(format_args!(
        "{}: {} nodes requested{note}",
        args.job, args.nodes
    ))?;
    Ok(ExitCode::SUCCESS)
}
