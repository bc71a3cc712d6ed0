//! Parallelism over devices, and the world sizes that the run may have.

use serde::{Deserialize, Serialize};

/// Sizes of the parallel axes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parallel {
    /// State that the data-parallel ranks shard: `ddp` none; `zero1` optimiser states; `zero2` gradients
    /// too; `fsdp` parameters too.
    pub strategy: Strategy,
    /// Tensor-parallel size, in devices.
    pub tensor: u64,
    /// Pipeline-parallel size, in devices.
    pub pipeline: u64,
    /// Context-parallel size, in devices.
    pub context: u64,
    /// Sequence-parallel size (Ulysses), in devices.
    pub sequence: u64,
    /// One process drives all devices, so the data-parallel size is always 1.
    pub one_process: bool,
    /// Data-parallel replicas of the recipe (hybrid sharding), for the check of the product of all sizes.
    pub data_replicate: Option<u64>,
    /// Data-parallel shards of the recipe, for the check of the product of all sizes.
    pub data_shard: Option<u64>,
}

impl Default for Parallel {
    fn default() -> Self {
        Parallel {
            strategy: Strategy::Ddp,
            tensor: 1,
            pipeline: 1,
            context: 1,
            sequence: 1,
            one_process: false,
            data_replicate: None,
            data_shard: None,
        }
    }
}

/// The state that the data-parallel ranks shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Nothing: every rank holds everything.
    #[default]
    Ddp,
    /// Parameters, gradients and optimiser states (FSDP full shard, ZeRO-3).
    Fsdp,
    /// Only the optimiser states.
    Zero1,
    /// Optimiser states and gradients.
    Zero2,
}

/// World sizes that the run may have.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Elasticity {
    /// Minimum number of ranks.
    pub min: Option<u64>,
    /// Maximum number of ranks.
    pub max: Option<u64>,
}
