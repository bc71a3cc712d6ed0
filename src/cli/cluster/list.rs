//! `evenkeel list`: the TrainingJobs of one or all namespaces.

use std::process::ExitCode;

use super::ClusterArgs;
use crate::api::TrainingJob;
use crate::cli::output::{Format, line, print, say};
use crate::cli::table::Table;
use crate::client::change;

/// List TrainingJobs.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel list                 jobs in the context's namespace
  evenkeel list -A -o json      all jobs as JSON")]
pub struct Args {
    /// List the jobs of all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    list(&args.cluster, args.all_namespaces, args.output)
}

/// Lists the jobs; `evenkeel status` without a name does the same.
pub fn list(
    cluster: &ClusterArgs,
    all_namespaces: bool,
    output: Format,
) -> anyhow::Result<ExitCode> {
    let ((jobs, unreadable), namespace) = cluster.run(async |cluster| {
        let jobs = change::list(cluster, all_namespaces).await?;
        Ok((jobs, cluster.namespace.clone()))
    })?;
    for job in &unreadable {
        let (name, error) = (job.metadata.name.as_deref().unwrap_or_default(), &job.error);
        say(format_args!("TrainingJob {name} cannot be read: {error}"));
    }
    if output != Format::Text {
        output.print(&jobs)?;
        return Ok(ExitCode::SUCCESS);
    }
    if jobs.is_empty() {
        if all_namespaces {
            line("no TrainingJobs")?;
        } else {
            line(format_args!(
                "no TrainingJobs in namespace {namespace} (-A lists all namespaces)"
            ))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new([
        "job", "phase", "nodes", "batch", "progress", "step", "loss", "left", "message",
    ]);
    for job in &jobs {
        table.row(cells(job, all_namespaces));
    }
    print(table.render())?;
    Ok(ExitCode::SUCCESS)
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
