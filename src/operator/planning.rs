//! The step that plans a job, and the worlds that a job may have.

use std::ops::RangeInclusive;
use std::time::Duration;

use kube::ResourceExt;
use tracing::{error, warn};

use super::conditions;
use super::context::Context;
use super::planner::{NoPlan, PlanInput, Planner};
use super::recipe_source::{Refusal, plan_refused, snapshot};
use crate::api::TrainingJob;
use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::status::{Phase, PlanSummary, RecipeSnapshot, TrainingJobStatus};
use crate::lifecycle::placement::{Placement, PlacementAction};
use crate::plan::{Plan, Reached, descend};

/// Numbers of nodes beyond `nodes` whose feasibility the status names.
const LOOK_AHEAD: u32 = 8;

/// Why a job is not planned now.
pub enum Unplanned {
    Refused(Refusal),
    /// Another job of the namespace plans; try again after this pause.
    Later(Duration),
}

impl From<Refusal> for Unplanned {
    fn from(refusal: Refusal) -> Unplanned {
        Unplanned::Refused(refusal)
    }
}

/// The worlds that a job may have.
pub struct Planned {
    pub planner: Planner,
    /// Why the edited spec has no plan. The running generation continues unchanged and is still reconciled.
    pub refusal: Option<String>,
    /// Pause until the job may have its turn to plan. Until then, `planner` knows only what the status says: the
    /// running generation is observed and may be drained, and no world or pod is decided.
    pub waits: Option<Duration>,
    /// Whether edits of the spec take effect.
    pub edits: bool,
}

/// Plans a job. Stores the recipe snapshot and the first plan in the status.
pub async fn plan(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    context: &Context,
) -> Result<Planned, Unplanned> {
    let mut planner = context.take_planner(job);
    match read_and_plan(job, status, &mut planner, context).await {
        Ok(()) => Ok(Planned {
            planner,
            refusal: None,
            waits: None,
            edits: true,
        }),
        Err(Unplanned::Later(pause)) => {
            context.store_planner(job, planner);
            // This spec is not planned yet.
            status.observed_generation = job.status.as_ref().and_then(|s| s.observed_generation);
            until_turn(job, pause, is_accepted(job)).ok_or(Unplanned::Later(pause))
        }
        Err(Unplanned::Refused(refusal)) => refused(status, refusal),
    }
}

/// A refused job continues with the plan of its newest generation.
fn refused(status: &mut TrainingJobStatus, refusal: Refusal) -> Result<Planned, Unplanned> {
    let Some(current) = &status.generation else {
        return Err(Unplanned::Refused(refusal));
    };
    let planner = Planner::with_plan(current.record.plan.clone());
    let (reason, message) = (refusal.reason, refusal.message);
    conditions::set(status, ConditionType::Planned, false, reason, &message);
    Ok(Planned {
        planner,
        refusal: Some(message),
        waits: None,
        edits: false,
    })
}

/// Evaluates the worlds of a job for what was observed. Also returns the feasible numbers of nodes.
pub fn evaluate_observed(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    planned: Planned,
    context: &Context,
) -> Result<(Planned, Vec<u32>), Unplanned> {
    let (planner, reached) = (&planned.planner, reached(status));
    let known = |nodes| match planner.known(ranks(job, nodes), reached) {
        Some(feasible) => feasible.then_some(Some(nodes)),
        None => Some(None),
    };
    let feasible = match considered(job).filter_map(known).collect() {
        Some(feasible) => Ok(feasible),
        None => in_turn(job, context, || feasible_nodes(job, reached, planner)),
    };
    match feasible {
        Ok(feasible) => Ok((planned, feasible)),
        Err(unplanned) => {
            let planned = without_plan(job, status, planned, unplanned, context)?;
            let feasible = feasible_nodes(job, reached, &planned.planner);
            Ok((planned, feasible))
        }
    }
}

/// What a job continues with if a world that it asks for cannot be planned now.
pub fn without_plan(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    planned: Planned,
    unplanned: Unplanned,
    context: &Context,
) -> Result<Planned, Unplanned> {
    context.store_planner(job, planned.planner);
    match unplanned {
        Unplanned::Later(pause) => {
            let until_turn = until_turn(job, pause, planned.edits);
            until_turn.ok_or(Unplanned::Later(pause))
        }
        Unplanned::Refused(refusal) => {
            if let Some(snapshot) = &status.recipe {
                let input = PlanInput::of(job, status, snapshot, reached(status));
                let uid = job.uid().unwrap_or_default();
                context.record_refusal(&uid, input, refusal.clone());
            }
            refused(status, refusal)
        }
    }
}

/// What is known without a plan of a job whose generation runs; `None` if none runs: then nothing is urgent.
fn until_turn(job: &TrainingJob, pause: Duration, edits: bool) -> Option<Planned> {
    let status = job.status.as_ref()?;
    let current = status.generation.as_ref()?;
    if current.outcome.is_some() {
        return None;
    }
    let feasible = status.plan.iter().flat_map(|plan| &plan.feasible_nodes);
    let worlds = feasible.map(|nodes| ranks(job, *nodes));
    // An edit may have made them infeasible.
    let worlds = worlds.filter(|_| is_accepted(job)).collect();
    Some(Planned {
        planner: Planner::with_known_worlds(current.record.plan.clone(), worlds),
        refusal: None,
        waits: Some(pause),
        edits,
    })
}

/// Whether the spec has been planned, by this controller process or an earlier one.
fn is_accepted(job: &TrainingJob) -> bool {
    let conditions = job.status.iter().flat_map(|status| &status.conditions);
    let mut planned = conditions.filter(|c| c.type_ == ConditionType::Planned.name());
    planned.any(|c| c.status == "True" && c.observed_generation == job.metadata.generation)
}

async fn read_and_plan(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    planner: &mut Planner,
    context: &Context,
) -> Result<(), Unplanned> {
    planner.refuse_unbuildable(job, context.image.as_deref())?;
    let snapshot = snapshot(&context.client, job).await?;
    let uid = job.uid().unwrap_or_default();
    let input = PlanInput::of(job, status, &snapshot, reached(status));
    if let Some(refusal) = context.refusal(&uid, &input) {
        return Err(refusal.into());
    }
    let planned = plan_recipe(job, status, planner, snapshot, context);
    if let Err(Unplanned::Refused(refusal)) = &planned {
        context.record_refusal(&uid, input, refusal.clone());
    }
    planned
}

/// Reads the recipe and plans the first world that is feasible, in one turn.
fn plan_recipe(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    planner: &mut Planner,
    snapshot: RecipeSnapshot,
    context: &Context,
) -> Result<(), Unplanned> {
    let has_read = planner.has_read(job, &snapshot);
    // A running job is planned too: after a change of its command no other world may be feasible, and
    // then it is left unchanged.
    if !has_read || !planner.found_plan || status.plan.is_none() {
        let reached = reached(status);
        let (plan, feasible) = in_turn(job, context, || {
            if !has_read {
                planner.read(job, &snapshot, &context.recipes)?;
            }
            if status.generation.is_none() {
                planner.refuse_losses(&snapshot.overrides)?;
            }
            first_plan(job, planner, reached)
        })??;
        planner.found_plan = true;
        let summary = || PlanSummary::of(&job.spec, &plan, feasible);
        status.plan.get_or_insert_with(summary);
    }
    // A refused recipe may still be edited.
    status.recipe = Some(snapshot);
    conditions::set(
        status,
        ConditionType::Planned,
        true,
        ConditionReason::Planned,
        "the recipe is planned and its rules hold",
    );
    Ok(())
}

/// The plan of the largest feasible world of a job, and the feasible numbers of nodes.
fn first_plan(
    job: &TrainingJob,
    planner: &Planner,
    reached: Reached,
) -> Result<(Plan, Vec<u32>), Refusal> {
    let feasible = feasible_nodes(job, reached, planner);
    let nodes = job.spec.nodes.max(1);
    let most = nodes.min(*bounds(job).end());
    let first = feasible.iter().rfind(|nodes| **nodes <= most);
    let ranks = ranks(job, *first.unwrap_or(&nodes));
    let plan = planner.plan(ranks, reached).map_err(|message| {
        let per_node = job.spec.gpus_per_node;
        plan_refused(format!(
            "no plan for {nodes} nodes of {per_node} GPUs: {message}"
        ))
    })?;
    Ok((plan, feasible))
}

/// Reads or plans a recipe in the turn of its job. A recipe is its tenant's: it may take long, and it may make the
/// planner panic.
fn in_turn<T>(
    job: &TrainingJob,
    context: &Context,
    work: impl FnOnce() -> T,
) -> Result<T, Unplanned> {
    let turn = context.turns.begin(&job.namespace().unwrap_or_default());
    let done = turn.map_err(Unplanned::Later)?.run(work);
    done.map_err(|_| {
        error!("the planner panicked on the recipe");
        let message = "the planner failed on this recipe: please report it with the recipe; the controller's \
                       log has the place";
        Unplanned::Refused(plan_refused(message.into()))
    })
}

/// Numbers of nodes whose feasibility matters.
fn considered(job: &TrainingJob) -> impl Iterator<Item = u32> + use<> {
    let bounds = bounds(job);
    (1..=job.spec.nodes.saturating_add(LOOK_AHEAD)).filter(move |nodes| bounds.contains(nodes))
}

pub fn bounds(job: &TrainingJob) -> RangeInclusive<u32> {
    let elasticity = &job.spec.elasticity;
    elasticity.min_nodes..=elasticity.max_nodes.unwrap_or(1024)
}

/// Feasible numbers of nodes.
fn feasible_nodes(job: &TrainingJob, reached: Reached, planner: &Planner) -> Vec<u32> {
    let mut nodes = Vec::from_iter(considered(job));
    nodes.retain(|nodes| planner.is_feasible(ranks(job, *nodes), reached));
    nodes
}

/// Ranks on a number of nodes.
fn ranks(job: &TrainingJob, nodes: u32) -> u64 {
    u64::from(nodes) * u64::from(job.spec.gpus_per_node)
}

/// Message for numbers of nodes that fit in the pool but that a rule refuses. `None` also while they are not evaluated.
pub fn skipped(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    placeable: u32,
    planner: &Planner,
    context: &Context,
) -> Result<Option<String>, Unplanned> {
    if status.phase != Phase::Running {
        return Ok(None);
    }
    let first = status.nodes + 1;
    let last = job.spec.nodes.min(*bounds(job).end()).min(placeable);
    let reached = reached(status);
    // If one of them is feasible, a scale up to it is under way.
    let is_refused = |nodes| planner.known(ranks(job, nodes), reached) == Some(false);
    if first > last || !(first..=last).all(is_refused) {
        return Ok(None);
    }
    let ranks = ranks(job, last);
    // A world that does not split the batch is not evaluated before.
    let refusal = match planner.known_refusal(ranks, reached) {
        Some(refusal) => refusal,
        None => in_turn(job, context, || planner.refusal(ranks, reached))?,
    };
    Ok(refusal.map(|message| match first == last {
        true => format!("skips {first} nodes: {message}"),
        false => format!("skips {first} to {last} nodes: {message}"),
    }))
}

/// The largest micro-batch below that of `plan` with which its world is feasible, for the current global batch
/// `batch`: the question after an out-of-memory error.
pub fn smaller(
    job: &TrainingJob,
    planned: &Planned,
    reached: Reached,
    (plan, batch): (&Plan, u64),
    context: &Context,
) -> Result<Option<u64>, Unplanned> {
    if let Some(pause) = planned.waits {
        return Err(Unplanned::Later(pause));
    }
    let is_feasible = |limit: &u64| {
        let within = Reached {
            per_device_batch_size_limit: Some(*limit),
            ..reached
        };
        let world = plan.outline.world_size;
        planned.planner.is_feasible(world, within)
    };
    in_turn(job, context, || descend(plan, batch).find(is_feasible))
}

/// A world that is published, and the feasible numbers of nodes beside it.
#[derive(Debug)]
pub struct World {
    pub plan: Plan,
    pub feasible_nodes: Vec<u32>,
}

/// Plans the world that a placement publishes. `None`: it publishes none, or the world has no plan.
pub fn world(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    placement: &Placement,
    planner: &Planner,
    context: &Context,
) -> Result<Option<World>, Unplanned> {
    let PlacementAction::Publish {
        members,
        per_device_batch_size_limit: limit,
        ..
    } = &placement.action
    else {
        return Ok(None);
    };
    let before = reached(status);
    let reached = Reached {
        per_device_batch_size_limit: limit.or(before.per_device_batch_size_limit),
        ..before
    };
    let ranks = members.len() as u64 * u64::from(job.spec.gpus_per_node);
    let plan = || {
        let feasible_nodes = feasible_nodes(job, reached, planner);
        let plan = planner.plan(ranks, reached)?;
        Ok::<_, NoPlan>(World {
            plan,
            feasible_nodes,
        })
    };
    let world = if planner.has_recipe() {
        in_turn(job, context, plan)?
    } else {
        plan()
    };
    Ok(world
        .inspect_err(|error| warn!(%error, "the decided world has no plan and is not published"))
        .ok())
}

/// Progress of a job that restricts its next plans.
pub fn reached(status: &TrainingJobStatus) -> Reached {
    Reached {
        global_batch_size: status.plan.as_ref().map(|plan| plan.global_batch_size),
        per_device_batch_size_limit: status.per_device_batch_size_limit,
        batch: status
            .checkpoint
            .as_ref()
            .map(|checkpoint_ref| checkpoint_ref.batch),
    }
}
