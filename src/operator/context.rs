//! State shared by all reconciliations, and the cached state of each job between two of them.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use kube::api::Api;
use kube::runtime::events::Recorder;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, ResourceExt};

use super::agents::Agents;
use super::conditions::Blocked;
use super::leases::Leases;
use super::metrics::Metrics;
use super::planner::{PlanInput, Planner, Recipes};
use super::recipe_source::Refusal;
use super::stores::{self, Stores};
use crate::api::TrainingJob;
use crate::api::condition::ConditionReason;
use crate::api::guarded::GuardedJob;
use crate::operator::outcome::fraction;
use crate::operator::reservations::Reservations;
use crate::operator::suspects::Suspects;
use crate::operator::turns::Turns;
use crate::telemetry::now;
use crate::util::key::Key;
use crate::util::lock::lock;

/// First pause after a failed reconciliation; it doubles with each failure up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Pause after a conflict that follows no other.
const FIRST_CONFLICT_PAUSE: Duration = Duration::from_millis(50);
/// Time after which the watch cache has a created pod, unless the pod was deleted meanwhile.
const CACHED: Duration = Duration::from_secs(30);
/// Window in which job creations are treated as a burst.
const BURST: Duration = Duration::from_millis(500);
/// Longest time for which a job's later companion objects wait for the other jobs of a burst.
const PATIENCE: Duration = Duration::from_secs(10);

/// State shared by all reconciliations.
pub struct Context {
    /// Client of the API server.
    pub client: Client,
    /// Caches of nodes and pods.
    pub stores: Arc<Stores>,
    /// Cache of the jobs.
    pub known: Store<TrainingJob>,
    /// States reported by the agents.
    pub agents: Agents,
    /// Leases of nodes with silent pods.
    pub leases: Leases,
    /// Devices reserved for the jobs' pods.
    pub reservations: Mutex<Reservations>,
    /// Recipes of the jobs.
    pub recipes: Recipes,
    /// Turns to plan.
    pub turns: Turns,
    /// Nodes with unresponsive pods.
    pub suspects: Mutex<Suspects>,
    pub recorder: Recorder,
    pub metrics: Arc<Metrics>,
    /// The controller's namespace.
    pub namespace: String,
    /// The controller's key.
    pub key: Key,
    /// The controller's image, for pods whose image does not contain this program.
    pub image: Option<String>,
    /// Cached state of each job.
    pub job_cache: JobCache,
    /// Uid of the job that got its first pods last, with the time.
    pub newest: Mutex<Option<(String, Instant)>>,
    /// Done once the reservations have been restored from the statuses.
    pub restored: Once,
}

/// The controller's memory of the jobs between reconciliations, by uid.
#[derive(Default)]
pub struct JobCache(Mutex<HashMap<String, JobState>>);

/// The controller's memory of one job.
#[derive(Default)]
struct JobState {
    /// The object as last written by this process, and when.
    written: Option<(TrainingJob, Instant)>,
    /// Created pods that the watch cache does not have yet.
    created: HashMap<String, Instant>,
    planner: Planner,
    /// The last refusal of its plans, until what they depend on changes.
    refused: Option<(PlanInput, Refusal)>,
    applied: Companions,
    /// Time at which it got its first pods.
    begun: Option<Instant>,
    /// Number of consecutive failed reconciliations.
    failures: u32,
    /// Number of conflicts since the last reconciliation without one.
    conflicts: u32,
    /// End of the pause after the last failure, and `metadata.generation` then.
    retry: Option<(Instant, Option<i64>)>,
    /// What keeps the job from its objects.
    blocked: Option<Blocked>,
    /// Names of its objects that other objects have.
    taken: HashMap<String, TakenName>,
}

/// A name that another object had when the controller tried to create the job's.
struct TakenName {
    attempts: u32,
    retry: Instant,
}

/// Which of a job's companion objects this process has applied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Companions {
    #[default]
    Missing,
    /// Those that must exist before its pods.
    BeforePods,
    Complete,
}

impl JobCache {
    /// Reads or changes the state of a job.
    fn of<T>(&self, uid: &str, change: impl FnOnce(&mut JobState) -> T) -> T {
        change(lock(&self.0).entry(uid.to_owned()).or_default())
    }
}

impl Context {
    /// API of the TrainingJobs in the job's namespace.
    pub fn jobs(&self, job: &TrainingJob) -> Api<GuardedJob> {
        Api::namespaced(self.client.clone(), &job.namespace().unwrap_or_default())
    }

    /// The newer of the cached and the last written object: a stale status would repeat a decision. What was written
    /// long ago no longer counts: an API server that was restored from an older copy has older resource versions.
    pub fn newest(&self, cached: Arc<TrainingJob>) -> Arc<TrainingJob> {
        let uid = cached.uid().unwrap_or_default();
        let version_of = version(&cached);
        let written = self.job_cache.of(&uid, |job| {
            job.written
                .take_if(|(own, at)| version(own) <= version_of || at.elapsed() > CACHED);
            job.written.as_ref().map(|(own, _)| own.clone())
        });
        written.map_or(cached, Arc::new)
    }

    /// Stores the written object until the watch cache has it.
    pub fn record_written(&self, job: &TrainingJob) {
        let mut written = job.clone();
        stores::slim_job(&mut written);
        let uid = job.uid().unwrap_or_default();
        self.job_cache.of(&uid, |job| {
            (job.written, job.conflicts) = (Some((written, Instant::now())), 0)
        });
    }

    /// Whether this process created a pod that the watch cache may not have yet.
    pub fn has_just_created(&self, uid: &str, pod: &str) -> bool {
        let at = self.job_cache.of(uid, |job| job.created.get(pod).copied());
        at.is_some_and(|at| at.elapsed() < CACHED)
    }

    /// Drops created pods that the watch cache has.
    pub fn forget_created(&self, uid: &str, has: impl Fn(&str) -> bool) {
        self.job_cache
            .of(uid, |job| job.created.retain(|pod, _| !has(pod)));
    }

    /// Records pods that this process created.
    pub fn record_created(&self, uid: &str, pods: impl Iterator<Item = String>) {
        self.job_cache.of(uid, |job| {
            job.created.retain(|_, at| at.elapsed() < CACHED);
            job.created.extend(pods.map(|pod| (pod, Instant::now())));
        });
    }

    /// Takes the job's planner.
    pub fn take_planner(&self, job: &TrainingJob) -> Planner {
        let uid = job.uid().unwrap_or_default();
        self.job_cache
            .of(&uid, |job| std::mem::take(&mut job.planner))
    }

    /// Stores the job's planner for the next reconciliation.
    pub fn store_planner(&self, job: &TrainingJob, planner: Planner) {
        let uid = job.uid().unwrap_or_default();
        self.job_cache.of(&uid, |job| job.planner = planner);
    }

    /// Why plans of this input were refused.
    pub fn refusal(&self, uid: &str, input: &PlanInput) -> Option<Refusal> {
        self.job_cache.of(uid, |job| {
            let (refused, refusal) = job.refused.as_ref()?;
            (refused == input).then(|| refusal.clone())
        })
    }

    /// Records why plans of this input are refused, so that they are not planned again.
    pub fn record_refusal(&self, uid: &str, input: PlanInput, refusal: Refusal) {
        self.job_cache
            .of(uid, |job| job.refused = Some((input, refusal)));
    }

    /// Records a successful reconciliation.
    pub fn record_success(&self, uid: &str) {
        self.job_cache.of(uid, |job| {
            (job.failures, job.conflicts, job.retry) = (0, 0, None);
            job.blocked = None;
        });
    }

    /// Records what keeps the job from its objects, for the next reconciliation to report; true if it was
    /// not recorded before.
    pub fn record_blocked(&self, uid: &str, blocked: Blocked) -> bool {
        self.job_cache.of(uid, |job| {
            let before = job.blocked.replace(blocked);
            before != job.blocked
        })
    }

    /// What keeps the job from its objects.
    pub fn blocked(&self, uid: &str) -> Option<Blocked> {
        self.job_cache.of(uid, |job| job.blocked.clone())
    }

    /// Whether a name was taken and the pause after the last attempt is not over.
    pub fn is_taken(&self, uid: &str, name: &str) -> bool {
        let retry = self
            .job_cache
            .of(uid, |job| job.taken.get(name).map(|taken| taken.retry));
        retry.is_some_and(|retry| Instant::now() < retry)
    }

    /// Records an attempt to create an object of this name.
    pub fn record_name(&self, uid: &str, name: &str, taken: bool) {
        self.job_cache.of(uid, |job| {
            if !taken {
                job.taken.remove(name);
                return;
            }
            let attempts = job.taken.get(name).map_or(0, |taken| taken.attempts);
            let next = TakenName {
                attempts: attempts.saturating_add(1),
                retry: Instant::now() + pause(attempts),
            };
            job.taken.insert(name.to_owned(), next);
        });
    }

    /// Which of the job's companion objects this process has applied.
    pub fn companions(&self, uid: &str) -> Companions {
        self.job_cache.of(uid, |job| job.applied)
    }

    /// Records that all companion objects are applied.
    pub fn record_companions(&self, uid: &str) {
        self.job_cache
            .of(uid, |job| job.applied = Companions::Complete);
    }

    /// Records that a job gets its first pods.
    pub fn record_first_pods(&self, uid: &str) {
        let now = Instant::now();
        self.job_cache.of(uid, |job| {
            job.begun = Some(now);
            job.applied = Companions::BeforePods;
        });
        *lock(&self.newest) = Some((uid.to_owned(), now));
    }

    /// Whether other jobs get their first pods now. Companion objects that this job's pods need only
    /// while running can then wait, since the scheduler's pods per second are limited.
    pub fn is_burst_of_others(&self, uid: &str) -> bool {
        let begun = self.job_cache.of(uid, |job| job.begun);
        let newest = lock(&self.newest);
        let bursts = newest
            .as_ref()
            .is_some_and(|(other, at)| other != uid && at.elapsed() < BURST);
        bursts && begun.is_some_and(|at| at.elapsed() < PATIENCE)
    }

    /// Drops the state of deleted jobs, since deletions cause no reconciliation. Uids are never reused.
    pub fn forget_deleted(&self) {
        let jobs = self.known.state();
        let uids: HashSet<&str> = jobs
            .iter()
            .filter_map(|job| job.metadata.uid.as_deref())
            .collect();
        lock(&self.reservations).keep_only(|uid| uids.contains(uid));
        let references: HashSet<_> = jobs
            .iter()
            .map(|j| ObjectRef::from_obj(j.as_ref()))
            .collect();
        self.agents.keep_jobs(|job| references.contains(job));
        lock(&self.job_cache.0).retain(|uid, _| uids.contains(uid.as_str()));
    }

    /// Drops the state of a finished job.
    pub fn forget(&self, job: &TrainingJob) {
        let uid = &job.uid().unwrap_or_default();
        self.agents
            .keep_only(&ObjectRef::from_obj(job), &BTreeSet::new());
        lock(&self.reservations).forget(uid);
        lock(&self.job_cache.0).remove(uid);
    }

    /// Whether the job's last reconciliation failed.
    pub fn has_failed(&self, uid: &str) -> bool {
        self.job_cache.of(uid, |job| job.failures > 0)
    }

    /// Pause after a failed reconciliation.
    pub fn pause(&self, job: &TrainingJob) -> Duration {
        self.job_cache.of(&job.uid().unwrap_or_default(), |state| {
            let pause = pause(state.failures);
            state.failures = state.failures.saturating_add(1);
            state.retry = Some((Instant::now() + pause, job.metadata.generation));
            pause
        })
    }

    /// Pause after a conflict: the first one is short, since the watch soon has the changed object.
    pub fn conflict_pause(&self, job: &TrainingJob) -> Duration {
        self.job_cache.of(&job.uid().unwrap_or_default(), |state| {
            let before = state.conflicts;
            state.conflicts = before.saturating_add(1);
            before.checked_sub(1).map_or(FIRST_CONFLICT_PAUSE, pause)
        })
    }

    /// Time for which no object of the job is created, because the API server has refused one. An edit of
    /// the job ends it; other changes of the cluster do not, since they may be frequent.
    pub fn creation_pause(&self, job: &TrainingJob) -> Option<Duration> {
        let uid = job.uid().unwrap_or_default();
        let (end, generation) = self.job_cache.of(&uid, |state| {
            let blocked = state.blocked.as_ref()?;
            let retry = state.retry;
            retry.filter(|_| blocked.reason == ConditionReason::Refused)
        })?;
        let left = end.checked_duration_since(Instant::now());
        left.filter(|left| !left.is_zero() && generation == job.metadata.generation)
    }

    /// Restores the reservations from the statuses of all jobs, once, before the first reconciliation: a
    /// new controller process has none.
    pub fn restore_reservations(&self) {
        self.restored.call_once(|| {
            let mut reservations = lock(&self.reservations);
            let pod_index = self.stores.pod_index();
            for job in self.known.state() {
                reservations.restore(&job, &pod_index, Instant::now());
            }
        });
    }
}

/// Pause after a failure that follows `before` others, with a random factor between 0.5 and 1, so that
/// jobs that failed together are not retried together.
fn pause(before: u32) -> Duration {
    let pause = PAUSE
        .saturating_mul(2u32.saturating_pow(before.min(12)))
        .min(LONGEST_PAUSE);
    pause.mul_f64(0.5 + 0.5 * fraction(now()))
}

/// Resource versions are increasing numbers (KEP-5504); other values count as 0.
fn version(job: &TrainingJob) -> u128 {
    job.resource_version()
        .and_then(|version| version.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::testing::{ApiServer, job};

    #[test]
    fn pauses_double_up_to_a_minute() {
        for (failures, longest) in [(0, 100), (1, 200), (5, 3200), (9, 51_200), (10, 60_000)] {
            let longest = Duration::from_millis(longest);
            let pause = pause(failures);
            assert!(
                (longest / 2..=longest).contains(&pause),
                "{failures}: {pause:?}"
            );
        }
        assert!(pause(u32::MAX) <= LONGEST_PAUSE);
    }

    #[tokio::test]
    async fn what_was_written_long_ago_no_longer_counts() {
        let context = Arc::new(ApiServer::default()).context();
        let job = |version: &str| {
            let mut job = job("x", "u");
            job.metadata.resource_version = Some(version.to_owned());
            job
        };
        context.record_written(&job("7"));
        let newest = || version(&context.newest(Arc::new(job("5"))));
        assert_eq!(newest(), 7);
        context.job_cache.of("u", |state| {
            let (_, at) = state.written.as_mut().unwrap();
            *at = at.checked_sub(2 * CACHED).unwrap();
        });
        assert_eq!(newest(), 5);
    }
}
