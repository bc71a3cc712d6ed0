//! Deletes a TrainingJob.

use super::ClusterArgs;
use crate::cli::output::line;
use crate::client::change;

pub fn run(job: &str, cluster: &ClusterArgs) -> anyhow::Result<()> {
    let deleted = cluster.run(async |cluster| Ok(change::cancel(cluster, job).await?))?;
    let checkpoint_ref = deleted.status.and_then(|status| status.checkpoint);
    let kept = match checkpoint_ref {
        Some(checkpoint_ref) => format!(
            "its newest checkpoint, {}, stays on the volume",
            checkpoint_ref.path
        ),
        None => "it has no checkpoint".into(),
    };
    line(format_args!("{job} is being deleted; {kept}"))?;
    Ok(())
}
