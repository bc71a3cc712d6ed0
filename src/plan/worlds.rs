//! The worlds of a run: which have a plan, why others have none, and their plans. The local launcher and the
//! controller ask it before and during training.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;

use super::Plan;
use super::arithmetic::gcd;
use super::draft::{self, Draft, NOT_ENOUGH, global_batch, synthetic_samples};
use super::oom_policy::descend;
use super::planner;
use super::request::{PlanRequest, Reached};
use super::runner::{DeviceMemory, Runner};
use crate::recipe::schema::spec::Remainder;
use crate::recipe::{Diagnostic, Recipe, Spec};
use crate::util::lock::lock;

/// Verdicts that are kept; beyond this number worlds are planned again.
const MAX_VERDICTS: usize = 8192;
/// Plans that are kept. They are large, and a run needs one for each generation.
const MAX_PLANS: usize = 16;

/// A world and the state of the run that its plan continues.
type Key = (u64, Reached);

/// All worlds of one recipe, its runner and its machine. No world is planned twice for the same state of the run.
#[derive(Debug)]
pub struct Worlds {
    recipe: Recipe,
    /// The request of every world, apart from its size, memory and progress.
    request: PlanRequest,
    memory: Option<DeviceMemory>,
    known: Mutex<Known>,
}

/// What is known without a further plan.
#[derive(Debug, Clone, Default)]
struct Known {
    verdicts: HashMap<Key, Option<NoPlan>>,
    plans: HashMap<Key, Plan>,
}

/// Why a world has no plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoPlan {
    /// The first error; `None`: the recipe has too little for a plan.
    error: Option<Diagnostic>,
    /// The world splits the batch: another rule refuses it.
    splits: bool,
}

impl fmt::Display for NoPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.error {
            Some(error) => f.write_str(&error.one_line()),
            None => f.write_str(NOT_ENOUGH),
        }
    }
}

impl NoPlan {
    fn of(draft: &Draft) -> NoPlan {
        NoPlan {
            error: draft.errors().next().cloned(),
            splits: draft.split.is_some(),
        }
    }
}

impl Clone for Worlds {
    fn clone(&self) -> Worlds {
        Worlds {
            recipe: self.recipe.clone(),
            request: self.request.clone(),
            memory: self.memory,
            known: Mutex::new(lock(&self.known).clone()),
        }
    }
}

impl Worlds {
    /// The worlds of a recipe. `request` is that of every world, apart from its size and progress; `memory` is that of
    /// the machine's devices, if it is known.
    pub fn new(recipe: Recipe, request: PlanRequest, memory: Option<DeviceMemory>) -> Worlds {
        let data_samples = request
            .data_samples
            .or_else(|| synthetic_samples(&recipe.spec));
        Worlds {
            request: PlanRequest {
                data_samples,
                ..request
            },
            recipe,
            memory,
            known: Mutex::default(),
        }
    }

    /// The same worlds with what became known of the run: its settings, if it was launched before, and the length of
    /// its data. They keep their plans if nothing differs.
    pub fn with(self, run: Option<(&Spec, Runner)>, data_samples: Option<u64>) -> Worlds {
        let (spec, runner) = run.unwrap_or((&self.recipe.spec, self.request.runner));
        let data_samples = data_samples.or(self.request.data_samples);
        let is_same = *spec == self.recipe.spec
            && runner == self.request.runner
            && data_samples == self.request.data_samples;
        if is_same {
            return self;
        }
        let recipe = Recipe {
            spec: spec.clone(),
            ..self.recipe
        };
        let request = PlanRequest {
            runner,
            data_samples,
            ..self.request
        };
        Worlds::new(recipe, request, self.memory)
    }

    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// What is known of every world.
    pub fn request(&self) -> &PlanRequest {
        &self.request
    }

    /// The plan of `world` ranks for a run that has reached this state.
    pub fn plan(&self, world: u64, reached: Reached) -> Result<Plan, Box<Draft>> {
        let known = lock(&self.known)
            .plans
            .get(&self.key(world, reached))
            .cloned();
        match known {
            Some(plan) => Ok(plan),
            None => self.examine(world, reached).finish(),
        }
    }

    /// Derives the numbers of a world and runs every rule, also if its plan is known: for the findings.
    pub fn examine(&self, world: u64, reached: Reached) -> Draft {
        let request = PlanRequest {
            gpus: world,
            device_memory: self.memory.map(|memory| memory.of_rank(world)),
            ..self.request.clone()
        };
        let draft = planner::examine(&self.recipe, &request.after(reached));
        let plan = draft.plan();
        let mut known = lock(&self.known);
        if known.verdicts.len() >= MAX_VERDICTS {
            // Those of the same state of the run are needed for one decision.
            known.verdicts.retain(|(_, other), _| *other == reached);
        }
        if known.plans.len() >= MAX_PLANS {
            known.plans.clear();
        }
        let refusal = match plan {
            Some(plan) => {
                known.plans.insert(self.key(world, reached), plan);
                None
            }
            None => Some(NoPlan::of(&draft)),
        };
        known.verdicts.insert((world, reached), refusal);
        draft
    }

    /// Why a world has no plan; `None`: it has one.
    pub fn refusal(&self, world: u64, reached: Reached) -> Option<NoPlan> {
        if let Some(verdict) = self.known().refusal(world, reached) {
            return verdict;
        }
        self.examine(world, reached);
        self.known().refusal(world, reached).flatten()
    }

    /// What is known without a further plan.
    pub fn known(&self) -> KnownWorlds<'_> {
        KnownWorlds(self)
    }

    /// The key of a plan. A run that keeps its recipe's batch has the plans of the recipe, but other refusals: they
    /// offer no change of the recipe. A batch that has not grown restricts no plan.
    fn key(&self, world: u64, reached: Reached) -> Key {
        let global = reached.global_batch_size;
        let global = global.or_else(|| global_batch(&self.recipe.spec));
        let reached = Reached {
            global_batch_size: global,
            batch: reached.batch.filter(|batch| Some(*batch) != global),
            ..reached
        };
        (world, reached)
    }

    /// Why a world has no plan although it splits the batch; `None` for all other worlds.
    pub fn refused_split(&self, world: u64, reached: Reached) -> Option<String> {
        if !self.may_split(world, reached) {
            return None;
        }
        let refusal = self.refusal(world, reached)?;
        let message = refusal.error.map(|error| error.message);
        refusal
            .splits
            .then(|| message.unwrap_or_else(|| NOT_ENOUGH.to_owned()))
    }

    /// Whether a world has a plan.
    pub fn is_feasible(&self, world: u64, reached: Reached) -> bool {
        let known = self.known().is_feasible(world, reached);
        known.unwrap_or_else(|| self.refusal(world, reached).is_none())
    }

    /// Whether a world may split the batch. It costs one division, where a plan derives every number and runs every
    /// rule: if this is false, the world has no plan.
    fn may_split(&self, world: u64, reached: Reached) -> bool {
        let spec = &self.recipe.spec;
        let Some(ranks) = draft::ranks(world, &spec.parallel) else {
            return false;
        };
        // DeepSpeed's elasticity derives a batch for each world.
        let Some(global) = reached.global_batch_size.or_else(|| global_batch(spec)) else {
            return true;
        };
        let current = reached.batch.filter(|&batch| batch > 0);
        let current = current.unwrap_or(global);
        match spec.batch.remainder {
            Remainder::Exact => gcd(global, current).is_multiple_of(ranks),
            Remainder::Uneven => ranks <= global.min(current),
        }
    }

    /// The next micro-batch after that of `failed` ran out of memory: the largest smaller one for which its world has
    /// a plan.
    pub fn smaller(&self, failed: &Plan, reached: Reached) -> Option<u64> {
        let current = reached.batch.unwrap_or(failed.global_batch_size);
        descend(failed, current).find(|&size| {
            let within = Reached {
                per_device_batch_size_limit: Some(size),
                ..reached
            };
            self.is_feasible(failed.facts.world_size, within)
        })
    }

    /// Number of worlds that were planned, for tests.
    #[cfg(test)]
    pub fn evaluated(&self) -> usize {
        lock(&self.known).verdicts.len()
    }
}

/// What is known of worlds. Nothing is planned for an answer, and `None` says that only a plan can tell.
#[derive(Debug, Clone, Copy)]
pub struct KnownWorlds<'a>(&'a Worlds);

impl KnownWorlds<'_> {
    pub fn is_feasible(self, world: u64, reached: Reached) -> Option<bool> {
        if !self.0.may_split(world, reached) {
            return Some(false);
        }
        Some(self.refusal(world, reached)?.is_none())
    }

    pub fn refusal(self, world: u64, reached: Reached) -> Option<Option<NoPlan>> {
        let known = lock(&self.0.known);
        if known.plans.contains_key(&self.0.key(world, reached)) {
            return Some(None);
        }
        known.verdicts.get(&(world, reached)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::planner::examined;
    use crate::plan::rules::testing::recipe;

    #[test]
    fn a_world_is_planned_once_until_the_run_progresses() {
        let worlds = Worlds::new(recipe(), PlanRequest::gpus(1), None);
        let before = examined().len();
        let planned = || examined()[before..].to_vec();
        let start = Reached::default();
        assert!(worlds.is_feasible(4, start) && worlds.plan(4, start).is_ok());
        // Those that do not split the batch are known without a plan, except for the reason.
        assert!(!worlds.is_feasible(3, start));
        assert_eq!(planned(), [4]);
        let refusal = worlds.refusal(3, start).unwrap().to_string();
        assert!(refusal.starts_with("batch-divisible: "), "{refusal}");
        assert_eq!(worlds.refused_split(3, start), None);
        assert!(worlds.refusal(3, start).is_some());
        assert_eq!(planned(), [4, 3]);
        // A run keeps the batch of its recipe.
        let begun = Reached {
            global_batch_size: Some(128),
            ..start
        };
        assert!(worlds.is_feasible(4, begun) && worlds.plan(4, begun).is_ok());
        let grown = Reached {
            batch: Some(256),
            ..begun
        };
        assert!(worlds.is_feasible(4, grown) && worlds.is_feasible(4, grown));
        assert_eq!(planned(), [4, 3, 4]);
        let plan = worlds.plan(4, grown).unwrap();
        assert_eq!(worlds.smaller(&plan, grown), Some(8));
        assert_eq!(planned(), [4, 3, 4, 4]);
    }

    #[test]
    fn worlds_are_planned_again_once_the_data_are_counted() {
        let worlds = Worlds::new(recipe(), PlanRequest::gpus(1), None);
        let start = Reached::default();
        worlds.plan(4, start).unwrap();
        let same = worlds.with(None, None);
        assert_eq!(same.known().is_feasible(4, start), Some(true));
        let counted = same.with(None, Some(1000));
        assert_eq!(counted.known().is_feasible(4, start), None);
        let counted = counted.with(None, Some(1000));
        assert_eq!(counted.request().data_samples, Some(1000));
    }
}
