//! The batch of a recipe.

use serde::{Deserialize, Serialize};

/// The batch of a recipe. A recipe states `global`, or `per_device_batch_size` × `accumulation` × the data-parallel
/// size at `gpus` yields it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Batch {
    /// Global batch: samples per optimiser step over all devices.
    pub global: Option<u64>,
    /// Samples per device and forward pass in the recipe. The planner exceeds it only with `prefer:
    /// per_device_batch_size`.
    pub per_device_batch_size: Option<u64>,
    /// Forward passes per optimiser step at `gpus` devices.
    pub accumulation: Option<u64>,
    /// GPUs that the recipe was written for.
    pub gpus: Option<u64>,
    /// Without an exact split at a world size: `exact` refuses it and names the sizes that have
    /// one; `uneven` gives ranks different numbers of micro-batches.
    pub remainder: Remainder,
    /// What a larger world changes first: `accumulation` keeps the micro-batch and lowers
    /// accumulation; `per_device_batch_size` raises the micro-batch, within memory.
    pub prefer: Prefer,
    /// Samples that do not fill the last batch of an epoch: `wrap` fills the batch up from the next
    /// epoch; `drop` leaves them out.
    pub last_batch: LastBatch,
    /// Upstream's automatic batch finder is on (`auto_find_batch_size`).
    pub auto_find: bool,
    /// How the micro-batch follows from the recipe: `stated` in `per_device_batch_size`; `exact` or `floored`
    /// division of `global`.
    pub division: Division,
    /// The bounds of DeepSpeed's `elasticity`, which computes the batch.
    pub elastic: Option<Elastic>,
}

impl Batch {
    /// Sets a missing `gpus` to the world that the recipe was written for, where the micro-batch
    /// depends on that world.
    pub fn settle(&mut self, gpus: u64) {
        if self.division != Division::Stated {
            self.gpus.get_or_insert(gpus);
        }
    }
}

/// DeepSpeed's `elasticity` (edaa722, `elasticity/config.py`): bounds for a batch that many GPU
/// counts divide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Elastic {
    /// `max_train_batch_size`, samples; the computed batch may be smaller.
    pub max_batch: u64,
    /// `micro_batch_sizes`, samples per device and forward pass.
    pub micro_batches: Vec<u64>,
    /// `min_gpus`: the smallest number of GPUs.
    pub min_gpus: u64,
    /// `max_gpus`: the largest number of GPUs.
    pub max_gpus: u64,
    /// `version` of the algorithm.
    pub version: ElasticVersion,
    /// `num_gpus_per_node`; version 0.2 adds and removes whole nodes.
    pub gpus_per_node: u64,
    /// `model_parallel_size`, version 0.2 only.
    pub model_parallel: u64,
    /// `prefer_larger_batch`: of equally good batches take the larger.
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
    /// The recipe states `per_device_batch_size`.
    #[default]
    Stated,
    /// `global` / (`accumulation` × data-parallel size), which must be whole (HALOs).
    Exact,
    /// ⌊⌊`global` / `accumulation`⌋ / data-parallel size⌋: upstream drops the rest of every batch
    /// (direct-preference-optimization, HALOs' legacy tree).
    Floored,
}

/// The version of DeepSpeed's elasticity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum ElasticVersion {
    /// One batch for every world.
    #[serde(rename = "0.1")]
    V01,
    /// Whole nodes; for worlds outside its list the batch depends on the world.
    #[default]
    #[serde(rename = "0.2")]
    V02,
}

/// The response to a world size without an exact split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remainder {
    /// Refuse it, and name the counts that work.
    #[default]
    Exact,
    /// Give ranks different numbers of micro-batches, whose sum is the global batch.
    Uneven,
}

/// What a larger world changes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prefer {
    /// Keeps the recipe's micro-batch and lowers accumulation.
    #[default]
    Accumulation,
    /// Raises the micro-batch, within memory.
    #[serde(rename = "per_device_batch_size")]
    PerDeviceBatchSize,
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
