//! One look at one job: observe → decide → write status → apply.

use std::sync::Arc;
use std::time::Duration;

use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::announce::announce;
use super::apply::{self, ApplyError, MANAGER};
use super::context::{Companions, Context};
use super::locked::locked;
use super::observe::Observation;
use super::planning::{self, Planner, Refusal};
use super::{build, conditions, faults, status};
use crate::batch::Reached;
use crate::job::api::status::{PlanSummary, Seat, State, TrainingJobStatus};
use crate::job::api::{Capacity, TrainingJob};
use crate::job::steer::{Act, Decision, View, steer};
use crate::telemetry::now;

/// Between two looks while something is under way.
const SOON: Duration = Duration::from_secs(1);
/// Between two looks of a job that waits for the pool.
const POOL: Duration = Duration::from_secs(5);
/// Between two looks while nothing is.
const LATER: Duration = Duration::from_secs(60);
/// Numbers of nodes beyond `nodes` whose feasibility the status names.
const LOOK_AHEAD: u32 = 8;

/// Why a look did not end well; it is repeated after a while.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// An object could not be applied.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The API server said no, or nothing.
    #[error("{0}")]
    Api(#[from] kube::Error),
    /// The status has fields that the API server has not heard of.
    #[error(
        "the TrainingJob definition (CRD) in this cluster is not this controller's, apply the one of its release (charts/evenkeel/crds; Helm upgrades no CRDs): {0}"
    )]
    Definition(Box<kube::core::Status>),
}

/// Looks at a job once.
pub async fn reconcile(
    job: Arc<TrainingJob>,
    context: Arc<Context>,
) -> Result<Action, ReconcileError> {
    context.recover_promises();
    let job = context.newest(job);
    let uid = job.uid().unwrap_or_default();
    if job.metadata.deletion_timestamp.is_some() {
        context.forget(&job);
        return Ok(Action::await_change());
    }
    let before = job.status.clone().unwrap_or_default();
    if matches!(before.state, State::Complete | State::Failed) {
        return ended(&job, &before, &context).await;
    }
    let mut next = before.clone();
    conditions::readable(&mut next);
    if next.observed_generation != job.metadata.generation {
        // What kept pods from starting may have been mended.
        next.pod_failures = None;
    }
    next.observed_generation = job.metadata.generation;
    let labels = build::selector(&job)
        .into_iter()
        .map(|(key, value)| format!("{key}={value}"));
    next.selector = labels.collect::<Vec<_>>().join(",");
    let planned = plan(&job, &mut next, &context).await;
    let (mut planner, refusal) = match (planned, &before.generation) {
        (Ok(planner), _) => (planner, None),
        (Err(refusal), None) => return refused(&job, &before, next, &refusal, &context).await,
        // It goes on as it is, and is looked after.
        (Err(refusal), Some(current)) => {
            let (reason, message) = (refusal.reason, refusal.message);
            conditions::set(&mut next, "Planned", false, reason, &message);
            (Planner::holding(current.record.plan.clone()), Some(message))
        }
    };

    let now = now();
    let edits = refusal.is_none();
    let (stores, agents, leases) = (&context.stores, &context.agents, &context.leases);
    let seen = Observation::of(&job, &next, stores, agents, leases, edits);
    let reached = planning::reached(&next);
    let holds = |ranks, limit| {
        let within = Reached {
            micro_limit: Some(limit),
            ..reached
        };
        planner.is_feasible(ranks, within)
    };
    status::take_in(&job, &mut next, &seen, holds, now);
    let (decision, placeable) = decide(&job, &next, &seen, &mut planner, &context, now);
    next.attempts = decision.attempts;
    next.larger_since = decision.larger_since;
    next.placing_since = decision.placing_since;
    let over = matches!(decision.act, Act::End(_));
    if !over {
        next.seats.clone_from(&decision.seats);
    }
    let mut plan = None;
    if let Act::Publish {
        members,
        micro_limit,
        ..
    } = &decision.act
    {
        next.micro_limit = micro_limit.or(next.micro_limit);
        let ranks = members.len() as u64 * u64::from(job.spec.gpus_per_node);
        plan = planner.plan(ranks, planning::reached(&next)).ok();
        if let Some(plan) = &plan {
            let feasible = feasible_nodes(&job, &next, &mut planner);
            next.plan = Some(PlanSummary::of(plan, feasible));
        }
    }
    status::carry_out(&job, &mut next, &decision.act, plan.as_ref(), &seen, now);
    status::batch_now(&mut next);
    let refused = context.refusal(&uid).filter(|_| !over);
    let skipped = || skipped(&job, &next, placeable, &mut planner);
    let notice = refused.clone().or(refusal).or_else(skipped);
    status::notice(&mut next, notice);
    conditions::of_state(&mut next, refused.as_deref());
    context.keep(&uid, planner);

    let act = decision.act.name();
    faults::point("decided", act);
    let written = write(&job, &before, &next, &context).await?;
    faults::point("written", act);
    announce(&written, &before, &next, &context);
    let mut after = next_look(&next);
    if !over {
        let made = make(&written, &next, &seen, act, &context).await;
        if let Err(error) = &made
            && let Some(why) = error.refusal()
        {
            context.was_refused(&uid, why);
        }
        if made? {
            after = Duration::ZERO;
        }
    }
    context.went_well(&uid);
    Ok(Action::requeue(after))
}

/// Makes what the status says; true where the job is to be looked at again at once.
async fn make(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    seen: &Observation,
    act: &str,
    context: &Context,
) -> Result<bool, ApplyError> {
    let uid = job.uid().unwrap_or_default();
    // Nothing is made for a job that has no place for a pod.
    let due = match status.seats.is_empty() {
        true => Companions::Complete,
        false => context.companions(&uid),
    };
    if due == Companions::Missing {
        apply::before_pods(&context.client, job).await?;
        context.begins(&uid);
        faults::point("companions", act);
    }
    // The rest in a look of its own, behind those of other jobs: their pods come first. Its own
    // pods are heard of meanwhile, so that it is looked at again.
    let waits = due == Companions::BeforePods && context.others_begin(&uid);
    let beside = async {
        if due == Companions::BeforePods && !waits {
            apply::beside_pods(&context.client, job).await?;
            context.complete(&uid);
        }
        Ok(())
    };
    tokio::try_join!(apply::pods(context, job, status, seen), beside)?;
    faults::point("pods", act);
    Ok(due == Companions::Missing)
}

/// Numbers of nodes that the pool would hold, and that the job passes over, with the rule that says so.
fn skipped(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    placeable: u32,
    planner: &mut Planner,
) -> Option<String> {
    if status.state != State::Running {
        return None;
    }
    let first = status.nodes + 1;
    let last = job.spec.nodes.min(*bounds(job).end()).min(placeable);
    if first > last {
        return None;
    }
    let (per_node, reached) = (u64::from(job.spec.gpus_per_node), planning::reached(status));
    let mut refused = |nodes: u32| planner.refusal(u64::from(nodes) * per_node, reached);
    // One that splits the batch is on its way, if there is one.
    let all = (first..=last).all(|nodes| refused(nodes).is_some());
    let why = refused(last).filter(|_| all)?;
    Some(match first == last {
        true => format!("passes over {first} nodes: {why}"),
        false => format!("passes over {first} to {last} nodes: {why}"),
    })
}

/// When to look again if nothing is heard of the job: soon while a clock runs.
fn next_look(status: &TrainingJobStatus) -> Duration {
    let current = status.generation.as_ref();
    let waits = status.larger_since.is_some() || status.not_before.is_some();
    let in_change = status.change_since.is_some() && current.is_some();
    match status.state {
        State::Suspended => LATER,
        _ if waits || in_change => SOON,
        State::Draining => SOON,
        // Another job may have given back what it was promised but did not hold yet.
        _ => POOL,
    }
}

/// The job's planner, with its recipe read; the status keeps the recipe and the first plan.
async fn plan(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    context: &Context,
) -> Result<Planner, Refusal> {
    let mut planner = context.planner(&job.uid().unwrap_or_default());
    planner.refuse_unmakeable(job, context.image.as_deref())?;
    let snapshot = planning::snapshot(&context.client, job).await?;
    let another = planner.read(job, &snapshot)?;
    if status.generation.is_none() {
        planner.refuse_losses(&snapshot.overrides)?;
    }
    status.recipe = Some(snapshot);
    // Also of a job that runs: with another command there may be no world that it can move to, and
    // nothing is done to it then.
    if another || status.plan.is_none() {
        let bounds = bounds(job);
        let per_node = u64::from(job.spec.gpus_per_node);
        let most = job.spec.nodes.min(*bounds.end());
        let reached = planning::reached(status);
        let mut worlds = (*bounds.start()..=most).rev();
        let first =
            worlds.find_map(|nodes| planner.plan(u64::from(nodes) * per_node, reached).ok());
        let Some(plan) = first else {
            let nodes = job.spec.nodes.max(1);
            let ranks = u64::from(nodes) * per_node;
            let why = planner.plan(ranks, reached).err().unwrap_or_default();
            return Err(planning::plan_refused(format!(
                "no plan for {nodes} nodes of {per_node} GPUs: {why}"
            )));
        };
        if status.plan.is_none() {
            let feasible = feasible_nodes(job, status, &mut planner);
            status.plan = Some(PlanSummary::of(&plan, feasible));
        }
    }
    conditions::set(
        status,
        "Planned",
        true,
        "Planned",
        "the recipe is planned and its rules hold",
    );
    Ok(planner)
}

fn bounds(job: &TrainingJob) -> std::ops::RangeInclusive<u32> {
    let elasticity = &job.spec.elasticity;
    elasticity.min_nodes..=elasticity.max_nodes.unwrap_or(1024)
}

/// Numbers of nodes that split the batch.
fn feasible_nodes(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    planner: &mut Planner,
) -> Vec<u32> {
    let per_node = u64::from(job.spec.gpus_per_node);
    let reached = planning::reached(status);
    (1..=job.spec.nodes + LOOK_AHEAD)
        .filter(|nodes| bounds(job).contains(nodes))
        .filter(|nodes| planner.is_feasible(u64::from(*nodes) * per_node, reached))
        .collect()
}

/// Decides, alone: what this job counts on is promised before the next one looks. Beside the decision,
/// the seats that the nodes have room for now.
fn decide(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    seen: &Observation,
    planner: &mut Planner,
    context: &Context,
    now: f64,
) -> (Decision, u32) {
    let name = job.name_any();
    let per_node = u64::from(job.spec.gpus_per_node);
    let members = status::members(status, &name);
    let reached = planning::reached(status);
    // The rules are asked once for every number of nodes that may be looked at.
    let most = bounds(job).end().min(&job.spec.nodes).to_owned();
    let feasible: Vec<bool> = (0..=most)
        .map(|nodes| nodes > 0 && planner.is_feasible(u64::from(nodes) * per_node, reached))
        .collect();
    let mut ledger = locked(&context.ledger);
    ledger.suspect(&seen.suspects);
    let placeable = ledger.seats(&context.stores, job, &seen.wants) + seen.staying;
    let pool = match job.spec.elasticity.capacity {
        Capacity::Request => job.spec.nodes,
        Capacity::Discovered => placeable,
    };
    let decision = steer(&View {
        desired: job.spec.nodes,
        bounds: bounds(job),
        ranks_per_node: per_node,
        feasible: &|nodes| feasible.get(nodes as usize).copied().unwrap_or(false),
        pool,
        placeable,
        seats: &seen.seats,
        members: &members,
        ranks: status::ranks(status),
        suspend: job.spec.suspend,
        restarts_left: u64::from(
            job.spec
                .budgets
                .restarts
                .saturating_sub(status.restarts.saturating_sub(1)),
        ),
        problem: seen
            .problem
            .as_ref()
            .filter(|p| p.deterministic)
            .map(|p| p.message.clone()),
        attempts: status.attempts,
        larger_since: status.larger_since,
        placing_since: status.placing_since,
        grow_delay: f64::from(job.spec.elasticity.grow_delay_seconds),
        placement: f64::from(job.spec.elasticity.placement_seconds),
        not_before: status.not_before.unwrap_or(0.0),
        no_pod_before: status.pod_failures.as_ref().map_or(0.0, |f| f.again),
        now,
    });
    let pods = decision
        .seats
        .iter()
        .map(|seat: &Seat| seat.pod(&name))
        .collect();
    ledger.promise(job, &seen.wants, pods);
    (decision, placeable)
}

/// A job that cannot be planned and never ran: nothing is made for it, and it waits for a change.
async fn refused(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    mut next: TrainingJobStatus,
    refusal: &Refusal,
    context: &Context,
) -> Result<Action, ReconcileError> {
    next.state = State::Pending;
    // Pods that were being placed when it was edited hold devices for nothing.
    next.seats.clear();
    locked(&context.ledger).forget(&job.uid().unwrap_or_default());
    next.why.clone_from(&refusal.message);
    conditions::set(
        &mut next,
        "Planned",
        false,
        refusal.reason,
        &refusal.message,
    );
    let written = write(job, before, &next, context).await?;
    announce(&written, before, &next, context);
    if !before.seats.is_empty() {
        let (stores, agents, leases) = (&context.stores, &context.agents, &context.leases);
        let seen = Observation::of(job, &next, stores, agents, leases, false);
        apply::pods(context, &written, &next, &seen).await?;
    }
    Ok(match refusal.waits {
        true => Action::requeue(Duration::from_secs(5)),
        false => Action::await_change(),
    })
}

/// A job that is over: its agents leave by themselves, its objects stay until it is deleted or its
/// time is up.
async fn ended(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    context.forget(job);
    let (Some(ttl), Some(finished)) = (job.spec.ttl_seconds_after_finished, status.finished) else {
        return Ok(Action::await_change());
    };
    let left = finished + f64::from(ttl) - now();
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

/// What a server-side apply says of a field that the definition lacks: a 500 by its code, so that only
/// these words tell it from other failures (structured-merge-diff v6, `typed/helpers.go`).
const UNDECLARED: &str = "not declared in schema";

/// Writes the status, if it changed, on top of the very object that was looked at: another
/// controller's write in between is a conflict, and the job is looked at again.
async fn write(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    next: &TrainingJobStatus,
    context: &Context,
) -> Result<TrainingJob, ReconcileError> {
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
    context.wrote(&written);
    Ok(written)
}
