//! One reconciliation of one job: plan → observe → decide → build the next status → write it → apply it.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Request;
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use serde::de::Error;
use serde_json::json;
use tracing::{Instrument, Span, debug, error_span};

use super::conditions::{self, Findings, Refusal};
use super::context::{Context, Reconciliation};
use super::decide::Decision;
use super::error::ReconcileError;
use super::events::announce;
use super::observe::ClusterState;
use super::ownership::MANAGER;
use super::planning::{Planning, Unplanned};
use super::recipes::reached;
use super::{faults, status, unreadable};
use crate::api::TrainingJob;
use crate::api::condition::ConditionReason;
use crate::api::guarded::GuardedJob;
use crate::api::status::{Phase, TrainingJobStatus};
use crate::lifecycle::placement::PlacementAction;
use crate::plan::{self, Plan};
use crate::telemetry::now;
use crate::util::lock::lock;
use crate::util::time::seconds;

/// Requeue interval during a change.
const SOON: Duration = Duration::from_secs(1);
/// Requeue interval of a job that depends on the pool.
const POOL: Duration = Duration::from_secs(5);
/// Requeue interval of a suspended job, and of one whose recipe is refused and in a ConfigMap.
const LATER: Duration = Duration::from_secs(60);

/// Runs one reconciliation of a job.
pub async fn reconcile(
    job: Arc<TrainingJob>,
    context: Arc<Context>,
) -> Result<Action, ReconcileError> {
    let start = Instant::now();
    let span = span(&job);
    // A panic would end the controller, and again after each start. Locks recover from it.
    let steps = AssertUnwindSafe(steps(job.clone(), &context)).catch_unwind();
    let caught = steps.instrument(span).await;
    let panicked = |panic: Box<dyn Any + Send>| {
        Err(ReconcileError::Panicked(panic_message(&*panic).to_owned()))
    };
    let result = caught.unwrap_or_else(panicked);
    if let Err(error @ (ReconcileError::Panicked(_) | ReconcileError::Status(_))) = &result {
        // A condition alone may be accepted where the whole status is too large.
        unreadable::report(&context.client, &job, &error.to_string()).await;
    }
    let outcome = match &result {
        Ok(_) => "ok",
        Err(error) if error.is_conflict() => "conflict",
        Err(_) => "error",
    };
    context.metrics.reconciled(outcome, start.elapsed());
    result
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    let words = owned.or_else(|| panic.downcast_ref::<&str>().copied());
    words.unwrap_or("without a message")
}

/// The span of a reconciliation and of what follows from its result: it names the job and its generation in each line of
/// the log, at every level of the log.
pub fn span(job: &TrainingJob) -> Span {
    let generation = job.status.as_ref().and_then(|status| status.number());
    error_span!("reconcile", job = %job.name_any(), namespace = job.namespace(), generation)
}

async fn steps(job: Arc<TrainingJob>, context: &Context) -> Result<Action, ReconcileError> {
    context.restore_reservations();
    #[cfg(test)]
    assert!(
        !context.panics.load(std::sync::atomic::Ordering::Relaxed),
        "as a test says"
    );
    let job = &*context.newest(job);
    if job.metadata.deletion_timestamp.is_some() {
        context.forget(job);
        return Ok(Action::await_change());
    }
    let now = now();
    let reconciliation = Reconciliation { job, context, now };
    // Its state is tens of kilobytes, which each caller would have on its stack several times.
    Box::pin(reconciliation.run()).await
}

impl Reconciliation<'_> {
    async fn run(&self) -> Result<Action, ReconcileError> {
        let before = self.job.status.clone().unwrap_or_default();
        if before.is_over() {
            return self.keep_finished(&before).await;
        }
        let Next {
            status: next,
            action,
            cluster,
            turn,
        } = match self.next(&before).await {
            Ok(next) => next,
            Err(Stopped::Later(pause)) => return Ok(Action::requeue(pause)),
            Err(Stopped::Refused(observed, refusal)) => {
                return self.refuse(&before, *observed, &refusal).await;
            }
        };
        let (next, proof) = self.with_proof(next);
        let metrics = &self.context.metrics;
        let name = action.name();
        faults::point("decided", name);
        let written = self.write(&before, &next);
        let written = &metrics.time("write-status", written).await?;
        faults::point("written", name);
        announce(written, &before, &next, self.context);
        let after = requeue_interval(&next);
        let after = turn.map_or(after, |pause| pause.min(after));
        let written = Reconciliation {
            job: written,
            ..*self
        };
        let applied = written.apply_status(&next, &cluster, &action, after);
        let applied = metrics.time("apply", Box::pin(applied)).await?;
        written.create_proof(proof).await?;
        Ok(applied)
    }

    /// The steps up to the next status. They change nothing in the cluster.
    async fn next(&self, before: &TrainingJobStatus) -> Result<Next, Stopped> {
        let metrics = &self.context.metrics;
        let status = status::of_spec(self.job, before, self.now);
        let planned = metrics.time("plan", self.plan(&status)).await;
        let (planned, first) = match planned {
            Ok(planned) => planned,
            Err(unplanned) => return Err(Observed::of(status).stopped(unplanned)),
        };
        let status = self.with_plan(status, before, &planned, first);
        let observed = async { self.observe(status, planned) };
        let (observed, planned) = metrics.time("observe", observed).await?;
        let decided = async { self.evaluate_and_decide(observed, planned) };
        let (observed, decision) = metrics.time("decide", decided).await?;
        let built = async { self.build(observed, decision) };
        Ok(metrics.time("build", built).await)
    }

    /// Observes the cluster. The error is [`Stopped::Later`] if how the generation ended depends on a plan.
    fn observe(
        &self,
        status: TrainingJobStatus,
        planned: Planning,
    ) -> Result<(Observed, Planning), Stopped> {
        let cluster = self.cluster_state(&status, &planned);
        let progress = reached(&status);
        let mut unplanned = None;
        let smaller = |plan: &Plan, batch| {
            let smaller = self.smaller(&planned, progress, plan, batch);
            smaller.unwrap_or_else(|error| {
                unplanned = Some(error);
                None
            })
        };
        let (later, excluded) = (status.later_generation, status.excluded_nodes.len());
        let status = self.with_observed(status, &cluster);
        let left = self.left(&status, &cluster);
        let status = self.with_outcome(status, &cluster, &cluster.ranks, smaller);
        let later = status.later_generation.filter(|it| Some(*it) != later);
        let restored = later.map(|later| status::restored_message(&status, later));
        let cluster = if status.excluded_nodes.len() > excluded {
            // The pods on these nodes leave.
            self.cluster_state(&status, &planned)
        } else {
            cluster
        };
        let observed = Observed {
            status,
            left,
            cluster,
            restored,
        };
        let planned = match unplanned {
            None => Ok(planned),
            Some(Unplanned::Later(pause)) => return Err(Stopped::Later(pause)),
            // The outcome of the generation is that no smaller micro-batch is feasible.
            Some(refused) => self.without_plan(&observed.status, planned, refused),
        };
        match planned {
            Ok(planned) => Ok((observed, planned)),
            Err(unplanned) => Err(observed.stopped(unplanned)),
        }
    }

    /// Evaluates the worlds of the job for what was observed, and decides.
    fn evaluate_and_decide(
        &self,
        observed: Observed,
        planned: Planning,
    ) -> Result<(Observed, Decision), Stopped> {
        let (planned, feasible) = match self.evaluate_observed(&observed.status, planned) {
            Ok(evaluated) => evaluated,
            Err(unplanned) => return Err(observed.stopped(unplanned)),
        };
        let observed = if observed.cluster.edits && !planned.edits {
            let cluster = self.cluster_state(&observed.status, &planned);
            Observed {
                cluster,
                ..observed
            }
        } else {
            observed
        };
        let (cluster, left) = (&observed.cluster, observed.left.as_ref());
        let planned = match left {
            None => planned,
            Some(left) => match self.decide(left, cluster, planned, &feasible) {
                Ok(decision) if self.continues(left, &decision.placement, cluster) => {
                    let status = left.clone();
                    return Ok((Observed { status, ..observed }, decision));
                }
                Ok(decision) => decision.planned,
                Err(unplanned) => return Err(observed.stopped(unplanned)),
            },
        };
        match self.decide(&observed.status, &observed.cluster, planned, &feasible) {
            Ok(decision) => Ok((observed, decision)),
            Err(unplanned) => Err(observed.stopped(unplanned)),
        }
    }

    fn cluster_state(&self, status: &TrainingJobStatus, planned: &Planning) -> ClusterState {
        let current = status.generation.as_ref();
        let batch = current.map(|current| current.record.plan.global_batch_size);
        let recipe = planned.recipe.as_ref();
        let most_samples = batch
            .zip(recipe)
            .and_then(|(batch, recipe)| plan::most_samples(&recipe.recipe().spec, batch));
        ClusterState::of(self.job, status, self.context, planned.edits, most_samples)
    }

    /// The status with the decision, and with what keeps the job from a larger world or from its objects.
    fn build(&self, observed: Observed, decision: Decision) -> Next {
        let Observed {
            status,
            cluster,
            restored,
            ..
        } = observed;
        let Decision {
            placement,
            world,
            placeable,
            planned,
        } = decision;
        let (verdict, waits) = (planned.verdict.as_ref(), planned.waits);
        let verdict = verdict.map(|verdict| verdict.as_ref().copied());
        let earlier = status.message.clone();
        let status = self.with_decision(status, &placement, world, &cluster);
        let action = placement.action;
        let over = action.ends_job();
        let blocked = self.state(|state| state.blocked.clone());
        let blocked = blocked.filter(|_| !over);
        let refusal = blocked.as_ref().or(verdict.and_then(Result::err));
        let notice = if let Some(refusal) = refusal {
            Some(refusal.message.clone())
        } else if waits.is_some() {
            Some(earlier)
        } else {
            let skipped = self.skipped(&status, placeable, &planned);
            skipped.unwrap_or(Some(earlier))
        };
        let status = TrainingJobStatus {
            message: status::noticed(&status, notice),
            ..status
        };
        // A job may also fail by itself after its deadline.
        let overdue = self.overdue(&status);
        let overdue = overdue.filter(|overdue| over && status.message == overdue.message);
        let findings = Findings {
            planned: verdict,
            restored: restored.as_deref(),
            blocked: blocked.as_ref(),
            problem: cluster.problem.as_ref(),
            overdue: overdue.as_ref(),
            stalled: cluster.stalled.is_some(),
        };
        let status = conditions::finish(status, &findings).bounded();
        Next {
            status,
            action,
            cluster,
            turn: waits,
        }
    }

    /// Creates and deletes objects according to the written status, unless the job is over. Returns when to reconcile
    /// again.
    async fn apply_status(
        &self,
        status: &TrainingJobStatus,
        cluster: &ClusterState,
        action: &PlacementAction,
        mut after: Duration,
    ) -> Result<Action, ReconcileError> {
        if let Some(pause) = self.context.creation_pause(self.job) {
            self.delete_pods(status, cluster).await?;
            return Ok(Action::requeue(pause.min(after)));
        }
        if !action.ends_job() {
            match self.apply(status, cluster, action.name()).await {
                Ok(true) => after = Duration::ZERO,
                Ok(false) => {}
                Err(error) => return self.not_applied(error, cluster, after),
            }
        }
        self.context.record_success(self.job);
        Ok(Action::requeue(after))
    }

    /// Records why objects could not be created; the next reconciliation reports it.
    fn not_applied(
        &self,
        error: ReconcileError,
        cluster: &ClusterState,
        after: Duration,
    ) -> Result<Action, ReconcileError> {
        let is_new = error.blocked().is_some_and(|blocked| {
            let uid = self.job.uid().unwrap_or_default();
            let exists = |pod: &str| cluster.pods.contains_key(pod);
            lock(&self.context.reservations).refused(&uid, exists);
            self.state(|state| {
                let before = state.blocked.replace(blocked);
                before != state.blocked
            })
        });
        match error {
            ReconcileError::Leaving(_) => {
                debug!(%error, "waiting");
                Ok(Action::requeue(self.context.pause(self.job).min(after)))
            }
            ReconcileError::NameTaken(_) if is_new => Ok(Action::requeue(Duration::ZERO)),
            ReconcileError::NameTaken(_) => Ok(Action::requeue(after)),
            error => Err(error),
        }
    }

    /// Handles a job that cannot be planned and never ran: it gets no objects and waits for a change.
    async fn refuse(
        &self,
        before: &TrainingJobStatus,
        observed: Observed,
        refusal: &Refusal,
    ) -> Result<Action, ReconcileError> {
        // Pods placed before an edit made the job invalid hold unused devices.
        lock(&self.context.reservations).forget(&self.job.uid().unwrap_or_default());
        let status = TrainingJobStatus {
            phase: Phase::Pending,
            slots: Vec::new(),
            message: refusal.message.clone(),
            ..observed.status
        };
        let findings = Findings {
            planned: Some(Err(refusal)),
            restored: observed.restored.as_deref(),
            ..Findings::default()
        };
        let next = conditions::finish(status, &findings).bounded();
        // It never ran, so there is nothing to prove.
        let (next, _) = self.with_proof(next);
        let written = self.write(before, &next).await?;
        announce(&written, before, &next, self.context);
        if !before.slots.is_empty() {
            let cluster = ClusterState::of(self.job, &next, self.context, false, None);
            self.delete_pods(&next, &cluster).await?;
        }
        // Only what the job refers to may appear or change without a change of the job.
        Ok(if refusal.reason == ConditionReason::RecipeMissing {
            Action::requeue(POOL)
        } else if self.job.spec.recipe.config_map.is_some() {
            Action::requeue(LATER)
        } else {
            Action::await_change()
        })
    }

    /// Handles a finished job: its agents exit by themselves, its objects remain until it is deleted or
    /// its TTL expires.
    async fn keep_finished(&self, status: &TrainingJobStatus) -> Result<Action, ReconcileError> {
        let job = self.job;
        let observed = conditions::observed(status, job.metadata.generation).bounded();
        let (observed, proof) = self.with_proof(observed);
        self.write(status, &observed).await?;
        self.context.forget(job);
        self.create_proof(proof).await?;
        let ttl = job.spec.ttl_seconds_after_finished;
        let Some((ttl, finished)) = ttl.zip(status.completion_time.as_ref()) else {
            return Ok(Action::await_change());
        };
        let left = seconds(finished) + f64::from(ttl) - self.now;
        if left > 0.0 {
            return Ok(Action::requeue(Duration::from_secs_f64(left)));
        }
        let parameters = DeleteParams::background().preconditions(Preconditions {
            uid: job.uid(),
            resource_version: None,
        });
        let jobs = TrainingJob::url_path(&(), job.namespace().as_deref());
        let request = Request::new(jobs).delete(&job.name_any(), &parameters);
        let request = request.map_err(kube::Error::BuildRequest)?;
        // While a finalizer holds the job, the response is the object, which `Api::delete` decodes unguarded.
        match self.context.client.request_text(request).await {
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
            other => drop(other?),
        }
        Ok(Action::await_change())
    }

    /// Writes the status, if it changed, with the observed resource version: another controller's write in
    /// between is a conflict, and the job is reconciled again.
    async fn write(
        &self,
        before: &TrainingJobStatus,
        next: &TrainingJobStatus,
    ) -> Result<TrainingJob, ReconcileError> {
        let job = self.job;
        if before == next {
            return Ok(job.clone());
        }
        let patch = json!({
            "apiVersion": TrainingJob::api_version(&()),
            "kind": TrainingJob::kind(&()),
            "metadata": {"name": job.name_any(), "resourceVersion": job.resource_version()},
            "status": next,
        });
        let namespace = job.namespace().unwrap_or_default();
        let jobs: Api<GuardedJob> = Api::namespaced(self.context.client.clone(), &namespace);
        let parameters = PatchParams::apply(MANAGER).force();
        let written = jobs
            .patch_status(&job.name_any(), &parameters, &Patch::Apply(patch))
            .await
            .map_err(ReconcileError::of_status)?;
        let invalid = |invalid| kube::Error::SerdeError(serde_json::Error::custom(invalid));
        let written = written.decoded.map_err(invalid)?;
        self.context.record_written(&written);
        Ok(written)
    }
}

/// What a reconciliation observed.
struct Observed {
    /// The status with it.
    status: TrainingJobStatus,
    /// The same as if the ranks that wait had left, if they may continue in the next generation.
    left: Option<TrainingJobStatus>,
    cluster: ClusterState,
    /// Message that the API server was restored from an older copy of its data.
    restored: Option<String>,
}

impl Observed {
    /// A status before anything was observed.
    fn of(status: TrainingJobStatus) -> Observed {
        Observed {
            status,
            left: None,
            cluster: ClusterState::default(),
            restored: None,
        }
    }

    /// Ends the reconciliation of a job that is not planned.
    fn stopped(self, unplanned: Unplanned) -> Stopped {
        match unplanned {
            Unplanned::Later(pause) => Stopped::Later(pause),
            Unplanned::Refused(refusal) => Stopped::Refused(Box::new(self), refusal),
        }
    }
}

/// A status to write and to apply.
struct Next {
    status: TrainingJobStatus,
    action: PlacementAction,
    cluster: ClusterState,
    /// Pause until the job may have its turn to plan.
    turn: Option<Duration>,
}

/// Why a reconciliation ends without a decision.
enum Stopped {
    /// Another job of the namespace plans; try again after this pause.
    Later(Duration),
    /// The job cannot be planned and never ran.
    Refused(Box<Observed>, Refusal),
}

/// Requeue interval if the job causes no event: short while a time limit runs.
fn requeue_interval(status: &TrainingJobStatus) -> Duration {
    let current = status.generation.as_ref();
    let waits = status.scale_up_pending_since.is_some() || status.restart_not_before.is_some();
    let in_change = status.rescale_since.is_some() && current.is_some();
    match status.phase {
        Phase::Suspended => LATER,
        _ if waits || in_change => SOON,
        Phase::Draining => SOON,
        // Another job may have released a reservation without pods.
        _ => POOL,
    }
}
