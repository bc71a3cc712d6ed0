//! The TrainingJobs of one or all namespaces.

use std::process::ExitCode;

use kube::core::error_boundary::InvalidObject;

use super::ClusterArgs;
use crate::api::TrainingJob;
use crate::cli::output::{Format, line, print, say, width};
use crate::cli::table::Table;
use crate::client::{ClientError, change};

pub fn list(
    cluster: &ClusterArgs,
    all_namespaces: bool,
    output: Format,
) -> anyhow::Result<ExitCode> {
    let (jobs, namespace) = jobs(cluster, all_namespaces)?;
    match output {
        Format::Text => print_table(&jobs, all_namespaces, &namespace)?,
        output => output.print(&jobs)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The jobs of a cluster that the user has not named, and the namespace.
pub fn soon(cluster: &ClusterArgs) -> Result<(Vec<TrainingJob>, String), ClientError> {
    let (found, namespace) = cluster.soon(async |cluster| {
        let jobs = change::list(cluster, false).await?;
        Ok((jobs, cluster.namespace.clone()))
    })?;
    Ok((readable(found), namespace))
}

/// The jobs, and the namespace.
fn jobs(cluster: &ClusterArgs, all_namespaces: bool) -> anyhow::Result<(Vec<TrainingJob>, String)> {
    let (found, namespace) = cluster.run(async |cluster| {
        let jobs = change::list(cluster, all_namespaces).await?;
        Ok((jobs, cluster.namespace.clone()))
    })?;
    Ok((readable(found), namespace))
}

/// The jobs that this program can read; it reports the others.
fn readable((jobs, unreadable): (Vec<TrainingJob>, Vec<InvalidObject>)) -> Vec<TrainingJob> {
    for job in &unreadable {
        let (name, error) = (job.metadata.name.as_deref().unwrap_or_default(), &job.error);
        say(format_args!("TrainingJob {name} cannot be read: {error}\n"));
    }
    jobs
}

pub fn print_table(
    jobs: &[TrainingJob],
    all_namespaces: bool,
    namespace: &str,
) -> anyhow::Result<()> {
    if jobs.is_empty() {
        if all_namespaces {
            line("no TrainingJobs")?;
        } else {
            line(format_args!(
                "no TrainingJobs in namespace {namespace} (-A lists all namespaces)"
            ))?;
        }
        return Ok(());
    }
    let mut table = Table::new([
        "job", "phase", "nodes", "batch", "progress", "step", "loss", "left", "message",
    ]);
    for job in jobs {
        table.row(cells(job, all_namespaces));
    }
    print(table.render(width()))?;
    Ok(())
}

fn cells(job: &TrainingJob, with_namespace: bool) -> [String; 9] {
    let status = job.status.clone().unwrap_or_default();
    let progress = status.progress.unwrap_or_default();
    let name = job.metadata.name.clone().unwrap_or_default();
    let namespace = job.metadata.namespace.clone().unwrap_or_default();
    [
        if with_namespace {
            format!("{namespace}/{name}")
        } else {
            name
        },
        format!("{:?}", status.phase),
        format!("{} of {}", status.nodes, job.spec.nodes),
        status.plan.map(|plan| plan.formula).unwrap_or_default(),
        progress.share,
        match progress.step {
            0 => String::new(),
            step => step.to_string(),
        },
        progress.loss,
        progress.time_left,
        status.message.lines().next().unwrap_or_default().to_owned(),
    ]
}
