//! One reconciliation of one job: plan → observe → decide → write the status → apply it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use kube::runtime::controller::Action;
use tracing::{Instrument, Span, debug, error_span, warn};

use super::apply::{self, ApplyError};
use super::conditions::{self, Blocked};
use super::context::Context;
use super::decide::{self, Decision};
use super::error::ReconcileError;
use super::events::announce;
use super::metrics::{ReconcileResult, Step};
use super::observe::ClusterState;
use super::planning::{self, Planned, Unplanned};
use super::write::write;
use super::{faults, finished, status};
use crate::api::TrainingJob;
use crate::api::status::{Phase, TrainingJobStatus};
use crate::lifecycle::placement::PlacementAction;
use crate::telemetry::now;
use crate::util::lock::lock;

/// Requeue interval during a change.
const SOON: Duration = Duration::from_secs(1);
/// Requeue interval of a job that depends on the pool.
const POOL: Duration = Duration::from_secs(5);
/// Requeue interval of a suspended job.
const LATER: Duration = Duration::from_secs(60);

/// Runs one reconciliation of a job.
pub async fn reconcile(
    job: Arc<TrainingJob>,
    context: Arc<Context>,
) -> Result<Action, ReconcileError> {
    let start = Instant::now();
    let span = span(&job);
    let result = steps(job, &context).instrument(span).await;
    let outcome = match &result {
        Ok(_) => ReconcileResult::Ok,
        Err(error) if error.is_conflict() => ReconcileResult::Conflict,
        Err(_) => ReconcileResult::Error,
    };
    context.metrics.reconciled(outcome, start.elapsed());
    result
}

/// The span of a reconciliation and of what follows from its result: it names the job and its generation in each line of
/// the log, at every level of the log.
pub fn span(job: &TrainingJob) -> Span {
    let current = job.status.as_ref();
    let current = current.and_then(|status| status.generation.as_ref());
    let generation = current.map(|current| current.record.number);
    error_span!("reconcile", job = %job.name_any(), namespace = job.namespace(), generation)
}

async fn steps(job: Arc<TrainingJob>, context: &Context) -> Result<Action, ReconcileError> {
    let metrics = &context.metrics;
    context.restore_reservations();
    let job = context.newest(job);
    if job.metadata.deletion_timestamp.is_some() {
        context.forget(&job);
        return Ok(Action::await_change());
    }
    let before = job.status.clone().unwrap_or_default();
    if matches!(before.phase, Phase::Complete | Phase::Failed) {
        return finished::keep(&job, &before, context).await;
    }
    let now = now();
    let mut next = status::of_spec(&job, &before, now);
    let planned = metrics.time(Step::Plan, planning::plan(&job, &mut next, context));
    let planned = match planned.await {
        Ok(planned) => planned,
        Err(Unplanned::Later(pause)) => return Ok(Action::requeue(pause)),
        Err(Unplanned::Refused(refusal)) => {
            return finished::refuse(&job, &before, next, &refusal, context).await;
        }
    };
    let cluster = async { observe(&job, &mut next, &planned, context, now) };
    let mut cluster = match metrics.time(Step::Observe, cluster).await {
        Ok(cluster) => cluster,
        Err(pause) => return Ok(Action::requeue(pause)),
    };
    let planned = match planning::evaluate_observed(&job, &mut next, planned, context) {
        Ok(planned) => planned,
        Err(Unplanned::Later(pause)) => return Ok(Action::requeue(pause)),
        Err(Unplanned::Refused(refusal)) => {
            return finished::refuse(&job, &before, next, &refusal, context).await;
        }
    };
    if cluster.edits && !planned.edits {
        cluster = cluster_state(&job, &next, &planned, context);
    }
    let turn = planned.waits;
    let decision = async { decide::decide(&job, &next, &cluster, &planned, context, now) };
    let decision = metrics.time(Step::Decide, decision).await;
    let action = decision.placement.action.name();
    let over = matches!(decision.placement.action, PlacementAction::End(_));
    decided(&job, &mut next, &cluster, planned, decision, context, now);
    faults::point("decided", action);
    let written = write(&job, &before, &mut next, context);
    let written = metrics.time(Step::WriteStatus, written).await?;
    faults::point("written", action);
    announce(&written, &before, &next, context);
    let after = requeue_interval(&next);
    let after = turn.map_or(after, |pause| pause.min(after));
    let applied = apply_status(&written, &next, &cluster, action, over, after, context);
    metrics.time(Step::Apply, applied).await
}

/// Observes the cluster and updates the status with what is there. The error is the pause until the job may have its
/// turn to plan: how its generation ended depends on that.
fn observe(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    planned: &Planned,
    context: &Context,
    now: f64,
) -> Result<ClusterState, Duration> {
    let mut cluster = cluster_state(job, status, planned, context);
    let mut holds = planning::holds(&planned.planner, planning::reached(status));
    let mut asked = false;
    let holds = |ranks, limit| {
        asked = true;
        holds(ranks, limit)
    };
    let excluded = status.excluded_nodes.len();
    status::apply_observed(job, status, &cluster, holds, now);
    if status.excluded_nodes.len() > excluded {
        // The pods on these nodes leave.
        cluster = cluster_state(job, status, planned, context);
    }
    match planned.waits.filter(|_| asked) {
        Some(pause) => Err(pause),
        None => Ok(cluster),
    }
}

fn cluster_state(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    planned: &Planned,
    context: &Context,
) -> ClusterState {
    let Planned { planner, edits, .. } = planned;
    let (stores, agents, leases) = (&context.stores, &context.agents, &context.leases);
    let current = status.generation.as_ref();
    let most_samples = current.and_then(|c| planner.most_samples(c.record.plan.global_batch_size));
    ClusterState::of(job, status, stores, agents, leases, *edits, most_samples)
}

/// Updates the status with the decision, and with what keeps the job from a larger world or from its objects.
fn decided(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    cluster: &ClusterState,
    planned: Planned,
    decision: Decision,
    context: &Context,
    now: f64,
) {
    let Planned {
        planner,
        refusal,
        waits,
        edits: _,
    } = planned;
    let earlier = status.message.clone();
    let Decision {
        placement,
        placeable,
        overdue,
    } = decision;
    let over = matches!(placement.action, PlacementAction::End(_));
    let plan = status::place(job, status, &placement, &planner).unwrap_or_else(|error| {
        warn!(%error, "the decided world has no plan and is not published");
        None
    });
    status::apply_decision(job, status, &placement.action, plan.as_ref(), cluster, now);
    status::batch_now(status);
    let blocked = context.blocked(&job.uid().unwrap_or_default());
    let blocked = blocked.filter(|_| !over);
    let message = |blocked: &Blocked| blocked.message.clone();
    let notice = blocked.as_ref().map(message).or(refusal);
    let notice = notice.or_else(|| match waits {
        Some(_) => Some(earlier),
        None => planning::skipped(job, status, placeable, &planner),
    });
    status::notice(status, notice);
    let problem = overdue.as_ref().filter(|_| over);
    conditions::of_phase(
        status,
        blocked.as_ref(),
        problem.or(cluster.problem.as_ref()),
        cluster.stalled.is_some(),
    );
    if waits.is_none() {
        context.store_planner(job, planner);
    }
}

/// Creates and deletes objects according to the written status, unless the job is over. Returns when to reconcile
/// again.
async fn apply_status(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    cluster: &ClusterState,
    action: &str,
    over: bool,
    mut after: Duration,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let uid = job.uid().unwrap_or_default();
    if let Some(pause) = context.creation_pause(job) {
        apply::delete_pods(context, job, status, cluster).await?;
        return Ok(Action::requeue(pause.min(after)));
    }
    if !over {
        match apply::apply(job, status, cluster, action, context).await {
            Ok(true) => after = Duration::ZERO,
            Ok(false) => {}
            Err(error) => return not_applied(error, job, cluster, after, context),
        }
    }
    context.record_success(&uid);
    Ok(Action::requeue(after))
}

/// Records why objects could not be created; the next reconciliation reports it.
fn not_applied(
    error: ApplyError,
    job: &TrainingJob,
    cluster: &ClusterState,
    after: Duration,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let uid = job.uid().unwrap_or_default();
    let blocked = error.blocked();
    if blocked.is_some() {
        let exists = |pod: &str| cluster.pods.contains_key(pod);
        lock(&context.reservations).refused(&uid, exists);
    }
    let reported = blocked.is_none_or(|it| !context.record_blocked(&uid, it));
    match error {
        ApplyError::Leaving(_) => {
            debug!(%error, "waiting");
            Ok(Action::requeue(context.pause(job).min(after)))
        }
        ApplyError::NameTaken(_) if !reported => Ok(Action::requeue(Duration::ZERO)),
        ApplyError::NameTaken(_) => Ok(Action::requeue(after)),
        error => Err(error.into()),
    }
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
