//! What all looks at jobs share, and what is remembered of each job between two of them.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use kube::api::Api;
use kube::runtime::events::Recorder;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, ResourceExt};

use super::agents::Agents;
use super::ended::fraction;
use super::leases::Leases;
use super::ledger::Ledger;
use super::locked::locked;
use super::planning::Planner;
use super::stores::{self, Stores};
use crate::job::api::TrainingJob;
use crate::telemetry::now;

/// The first pause after a look that failed; twice as long after each, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// After so long the cache has what was made, or somebody deleted it before a look saw it there.
const CACHED: Duration = Duration::from_secs(30);
/// So long after another job was given its first pods there may be more such jobs,
const BURST: Duration = Duration::from_millis(500);
/// and so long at most the rest of a job waits for them.
const PATIENCE: Duration = Duration::from_secs(10);

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
    /// Leases of nodes whose pods fell silent.
    pub leases: Leases,
    /// Devices that jobs count on.
    pub ledger: Mutex<Ledger>,
    /// Writes events.
    pub recorder: Recorder,
    /// The image that this program runs in, for pods whose image does not hold it.
    pub image: Option<String>,
    /// What is remembered of each job.
    pub memory: Memory,
    /// The job that was given its first pods last, by uid, and when.
    pub newest: Mutex<Option<(String, Instant)>>,
    /// The ledger knows what the statuses promise.
    pub recovered: Once,
}

/// What is remembered of each job between two looks, by uid.
#[derive(Default)]
pub struct Memory(Mutex<HashMap<String, Remembered>>);

/// What is remembered of a job.
#[derive(Default)]
struct Remembered {
    /// The object as it was written last.
    written: Option<TrainingJob>,
    /// Pods that were made, and that no look has seen yet.
    created: HashMap<String, Instant>,
    planner: Planner,
    applied: Companions,
    /// When it was given its first pods.
    begun: Option<Instant>,
    /// Looks that failed, one after another.
    failures: u32,
    /// What the API server said against what was made for the job last.
    refused: Option<String>,
}

/// Which of a job's companions this process has applied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Companions {
    /// None.
    #[default]
    Missing,
    /// Those without which no pod can be made.
    BeforePods,
    /// All.
    Complete,
}

impl Memory {
    /// Looks at what is remembered of a job, and changes it.
    fn of<T>(&self, uid: &str, change: impl FnOnce(&mut Remembered) -> T) -> T {
        change(locked(&self.0).entry(uid.to_owned()).or_default())
    }
}

impl Context {
    /// The API of a job's namespace.
    pub fn jobs(&self, job: &TrainingJob) -> Api<TrainingJob> {
        Api::namespaced(self.client.clone(), &job.namespace().unwrap_or_default())
    }

    /// The newer of what the cache has and what was written last: a look at a stale status would
    /// decide again what was decided already.
    pub fn newest(&self, cached: Arc<TrainingJob>) -> Arc<TrainingJob> {
        let uid = cached.uid().unwrap_or_default();
        let version_of = version(&cached);
        let written = self.memory.of(&uid, |job| {
            job.written.take_if(|own| version(own) <= version_of);
            job.written.clone()
        });
        written.map_or(cached, Arc::new)
    }

    /// Remembers what was written, until the cache has it.
    pub fn wrote(&self, job: &TrainingJob) {
        let mut written = job.clone();
        stores::slim_job(&mut written);
        let uid = job.uid().unwrap_or_default();
        self.memory.of(&uid, |job| job.written = Some(written));
    }

    /// Whether this process made a pod a moment ago, so that the cache may not have it yet.
    pub fn has_just_created(&self, uid: &str, pod: &str) -> bool {
        let at = self.memory.of(uid, |job| job.created.get(pod).copied());
        at.is_some_and(|at| at.elapsed() < CACHED)
    }

    /// The cache has these.
    pub fn cached(&self, uid: &str, has: impl Fn(&str) -> bool) {
        self.memory
            .of(uid, |job| job.created.retain(|pod, _| !has(pod)));
    }

    /// It has.
    pub fn created(&self, uid: &str, pods: impl Iterator<Item = String>) {
        self.memory.of(uid, |job| {
            job.created.retain(|_, at| at.elapsed() < CACHED);
            job.created.extend(pods.map(|pod| (pod, Instant::now())));
        });
    }

    /// The job's planner, as it was left.
    pub fn planner(&self, uid: &str) -> Planner {
        self.memory.of(uid, |job| std::mem::take(&mut job.planner))
    }

    /// Keeps the job's planner for the next look.
    pub fn keep(&self, uid: &str, planner: Planner) {
        self.memory.of(uid, |job| job.planner = planner);
    }

    /// A look at the job went well to its end.
    pub fn went_well(&self, uid: &str) {
        self.memory.of(uid, |job| {
            job.failures = 0;
            job.refused = None;
        });
    }

    /// The API server refuses what is made for the job; the next look says so.
    pub fn was_refused(&self, uid: &str, why: String) {
        self.memory.of(uid, |job| job.refused = Some(why));
    }

    /// What it said, where it did.
    pub fn refusal(&self, uid: &str) -> Option<String> {
        self.memory.of(uid, |job| job.refused.clone())
    }

    /// Which of the job's companions this process has applied.
    pub fn companions(&self, uid: &str) -> Companions {
        self.memory.of(uid, |job| job.applied)
    }

    /// It has applied all of them.
    pub fn complete(&self, uid: &str) {
        self.memory
            .of(uid, |job| job.applied = Companions::Complete);
    }

    /// A job is given its first pods.
    pub fn begins(&self, uid: &str) {
        let now = Instant::now();
        self.memory.of(uid, |job| {
            job.begun = Some(now);
            job.applied = Companions::BeforePods;
        });
        *locked(&self.newest) = Some((uid.to_owned(), now));
    }

    /// Whether other jobs are being given their first pods: what this one's pods need only once they
    /// run has time until then, since the scheduler has only so many pods a second.
    pub fn others_begin(&self, uid: &str) -> bool {
        let begun = self.memory.of(uid, |job| job.begun);
        let newest = locked(&self.newest);
        let bursts = newest
            .as_ref()
            .is_some_and(|(other, at)| other != uid && at.elapsed() < BURST);
        bursts && begun.is_some_and(|at| at.elapsed() < PATIENCE)
    }

    /// Forgets jobs that do not exist any more: nobody is told of a deletion in particular. Their
    /// uids are never used again.
    pub fn forget_deleted(&self) {
        let jobs = self.known.state();
        let uids: HashSet<&str> = jobs
            .iter()
            .filter_map(|job| job.metadata.uid.as_deref())
            .collect();
        locked(&self.ledger).keep_only(|uid| uids.contains(uid));
        let references: HashSet<_> = jobs
            .iter()
            .map(|j| ObjectRef::from_obj(j.as_ref()))
            .collect();
        self.agents.keep_jobs(|job| references.contains(job));
        locked(&self.memory.0).retain(|uid, _| uids.contains(uid.as_str()));
    }

    /// Forgets a job that is over.
    pub fn forget(&self, job: &TrainingJob) {
        let uid = &job.uid().unwrap_or_default();
        self.agents
            .keep_only(&ObjectRef::from_obj(job), &BTreeSet::new());
        locked(&self.ledger).forget(uid);
        locked(&self.memory.0).remove(uid);
    }

    /// Whether the last look at it failed.
    pub fn has_failed(&self, uid: &str) -> bool {
        self.memory.of(uid, |job| job.failures > 0)
    }

    /// How long to wait after a failed look: between half of a pause and all of it, so that jobs that
    /// failed together part.
    pub fn pause(&self, uid: &str) -> Duration {
        let before = self.memory.of(uid, |job| {
            job.failures = job.failures.saturating_add(1);
            job.failures - 1
        });
        let pause = PAUSE
            .saturating_mul(2u32.saturating_pow(before.min(12)))
            .min(LONGEST_PAUSE);
        pause.mul_f64(0.5 + 0.5 * fraction(now()))
    }

    /// What the jobs count on by their statuses is promised to them before the first of them is looked
    /// at: a controller that was just started knows no promises.
    pub fn recover_promises(&self) {
        self.recovered.call_once(|| {
            let mut ledger = locked(&self.ledger);
            for job in self.known.state() {
                ledger.recover(&job);
            }
        });
    }
}

/// Resource versions are numbers that only grow (KEP-5504); what is not is taken as old.
fn version(job: &TrainingJob) -> u128 {
    job.resource_version()
        .and_then(|version| version.parse().ok())
        .unwrap_or(0)
}
