//! `evenkeel controller`: the controller of TrainingJobs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::operator::{self, Options};

/// Run the controller of TrainingJobs (the chart starts it in a cluster).
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel controller                              use the cluster of the current kubeconfig
  evenkeel controller --no-leader-election         run as the only replica
  evenkeel controller --namespaced --namespace ml  watch only the jobs of the namespace ml")]
pub struct Args {
    /// The controller's namespace, with the Lease for leader election among replicas.
    #[arg(long, env = "POD_NAMESPACE", default_value = "evenkeel-system")]
    namespace: String,
    /// Watch only the TrainingJobs and pods of this namespace. Devices that pods of other namespaces hold count as
    /// free until the scheduler refuses a pod.
    #[arg(long)]
    namespaced: bool,
    /// Identity of this replica in the leader election; by default the process id.
    #[arg(long, env = "POD_NAME", default_value_t = std::process::id().to_string(), hide_default_value = true)]
    identity: String,
    /// Skip leader election; use only without other replicas.
    #[arg(long)]
    no_leader_election: bool,
    /// Address that serves /healthz and /metrics.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Image of this controller. Pods of external trainers copy the evenkeel executable from it.
    #[arg(long, env = "EVENKEEL_CONTROLLER_IMAGE")]
    image: Option<String>,
    /// File with the controller's key, from which the keys of all jobs derive. Without the file the first controller
    /// creates the Secret `evenkeel-controller-key` in its namespace, which the chart mounts here.
    #[arg(long, env = "EVENKEEL_KEY_FILE", default_value = "/run/evenkeel/key")]
    key: PathBuf,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    super::logging::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let ended = runtime.block_on(operator::run(Options {
        namespace: args.namespace,
        namespaced: args.namespaced,
        identity: args.identity,
        elect: !args.no_leader_election,
        listen: args.listen,
        image: args.image,
        key: args.key,
    }));
    // A plan under way must not keep the process, which renews its Lease.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}
