//! Changes the number of nodes of a TrainingJob.

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

/// Requests another number of nodes.
pub fn run(job: &str, cluster: &ClusterArgs, nodes: u32) -> anyhow::Result<()> {
    let changed = cluster.run(async |cluster| Ok(change::scale(cluster, job, nodes).await?))?;
    let feasible = changed.status.and_then(|status| status.plan);
    let feasible = feasible.map(|plan| plan.feasible_nodes).unwrap_or_default();
    let will = feasible.iter().filter(|wanted| **wanted <= nodes).max();
    let note = match will {
        Some(will) if *will != nodes => {
            format!("; {nodes} nodes do not split its batch exactly, so it uses {will}")
        }
        _ => String::new(),
    };
    line(format_args!("{job}: {nodes} nodes requested{note}"))?;
    Ok(())
}
