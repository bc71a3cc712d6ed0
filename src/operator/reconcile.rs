//! One reconciliation of one job: plan → observe → decide → build the next status → write it → apply it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use kube::runtime::controller::Action;
use tracing::{Instrument, Span, debug, error_span};

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
use crate::plan::Plan;
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
    let Built {
        action,
        cluster,
        turn,
    } = match next_status(&job, &mut next, context, now).await {
        Ok(built) => built,
        Err(Unplanned::Later(pause)) => return Ok(Action::requeue(pause)),
        Err(Unplanned::Refused(refusal)) => {
            return finished::refuse(&job, &before, next, &refusal, context).await;
        }
    };
    let name = action.name();
    faults::point("decided", name);
    let written = write(&job, &before, &mut next, context);
    let written = metrics.time(Step::WriteStatus, written).await?;
    faults::point("written", name);
    announce(&written, &before, &next, context);
    let after = requeue_interval(&next);
    let after = turn.map_or(after, |pause| pause.min(after));
    let over = matches!(action, PlacementAction::End(_));
    let applied = apply_status(&written, &next, &cluster, name, over, after, context);
    metrics.time(Step::Apply, applied).await
}

/// The steps up to the next status. They change nothing in the cluster.
async fn next_status(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    context: &Context,
    now: f64,
) -> Result<Built, Unplanned> {
    let metrics = &context.metrics;
    let planned = planning::plan(job, status, context);
    let planned = metrics.time(Step::Plan, planned).await?;
    let observed = async { observe(job, status, planned, context, now) };
    let (planned, mut cluster) = metrics.time(Step::Observe, observed).await?;
    let decided = async {
        let (planned, feasible) = planning::evaluate_observed(job, status, planned, context)?;
        if cluster.edits && !planned.edits {
            cluster = cluster_state(job, status, &planned, context);
        }
        let input = (&cluster, &planned, &feasible[..]);
        let decision = decide::decide(job, status, input, context, now);
        Ok::<_, Unplanned>((planned, decision))
    };
    let (planned, decision) = metrics.time(Step::Decide, decided).await?;
    let built = async { build(job, status, cluster, planned, decision, context, now) };
    metrics.time(Step::Build, built).await
}

/// Observes the cluster and updates the status with what is there. The error is [`Unplanned::Later`] if how the
/// generation ended depends on a plan.
fn observe(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    planned: Planned,
    context: &Context,
    now: f64,
) -> Result<(Planned, ClusterState), Unplanned> {
    let mut cluster = cluster_state(job, status, &planned, context);
    let reached = planning::reached(status);
    let mut unplanned = None;
    let smaller = |plan: &Plan, batch| {
        let smaller = planning::smaller(job, &planned, reached, (plan, batch), context);
        smaller.unwrap_or_else(|error| {
            unplanned = Some(error);
            None
        })
    };
    let excluded = status.excluded_nodes.len();
    status::apply_observed(job, status, &cluster, smaller, now);
    if status.excluded_nodes.len() > excluded {
        // The pods on these nodes leave.
        cluster = cluster_state(job, status, &planned, context);
    }
    let planned = match unplanned {
        None => planned,
        Some(Unplanned::Later(pause)) => return Err(Unplanned::Later(pause)),
        // The outcome of the generation is that no smaller micro-batch is feasible.
        Some(refused) => planning::without_plan(job, status, planned, refused, context)?,
    };
    Ok((planned, cluster))
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

/// A status to write and to apply.
struct Built {
    action: PlacementAction,
    cluster: ClusterState,
    /// Pause until the job may have its turn to plan.
    turn: Option<Duration>,
}

/// Updates the status with the decision, and with what keeps the job from a larger world or from its objects.
fn build(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    cluster: ClusterState,
    mut planned: Planned,
    decision: Decision,
    context: &Context,
    now: f64,
) -> Result<Built, Unplanned> {
    let Decision {
        mut placement,
        placeable,
        overdue,
    } = decision;
    let world = match planning::world(job, status, &placement, &planned.planner, context) {
        Ok(world) => world,
        Err(unplanned) => {
            planned = planning::without_plan(job, status, planned, unplanned, context)?;
            placement = decide::drain_only(placement, status);
            None
        }
    };
    let Planned {
        planner,
        refusal,
        waits,
        edits: _,
    } = planned;
    let earlier = status.message.clone();
    status::place(job, status, &placement, world.as_ref());
    let action = placement.action;
    let plan = world.as_ref().map(|world| &world.plan);
    status::apply_decision(job, status, &action, plan, &cluster, now);
    status::batch_now(status);
    let over = matches!(action, PlacementAction::End(_));
    let blocked = context.blocked(&job.uid().unwrap_or_default());
    let blocked = blocked.filter(|_| !over);
    let message = |blocked: &Blocked| blocked.message.clone();
    let notice = blocked.as_ref().map(message).or(refusal);
    let notice = notice.or_else(|| match waits {
        Some(_) => Some(earlier),
        None => {
            let skipped = planning::skipped(job, status, placeable, &planner, context);
            skipped.unwrap_or(Some(earlier))
        }
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
    Ok(Built {
        action,
        cluster,
        turn: waits,
    })
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
