//! State shared by all reconciliations, and the cached state of each job between two of them.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, Once, Weak};
use std::time::{Duration, Instant};

use kube::runtime::events::Recorder;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, ResourceExt};

use super::agents::Agents;
use super::conditions::Refusal;
use super::leases::Leases;
use super::metrics::Metrics;
use super::pace::back_off;
use super::recipes::{JobRecipe, PlanInput, Recipes};
use super::stores::{self, Stores};
use crate::api::TrainingJob;
use crate::api::condition::ConditionReason;
use crate::inventory::kubernetes::ResourceRequest;
use crate::operator::reservations::Reservations;
use crate::operator::turns::Turns;
use crate::telemetry::now;
use crate::util::key::Key;
use crate::util::lock::lock;

/// First pause after a failed reconciliation, seconds; it doubles with each failure up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: f64 = 0.1;
const LONGEST_PAUSE: f64 = 60.0;
/// Pause after a conflict that follows no other.
const FIRST_CONFLICT_PAUSE: Duration = Duration::from_millis(50);
/// Time after which the watch cache has a created pod, unless the pod was deleted meanwhile.
pub const CACHED: Duration = Duration::from_secs(30);
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
    /// Nodes with silent pods.
    pub leases: Leases,
    /// Devices reserved for the jobs' pods.
    pub reservations: Mutex<Reservations>,
    /// Recipes of the jobs.
    pub recipes: Recipes,
    pub turns: Turns,
    pub recorder: Recorder,
    pub metrics: Arc<Metrics>,
    pub namespace: String,
    pub key: Key,
    /// The controller's image, for pods whose image does not contain this program.
    pub image: Option<String>,
    /// Priority classes that a `podTemplate` may name; `None`: all.
    pub priority_classes: Option<Vec<String>>,
    /// Memory of the jobs, by uid.
    pub job_cache: Mutex<HashMap<String, JobState>>,
    /// Uid of the job that got its first pods last, with the time.
    pub newest: Mutex<Option<(String, Instant)>>,
    /// Done once the reservations have been restored from the statuses.
    pub restored: Once,
    /// Whether reconciliations panic, for tests.
    #[cfg(test)]
    pub panics: std::sync::atomic::AtomicBool,
}

/// One reconciliation of a job.
#[derive(Clone, Copy)]
pub struct Reconciliation<'a> {
    pub job: &'a TrainingJob,
    pub context: &'a Context,
    /// Seconds since the Unix epoch.
    pub now: f64,
}

impl Reconciliation<'_> {
    /// Reads or changes the state of the job.
    pub fn state<T>(&self, change: impl FnOnce(&mut JobState) -> T) -> T {
        self.context.state(self.job, change)
    }
}

/// The controller's memory of one job between reconciliations.
#[derive(Default)]
pub struct JobState {
    /// The object as last written by this process, and when.
    written: Option<(TrainingJob, Instant)>,
    /// Created pods that the watch cache may not have yet.
    pub created: HashMap<String, Instant>,
    /// The recipe for which a plan was found, while it is kept.
    pub planned: Weak<JobRecipe>,
    /// Resource request of its pods, which are valid as of this `metadata.generation`.
    pub buildable: Option<(Option<i64>, ResourceRequest)>,
    /// The hash of its recipe, of this `metadata.generation`, until the status has it. Not that of a ConfigMap, which
    /// may change.
    pub recipe: Option<(Option<i64>, String)>,
    /// The last refusal of its plans, until what they depend on changes.
    pub refused: Option<(PlanInput, Refusal)>,
    /// Which of its companion objects this process has applied.
    pub applied: Companions,
    /// Number of its companion objects that were seen to be deleted.
    pub deleted_companions: u64,
    /// Time at which it got its first pods.
    begun: Option<Instant>,
    /// Number of consecutive failed reconciliations.
    pub failures: u32,
    /// Number of conflicts since the last reconciliation without one.
    conflicts: u32,
    /// End of the pause after the last failure, and `metadata.generation` then.
    retry: Option<(Instant, Option<i64>)>,
    /// What keeps the job from its objects.
    pub blocked: Option<Refusal>,
    /// Why the API server refused the pod that was to prove its ledger.
    pub proof_refused: Option<String>,
    /// Names of its objects that other objects had: the number of attempts, and the time of the next one.
    pub taken: HashMap<String, (u32, Instant)>,
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

impl JobState {
    /// Records companion objects as applied, unless one was deleted since `deleted` of them had been: it may have been
    /// deleted after it was applied.
    pub fn record_applied(&mut self, applied: Companions, deleted: u64) {
        if self.deleted_companions == deleted {
            self.applied = applied;
        }
    }
}

impl Context {
    /// Reads or changes the state of a job.
    pub fn state<T>(&self, job: &TrainingJob, change: impl FnOnce(&mut JobState) -> T) -> T {
        let uid = job.uid().unwrap_or_default();
        change(lock(&self.job_cache).entry(uid).or_default())
    }

    /// The newer of the cached and the last written object: a stale status would repeat a decision. What was written
    /// long ago no longer counts: an API server that was restored from an older copy has older resource versions.
    pub fn newest(&self, cached: Arc<TrainingJob>) -> Arc<TrainingJob> {
        let version_of = version(&cached);
        let written = self.state(&cached, |state| {
            let written = &mut state.written;
            written.take_if(|(own, at)| version(own) <= version_of || at.elapsed() > CACHED);
            written.as_ref().map(|(own, _)| own.clone())
        });
        written.map_or(cached, Arc::new)
    }

    /// Stores the written object until the watch cache has it.
    pub fn record_written(&self, job: &TrainingJob) {
        let mut written = job.clone();
        stores::slim_job(&mut written);
        self.state(job, |state| {
            (state.written, state.conflicts) = (Some((written, Instant::now())), 0);
        });
    }

    /// Records a successful reconciliation.
    pub fn record_success(&self, job: &TrainingJob) {
        self.state(job, |state| {
            (state.failures, state.conflicts, state.retry) = (0, 0, None);
            state.blocked = None;
        });
    }

    /// Records that a job gets its first pods. `deleted`: see [`JobState::record_applied`].
    pub fn record_first_pods(&self, job: &TrainingJob, deleted: u64) {
        let now = Instant::now();
        self.state(job, |state| {
            state.begun = Some(now);
            state.record_applied(Companions::BeforePods, deleted);
        });
        *lock(&self.newest) = Some((job.uid().unwrap_or_default(), now));
    }

    /// Whether other jobs get their first pods now. Companion objects that this job's pods need only
    /// while running can then wait, since the scheduler's pods per second are limited.
    pub fn is_burst_of_others(&self, job: &TrainingJob) -> bool {
        let begun = self.state(job, |state| state.begun);
        let bursts = lock(&self.newest).as_ref().is_some_and(|(other, at)| {
            Some(other) != job.metadata.uid.as_ref() && at.elapsed() < BURST
        });
        bursts && begun.is_some_and(|at| at.elapsed() < PATIENCE)
    }

    /// Drops the state of deleted jobs, since deletions cause no reconciliation. Uids are never reused.
    pub fn forget_deleted(&self) {
        let jobs = self.known.state();
        let uids: HashSet<String> = jobs.iter().filter_map(|job| job.uid()).collect();
        let references = jobs.iter().map(|job| ObjectRef::from_obj(job.as_ref()));
        let references: HashSet<_> = references.collect();
        lock(&self.reservations).retain(|uid| uids.contains(uid));
        self.agents.retain(|job, _| references.contains(job));
        lock(&self.job_cache).retain(|uid, _| uids.contains(uid));
    }

    /// Drops the state of a finished job.
    pub fn forget(&self, job: &TrainingJob) {
        let uid = &job.uid().unwrap_or_default();
        let reference = ObjectRef::from_obj(job);
        self.agents.retain(|other, _| *other != reference);
        lock(&self.reservations).forget(uid);
        lock(&self.job_cache).remove(uid);
    }

    /// Pause after a failed reconciliation.
    pub fn pause(&self, job: &TrainingJob) -> Duration {
        self.state(job, |state| {
            let pause = pause(state.failures);
            state.failures = state.failures.saturating_add(1);
            state.retry = Some((Instant::now() + pause, job.metadata.generation));
            pause
        })
    }

    /// Pause after a conflict: the first one is short, since the watch soon has the changed object.
    pub fn conflict_pause(&self, job: &TrainingJob) -> Duration {
        self.state(job, |state| {
            let before = state.conflicts;
            state.conflicts = before.saturating_add(1);
            before.checked_sub(1).map_or(FIRST_CONFLICT_PAUSE, pause)
        })
    }

    /// Time for which no object of the job is created, because the API server has refused one. An edit of
    /// the job ends it; other changes of the cluster do not, since they may be frequent.
    pub fn creation_pause(&self, job: &TrainingJob) -> Option<Duration> {
        let (end, generation) = self.state(job, |state| {
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
        // Also after a panic in an earlier call.
        self.restored.call_once_force(|_| {
            let mut reservations = lock(&self.reservations);
            let pod_index = self.stores.pod_index();
            for job in self.known.state() {
                reservations.restore(&job, &pod_index, Instant::now());
            }
        });
    }
}

/// Pause after a failure that follows `before` others.
pub fn pause(before: u32) -> Duration {
    Duration::from_secs_f64(back_off(FIRST_PAUSE, LONGEST_PAUSE, before, now()))
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
        assert!(pause(u32::MAX).as_secs_f64() <= LONGEST_PAUSE);
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
        context.state(&job("1"), |state| {
            let (_, at) = state.written.as_mut().unwrap();
            *at = at.checked_sub(2 * CACHED).unwrap();
        });
        assert_eq!(newest(), 5);
    }
}
