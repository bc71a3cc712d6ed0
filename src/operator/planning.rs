//! The step that plans a job, and the worlds that a job may have.

use std::mem::take;
use std::ops::RangeInclusive;
use std::time::Duration;

use kube::ResourceExt;
use tracing::{error, warn};

use super::conditions::Refusal;
use super::context::{Context, Reconciliation};
use super::planner::{PlanInput, Planner, RecipeId, reached};
use super::recipe_source::{Source, plan_refused, source};
use super::turns::Turn;
use crate::api::condition::ConditionType;
use crate::api::status::{KeptRecipe, Phase, PlanSummary, TrainingJobStatus};
use crate::lifecycle::RankAction;
use crate::lifecycle::placement::{Placement, PlacementAction};
use crate::plan::{Plan, Reached};

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

/// The worlds that a job may have.
#[derive(Default)]
pub struct Planned {
    pub planner: Planner,
    /// Whether the spec has a plan. `None`: it waits for its turn. Of a refused edit the running generation continues
    /// unchanged and is still reconciled.
    pub verdict: Option<Result<(), Refusal>>,
    /// Pause until the job may have its turn to plan. Until then, `planner` knows only what the status says: the
    /// running generation is observed and may be drained, and no world or pod is decided.
    pub waits: Option<Duration>,
    /// Whether edits of the spec take effect.
    pub edits: bool,
    /// No pod can or may be made from the spec: the job keeps the pods that it has.
    pub is_unbuildable: bool,
}

/// A recipe that has a plan.
pub struct PlannedRecipe {
    /// What the status keeps of it.
    pub recipe: KeptRecipe,
    /// The plan of its first feasible world.
    pub plan: PlanSummary,
}

impl Reconciliation<'_> {
    /// Plans the job. Also returns its recipe, unless the spec is refused or waits for its turn.
    pub async fn plan(
        &self,
        status: &TrainingJobStatus,
    ) -> Result<(Planned, Option<PlannedRecipe>), Unplanned> {
        let planner = self.state(|state| take(&mut state.planner));
        let mut planner = planner.awake(&self.context.recipes);
        let Context {
            image,
            priority_classes,
            ..
        } = self.context;
        let classes = priority_classes.as_deref();
        if let Err(refusal) = planner.refuse_unbuildable(self.job, image.as_deref(), classes) {
            let planned = Planned {
                is_unbuildable: true,
                ..refused(status, refusal)?
            };
            return Ok((planned, None));
        }
        match self.read_and_plan(status, &mut planner).await {
            Ok(recipe) => {
                let planned = Planned {
                    planner,
                    verdict: Some(Ok(())),
                    edits: true,
                    ..Planned::default()
                };
                Ok((planned, recipe))
            }
            Err(Unplanned::Later(pause)) => {
                self.state(|state| state.planner = planner.at_rest());
                Ok((self.until_turn(pause, self.is_accepted())?, None))
            }
            Err(Unplanned::Refused(refusal)) => Ok((refused(status, refusal)?, None)),
        }
    }

    /// Evaluates the worlds of the job for what was observed. Also returns the feasible numbers of nodes.
    pub fn evaluate_observed(
        &self,
        status: &TrainingJobStatus,
        planned: Planned,
    ) -> Result<(Planned, Vec<u32>), Unplanned> {
        let (planner, reached) = (&planned.planner, reached(status));
        let known = |nodes| Some((nodes, planner.known(self.ranks(nodes), reached)?));
        let known: Option<Vec<(u32, bool)>> = self.considered().map(known).collect();
        let feasible = match known {
            Some(known) => Ok(known
                .into_iter()
                .filter(|known| known.1)
                .map(|known| known.0)
                .collect()),
            None => self.in_turn(|| self.feasible_nodes(reached, planner)),
        };
        match feasible {
            Ok(feasible) => Ok((planned, feasible)),
            Err(unplanned) => {
                let planned = self.without_plan(status, planned, unplanned)?;
                let feasible = self.feasible_nodes(reached, &planned.planner);
                Ok((planned, feasible))
            }
        }
    }

    /// What the job continues with if a world that it asks for cannot be planned now.
    pub fn without_plan(
        &self,
        status: &TrainingJobStatus,
        planned: Planned,
        unplanned: Unplanned,
    ) -> Result<Planned, Unplanned> {
        self.state(|state| state.planner = planned.planner.at_rest());
        match unplanned {
            Unplanned::Later(pause) => Ok(Planned {
                verdict: planned.verdict,
                ..self.until_turn(pause, planned.edits)?
            }),
            Unplanned::Refused(refusal) => {
                if let Some(kept) = &status.recipe {
                    let input = PlanInput::of(self.job, status, &kept.into());
                    self.state(|state| state.refused = Some((input, refusal.clone())));
                }
                refused(status, refusal)
            }
        }
    }

    /// What is known without a plan of a job whose generation runs. If none runs, nothing is urgent.
    fn until_turn(&self, pause: Duration, edits: bool) -> Result<Planned, Unplanned> {
        let status = self.job.status.as_ref();
        let running = status.and_then(|status| Some((status, status.generation.as_ref()?)));
        let running = running.filter(|(_, current)| current.outcome.is_none());
        let (status, current) = running.ok_or(Unplanned::Later(pause))?;
        let feasible = status.plan.iter().flat_map(|plan| &plan.feasible_nodes);
        let worlds = feasible.map(|nodes| self.ranks(*nodes));
        // An edit may have made them infeasible.
        let worlds = worlds.filter(|_| self.is_accepted()).collect();
        Ok(Planned {
            planner: Planner::with_known_worlds(current.record.plan.clone(), worlds),
            waits: Some(pause),
            edits,
            ..Planned::default()
        })
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
        planner: &mut Planner,
    ) -> Result<Option<PlannedRecipe>, Unplanned> {
        if let Some(id) = self.known_recipe(status) {
            self.refuse_again(status, &id)?;
            // A running job is planned too: after a change of its command no other world may be feasible, and
            // then it is left unchanged.
            let has_read = planner.found_plan && planner.has_read(self.job, &id);
            if has_read && status.recipe.is_some() && status.plan.is_some() {
                return Ok(None);
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
        let planned = self.plan_recipe(turn, status, planner, source);
        if let Err(Unplanned::Refused(refusal)) = &planned {
            let input = PlanInput::of(self.job, status, &id);
            self.state(|state| state.refused = Some((input, refusal.clone())));
        }
        planned.map(Some)
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
        planner: &mut Planner,
        source: Source,
    ) -> Result<PlannedRecipe, Unplanned> {
        let Source {
            job,
            snapshot: mut recipe,
        } = source;
        let reached = reached(status);
        let (plan, feasible) = self.work_in(turn, || {
            if !planner.has_read(self.job, &RecipeId::from(&recipe)) {
                planner.read(self.job, &recipe, &self.context.recipes)?;
            }
            let first = self.first_plan(planner, reached)?;
            if status.generation.is_none() {
                planner.check_command(self.job, &recipe, &first.0)?;
            }
            if status.recipe.is_some() || !planner.needs_a_first_world() {
                return Ok(first);
            }
            // From now on every world is planned from this one, as `launch` plans those of a run.
            recipe.gpus = Some(first.0.facts.world_size);
            planner.read(self.job, &recipe, &self.context.recipes)?;
            self.first_plan(planner, reached)
        })??;
        planner.found_plan = true;
        let plan = PlanSummary::of(&self.job.spec, &plan, feasible);
        let recipe = recipe.kept(&job.spec.recipe);
        Ok(PlannedRecipe { recipe, plan })
    }

    /// The plan of the largest feasible world of the job, and the feasible numbers of nodes.
    fn first_plan(&self, planner: &Planner, reached: Reached) -> Result<(Plan, Vec<u32>), Refusal> {
        let feasible = self.feasible_nodes(reached, planner);
        let nodes = self.job.spec.nodes.max(1);
        let most = nodes.min(*self.bounds().end());
        let first = feasible.iter().rfind(|nodes| **nodes <= most);
        let plan = planner.plan(self.ranks(*first.unwrap_or(&nodes)), reached);
        let plan = plan.map_err(|message| {
            let per_node = self.job.spec.gpus_per_node;
            plan_refused(format!(
                "no plan for {nodes} nodes of {per_node} GPUs: {message}"
            ))
        })?;
        Ok((plan, feasible))
    }

    /// The turn of the job to read or plan its recipe.
    fn turn(&self) -> Result<Turn<'_>, Unplanned> {
        let namespace = self.job.namespace().unwrap_or_default();
        let turn = self.context.turns.begin(&namespace);
        turn.map_err(Unplanned::Later)
    }

    /// Plans in the turn of the job.
    fn in_turn<T>(&self, work: impl FnOnce() -> T) -> Result<T, Unplanned> {
        self.work_in(self.turn()?, work)
    }

    /// Reads or plans a recipe. A recipe is its tenant's: it may take long, and it may make the planner panic.
    fn work_in<T>(&self, turn: Turn<'_>, work: impl FnOnce() -> T) -> Result<T, Unplanned> {
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
    fn feasible_nodes(&self, reached: Reached, planner: &Planner) -> Vec<u32> {
        let is_feasible = |nodes: &u32| planner.is_feasible(self.ranks(*nodes), reached);
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
        planner: &Planner,
    ) -> Result<Option<String>, Unplanned> {
        if status.phase != Phase::Running {
            return Ok(None);
        }
        let first = status.nodes + 1;
        let last = self.job.spec.nodes.min(*self.bounds().end()).min(placeable);
        let reached = reached(status);
        // If one of them is feasible, a scale up to it is under way.
        let is_refused = |nodes| planner.known(self.ranks(nodes), reached) == Some(false);
        if first > last || !(first..=last).all(is_refused) {
            return Ok(None);
        }
        let ranks = self.ranks(last);
        // A world that does not split the batch is not evaluated before.
        let refusal = match planner.known_refusal(ranks, reached) {
            Some(refusal) => refusal,
            None => self.in_turn(|| planner.refusal(ranks, reached))?,
        };
        let skipped = if first == last {
            format!("{first} nodes")
        } else {
            format!("{first} to {last} nodes")
        };
        Ok(refusal.map(|message| format!("skips {skipped}: {message}")))
    }

    /// The largest micro-batch below that of `plan` with which its world is feasible, for the current global batch
    /// `batch`: the question after an out-of-memory error.
    pub fn smaller(
        &self,
        planned: &Planned,
        reached: Reached,
        plan: &Plan,
        batch: u64,
    ) -> Result<Option<u64>, Unplanned> {
        if let Some(pause) = planned.waits {
            return Err(Unplanned::Later(pause));
        }
        let reached = Reached {
            batch: Some(batch),
            ..reached
        };
        self.in_turn(|| planned.planner.smaller(plan, reached))
    }

    /// Plans the world that a placement publishes. `None`: it publishes none, or the world has no plan.
    pub fn world(
        &self,
        status: &TrainingJobStatus,
        placement: &Placement,
        planner: &Planner,
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
        let plan = || {
            let feasible_nodes = self.feasible_nodes(reached, planner);
            let plan = planner.plan(ranks, reached)?;
            Ok::<_, String>(World {
                plan,
                feasible_nodes,
            })
        };
        let world = if planner.has_recipe() {
            self.in_turn(plan)?
        } else {
            plan()
        };
        let world = world.inspect_err(|error| {
            warn!(%error, "the decided world has no plan and is not published");
        });
        Ok(world.ok())
    }
}

/// A refused job continues with the plan of its newest generation.
fn refused(status: &TrainingJobStatus, refusal: Refusal) -> Result<Planned, Unplanned> {
    let Some(current) = &status.generation else {
        return Err(Unplanned::Refused(refusal));
    };
    Ok(Planned {
        planner: Planner::with_known_worlds(current.record.plan.clone(), Vec::new()),
        verdict: Some(Err(refusal)),
        ..Planned::default()
    })
}

/// A world that is published, and the feasible numbers of nodes beside it.
#[derive(Debug)]
pub struct World {
    pub plan: Plan,
    pub feasible_nodes: Vec<u32>,
}
