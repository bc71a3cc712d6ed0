//! Shards and replicas of a plan's data-parallel ranks, in the terms of accelerate's parallelism
//! config.
//!
//! Source: accelerate 16cb6eb, `parallelism_config.py` (`__post_init__`, `_validate_accelerator`),
//! and 1.15.0 for FSDP, which needs an axis to shard over.

use super::BatchNumbers;
use crate::recipe::schema::spec::Parallel;

/// FSDP has no axis to shard over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "all {world} processes hold one copy of the model (tensor-parallel size {tensor}), and accelerate refuses FSDP with nothing to shard over (plan for at least {twice} GPUs, or reduce `tp_size`)"
)]
pub struct ShardError {
    world: u64,
    tensor: u64,
    twice: u64,
}

/// Shards and replicas whose product is the data-parallel size. Keeps the recipe's replicas where
/// they divide it, else its shards, else makes one group. Tensor and context parallelism need
/// sharded replicas; FSDP without context parallelism does too.
pub(super) fn shards(
    parallel: &Parallel,
    numbers: &BatchNumbers,
    fsdp: bool,
) -> Result<[u64; 2], ShardError> {
    let ranks = numbers.data_parallel;
    if fsdp && ranks == 1 && parallel.context == 1 && numbers.world > 1 {
        return Err(ShardError {
            world: numbers.world,
            tensor: parallel.tensor,
            twice: numbers.world * 2,
        });
    }
    let fits = |size: Option<u64>| size.filter(|size| *size > 0 && ranks.is_multiple_of(*size));
    let split = parallel.tensor > 1 || parallel.context > 1 || fsdp;
    let replicas = fits(parallel.data_replicate).filter(|&size| !split || size < ranks);
    Ok(match (replicas, fits(parallel.data_shard)) {
        (Some(replicas), _) => [ranks / replicas, replicas],
        (None, Some(shards)) if shards > 1 || !split => [shards, ranks / shards],
        _ => [ranks, 1],
    })
}
