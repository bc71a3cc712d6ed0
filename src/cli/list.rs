//! `evenkeel list`: the runs on this machine, and the TrainingJobs of a cluster.

use std::process::ExitCode;

use serde_json::json;

use super::cluster::{self, ClusterArgs};
use super::output::{Format, line, say};
use super::status;

/// List the runs on this machine, and the TrainingJobs of the cluster.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel list             runs launched here, and jobs of the namespace
  evenkeel list --local     runs only
  evenkeel list -A -o json  the jobs of all namespaces, as JSON")]
pub struct Args {
    /// List only runs on this machine
    #[arg(long, conflicts_with_all = ["all_namespaces", "namespace", "context", "kubeconfig"])]
    local: bool,
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
    if args.cluster.is_selected() || args.all_namespaces {
        return cluster::list::list(&args.cluster, args.all_namespaces, args.output);
    }
    if args.output == Format::Text {
        status::list(args.output)?;
    }
    let asks = !args.local && args.cluster.is_configured();
    let jobs = asks.then(|| cluster::list::soon(&args.cluster));
    let jobs = match jobs.transpose() {
        Ok(jobs) => jobs,
        Err(error) => {
            say(format_args!("no jobs are listed: {error}\n"));
            None
        }
    };
    match (args.output, jobs) {
        (Format::Text, Some((jobs, namespace))) => {
            line("")?;
            cluster::list::print_table(&jobs, false, &namespace)?;
        }
        (Format::Text, None) => {}
        (output, jobs) => {
            let jobs = jobs.map(|(jobs, _)| jobs);
            output.print(
                &json!({"runs": status::rows(), "queued": status::queued(), "jobs": jobs}),
            )?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
