//! What a recipe says about its batch.

use serde::{Deserialize, Serialize};

/// What the recipe says about its batch. Either `global` is given, or
/// `micro` × `accumulation` × the data-parallel size at `gpus` makes it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Batch {
    /// Samples per optimiser step over all devices.
    pub global: Option<u64>,
    /// Samples per device and forward pass that the author chose; the planner never goes above it
    /// unless `prefer: micro` lets it.
    pub micro: Option<u64>,
    /// Forward passes per optimiser step at `gpus` devices.
    pub accumulation: Option<u64>,
    /// The number of GPUs the recipe was written for.
    pub gpus: Option<u64>,
    /// What to do when no exact split exists at the world size asked for.
    pub remainder: Remainder,
    /// What growing the world should change first.
    pub prefer: Prefer,
    /// What the dialect does with samples that do not fill the last batch of an epoch.
    pub last_batch: LastBatch,
    /// Upstream's automatic batch finder is on (`auto_find_batch_size`).
    pub auto_find: bool,
    /// How a dialect that states its global batch comes to a micro-batch.
    pub division: Division,
}

impl Batch {
    /// Takes `gpus` for the world that the recipe was written for, where nobody says and only that
    /// world tells its micro-batch.
    pub fn settle(&mut self, gpus: u64) {
        if self.division != Division::Stated {
            self.gpus.get_or_insert(gpus);
        }
    }
}

/// How the micro-batch follows from the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Division {
    /// The recipe states it, in `micro`.
    #[default]
    Stated,
    /// `global` / (`accumulation` × data-parallel size), which has to be whole (HALOs).
    Exact,
    /// ⌊⌊`global` / `accumulation`⌋ / data-parallel size⌋: upstream leaves the rest of every batch
    /// out (direct-preference-optimization, HALOs' legacy tree).
    Floored,
}

/// What to do when no exact split exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remainder {
    /// Refuse, and name the counts that work.
    #[default]
    Exact,
    /// Deal whole micro-batches unevenly; their sum stays the global batch.
    Uneven,
}

/// What growing the world changes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prefer {
    /// Keep the recipe's micro-batch, lower accumulation.
    #[default]
    Accumulation,
    /// Raise the micro-batch, within memory.
    Micro,
}

/// What happens to samples that do not fill the last batch of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LastBatch {
    /// Filled up from the next epoch (transformers with accelerate's `even_batches`; native).
    #[default]
    Wrap,
    /// Dropped: an epoch is ⌊n/B⌋·B samples (HALOs; `dataloader_drop_last: true`).
    Drop,
}
