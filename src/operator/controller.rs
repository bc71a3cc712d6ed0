//! The controller process: wires caches, agents and reconciliations together.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use kube::runtime::Controller;
use kube::runtime::controller::{self, Action, Config};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, ResourceExt};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::agents::Agents;
use super::context::Context;
use super::error::ReconcileError;
use super::housekeeping;
use super::keys::{self, KeySource};
use super::leader::{self, Candidate};
use super::metrics::Metrics;
use super::ownership::MANAGER;
use super::pace;
use super::reconcile::{reconcile, span};
use super::stores::{self, Affected, COALESCE_WINDOW, Scope};
use super::unreadable;
use super::vital::{self, Pulse};
use crate::api::TrainingJob;
use crate::api::status::Phase;
use crate::operator::coalesce::Coalescer;
use crate::operator::events;

/// Concurrent reconciliations. The limit lets a started job finish soon: its pods exist before the
/// companion objects of the last job.
const CONCURRENCY: u16 = 32;
/// Longest wait for the release of the Lease.
const RELEASE: Duration = Duration::from_secs(2);

/// Options of the controller.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its own namespace, which holds the Lease.
    pub namespace: String,
    /// Whether it watches only the jobs of this namespace.
    pub namespaced: bool,
    /// Identity among the replicas.
    pub identity: String,
    /// Whether to elect a leader among several replicas.
    pub elect: bool,
    /// Address of `/healthz` and `/metrics`.
    pub listen: SocketAddr,
    /// Image of the controller's own pod.
    pub image: Option<String>,
    /// File of the controller's key.
    pub key: PathBuf,
}

/// Runs the controller until SIGTERM or SIGINT.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let client = Client::try_default().await?;
    let metrics = Arc::new(Metrics::default());
    let pulse = Pulse::new();
    let candidate = options.elect.then(|| Candidate {
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
    let source = KeySource {
        namespace: options.namespace.clone(),
        file: options.key,
    };
    let key = keys::load(client.clone(), &source).await?;
    let (wake, woken) = unbounded_channel();
    let scope = match options.namespaced {
        true => Scope::Namespace(options.namespace.clone()),
        false => Scope::Cluster,
    };
    let (stores, pods, nodes) = stores::start(&client, &scope);
    let (aside, set_aside) = unbounded_channel();
    let (known, jobs) = stores::jobs(&client, &scope, aside);
    let telling = tokio::spawn(unreadable::report(client.clone(), set_aside));
    let controller = Controller::for_stream(jobs, known.clone());
    metrics.leads(known.clone());
    let changes = futures::stream::select(pods.boxed(), nodes.boxed());
    let (news, heard) = unbounded_channel();
    let heard = tokio::spawn(pace::forward(pace::RECONCILIATIONS, heard, wake.clone()));
    let pool = tokio::spawn(forward_changes(changes, known.clone(), wake));
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
        agents: Agents::new(news, key.clone()),
        key,
        client,
        stores,
        known,
        leases: Default::default(),
        reservations: Default::default(),
        recipes: Default::default(),
        turns: Default::default(),
        suspects: Default::default(),
        job_cache: Default::default(),
        newest: Default::default(),
        restored: std::sync::Once::new(),
    });
    let housekeeper = tokio::spawn(housekeeping::keep(context.clone()));
    let woken = futures::stream::unfold(woken, |mut woken| async {
        let job = woken.recv().await?;
        Some((job, woken))
    });
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
    pool.abort();
    heard.abort();
    housekeeper.abort();
    telling.abort();
    Ok(())
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
    let uid = job.uid().unwrap_or_default();
    if let ReconcileError::Definition(_) = error
        && !context.has_failed(&uid)
    {
        events::unwritten(&job, &error.to_string(), &context);
    }
    Action::requeue(context.pause(&job))
}

/// Turns changes into the jobs to reconcile.
async fn forward_changes(
    mut changes: impl Stream<Item = Affected> + Unpin,
    jobs: Store<TrainingJob>,
    wake: UnboundedSender<ObjectRef<TrainingJob>>,
) {
    let mut all: Option<Instant> = None;
    let mut coalesce = Coalescer::new(COALESCE_WINDOW);
    loop {
        let pool_due = all.unwrap_or_else(Instant::now);
        let due = coalesce.next();
        tokio::select! {
            affected = changes.next() => match affected {
                Some(Affected::Job(job)) => {
                    if coalesce.record(job.clone(), Instant::now()) && wake.send(job).is_err() {
                        return;
                    }
                }
                Some(Affected::All) => {
                    all.get_or_insert_with(|| Instant::now() + COALESCE_WINDOW);
                }
                None => return,
            },
            () = tokio::time::sleep_until(due.unwrap_or(pool_due)), if due.is_some() => {
                for job in coalesce.due(Instant::now()) {
                    if wake.send(job).is_err() {
                        return;
                    }
                }
            }
            () = tokio::time::sleep_until(pool_due), if all.is_some() => {
                all = None;
                for job in jobs.state() {
                    let over = job.status.as_ref().is_some_and(|status| {
                        matches!(status.phase, Phase::Complete | Phase::Failed)
                    });
                    if !over && wake.send(ObjectRef::from_obj(job.as_ref())).is_err() {
                        return;
                    }
                }
            }
        }
    }
}
