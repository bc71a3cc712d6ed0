//! The plan: a generation's batch arithmetic as data.
//!
//! The planner computes it once; every other part shows, stores or executes it unchanged. It fixes the world,
//! the micro-batch and the quantum. Accumulation depends only on the current global batch, through
//! [`Plan::deal`].

use serde::{Deserialize, Serialize};

use super::split::{self, Split};
use crate::recipe::batch_arguments::{self, BatchNumbers};
use crate::recipe::schema::spec::{Objective, Remainder, Strategy};
use crate::recipe::{Located, Recipe};
use crate::util::format::outside;

/// A generation's plan. Its JSON form is a contract (`evenkeel plan -o json`): one object, with the keys
/// of the [`Facts`] at the same level.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The arithmetic shown to people, for example `8 × 16 × 1 = 128`
    /// (data-parallel size × micro-batch × accumulation), or `16 × (3 + 3 + 2) = 128`.
    pub formula: String,
    /// `world_size` / (tensor × pipeline × context × sequence).
    pub data_parallel_size: u64,
    pub per_device_batch_size: u64,
    /// Forward passes per step at the base batch; under uneven dealing, the most of any rank.
    pub gradient_accumulation_steps: u64,
    /// The base global batch, samples.
    pub global_batch_size: u64,
    /// The quantum: every batch that the norm test may choose is a multiple of it, samples.
    pub quantum: u64,
    /// The part that needs no split.
    #[serde(flatten)]
    pub facts: Facts,
}

/// The part of a plan that does not depend on its split. A [`super::Draft`] has it as well.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    pub dialect: crate::recipe::Dialect,
    pub objective: Objective,
    /// Devices over all axes.
    pub world_size: u64,
    pub tensor_parallel_size: u64,
    pub pipeline_parallel_size: u64,
    pub context_parallel_size: u64,
    pub sequence_parallel_size: u64,
    /// How the data-parallel ranks shard weights, gradients and optimiser states.
    pub strategy: Strategy,
    /// Samples per device and evaluation pass.
    pub eval_batch_size: Option<u64>,
    /// Whether micro-batches are dealt exactly or unevenly; as requested while there is no split.
    pub remainder: Remainder,
    /// GPU counts up to 1024 (over all axes) with an exact split of the global batch.
    pub feasible_gpu_counts: Vec<u64>,
    /// The differences from the recipe.
    pub adjusted: Vec<Adjustment>,
    /// Estimated memory per device, if the model's shape is known.
    pub memory: Option<MemoryEstimate>,
    /// Findings of the reader and the rules; empty until the rules have run.
    pub diagnostics: Vec<Located>,
}

/// One value that differs from the recipe's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adjustment {
    /// The key as the recipe's dialect spells it.
    pub key: String,
    pub from: String,
    pub to: String,
    /// The reason, as a half-sentence.
    pub reason: String,
}

/// Memory per device in bytes, with the assumptions of the estimate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryEstimate {
    /// Weights on one device.
    pub parameters: u64,
    /// Gradients on one device.
    pub gradients: u64,
    /// Optimiser states on one device.
    pub optimizer: u64,
    /// Activations of one micro-batch.
    pub activations: u64,
    /// The sum of the parts.
    pub total: u64,
    /// Memory of a device, if known.
    pub available: Option<u64>,
    /// One line each: precision, sharding, sequence length, checkpointing, parameter count.
    pub assumed: Vec<String>,
}

/// The largest global batch, samples (the recipe's limit on `batch.global`).
pub const MAX_BATCH: u64 = 1 << 32;
/// Largest world of a plan that is read back, devices: 1,024 nodes with 64 GPUs each.
const LARGEST_WORLD: u64 = 1 << 16;

impl Plan {
    /// What cannot be in a plan; `None` in each that the planner made. A person who may edit the object or file that a plan is
    /// read from may have written anything.
    pub fn flaw(&self) -> Option<String> {
        let facts = &self.facts;
        let axes = [
            ("tensor_parallel_size", facts.tensor_parallel_size),
            ("pipeline_parallel_size", facts.pipeline_parallel_size),
            ("context_parallel_size", facts.context_parallel_size),
            ("sequence_parallel_size", facts.sequence_parallel_size),
            ("data_parallel_size", self.data_parallel_size),
        ];
        let accumulation = self.gradient_accumulation_steps;
        let batches = [
            ("per_device_batch_size", self.per_device_batch_size),
            ("gradient_accumulation_steps", accumulation),
            ("global_batch_size", self.global_batch_size),
            ("quantum", self.quantum),
            ("eval_batch_size", facts.eval_batch_size.unwrap_or(1)),
        ];
        outside(1..=LARGEST_WORLD, axes)
            .or_else(|| outside(1..=MAX_BATCH, batches))
            .or_else(|| self.contradiction(axes.iter().map(|(_, size)| *size)))
    }

    /// Two numbers that do not agree. `axes`: their sizes, each in its range.
    fn contradiction(&self, axes: impl Iterator<Item = u64>) -> Option<String> {
        let (global, stated) = (self.global_batch_size, self.facts.world_size);
        // One process may hold all devices, whatever their number.
        let world = match axes.fold(1, u64::saturating_mul) {
            1 => stated,
            product => product,
        };
        if world != stated || !(1..=LARGEST_WORLD).contains(&world) {
            return Some(format!("world_size is {stated}, but its axes give {world}"));
        }
        let split = Split {
            ranks: self.data_parallel_size,
            per_device_batch_size: self.per_device_batch_size,
            micro_batches: global / self.per_device_batch_size,
            remainder: self.facts.remainder,
        };
        let (ranks, each, accumulation) = (
            split.ranks,
            split.per_device_batch_size,
            self.gradient_accumulation_steps,
        );
        let dealt =
            split.remainder != Remainder::Exact || split.micro_batches.is_multiple_of(ranks);
        let agrees = dealt && split.batch() == global && split.accumulation() == accumulation;
        (!agrees).then(|| {
            format!("global_batch_size is {global}, which {ranks} ranks do not make of {each} × {accumulation}")
        })
    }

    /// The arithmetic for the batch that a run has reached (`None`: the base batch); if a schedule has
    /// changed it, with the base: `2 × 2 × 6 = 24 (base 12)`.
    pub fn formula_at(&self, batch: Option<u64>) -> String {
        let base = self.global_batch_size;
        let Some(batch) = batch.filter(|batch| *batch != base) else {
            return self.formula.clone();
        };
        let per_device_batch_size = self.per_device_batch_size;
        let split = Split {
            ranks: self.data_parallel_size,
            per_device_batch_size,
            micro_batches: batch / per_device_batch_size,
            remainder: self.facts.remainder,
        };
        format!("{} (base {base})", split.formula())
    }

    /// The numbers that a recipe must state to run this plan.
    pub fn numbers(&self, recipe: &Recipe) -> BatchNumbers {
        let key = recipe.key("generation.steps_per_generation");
        let mut adjusted = self.facts.adjusted.iter();
        let adjusted = adjusted.find(|adjustment| adjustment.key == key);
        let stated = recipe.spec.generation.steps_per_generation;
        BatchNumbers {
            steps_per_generation: adjusted.and_then(|a| a.to.parse().ok()).or(stated),
            ..self.plain_numbers()
        }
    }

    /// The numbers as environment variables of an external trainer.
    pub fn variables(&self) -> Vec<(&'static str, u64)> {
        let facts = &self.facts;
        let axes = [
            facts.tensor_parallel_size,
            facts.context_parallel_size,
            facts.sequence_parallel_size,
        ];
        batch_arguments::variables(&self.plain_numbers(), axes)
    }

    /// The numbers without those of one objective.
    fn plain_numbers(&self) -> BatchNumbers {
        BatchNumbers {
            world: self.facts.world_size,
            nodes: None,
            data_parallel: self.data_parallel_size,
            global: self.global_batch_size,
            per_device_batch_size: self.per_device_batch_size,
            accumulation: self.gradient_accumulation_steps,
            steps_per_generation: None,
        }
    }

    /// The micro-batches of each data-parallel rank for a global batch of `batch` samples. Only this
    /// function derives accumulation from the current batch.
    ///
    /// `batch` is a multiple of the micro-batch (every batch the controller may choose is).
    /// The first `(batch / micro) % ranks` ranks run one more than the others, so under exact
    /// dealing all are equal.
    pub fn deal(&self, batch: u64) -> Vec<u64> {
        split::deal(batch / self.per_device_batch_size, self.data_parallel_size)
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::recipe;
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::schema::spec::Remainder;

    #[test]
    fn the_formula_of_a_grown_batch_names_its_base() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(12);
        recipe.spec.batch.per_device_batch_size = Some(2);
        let even = plan(&recipe, &PlanRequest::gpus(2)).unwrap();
        assert_eq!(even.formula_at(None), "2 × 2 × 3 = 12");
        assert_eq!(even.formula_at(Some(12)), "2 × 2 × 3 = 12");
        assert_eq!(even.formula_at(Some(24)), "2 × 2 × 6 = 24 (base 12)");
        recipe.spec.batch.remainder = Remainder::Uneven;
        let uneven = plan(&recipe, &PlanRequest::gpus(5)).unwrap();
        let formula = uneven.formula_at(Some(14));
        assert_eq!(formula, "2 × (2 + 2 + 1 + 1 + 1) = 14 (base 12)");
        recipe.spec.batch.global = Some(44);
        let many = plan(&recipe, &PlanRequest::gpus(9)).unwrap();
        let formula = |batch| many.formula_at(Some(batch));
        assert_eq!(formula(54), "2 × (3 × 0 + 3 × 9) = 54 (base 44)");
        // Only a forged status has a batch without a micro-batch.
        assert_eq!(formula(1), "2 × (0 × 0 + 0 × 9) = 0 (base 44)");
    }
}
