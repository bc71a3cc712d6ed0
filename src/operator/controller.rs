//! The controller's process: caches, agents and looks at jobs, wired together.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use futures::{Stream, StreamExt};
use kube::api::Api;
use kube::runtime::Controller;
use kube::runtime::controller::{Action, Config};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tracing::{debug, warn};

use super::agents::Agents;
use super::apply::MANAGER;
use super::leader;
use super::ledger::Ledger;
use super::planning::Planner;
use super::reconcile::{Planners, ReconcileError, reconcile};
use super::stores::{self, GATHER, Stores, Touched};
use crate::job::api::TrainingJob;
use crate::job::api::status::State;

/// Jobs that are looked at at once.
const AT_ONCE: u16 = 64;
/// The first pause after a look that failed; twice as long after each, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How the controller runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where its Lease is.
    pub namespace: String,
    /// Who it is among the replicas.
    pub identity: String,
    /// Whether there may be other replicas.
    pub elect: bool,
    /// Where it answers `/healthz`.
    pub listen: SocketAddr,
    /// The image that it runs in.
    pub image: Option<String>,
}

/// What all looks share.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// Caches of nodes and pods.
    pub stores: Arc<Stores>,
    /// Cache of the jobs.
    pub known: Store<TrainingJob>,
    /// What the agents say.
    pub agents: Agents,
    /// Devices that jobs count on.
    pub ledger: Mutex<Ledger>,
    /// Writes events.
    pub recorder: Recorder,
    /// The image that this program runs in, for pods whose image does not hold it.
    pub image: Option<String>,
    written: Mutex<HashMap<String, TrainingJob>>,
    planners: Mutex<Planners>,
    applied: Mutex<HashSet<String>>,
    failures: Mutex<HashMap<String, u32>>,
}

/// The value behind a lock, also after a thread that held it panicked.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// The API of a job's namespace.
    pub fn jobs(&self, job: &TrainingJob) -> Api<TrainingJob> {
        Api::namespaced(self.client.clone(), &job.namespace().unwrap_or_default())
    }

    /// The newer of what the cache has and what was written last: a look at a stale status would
    /// decide again what was decided already.
    pub fn newest(&self, cached: Arc<TrainingJob>) -> Arc<TrainingJob> {
        let written = locked(&self.written);
        let own = cached.uid().and_then(|uid| written.get(&uid));
        match own {
            Some(own) if version(own) > version(&cached) => Arc::new(own.clone()),
            _ => cached,
        }
    }

    /// Remembers what was written.
    pub fn wrote(&self, job: &TrainingJob) {
        locked(&self.written).insert(job.uid().unwrap_or_default(), job.clone());
    }

    /// The job's planner, as it was left.
    pub fn planner(&self, uid: &str) -> Planner {
        locked(&self.planners).remove(uid).unwrap_or_default()
    }

    /// Keeps the job's planner for the next look.
    pub fn keep(&self, uid: &str, planner: Planner) {
        locked(&self.failures).remove(uid);
        locked(&self.planners).insert(uid.into(), planner);
    }

    /// Whether this process has applied the job's companions.
    pub fn has_applied(&self, uid: &str) -> bool {
        locked(&self.applied).contains(uid)
    }

    /// It has.
    pub fn applied(&self, uid: &str) {
        locked(&self.applied).insert(uid.into());
    }

    /// Forgets jobs that do not exist any more. Their uids are never used again.
    pub fn forget_deleted(&self) {
        let jobs = self.known.state();
        let uids: HashSet<&str> = jobs
            .iter()
            .filter_map(|job| job.metadata.uid.as_deref())
            .collect();
        locked(&self.ledger).keep_only(|uid| uids.contains(uid));
        locked(&self.written).retain(|uid, _| uids.contains(uid.as_str()));
        locked(&self.planners).retain(|uid, _| uids.contains(uid.as_str()));
        locked(&self.applied).retain(|uid| uids.contains(uid.as_str()));
        locked(&self.failures).retain(|uid, _| uids.contains(uid.as_str()));
    }

    /// Forgets a job that is over.
    pub fn forget(&self, job: &TrainingJob) {
        let uid = &job.uid().unwrap_or_default();
        self.agents
            .keep_only(&ObjectRef::from_obj(job), &BTreeSet::new());
        locked(&self.ledger).forget(uid);
        locked(&self.written).remove(uid);
        locked(&self.planners).remove(uid);
        locked(&self.applied).remove(uid);
        locked(&self.failures).remove(uid);
    }

    /// How long to wait after a failed look.
    fn pause(&self, uid: &str) -> Duration {
        let mut failures = locked(&self.failures);
        let count = failures.entry(uid.into()).or_default();
        *count += 1;
        PAUSE
            .saturating_mul(2u32.saturating_pow((*count - 1).min(12)))
            .min(LONGEST_PAUSE)
    }
}

/// Resource versions are numbers that only grow (KEP-5504); what is not is taken as old.
fn version(job: &TrainingJob) -> u128 {
    job.resource_version()
        .and_then(|version| version.parse().ok())
        .unwrap_or(0)
}

/// Runs the controller until it is told to stop.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let client = Client::try_default().await?;
    let health = tokio::net::TcpListener::bind(options.listen).await?;
    let routes = Router::new().route("/healthz", get(|| async { "ok\n" }));
    tokio::spawn(async move { axum::serve(health, routes).await });
    let work = control(
        client.clone(),
        options.identity.clone(),
        options.image.clone(),
    );
    let leading = async {
        match options.elect {
            true => leader::lead(client, &options.namespace, &options.identity, work).await,
            false => work.await,
        }
    };
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        ended = leading => ended,
        _ = terminate.recv() => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn control(client: Client, identity: String, image: Option<String>) -> anyhow::Result<()> {
    let (wake, woken) = unbounded_channel();
    let (stores, pods, nodes) = stores::start(&client);
    let jobs: Api<TrainingJob> = Api::all(client.clone());
    let controller = Controller::new(jobs, watcher::Config::default());
    let known = controller.store();
    let touches = futures::stream::select(pods.boxed(), nodes.boxed());
    let pool = tokio::spawn(pass_on(touches, known.clone(), wake.clone()));
    stores.ready().await;
    let reporter = Reporter {
        controller: MANAGER.into(),
        instance: Some(identity),
    };
    let context = Arc::new(Context {
        recorder: Recorder::new(client.clone(), reporter),
        image,
        agents: Agents::new(wake)?,
        client,
        stores,
        known,
        ledger: Mutex::default(),
        written: Mutex::default(),
        planners: Mutex::default(),
        applied: Mutex::default(),
        failures: Mutex::default(),
    });
    let woken = futures::stream::unfold(woken, |mut woken| async {
        let job = woken.recv().await?;
        Some((job, woken))
    });
    controller
        .with_config(Config::default().concurrency(AT_ONCE))
        .reconcile_on(woken)
        .run(reconcile, again, context)
        .for_each(|looked| async move {
            if let Err(error) = looked {
                debug!(%error, "a look failed");
            }
        })
        .await;
    pool.abort();
    Ok(())
}

fn again(job: Arc<TrainingJob>, error: &ReconcileError, context: Arc<Context>) -> Action {
    let conflict =
        matches!(error, ReconcileError::Api(kube::Error::Api(status)) if status.is_conflict());
    if conflict {
        // Somebody changed the job meanwhile: look at what it is now.
        return Action::requeue(Duration::from_millis(50));
    }
    warn!(job = %job.name_any(), namespace = job.namespace(), %error, "a look failed");
    Action::requeue(context.pause(&job.uid().unwrap_or_default()))
}

/// Turns what was touched into jobs to look at.
async fn pass_on(
    mut touches: impl Stream<Item = Touched> + Unpin,
    jobs: Store<TrainingJob>,
    wake: UnboundedSender<ObjectRef<TrainingJob>>,
) {
    let mut all = false;
    loop {
        let gathered = tokio::time::sleep(GATHER);
        tokio::pin!(gathered);
        tokio::select! {
            touched = touches.next() => match touched {
                Some(Touched::Job(job)) => {
                    if wake.send(job).is_err() {
                        return;
                    }
                    continue;
                }
                Some(Touched::All) => all = true,
                None => return,
            },
            () = &mut gathered, if all => {
                all = false;
                for job in jobs.state() {
                    let over = job.status.as_ref().is_some_and(|status| {
                        matches!(status.state, State::Complete | State::Failed)
                    });
                    if !over && wake.send(ObjectRef::from_obj(job.as_ref())).is_err() {
                        return;
                    }
                }
            }
        }
    }
}
