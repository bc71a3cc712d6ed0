//! One reconciliation of one job: plan → observe → decide → write status → apply.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::apply::{self, ApplyError, MANAGER};
use super::context::{Companions, Context};
use super::observe::ClusterState;
use super::planner::Planner;
use super::planning::{self, Refusal};
use super::{build, conditions, faults, status};
use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::status::{Phase, PlanSummary, Slot, TrainingJobStatus};
use crate::api::{Capacity, TrainingJob};
use crate::lifecycle::placement::{Placement, PlacementAction, PlacementInput, decide_placement};
use crate::operator::events::announce;
use crate::operator::reservations::Pool;
use crate::plan::Reached;
use crate::telemetry::now;
use crate::util::lock::lock;
use crate::util::time::{micro_time, seconds};

/// Requeue interval during a change.
const SOON: Duration = Duration::from_secs(1);
/// Requeue interval of a job that depends on the pool.
const POOL: Duration = Duration::from_secs(5);
/// Requeue interval of a suspended job.
const LATER: Duration = Duration::from_secs(60);
/// Numbers of nodes beyond `nodes` whose feasibility the status names.
const LOOK_AHEAD: u32 = 8;

/// Failure of a reconciliation; it is retried after a pause.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// Failed to apply an object.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The API server refused the request or did not answer.
    #[error("{0}")]
    Api(#[from] kube::Error),
    /// The installed CRD lacks fields of the status.
    #[error(
        "the TrainingJob CRD in this cluster does not match this controller; apply the CRD of its release (charts/evenkeel/crds, Helm does not upgrade CRDs): {0}"
    )]
    Definition(Box<kube::core::Status>),
}

/// Runs one reconciliation of a job.
pub async fn reconcile(
    job: Arc<TrainingJob>,
    context: Arc<Context>,
) -> Result<Action, ReconcileError> {
    context.restore_reservations();
    let job = context.newest(job);
    let uid = job.uid().unwrap_or_default();
    if job.metadata.deletion_timestamp.is_some() {
        context.forget(&job);
        return Ok(Action::await_change());
    }
    let before = job.status.clone().unwrap_or_default();
    if matches!(before.phase, Phase::Complete | Phase::Failed) {
        return finished(&job, &before, &context).await;
    }
    let mut next = before.clone();
    conditions::readable(&mut next);
    if next.observed_generation != job.metadata.generation {
        // The edit may solve what kept pods from starting.
        next.pod_failures = None;
    }
    next.observed_generation = job.metadata.generation;
    let labels = build::selector(&job)
        .into_iter()
        .map(|(key, value)| format!("{key}={value}"));
    next.selector = labels.collect::<Vec<_>>().join(",");
    let mut planner = context.planner(&uid);
    let planned = plan(&job, &mut next, &mut planner, &context).await;
    let (planner, refusal) = match (planned, &before.generation) {
        (Ok(()), _) => (planner, None),
        (Err(Unplanned::Later(pause)), _) => {
            context.store_planner(&uid, planner);
            return Ok(Action::requeue(pause));
        }
        (Err(Unplanned::Refused(refusal)), None) => {
            return refused(&job, &before, next, &refusal, &context).await;
        }
        // The running generation continues unchanged and is still reconciled.
        (Err(Unplanned::Refused(refusal)), Some(current)) => {
            let (reason, message) = (refusal.reason, refusal.message);
            conditions::set(&mut next, ConditionType::Planned, false, reason, &message);
            (
                Planner::with_plan(current.record.plan.clone()),
                Some(message),
            )
        }
    };

    let now = now();
    let edits = refusal.is_none();
    let (stores, agents, leases) = (&context.stores, &context.agents, &context.leases);
    let current = next.generation.as_ref();
    let most_samples = current.and_then(|c| planner.most_samples(c.record.plan.global_batch_size));
    let cluster = ClusterState::of(&job, &next, stores, agents, leases, edits, most_samples);
    let reached = planning::reached(&next);
    let holds = |ranks, limit| {
        let within = Reached {
            per_device_batch_size_limit: Some(limit),
            ..reached
        };
        planner.is_feasible(ranks, within)
    };
    status::apply_observed(&job, &mut next, &cluster, holds, now);
    if let Err(pause) = evaluate(&job, planning::reached(&next), &planner, &context) {
        context.store_planner(&uid, planner);
        return Ok(Action::requeue(pause));
    }
    let (decision, placeable) = decide(&job, &next, &cluster, &planner, &context, now);
    next.attempts = decision.attempts;
    next.scale_up_pending_since = decision.scale_up_pending_since.map(micro_time);
    next.placement_since = decision.placement_since.map(micro_time);
    let over = matches!(decision.action, PlacementAction::End(_));
    if !over {
        next.slots.clone_from(&decision.slots);
    }
    let mut plan = None;
    if let PlacementAction::Publish {
        members,
        per_device_batch_size_limit,
        ..
    } = &decision.action
    {
        next.per_device_batch_size_limit =
            per_device_batch_size_limit.or(next.per_device_batch_size_limit);
        let ranks = members.len() as u64 * u64::from(job.spec.gpus_per_node);
        plan = planner.plan(ranks, planning::reached(&next)).ok();
        if let Some(plan) = &plan {
            let feasible = feasible_nodes(&job, &next, &planner);
            next.plan = Some(PlanSummary::of(plan, feasible));
        }
    }
    status::apply_decision(
        &job,
        &mut next,
        &decision.action,
        plan.as_ref(),
        &cluster,
        now,
    );
    status::batch_now(&mut next);
    let refused = context.refusal(&uid).filter(|_| !over);
    let skipped = || skipped(&job, &next, placeable, &planner);
    let notice = refused.clone().or(refusal).or_else(skipped);
    status::notice(&mut next, notice);
    conditions::of_phase(&mut next, refused.as_deref(), cluster.problem.as_ref());
    context.store_planner(&uid, planner);

    let action = decision.action.name();
    faults::point("decided", action);
    let written = write(&job, &before, &mut next, &context).await?;
    faults::point("written", action);
    announce(&written, &before, &next, &context);
    let mut after = requeue_interval(&next);
    if !over {
        let made = apply_status(&written, &next, &cluster, action, &context).await;
        if let Err(error) = &made
            && let Some(message) = error.refusal()
        {
            context.record_refusal(&uid, message);
            let exists = |pod: &str| cluster.pods.contains_key(pod);
            lock(&context.reservations).refused(&uid, exists);
        }
        if made? {
            after = Duration::ZERO;
        }
    }
    context.record_success(&uid);
    Ok(Action::requeue(after))
}

/// Creates and deletes objects according to the status; true if the job is to be requeued at once.
async fn apply_status(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    cluster: &ClusterState,
    action: &str,
    context: &Context,
) -> Result<bool, ApplyError> {
    let uid = job.uid().unwrap_or_default();
    // A job without slots needs no companion objects.
    let due = match status.slots.is_empty() {
        true => Companions::Complete,
        false => context.companions(&uid),
    };
    if due == Companions::Missing {
        apply::before_pods(&context.client, job).await?;
        context.record_first_pods(&uid);
        faults::point("companions", action);
    }
    // The remaining companion objects wait for a later reconciliation, so that the pods of other jobs
    // come first. Events of the job's own pods trigger that reconciliation.
    let waits = due == Companions::BeforePods && context.is_burst_of_others(&uid);
    let beside = async {
        if due == Companions::BeforePods && !waits {
            apply::beside_pods(&context.client, job).await?;
            context.record_companions(&uid);
        }
        Ok(())
    };
    tokio::try_join!(apply::pods(context, job, status, cluster), beside)?;
    faults::point("pods", action);
    Ok(due == Companions::Missing)
}

/// Message for numbers of nodes that fit in the pool but that a rule refuses.
fn skipped(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    placeable: u32,
    planner: &Planner,
) -> Option<String> {
    if status.phase != Phase::Running {
        return None;
    }
    let first = status.nodes + 1;
    let last = job.spec.nodes.min(*bounds(job).end()).min(placeable);
    if first > last {
        return None;
    }
    let (per_node, reached) = (u64::from(job.spec.gpus_per_node), planning::reached(status));
    let ranks = |nodes: u32| u64::from(nodes) * per_node;
    // If one of them is feasible, a scale up to it is under way.
    if (first..=last).any(|nodes| planner.is_feasible(ranks(nodes), reached)) {
        return None;
    }
    let message = planner.refusal(ranks(last), reached)?;
    Some(match first == last {
        true => format!("skips {first} nodes: {message}"),
        false => format!("skips {first} to {last} nodes: {message}"),
    })
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

/// Why a job is not planned now.
enum Unplanned {
    Refused(Refusal),
    /// Another job of the namespace plans; try again after this pause.
    Later(Duration),
}

impl From<Refusal> for Unplanned {
    fn from(refusal: Refusal) -> Unplanned {
        Unplanned::Refused(refusal)
    }
}

/// Reads the job's recipe into the planner. Stores the recipe snapshot and the first plan in the status.
async fn plan(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    planner: &mut Planner,
    context: &Context,
) -> Result<(), Unplanned> {
    planner.refuse_unbuildable(job, context.image.as_deref())?;
    let snapshot = planning::snapshot(&context.client, job).await?;
    if !planner.has_read(job, &snapshot) {
        let turn = context.turns.begin(&job.namespace().unwrap_or_default());
        let turn = turn.map_err(Unplanned::Later)?;
        turn.run(|| planner.read(job, &snapshot, &context.recipes))?;
    }
    if status.generation.is_none() {
        planner.refuse_losses(&snapshot.overrides)?;
    }
    status.recipe = Some(snapshot);
    // A running job is planned too: after a change of its command no other world may be feasible, and
    // then it is left unchanged.
    if !planner.found_plan || status.plan.is_none() {
        let reached = planning::reached(status);
        evaluate(job, reached, planner, context).map_err(Unplanned::Later)?;
        let bounds = bounds(job);
        let per_node = u64::from(job.spec.gpus_per_node);
        let most = job.spec.nodes.min(*bounds.end());
        let mut worlds = (*bounds.start()..=most).map(|nodes| u64::from(nodes) * per_node);
        let first = worlds.rfind(|ranks| planner.is_feasible(*ranks, reached));
        let nodes = job.spec.nodes.max(1);
        let ranks = first.unwrap_or(u64::from(nodes) * per_node);
        let plan = planner.plan(ranks, reached).map_err(|message| {
            planning::plan_refused(format!(
                "no plan for {nodes} nodes of {per_node} GPUs: {message}"
            ))
        })?;
        planner.found_plan = true;
        if status.plan.is_none() {
            let feasible = feasible_nodes(job, status, planner);
            status.plan = Some(PlanSummary::of(&plan, feasible));
        }
    }
    conditions::set(
        status,
        ConditionType::Planned,
        true,
        ConditionReason::Planned,
        "the recipe is planned and its rules hold",
    );
    Ok(())
}

/// Evaluates all worlds that a reconciliation may ask for; the error is the pause until the job's next turn.
fn evaluate(
    job: &TrainingJob,
    reached: Reached,
    planner: &Planner,
    context: &Context,
) -> Result<(), Duration> {
    let per_node = u64::from(job.spec.gpus_per_node);
    let worlds = || considered(job).map(|nodes| u64::from(nodes) * per_node);
    if planner.has_evaluated(worlds(), reached) {
        return Ok(());
    }
    let turn = context.turns.begin(&job.namespace().unwrap_or_default())?;
    turn.run(|| {
        for ranks in worlds() {
            planner.is_feasible(ranks, reached);
        }
    });
    Ok(())
}

/// Numbers of nodes whose feasibility matters.
fn considered(job: &TrainingJob) -> impl Iterator<Item = u32> + use<> {
    let bounds = bounds(job);
    (1..=job.spec.nodes.saturating_add(LOOK_AHEAD)).filter(move |nodes| bounds.contains(nodes))
}

fn bounds(job: &TrainingJob) -> std::ops::RangeInclusive<u32> {
    let elasticity = &job.spec.elasticity;
    elasticity.min_nodes..=elasticity.max_nodes.unwrap_or(1024)
}

/// Feasible numbers of nodes.
fn feasible_nodes(job: &TrainingJob, status: &TrainingJobStatus, planner: &Planner) -> Vec<u32> {
    let per_node = u64::from(job.spec.gpus_per_node);
    let reached = planning::reached(status);
    considered(job)
        .filter(|nodes| planner.is_feasible(u64::from(*nodes) * per_node, reached))
        .collect()
}

/// Decides under the lock of the reservations, so that the devices of this job are reserved before
/// the next job decides. Also returns the number of slots that fit on the present nodes.
fn decide(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    cluster: &ClusterState,
    planner: &Planner,
    context: &Context,
    now: f64,
) -> (Placement, u32) {
    let name = job.name_any();
    let per_node = u64::from(job.spec.gpus_per_node);
    let members = status::members(status, &name);
    let reached = planning::reached(status);
    // The rules are evaluated once for every number of nodes that the decision may consider.
    let most = bounds(job).end().min(&job.spec.nodes).to_owned();
    let feasible: Vec<bool> = (0..=most)
        .map(|nodes| nodes > 0 && planner.is_feasible(u64::from(nodes) * per_node, reached))
        .collect();
    let namespace = job.namespace().unwrap_or_default();
    let suspects = &context.suspects;
    lock(suspects).suspect(&namespace, &cluster.suspects);
    let mut reservations = lock(&context.reservations);
    let pod_index = context.stores.pod_index();
    let pool = Pool {
        nodes: &context.stores.nodes.state(),
        pod_index: &pod_index,
        lost: &cluster.suspects,
        avoid: &|node| lock(suspects).contains(&namespace, node),
    };
    let started = Instant::now();
    let free = reservations.slots(&pool, job, &cluster.resource_request, started);
    let placeable = free + cluster.staying;
    let pool = match job.spec.elasticity.capacity {
        Capacity::Request => job.spec.nodes,
        Capacity::Discovered => placeable,
    };
    let decision = decide_placement(&PlacementInput {
        desired: job.spec.nodes,
        bounds: bounds(job),
        ranks_per_node: per_node,
        feasible: &|nodes| feasible.get(nodes as usize).copied().unwrap_or(false),
        pool,
        placeable,
        slots: &cluster.slots,
        members: &members,
        ranks: status::ranks(status),
        suspend: job.spec.suspend,
        restarts_left: u64::from(
            job.spec
                .budgets
                .restarts
                .saturating_sub(status.restarts.saturating_sub(1)),
        ),
        problem: cluster
            .problem
            .as_ref()
            .filter(|p| p.deterministic)
            .map(|p| p.message.clone()),
        attempts: status.attempts,
        scale_up_pending_since: status.scale_up_pending_since.as_ref().map(seconds),
        placement_since: status.placement_since.as_ref().map(seconds),
        scale_up_delay: f64::from(job.spec.elasticity.scale_up_delay_seconds),
        placement: f64::from(job.spec.elasticity.placement_seconds),
        not_before: status.restart_not_before.as_ref().map_or(0.0, seconds),
        no_pod_before: status
            .pod_failures
            .as_ref()
            .map_or(0.0, |f| seconds(&f.retry_not_before)),
        now,
    });
    let pods = decision.slots.iter().map(|slot: &Slot| slot.pod(&name));
    // The API server refuses new pods, so only existing ones may get a node.
    let refused = context.refusal(&job.uid().unwrap_or_default()).is_some();
    let reserved = pods.filter(|pod| !refused || cluster.pods.contains_key(pod));
    reservations.reserve(job, reserved.collect(), &pod_index, started);
    (decision, placeable)
}

/// Handles a job that cannot be planned and never ran: it gets no objects and waits for a change.
async fn refused(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    mut next: TrainingJobStatus,
    refusal: &Refusal,
    context: &Context,
) -> Result<Action, ReconcileError> {
    next.phase = Phase::Pending;
    // Pods placed before an edit made the job invalid hold unused devices.
    next.slots.clear();
    lock(&context.reservations).forget(&job.uid().unwrap_or_default());
    next.message.clone_from(&refusal.message);
    conditions::set(
        &mut next,
        ConditionType::Planned,
        false,
        refusal.reason,
        &refusal.message,
    );
    conditions::of_phase(&mut next, None, None);
    let written = write(job, before, &mut next, context).await?;
    announce(&written, before, &next, context);
    if !before.slots.is_empty() {
        let (stores, agents, leases) = (&context.stores, &context.agents, &context.leases);
        let cluster = ClusterState::of(job, &next, stores, agents, leases, false, None);
        apply::pods(context, &written, &next, &cluster).await?;
    }
    Ok(match refusal.waits {
        true => Action::requeue(Duration::from_secs(5)),
        false => Action::await_change(),
    })
}

/// Handles a finished job: its agents exit by themselves, its objects remain until it is deleted or
/// its TTL expires.
async fn finished(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let mut observed = status.clone();
    conditions::observe(&mut observed, job.metadata.generation);
    write(job, status, &mut observed, context).await?;
    context.forget(job);
    let (Some(ttl), Some(finished)) =
        (job.spec.ttl_seconds_after_finished, &status.completion_time)
    else {
        return Ok(Action::await_change());
    };
    let left = seconds(finished) + f64::from(ttl) - now();
    if left > 0.0 {
        return Ok(Action::requeue(Duration::from_secs_f64(left)));
    }
    let jobs: Api<TrainingJob> = context.jobs(job);
    match jobs
        .delete(&job.name_any(), &DeleteParams::background())
        .await
    {
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        other => {
            other?;
        }
    }
    Ok(Action::await_change())
}

/// Message of a server-side apply with a field that the CRD lacks. Its code is 500, so only the message
/// distinguishes it from other failures (structured-merge-diff v6, `typed/helpers.go`).
const UNDECLARED: &str = "not declared in schema";

/// Writes the status, if it changed, with the observed resource version: another controller's write in
/// between is a conflict, and the job is reconciled again.
async fn write(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    next: &mut TrainingJobStatus,
    context: &Context,
) -> Result<TrainingJob, ReconcileError> {
    next.bound();
    if before == next {
        return Ok(job.clone());
    }
    let patch = json!({
        "apiVersion": TrainingJob::api_version(&()),
        "kind": TrainingJob::kind(&()),
        "metadata": {"name": job.name_any(), "resourceVersion": job.resource_version()},
        "status": next,
    });
    let jobs = context.jobs(job);
    let parameters = PatchParams::apply(MANAGER).force();
    let written = jobs
        .patch_status(&job.name_any(), &parameters, &Patch::Apply(patch))
        .await
        .map_err(|error| match error {
            kube::Error::Api(said) if said.message.contains(UNDECLARED) => {
                ReconcileError::Definition(said)
            }
            other => other.into(),
        })?;
    context.record_written(&written);
    Ok(written)
}
