//! How the work is spread over devices, and over how many it may be.

use serde::{Deserialize, Serialize};

/// How the work is spread over devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parallel {
    /// What the data-parallel ranks hold.
    pub strategy: Strategy,
    /// Tensor-parallel size.
    pub tensor: u64,
    /// Pipeline-parallel size.
    pub pipeline: u64,
    /// Context-parallel size.
    pub context: u64,
    /// Sequence-parallel size (Ulysses).
    pub sequence: u64,
    /// One process drives all devices, so that the data-parallel size is 1 on any number of them.
    pub one_process: bool,
    /// Data-parallel replicas that a recipe states (hybrid sharding), for the product rule.
    pub data_replicate: Option<u64>,
    /// Data-parallel shards that a recipe states, for the product rule.
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

/// What the data-parallel ranks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Everything on every rank.
    #[default]
    Ddp,
    /// Parameters, gradients and optimiser states sharded (FSDP full shard, ZeRO-3).
    Fsdp,
    /// Optimiser states sharded.
    Zero1,
    /// Optimiser states and gradients sharded.
    Zero2,
}

/// Which worlds the run may move to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Elasticity {
    /// Fewest ranks.
    pub min: Option<u64>,
    /// Most ranks.
    pub max: Option<u64>,
}
