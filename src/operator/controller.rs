//! The controller process: wires caches, agents and reconciliations together.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::channel::mpsc::{UnboundedSender, unbounded};
use futures::{Stream, StreamExt};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::Api;
use kube::runtime::Controller;
use kube::runtime::controller::{self, Action, Config};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{ObjectRef, Store};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::agents::Agents;
use super::companions;
use super::context::Context;
use super::error::ReconcileError;
use super::keys;
use super::leader::{self, Candidate};
use super::metrics::Metrics;
use super::ownership::MANAGER;
use super::pace::{self, COALESCE_WINDOW};
use super::reconcile::{reconcile, span};
use super::stores::{self, Affected};
use super::unreadable::reporter;
use super::vital::{self, Pulse};
use crate::api::TrainingJob;
use crate::api::TrainingJobStatus;
use crate::operator::events;

/// Concurrent reconciliations. The limit lets a started job finish soon: its pods exist before the
/// companion objects of the last job.
const CONCURRENCY: u16 = 32;
/// Interval between two rounds of [`housekeep`].
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// Longest wait for the release of the Lease.
const RELEASE: Duration = Duration::from_secs(2);

/// Run the controller of TrainingJobs (the chart starts it in a cluster).
#[derive(clap::Args, Debug, Clone)]
#[command(after_help = "\
Examples:
  evenkeel controller                              use the cluster of the current kubeconfig
  evenkeel controller --no-leader-election         run as the only replica
  evenkeel controller --namespaced --namespace ml  watch only the jobs of the namespace ml")]
pub struct Options {
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
    /// Priority classes that the podTemplate of a job may name, separated by commas; empty: none. Without the option every
    /// class is allowed. None may be one of Kubernetes' own (system-…).
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = priority_class)]
    priority_classes: Option<Vec<String>>,
    /// File with the controller's key, from which the keys of all jobs derive. Without the file the first controller
    /// creates the Secret `evenkeel-controller-key` in its namespace, which the chart mounts here.
    #[arg(long, env = "EVENKEEL_KEY_FILE", default_value = "/run/evenkeel/key")]
    key: PathBuf,
}

/// A class that would let a job preempt the controller and the cluster's own pods.
#[derive(Debug, thiserror::Error)]
#[error(
    "it would let a job preempt the controller and the cluster's own pods; list other classes only"
)]
struct SystemClass;

/// A priority class that jobs may name.
fn priority_class(name: &str) -> Result<String, SystemClass> {
    if name.starts_with("system-") {
        Err(SystemClass)
    } else {
        Ok(name.to_owned())
    }
}

/// Runs the controller until SIGTERM or SIGINT.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let client = Client::try_default().await?;
    let metrics = Arc::new(Metrics::default());
    let pulse = Pulse::new();
    let candidate = (!options.no_leader_election).then(|| Candidate {
        namespace: options.namespace.clone(),
        identity: options.identity.clone(),
    });
    let vital = vital::start(
        options.listen,
        candidate.clone(),
        metrics.clone(),
        pulse.clone(),
    )
    .await?;
    info!(address = %vital.address, "serving /healthz and /metrics");
    tokio::spawn(pulse.beat());
    let work = control(client.clone(), options, metrics);
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let ended = tokio::select! {
        ended = leader::lead(vital.leads, work) => ended,
        error = vital.ended => Err(error?),
        _ = terminate.recv() => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    };
    if let Some(candidate) = candidate {
        let released = tokio::time::timeout(RELEASE, leader::release(client, &candidate)).await;
        debug!(?released, "the work has ended");
    }
    ended
}

async fn control(client: Client, options: Options, metrics: Arc<Metrics>) -> anyhow::Result<()> {
    let key = keys::load(client.clone(), &options.namespace, &options.key).await?;
    let namespace = options.namespaced.then(|| options.namespace.clone());
    let (stores, pool) = stores::start(&client, namespace.as_deref());
    let (known, jobs) = stores::jobs(&client, namespace.as_deref(), reporter(client.clone()));
    let controller = Controller::for_stream(jobs, known.clone());
    metrics.leads(known.clone());
    let (wake, woken) = unbounded();
    let (news, heard) = mpsc::unbounded_channel();
    let (changed, changes) = mpsc::unbounded_channel();
    // They end with this future.
    let mut tasks = JoinSet::new();
    tasks.spawn(pace::forward(pace::RECONCILIATIONS, heard, wake.clone()));
    tasks.spawn(pace::forward(pace::CHANGES, changes, wake.clone()));
    tasks.spawn(forward_changes(pool, known.clone(), changed.clone(), wake));
    stores.ready().await;
    let reporter = Reporter {
        controller: MANAGER.into(),
        instance: Some(options.identity),
    };
    let context = Arc::new(Context {
        recorder: Recorder::new(client.clone(), reporter),
        metrics,
        namespace: options.namespace,
        image: options.image,
        priority_classes: options.priority_classes,
        agents: Agents::new(news, key.clone()),
        key,
        client,
        stores,
        known,
        leases: Default::default(),
        reservations: Default::default(),
        recipes: Default::default(),
        turns: Default::default(),
        job_cache: Default::default(),
        newest: Default::default(),
        restored: std::sync::Once::new(),
        #[cfg(test)]
        panics: Default::default(),
    });
    tasks.spawn(housekeep(context.clone()));
    tasks.spawn(companions::restore(context.clone(), namespace, changed));
    controller
        .with_config(Config::default().concurrency(CONCURRENCY))
        .reconcile_on(woken)
        .run(reconcile, error_policy, context)
        .for_each(|reconciled| async {
            match reconciled {
                Ok(_) => {}
                // `error_policy` has logged it.
                Err(controller::Error::ReconcilerFailed(..)) => {}
                Err(error) => debug!(%error, "no job to reconcile"),
            }
        })
        .await;
    Ok(())
}

/// Periodic work for all jobs together: drops the state of deleted ones, and reads the Leases of nodes with silent
/// pods.
async fn housekeep(context: Arc<Context>) {
    let leases: Api<Lease> = Api::namespaced(context.client.clone(), "kube-node-lease");
    loop {
        tokio::time::sleep(HOUSEKEEPING).await;
        context.forget_deleted();
        for node in context.leases.wanted() {
            // Without an answer a suspicion lasts until it expires.
            let Ok(Some(lease)) = leases.get_opt(&node).await else {
                continue;
            };
            let renewed = lease.spec.and_then(|spec| spec.renew_time);
            let renewed = renewed.map(|at| SystemTime::from(at.0));
            let now = std::time::Instant::now();
            context.leases.read(&node, renewed, now);
        }
    }
}

/// Logs a failed reconciliation and decides when the job is reconciled again.
pub fn error_policy(
    job: Arc<TrainingJob>,
    error: &ReconcileError,
    context: Arc<Context>,
) -> Action {
    let _span = span(&job).entered();
    if error.is_conflict() {
        debug!(%error, "reconciliation failed");
        return Action::requeue(context.conflict_pause(&job));
    }
    warn!(%error, "reconciliation failed");
    if error.is_of_status() && context.state(&job, |state| state.failures == 0) {
        events::unwritten(&job, &error.to_string(), &context);
    }
    Action::requeue(context.pause(&job))
}

/// Turns changes into the jobs to reconcile: `changed` receives the jobs of changed pods, `wake` all jobs a moment
/// after a change of the pool.
async fn forward_changes(
    mut pool: impl Stream<Item = Affected> + Unpin,
    jobs: Store<TrainingJob>,
    changed: mpsc::UnboundedSender<ObjectRef<TrainingJob>>,
    wake: UnboundedSender<ObjectRef<TrainingJob>>,
) {
    let mut all: Option<Instant> = None;
    loop {
        let due = all.unwrap_or_else(Instant::now);
        tokio::select! {
            affected = pool.next() => match affected {
                Some(Affected::Job(job)) => {
                    if changed.send(job).is_err() {
                        return;
                    }
                }
                Some(Affected::All) => {
                    all.get_or_insert_with(|| Instant::now() + COALESCE_WINDOW);
                }
                None => return,
            },
            () = tokio::time::sleep_until(due), if all.is_some() => {
                all = None;
                for job in jobs.state() {
                    let over = job.status.as_ref().is_some_and(TrainingJobStatus::is_over);
                    if !over && wake.unbounded_send(ObjectRef::from_obj(&*job)).is_err() {
                        return;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};

    use super::*;

    #[test]
    fn no_class_of_kubernetes_may_be_listed() {
        let parse = |classes: &str| {
            let command = Options::augment_args(Command::new("controller"));
            let given = [
                "controller",
                "--namespace=n",
                &format!("--priority-classes={classes}"),
            ];
            let matches = command.try_get_matches_from(given);
            matches.map(|matches| {
                let options = Options::from_arg_matches(&matches).unwrap();
                options.priority_classes.unwrap()
            })
        };
        assert_eq!(parse("batch,low").unwrap(), ["batch", "low"]);
        let error = parse("batch,system-node-critical").unwrap_err();
        insta::assert_snapshot!(error.to_string().lines().next().unwrap(), @"error: invalid value 'system-node-critical' for '--priority-classes <NAMES>': it would let a job preempt the controller and the cluster's own pods; list other classes only");
    }
}
