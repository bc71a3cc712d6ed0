//! The step that plans a job, and the worlds that a job may have.

use std::ops::RangeInclusive;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kube::ResourceExt;
use tracing::{error, warn};

use super::build;
use super::conditions::Refusal;
use super::context::Reconciliation;
use super::recipe_source::{Source, plan_refused, source};
use super::recipes::{JobRecipe, PlanInput, RecipeId, reached};
use super::turns::{AtWork, Turn};
use crate::api::condition::ConditionType;
use crate::api::status::{KeptRecipe, Phase, Slot, TrainingJobStatus};
use crate::inventory::kubernetes::{MOST_CONSTRAINTS, ResourceRequest};
use crate::lifecycle::RankAction;
use crate::lifecycle::placement::{Placement, PlacementAction};
use crate::plan::{Plan, Reached, Worlds};
use crate::recipe::Diagnostic;

/// Numbers of nodes beyond `nodes` whose feasibility the status names.
const LOOK_AHEAD: u32 = 8;

/// Pause before a job is read again that the API server did not give.
const AGAIN: Duration = Duration::from_secs(1);
/// Refusal of a planned job with another recipe, which the API server refuses too.
const EDITED: &str = "spec.recipe or spec.overrides is not the one that the job was planned with: restore it, or create a \
                      new TrainingJob";

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

/// What planning a job has found.
#[derive(Default)]
pub struct Planning {
    /// The recipe that is planned. `None`: the spec is refused or waits for its turn, and only the worlds that the
    /// status names are known.
    pub recipe: Option<Arc<JobRecipe>>,
    /// Whether the spec has a plan. `None`: it waits for its turn. Of a refused edit the running generation continues
    /// unchanged and is still reconciled.
    pub verdict: Option<Result<(), Refusal>>,
    /// Pause until the job may have its turn to plan. Until then the running generation is observed and may be
    /// drained, and no world or pod is decided.
    pub waits: Option<Duration>,
    /// Whether edits of the spec take effect.
    pub edits: bool,
    /// No pod can or may be made from the spec: the job keeps the pods that it has.
    pub is_unbuildable: bool,
}

impl Reconciliation<'_> {
    /// Plans the job. Also returns what the status keeps of its recipe, with the first world, unless it has both.
    pub async fn plan(
        &self,
        status: &TrainingJobStatus,
    ) -> Result<(Planning, Option<(KeptRecipe, World)>), Unplanned> {
        if let Err(refusal) = self.refuse_unbuildable() {
            let planned = Planning {
                is_unbuildable: true,
                ..self.refused(status, refusal)?
            };
            return Ok((planned, None));
        }
        match self.read_and_plan(status).await {
            Ok((recipe, first)) => {
                self.state(|state| state.planned = Arc::downgrade(&recipe));
                let planned = Planning {
                    recipe: Some(recipe),
                    verdict: Some(Ok(())),
                    edits: true,
                    ..Planning::default()
                };
                Ok((planned, first))
            }
            Err(Unplanned::Later(pause)) => Ok((self.until_turn(pause, self.is_accepted())?, None)),
            Err(Unplanned::Refused(refusal)) => Ok((self.refused(status, refusal)?, None)),
        }
    }

    /// Refuses a job whose objects cannot be built; checked once for every edit.
    fn refuse_unbuildable(&self) -> Result<(), Refusal> {
        if self.reserved_request().is_none() {
            let request = self.buildable()?;
            let generation = self.job.metadata.generation;
            self.state(|state| state.buildable = Some((generation, request)));
        }
        Ok(())
    }

    /// Resource request of the job's pods, once they are known to be valid.
    pub fn reserved_request(&self) -> Option<ResourceRequest> {
        let generation = self.job.metadata.generation;
        let known = self.state(|state| state.buildable.clone());
        known
            .filter(|known| known.0 == generation)
            .map(|known| known.1)
    }

    /// Resource request of the job's pods; refuses a job whose objects cannot be built.
    pub fn buildable(&self) -> Result<ResourceRequest, Refusal> {
        let (job, image) = (self.job, self.context.image.as_deref());
        let request = build::resource_request(job);
        let constraints = request.constraints();
        if constraints > MOST_CONSTRAINTS {
            return Err(plan_refused(format!(
                "spec.podTemplate has {constraints} tolerations, node labels and values of the node affinity; \
                 {MOST_CONSTRAINTS} at most: label the nodes with one value that selects them"
            )));
        }
        let pod = build::pod(job, Slot::default(), image).map_err(|error| {
            plan_refused(format!(
                "spec.podTemplate does not give a valid pod: {error}; compare it with `kubectl explain pod.spec`"
            ))
        })?;
        let class = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.priority_class_name.as_deref())
            .filter(|class| !class.is_empty());
        if let (Some(class), Some(allowed)) = (class, &self.context.priority_classes)
            && !allowed.iter().any(|name| name == class)
        {
            return Err(plan_refused(format!(
                "spec.podTemplate has the priority class {class}, whose pods preempt those of others: remove it, or let the \
                 cluster's administrator add it to the chart's admissionPolicy.priorityClasses"
            )));
        }
        Ok(request.of_pod(&pod))
    }

    /// Evaluates the worlds of the job for what was observed. Also returns the feasible numbers of nodes.
    pub fn evaluate_observed(
        &self,
        status: &TrainingJobStatus,
        planned: Planning,
    ) -> Result<(Planning, Vec<u32>), Unplanned> {
        let reached = reached(status);
        let feasible = match &planned.recipe {
            None => Ok(self.named_nodes(status, &planned, reached)),
            Some(recipe) => {
                let known = |nodes| {
                    let is_feasible = recipe.known().is_feasible(self.ranks(nodes), reached)?;
                    Some((nodes, is_feasible))
                };
                let known: Option<Vec<(u32, bool)>> = self.considered().map(known).collect();
                match known {
                    Some(known) => Ok(known
                        .iter()
                        .filter(|known| known.1)
                        .map(|it| it.0)
                        .collect()),
                    None => {
                        self.in_turn(|at_work| self.feasible_nodes(recipe.worlds(at_work), reached))
                    }
                }
            }
        };
        match feasible {
            Ok(feasible) => Ok((planned, feasible)),
            Err(unplanned) => {
                let planned = self.without_plan(status, planned, unplanned)?;
                let feasible = self.named_nodes(status, &planned, reached);
                Ok((planned, feasible))
            }
        }
    }

    /// What the job continues with if a world that it asks for cannot be planned now.
    pub fn without_plan(
        &self,
        status: &TrainingJobStatus,
        planned: Planning,
        unplanned: Unplanned,
    ) -> Result<Planning, Unplanned> {
        match unplanned {
            Unplanned::Later(pause) => Ok(Planning {
                verdict: planned.verdict,
                ..self.until_turn(pause, planned.edits)?
            }),
            Unplanned::Refused(refusal) => {
                if let Some(kept) = &status.recipe {
                    let input = PlanInput::of(self.job, status, &kept.into());
                    self.state(|state| state.refused = Some((input, refusal.clone())));
                }
                self.refused(status, refusal)
            }
        }
    }

    /// A refused job continues with the plan of its newest generation.
    fn refused(&self, status: &TrainingJobStatus, refusal: Refusal) -> Result<Planning, Unplanned> {
        self.state(|state| state.planned = Weak::new());
        if status.generation.is_none() {
            return Err(Unplanned::Refused(refusal));
        }
        Ok(Planning {
            verdict: Some(Err(refusal)),
            ..Planning::default()
        })
    }

    /// What is known without a plan of a job whose generation runs. If none runs, nothing is urgent.
    fn until_turn(&self, pause: Duration, edits: bool) -> Result<Planning, Unplanned> {
        let status = self.job.status.as_ref();
        let current = status.and_then(|status| status.generation.as_ref());
        if current.is_none_or(|current| current.outcome.is_some()) {
            return Err(Unplanned::Later(pause));
        }
        Ok(Planning {
            waits: Some(pause),
            edits,
            ..Planning::default()
        })
    }

    /// The feasible numbers of nodes that the status names. That of the newest generation is one of them, and the only
    /// one after an edit, which may have made the others infeasible.
    fn named_nodes(
        &self,
        status: &TrainingJobStatus,
        planned: &Planning,
        reached: Reached,
    ) -> Vec<u32> {
        let others: &[u32] = match &status.plan {
            Some(plan) if planned.waits.is_some() && self.is_accepted() => &plan.feasible_nodes,
            _ => &[],
        };
        let current = status.generation.as_ref();
        let current = current.map(|current| current.record.plan.facts.world_size);
        let is_named = |nodes: &u32| match self.ranks(*nodes) {
            ranks if Some(ranks) == current => newest_plan(status, ranks, reached).is_some(),
            _ => others.contains(nodes),
        };
        self.considered().filter(is_named).collect()
    }

    /// Whether the spec has been planned, by this controller process or an earlier one.
    fn is_accepted(&self) -> bool {
        let conditions = self.job.status.iter().flat_map(|status| &status.conditions);
        let mut planned = conditions.filter(|c| c.type_ == ConditionType::Planned.name());
        let generation = self.job.metadata.generation;
        planned.any(|c| c.status == "True" && c.observed_generation == generation)
    }

    async fn read_and_plan(
        &self,
        status: &TrainingJobStatus,
    ) -> Result<(Arc<JobRecipe>, Option<(KeptRecipe, World)>), Unplanned> {
        let before = self.state(|state| state.planned.clone());
        let before = self.context.recipes.again(&before);
        if let Some(id) = self.known_recipe(status) {
            self.refuse_again(status, &id)?;
            // A running job is planned too: after a change of its command no other world may be feasible, and
            // then it is left unchanged.
            if let Some(recipe) = before.filter(|recipe| recipe.is_of(self.job, &id))
                && status.recipe.is_some()
                && status.plan.is_some()
            {
                return Ok((recipe, None));
            }
        }
        let turn = self.turn()?;
        let _reading = self.context.recipes.reading().await;
        let read = source(&self.context.client, self.job).await?;
        let source = read.ok_or(Unplanned::Later(AGAIN))?;
        let id = RecipeId::from(&source.snapshot);
        let of_status = status.recipe.as_ref();
        if let Some(kept) = of_status.filter(|kept| kept.hash != id.hash) {
            let (job, hash) = (self.job.name_any(), &kept.hash);
            warn!(job, hash, "the recipe of a planned job has changed");
            return Err(plan_refused(EDITED.into()).into());
        }
        if self.job.spec.recipe.config_map.is_none() {
            let known = (self.job.metadata.generation, id.hash.clone());
            self.state(|state| state.recipe = Some(known));
        }
        self.refuse_again(status, &id)?;
        let planned = self.plan_recipe(turn, status, source);
        if let Err(Unplanned::Refused(refusal)) = &planned {
            let input = PlanInput::of(self.job, status, &id);
            self.state(|state| state.refused = Some((input, refusal.clone())));
        }
        let (recipe, first) = planned?;
        Ok((recipe, Some(first)))
    }

    /// The recipe, if it is known without reading it.
    fn known_recipe(&self, status: &TrainingJobStatus) -> Option<RecipeId> {
        if let Some(kept) = &status.recipe {
            return Some(kept.into());
        }
        let (generation, hash) = self.state(|state| state.recipe.clone())?;
        let gpus = None;
        (generation == self.job.metadata.generation).then_some(RecipeId { hash, gpus })
    }

    /// Refuses a plan that was refused before, until what it depends on changes.
    fn refuse_again(&self, status: &TrainingJobStatus, recipe: &RecipeId) -> Result<(), Unplanned> {
        let input = PlanInput::of(self.job, status, recipe);
        match self.state(|state| state.refused.clone()) {
            Some((refused, refusal)) if refused == input => Err(refusal.into()),
            _ => Ok(()),
        }
    }

    /// Reads the recipe and plans the first world that is feasible, in one turn.
    fn plan_recipe(
        &self,
        turn: Turn<'_>,
        status: &TrainingJobStatus,
        source: Source,
    ) -> Result<(Arc<JobRecipe>, (KeptRecipe, World)), Unplanned> {
        let Source { job, mut snapshot } = source;
        let reached = reached(status);
        let recipes = &self.context.recipes;
        let (recipe, first) = self.work_in(turn, |at_work| {
            let recipe = recipes.read(self.job, &snapshot)?;
            let first = self.first_world(recipe.worlds(at_work), reached)?;
            if status.generation.is_none() {
                recipe.check_command(self.job, &snapshot, &first.plan)?;
            }
            if status.recipe.is_some() || !recipe.recipe().spec.batch.needs_a_world() {
                return Ok((recipe, first));
            }
            // From now on every world is planned from this one, as `launch` plans those of a run.
            snapshot.gpus = Some(first.plan.facts.world_size);
            let recipe = recipes.read(self.job, &snapshot)?;
            let first = self.first_world(recipe.worlds(at_work), reached)?;
            Ok::<_, Refusal>((recipe, first))
        })??;
        Ok((recipe, (snapshot.kept(&job.spec.recipe), first)))
    }

    /// The largest feasible world of the job.
    fn first_world(&self, worlds: &Worlds, reached: Reached) -> Result<World, Refusal> {
        let feasible_nodes = self.feasible_nodes(worlds, reached);
        let nodes = self.job.spec.nodes.max(1);
        let most = nodes.min(*self.bounds().end());
        let first = feasible_nodes.iter().rfind(|nodes| **nodes <= most);
        let plan = plan(worlds, self.ranks(*first.unwrap_or(&nodes)), reached);
        let plan = plan.map_err(|message| {
            let per_node = self.job.spec.gpus_per_node;
            plan_refused(format!(
                "no plan for {nodes} nodes of {per_node} GPUs: {message}"
            ))
        })?;
        Ok(World {
            plan,
            feasible_nodes,
        })
    }

    /// The turn of the job to read or plan its recipe.
    fn turn(&self) -> Result<Turn<'_>, Unplanned> {
        let namespace = self.job.namespace().unwrap_or_default();
        let turn = self.context.turns.begin(&namespace);
        turn.map_err(Unplanned::Later)
    }

    /// Plans in the turn of the job.
    fn in_turn<T>(&self, work: impl FnOnce(&AtWork) -> T) -> Result<T, Unplanned> {
        self.work_in(self.turn()?, work)
    }

    /// Reads or plans a recipe. A recipe is its tenant's: it may take long, and it may make the planner panic.
    fn work_in<T>(&self, turn: Turn<'_>, work: impl FnOnce(&AtWork) -> T) -> Result<T, Unplanned> {
        turn.run(work).ok_or_else(|| {
            error!("the planner panicked on the recipe");
            let message = "the planner failed on this recipe: please report it with the recipe; the controller's \
                           log has the place";
            Unplanned::Refused(plan_refused(message.into()))
        })
    }

    /// Numbers of nodes whose feasibility matters.
    fn considered(&self) -> impl Iterator<Item = u32> + use<> {
        let bounds = self.bounds();
        let most = self.job.spec.nodes.saturating_add(LOOK_AHEAD);
        (1..=most).filter(move |nodes| bounds.contains(nodes))
    }

    pub fn bounds(&self) -> RangeInclusive<u32> {
        let elasticity = &self.job.spec.elasticity;
        elasticity.min_nodes..=elasticity.max_nodes.unwrap_or(1024)
    }

    /// Feasible numbers of nodes.
    fn feasible_nodes(&self, worlds: &Worlds, reached: Reached) -> Vec<u32> {
        let is_feasible = |nodes: &u32| worlds.is_feasible(self.ranks(*nodes), reached);
        self.considered().filter(is_feasible).collect()
    }

    /// Ranks on a number of nodes.
    fn ranks(&self, nodes: u32) -> u64 {
        u64::from(nodes) * u64::from(self.job.spec.gpus_per_node)
    }

    /// Message for numbers of nodes that fit in the pool but that a rule refuses. `None` also while they are not
    /// evaluated.
    pub fn skipped(
        &self,
        status: &TrainingJobStatus,
        placeable: u32,
        planned: &Planning,
    ) -> Result<Option<String>, Unplanned> {
        let Some(recipe) = planned
            .recipe
            .as_ref()
            .filter(|_| status.phase == Phase::Running)
        else {
            return Ok(None);
        };
        let known = recipe.known();
        let first = status.nodes + 1;
        let last = self.job.spec.nodes.min(*self.bounds().end()).min(placeable);
        let reached = reached(status);
        // If one of them is feasible, a scale up to it is under way.
        let is_refused = |nodes| known.is_feasible(self.ranks(nodes), reached) == Some(false);
        if first > last || !(first..=last).all(is_refused) {
            return Ok(None);
        }
        let ranks = self.ranks(last);
        // A world that does not split the batch is not evaluated before.
        let refusal = match known.refusal(ranks, reached) {
            Some(refusal) => refusal,
            None => self.in_turn(|at_work| recipe.worlds(at_work).refusal(ranks, reached))?,
        };
        let skipped = if first == last {
            format!("{first} nodes")
        } else {
            format!("{first} to {last} nodes")
        };
        Ok(refusal.map(|refusal| format!("skips {skipped}: {refusal}")))
    }

    /// The largest micro-batch below that of `plan` with which its world is feasible, for the current global batch
    /// `batch`: the question after an out-of-memory error.
    pub fn smaller(
        &self,
        planned: &Planning,
        reached: Reached,
        plan: &Plan,
        batch: u64,
    ) -> Result<Option<u64>, Unplanned> {
        if let Some(pause) = planned.waits {
            return Err(Unplanned::Later(pause));
        }
        let Some(recipe) = &planned.recipe else {
            return Ok(None);
        };
        let reached = Reached {
            batch: Some(batch),
            ..reached
        };
        self.in_turn(|at_work| recipe.worlds(at_work).smaller(plan, reached))
    }

    /// Plans the world that a placement publishes. `None`: it publishes none, or the world has no plan.
    pub fn world(
        &self,
        status: &TrainingJobStatus,
        placement: &Placement,
        planned: &Planning,
    ) -> Result<Option<World>, Unplanned> {
        let PlacementAction::Ranks(RankAction::Publish {
            world: members,
            per_device_batch_size_limit: limit,
            ..
        }) = &placement.action
        else {
            return Ok(None);
        };
        let before = reached(status);
        let reached = Reached {
            per_device_batch_size_limit: limit.or(before.per_device_batch_size_limit),
            ..before
        };
        let ranks = members.len() as u64 * u64::from(self.job.spec.gpus_per_node);
        let world = match &planned.recipe {
            Some(recipe) => self.in_turn(|at_work| {
                let worlds = recipe.worlds(at_work);
                Ok(World {
                    plan: plan(worlds, ranks, reached)?,
                    feasible_nodes: self.feasible_nodes(worlds, reached),
                })
            })?,
            None => match newest_plan(status, ranks, reached) {
                Some(plan) => Ok(World {
                    plan: plan.clone(),
                    feasible_nodes: self.named_nodes(status, planned, reached),
                }),
                None => Err(
                    "the job as edited cannot be planned, only its current world is known"
                        .to_owned(),
                ),
            },
        };
        let world = world.inspect_err(|error| {
            warn!(%error, "the decided world has no plan and is not published");
        });
        Ok(world.ok())
    }
}

/// Plan for `ranks` ranks with the progress `reached`. The error has one line for each error.
fn plan(worlds: &Worlds, ranks: u64, reached: Reached) -> Result<Plan, String> {
    worlds.plan(ranks, reached).map_err(|refused| {
        let lines: Vec<String> = refused.errors().map(Diagnostic::one_line).collect();
        lines.join("\n")
    })
}

/// The plan of the newest generation, if it is one of this world and progress.
fn newest_plan(status: &TrainingJobStatus, ranks: u64, reached: Reached) -> Option<&Plan> {
    let plan = &status.generation.as_ref()?.record.plan;
    let limit = reached.per_device_batch_size_limit;
    let fits = limit.is_none_or(|limit| plan.per_device_batch_size <= limit);
    (plan.facts.world_size == ranks && fits).then_some(plan)
}

/// A world that has a plan, and the feasible numbers of nodes beside it.
#[derive(Debug)]
pub struct World {
    pub plan: Plan,
    pub feasible_nodes: Vec<u32>,
}
