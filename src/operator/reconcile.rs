//! One reconciliation of one job: plan → observe → decide → write status → apply.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Request;
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use serde_json::json;
use tokio::task::block_in_place;
use tracing::debug;

use super::apply::{self, ApplyError};
use super::conditions::Blocked;
use super::context::{Companions, Context};
use super::observe::ClusterState;
use super::ownership::MANAGER;
use super::planner::Planner;
use super::planning::{self, Refusal};
use super::{build, conditions, faults, status};
use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::status::{Phase, PlanSummary, Slot, TrainingJobStatus};
use crate::api::{Capacity, TrainingJob};
use crate::lifecycle::placement::{Placement, PlacementAction, PlacementInput, decide_placement};
use crate::operator::events::announce;
use crate::operator::reservations::Pool;
use crate::operator::turns::Panicked;
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
        // Only after an out-of-memory error.
        block_in_place(|| planner.is_feasible(ranks, within))
    };
    status::apply_observed(&job, &mut next, &cluster, holds, now);
    if let Err(unplanned) = evaluate(&job, planning::reached(&next), &planner, &context) {
        context.store_planner(&uid, planner);
        return Ok(Action::requeue(match unplanned {
            Unplanned::Later(pause) => pause,
            Unplanned::Refused(_) => POOL,
        }));
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
            next.plan = Some(PlanSummary::of(&job.spec, plan, feasible));
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
    let blocked = context.blocked(&uid).filter(|_| !over);
    let skipped = || skipped(&job, &next, placeable, &planner);
    let message = |blocked: &Blocked| blocked.message.clone();
    let notice = blocked.as_ref().map(message);
    let notice = notice.or(refusal).or_else(skipped);
    status::notice(&mut next, notice);
    conditions::of_phase(&mut next, blocked.as_ref(), cluster.problem.as_ref());
    context.store_planner(&uid, planner);

    let action = decision.action.name();
    faults::point("decided", action);
    let written = write(&job, &before, &mut next, &context).await?;
    faults::point("written", action);
    announce(&written, &before, &next, &context);
    let mut after = requeue_interval(&next);
    if let Some(pause) = context.creation_pause(&job) {
        apply::delete_pods(&context, &written, &next, &cluster).await?;
        return Ok(Action::requeue(pause.min(after)));
    }
    if !over {
        match apply_status(&written, &next, &cluster, action, &context).await {
            Ok(true) => after = Duration::ZERO,
            Ok(false) => {}
            Err(error) => {
                let blocked = error.blocked();
                if blocked.is_some() {
                    let exists = |pod: &str| cluster.pods.contains_key(pod);
                    lock(&context.reservations).refused(&uid, exists);
                }
                let reported = blocked.is_none_or(|it| !context.record_blocked(&uid, it));
                return match error {
                    ApplyError::Leaving(_) => {
                        debug!(job = %job.name_any(), namespace = job.namespace(), %error, "waiting");
                        Ok(Action::requeue(context.pause(&job).min(after)))
                    }
                    // The next reconciliation reports it.
                    ApplyError::NameTaken(_) if !reported => Ok(Action::requeue(Duration::ZERO)),
                    ApplyError::NameTaken(_) => Ok(Action::requeue(after)),
                    error => Err(error.into()),
                };
            }
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
    let create = async {
        if due == Companions::Missing {
            apply::before_pods(context, job).await?;
            context.record_first_pods(&uid);
            faults::point("companions", action);
        }
        // The remaining companion objects wait for a later reconciliation, so that the pods of other jobs
        // come first. Events of the job's own pods trigger that reconciliation.
        let waits = due == Companions::BeforePods && context.is_burst_of_others(&uid);
        let beside = async {
            if due == Companions::BeforePods && !waits {
                apply::beside_pods(context, job).await?;
                context.record_companions(&uid);
            }
            Ok(())
        };
        let pods = apply::create_pods(context, job, status, cluster);
        let (pods, beside) = tokio::join!(pods, beside);
        apply::first([pods, beside])
    };
    // Deletions do not wait for objects that cannot be created.
    let delete = apply::delete_pods(context, job, status, cluster);
    let (deleted, created) = tokio::join!(delete, create);
    apply::first([deleted, created])?;
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
        turn.run(|| planner.read(job, &snapshot, &context.recipes))
            .map_err(panicked)??;
    }
    if status.generation.is_none() {
        planner.refuse_losses(&snapshot.overrides)?;
    }
    status.recipe = Some(snapshot);
    // A running job is planned too: after a change of its command no other world may be feasible, and
    // then it is left unchanged.
    if !planner.found_plan || status.plan.is_none() {
        let reached = planning::reached(status);
        evaluate(job, reached, planner, context)?;
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
            status.plan = Some(PlanSummary::of(&job.spec, &plan, feasible));
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

/// Evaluates all worlds that a reconciliation may ask for.
fn evaluate(
    job: &TrainingJob,
    reached: Reached,
    planner: &Planner,
    context: &Context,
) -> Result<(), Unplanned> {
    let per_node = u64::from(job.spec.gpus_per_node);
    let worlds = || considered(job).map(|nodes| u64::from(nodes) * per_node);
    if planner.has_evaluated(worlds(), reached) {
        return Ok(());
    }
    let turn = context.turns.begin(&job.namespace().unwrap_or_default());
    let evaluated = turn.map_err(Unplanned::Later)?.run(|| {
        for ranks in worlds() {
            planner.is_feasible(ranks, reached);
        }
    });
    Ok(evaluated.map_err(panicked)?)
}

fn panicked(_: Panicked) -> Refusal {
    planning::plan_refused(
        "the planner failed on this recipe: please report it with the recipe; the controller's log has the place"
            .into(),
    )
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
        .map(|nodes| {
            bounds(job).contains(&nodes)
                && planner.is_feasible(u64::from(nodes) * per_node, reached)
        })
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
    // The API server refuses new pods, so only existing ones may get a node. A new leader knows it from the status.
    let refuses = ConditionReason::Refused.name();
    let refused = context.blocked(&job.uid().unwrap_or_default()).is_some()
        || status.conditions.iter().any(|c| c.reason == refuses);
    let exists = |pod: &String| cluster.pods.contains_key(pod);
    // The pod of a member is never created again.
    let gone: BTreeSet<String> = members.iter().map(|slot| slot.pod(&name)).collect();
    let reserved = pods.filter(|pod| exists(pod) || !(refused || gone.contains(pod)));
    let request = planner.reserved_request();
    let request = request.unwrap_or(&cluster.resource_request);
    reservations.reserve(job, request, reserved.collect(), &pod_index, started);
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
        apply::delete_pods(context, &written, &next, &cluster).await?;
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
    let parameters = DeleteParams::background().preconditions(Preconditions {
        uid: job.uid(),
        resource_version: None,
    });
    let jobs = TrainingJob::url_path(&(), job.namespace().as_deref());
    let request = Request::new(jobs).delete(&job.name_any(), &parameters);
    let request = request.map_err(kube::Error::BuildRequest)?;
    // While a finalizer holds the job, the response is the object, which `Api::delete` decodes unguarded.
    match context.client.request_text(request).await {
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
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
    let written = written.0.map_err(|invalid| {
        kube::Error::SerdeError(<serde_json::Error as serde::de::Error>::custom(invalid))
    })?;
    context.record_written(&written);
    Ok(written)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::Value;

    use super::*;
    use crate::operator::testing::{ApiServer, job, owner};

    /// Kinds of companion objects that pods wait for, and those that they do not wait for.
    const BEFORE_PODS: [&str; 2] = ["serviceaccounts", "networkpolicies"];
    const BESIDE_PODS: [&str; 3] = ["services", "roles", "rolebindings"];

    /// A server with the job `x`.
    fn server() -> Arc<ApiServer> {
        let server = Arc::new(ApiServer::default());
        server.put("trainingjobs", serde_json::to_value(job("x", "u")).unwrap());
        server
    }

    async fn reconcile_once(server: &ApiServer, context: &Arc<Context>) -> Action {
        let job = server.get("trainingjobs", "x").unwrap();
        let job = Arc::new(serde_json::from_value(job).unwrap());
        reconcile(job, context.clone()).await.unwrap()
    }

    /// Reconciles until `holds`.
    async fn reconcile_until(
        server: &ApiServer,
        context: &Arc<Context>,
        holds: impl Fn(&ApiServer) -> bool,
    ) {
        let start = Instant::now();
        while !holds(server) {
            assert!(start.elapsed() < Duration::from_secs(60), "timed out");
            reconcile_once(server, context).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn ready(server: &ApiServer) -> Value {
        let job = server.get("trainingjobs", "x").unwrap_or_default();
        let mut conditions = job["status"]["conditions"].as_array().into_iter().flatten();
        let ready = conditions.find(|condition| condition["type"] == "PodsReady");
        ready.cloned().unwrap_or_default()
    }

    fn is_taken(server: &ApiServer) -> bool {
        ready(server)["reason"] == "NameTaken"
    }

    // Planning needs a thread besides the runtime's own.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_companion_of_another_owner_is_reported_and_left_alone() {
        for kind in BEFORE_PODS.iter().chain(&BESIDE_PODS) {
            let (server, name) = (server(), "evenkeel-x");
            server.put(
                kind,
                json!({"metadata": {"name": name}, "data": "of the victim"}),
            );
            let victim = server.get(kind, name);
            let context = server.context();
            reconcile_until(&server, &context, is_taken).await;
            let condition = ready(&server);
            assert_eq!(condition["status"], "False");
            let message = condition["message"].as_str().unwrap().to_lowercase();
            assert!(message.contains("`evenkeel-x` exists"), "{message}");
            let pods = server.names("pods").len();
            assert_eq!(
                pods,
                if BEFORE_PODS.contains(kind) { 0 } else { 2 },
                "{kind}"
            );
            // Further reconciliations do not ask for the name each time.
            let asked = || server.requests(kind).len();
            let before = asked();
            for _ in 0..50 {
                reconcile_once(&server, &context).await;
            }
            assert!(asked() - before < 20, "{kind}: {}", asked() - before);
            assert_eq!(server.get(kind, name), victim, "{kind}");
            // It recovers by itself.
            server.remove(kind, name);
            reconcile_until(&server, &context, |server| {
                !is_taken(server) && server.names("rolebindings").len() == 1
            })
            .await;
            assert_eq!(server.names("pods").len(), 2);
            let made = server.get(kind, name).unwrap();
            assert_eq!(
                made["metadata"]["ownerReferences"],
                json!([owner("x", "u")])
            );
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_pod_of_another_owner_is_reported_and_does_not_keep_others_back() {
        let (server, name) = (server(), "x-0-1");
        let labels = json!({build::JOB_LABEL: "x", build::SLOT_LABEL: "0"});
        server.put(
            "pods",
            json!({"metadata": {"name": name, "labels": labels}}),
        );
        let victim = server.get("pods", name);
        let context = server.context();
        reconcile_until(&server, &context, is_taken).await;
        let message = ready(&server)["message"].clone();
        assert_eq!(
            message,
            "Pod `x-0-1` exists and does not belong to this TrainingJob; delete it, or create the job \
             with another name"
        );
        assert_eq!(server.names("pods"), ["x-0-1", "x-1-2"]);
        assert_eq!(server.get("pods", name), victim);
        server.remove("pods", name);
        reconcile_until(&server, &context, |server| !is_taken(server)).await;
        let made = server.get("pods", name).unwrap();
        assert_eq!(
            made["metadata"]["ownerReferences"],
            json!([owner("x", "u")])
        );
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn objects_of_an_earlier_job_are_waited_for_without_a_condition() {
        let server = server();
        let leave = |kind: &str, name: &str| {
            let owners = json!([owner("x", "earlier")]);
            server.put(
                kind,
                json!({"metadata": {"name": name, "ownerReferences": owners}}),
            );
        };
        leave("networkpolicies", "evenkeel-x");
        leave("pods", "x-0-1");
        let context = server.context();
        for _ in 0..5 {
            let action = reconcile_once(&server, &context).await;
            assert_ne!(action, Action::await_change());
            assert!(!is_taken(&server));
        }
        server.remove("networkpolicies", "evenkeel-x");
        reconcile_until(&server, &context, |server| server.names("pods").len() == 2).await;
        server.remove("pods", "x-0-1");
        reconcile_until(&server, &context, |server| server.names("pods").len() == 2).await;
        assert!(!is_taken(&server));
        for pod in ["x-0-1", "x-1-2"] {
            let made = server.get("pods", pod).unwrap();
            assert_eq!(
                made["metadata"]["ownerReferences"],
                json!([owner("x", "u")])
            );
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_expired_job_is_not_deleted_in_place_of_its_successor() {
        let server = server();
        let mut expired = job("x", "earlier");
        expired.spec.ttl_seconds_after_finished = Some(0);
        let mut status = TrainingJobStatus {
            completion_time: Some(micro_time(1000.0)),
            ..TrainingJobStatus::default()
        };
        status.phase = Phase::Complete;
        conditions::of_phase(&mut status, None, None);
        conditions::observe(&mut status, expired.metadata.generation);
        expired.status = Some(status);
        let done = reconcile(Arc::new(expired), server.context()).await;
        assert_eq!(done.unwrap(), Action::await_change());
        assert_eq!(server.names("trainingjobs"), ["x"]);
    }
}
