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
    /// DeepSpeed's `elasticity` is on, and makes the batch out of what it may be.
    pub elastic: Option<Elastic>,
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

/// DeepSpeed's `elasticity` (edaa722, `elasticity/config.py`): bounds out of which a batch is
/// computed that many GPU counts divide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Elastic {
    /// `max_train_batch_size`, samples; the batch that comes out may be smaller.
    pub max_batch: u64,
    /// `micro_batch_sizes`, samples per device and forward pass.
    pub micro_batches: Vec<u64>,
    /// `min_gpus`.
    pub min_gpus: u64,
    /// `max_gpus`.
    pub max_gpus: u64,
    /// `version`.
    pub version: ElasticVersion,
    /// `num_gpus_per_node`; version 0.2 adds and takes whole nodes.
    pub gpus_per_node: u64,
    /// `model_parallel_size`, version 0.2 only.
    pub model_parallel: u64,
    /// `prefer_larger_batch`.
    pub prefer_larger: bool,
}

impl Default for Elastic {
    fn default() -> Self {
        Elastic {
            max_batch: 2000,
            micro_batches: vec![2, 4, 6],
            min_gpus: 1,
            max_gpus: 10_000,
            version: ElasticVersion::V02,
            gpus_per_node: 1,
            model_parallel: 1,
            prefer_larger: true,
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

/// The version of DeepSpeed's elasticity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum ElasticVersion {
    /// One batch whatever the world.
    #[serde(rename = "0.1")]
    V01,
    /// Whole nodes; outside of its list the batch follows the world.
    #[default]
    #[serde(rename = "0.2")]
    V02,
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
