//! Releases the GPUs of a TrainingJob and acquires them again.

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

pub fn suspend(job: &str, cluster: &ClusterArgs) -> anyhow::Result<()> {
    let what = "commits a checkpoint and releases its GPUs";
    set(job, cluster, true, what)
}

pub fn resume(job: &str, cluster: &ClusterArgs) -> anyhow::Result<()> {
    set(job, cluster, false, "resumes from its newest checkpoint")
}

fn set(job: &str, cluster: &ClusterArgs, suspend: bool, what: &str) -> anyhow::Result<()> {
    cluster.run(async |cluster| Ok(change::suspend(cluster, job, suspend).await?))?;
    line(format_args!("{job} {what}"))?;
    Ok(())
}
