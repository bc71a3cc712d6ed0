//! `evenkeel controller`: the controller of TrainingJobs.

use std::net::SocketAddr;
use std::process::ExitCode;

use crate::operator::{self, Options};

/// Run the controller of TrainingJobs (the chart starts it in a cluster).
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel controller                              use the cluster of the current kubeconfig
  evenkeel controller --no-leader-election         run as the only replica")]
pub struct Args {
    /// Namespace of the Lease for leader election among replicas.
    #[arg(long, env = "POD_NAMESPACE", default_value = "evenkeel-system")]
    namespace: String,
    /// Identity of this replica in the leader election; by default the process id.
    #[arg(long, env = "POD_NAME", default_value_t = std::process::id().to_string(), hide_default_value = true)]
    identity: String,
    /// Skip leader election; use only without other replicas.
    #[arg(long)]
    no_leader_election: bool,
    /// Address that serves /healthz.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Image of this controller. Pods of external trainers copy the evenkeel executable from it.
    #[arg(long, env = "EVENKEEL_CONTROLLER_IMAGE")]
    image: Option<String>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    super::logging::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let ended = runtime.block_on(operator::run(Options {
        namespace: args.namespace,
        identity: args.identity,
        elect: !args.no_leader_election,
        listen: args.listen,
        image: args.image,
    }));
    // A plan under way must not keep the process, which renews its Lease.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}
