//! `evenkeel scale`: how many nodes a TrainingJob is to have.

use std::process::ExitCode;

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

/// Move a TrainingJob to another number of nodes; its global batch stays.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel scale first 4            to 4 nodes, or the largest feasible number below
  kubectl scale tj first --replicas 4    the same
  evenkeel suspend first            to none: it commits a checkpoint and waits for `resume`")]
pub struct Args {
    /// The TrainingJob
    job: String,
    /// Nodes
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
                "; {} do not split its batch exactly, it goes to {nodes}",
                args.nodes
            )
        }
        _ => String::new(),
    };
    line(format_args!(
        "{} wants {} nodes{note}",
        args.job, args.nodes
    ))?;
    Ok(ExitCode::SUCCESS)
}
