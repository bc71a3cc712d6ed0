//! `evenkeel controller`: the controller of TrainingJobs.

use std::net::SocketAddr;
use std::process::ExitCode;

use crate::operator::{self, Options};

/// Run the controller of TrainingJobs (in a cluster; the chart does it).
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel controller                              with the cluster of the current kubeconfig
  evenkeel controller --no-leader-election         when it is the only one")]
pub struct Args {
    /// The namespace of the Lease that replicas elect their leader by.
    #[arg(long, env = "POD_NAMESPACE", default_value = "evenkeel-system")]
    namespace: String,
    /// Who this replica is.
    #[arg(long, env = "POD_NAME", default_value_t = std::process::id().to_string())]
    identity: String,
    /// There is no other replica.
    #[arg(long)]
    no_leader_election: bool,
    /// Where to answer /healthz.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// The image that it runs in: the pods of foreign trainers copy this program from it.
    #[arg(long, env = "EVENKEEL_CONTROLLER_IMAGE")]
    image: Option<String>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    super::logging::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(operator::run(Options {
        namespace: args.namespace,
        identity: args.identity,
        elect: !args.no_leader_election,
        listen: args.listen,
        image: args.image,
    }))?;
    Ok(ExitCode::SUCCESS)
}
