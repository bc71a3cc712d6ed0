//! What the built-in trainer keeps on a CPU, where everything is f32. Its engine reserves every buffer before the first step
//! (`engine/cpu/store` and `workspace.rs`). The sums leave out each thread's scratch for attention scores.

use super::shape::Shape;
use super::{Adapters, F32};
use crate::recipe::schema::spec::{Groups, NormTest};

/// Elements of logits that exist at a time, in at least this number of rows.
const LOGITS: f64 = (1u64 << 21) as f64;
const HEAD_ROWS: f64 = 128.0;
/// Rows whose part of the gradient of vectors has one sum.
const ROWS: f64 = 32.0;

/// Weights, gradients and optimiser states of a rank, bytes. The ranks share every unit of the model if `shards` is more
/// than 1; each has all adapters. `in_fixed_point`: gradients are added as integers of twice their size.
pub(super) fn states(
    shape: &Shape,
    shards: f64,
    (norm_test, in_fixed_point): (Option<&NormTest>, bool),
    adapters: Option<&Adapters>,
) -> [f64; 3] {
    let all = shape.parameters();
    let [largest, tied] = match shape.tied {
        true => [shape.block().max(shape.norm()), shape.embeddings()],
        false => [
            shape
                .block()
                .max(shape.embeddings())
                .max(shape.norm() + shape.head()),
            0.0,
        ],
    };
    let sharded = shards > 1.0;
    let gathered = if sharded { 2.0 * largest + tied } else { 0.0 };
    let trained = adapters.map_or(all / shards, |adapters| adapters.parameters);
    let below = match adapters {
        None => gathered,
        // Not sharded, and a block is whole while it computes.
        Some(Adapters {
            four_bits: Some(size),
            ..
        }) => {
            let blocks = shape.layers as f64 * shape.block();
            size / F32 * blocks + all - blocks + shape.block()
        }
        Some(_) => all / shards + gathered,
    };
    let integers = if in_fixed_point { 2.0 } else { 0.0 };
    let mut gradients = trained * (1.0 + integers);
    if in_fixed_point {
        gradients += match adapters {
            Some(adapters) => adapters.parameters,
            None if !sharded => largest + tied,
            None => 0.0,
        };
    } else if let Some(test) = norm_test {
        let whole = test.unsharded_accumulation && sharded && adapters.is_none();
        let apart = test.measured_groups() == Groups::MicroBatches;
        gradients += match adapters {
            Some(adapters) if apart => adapters.parameters,
            None if apart && (whole || !sharded) => largest + tied,
            _ => 0.0,
        };
        if whole {
            gradients += all;
        }
        if test.coordinate_interval > 0 {
            gradients += adapters.map_or(all, |adapters| adapters.parameters);
        }
    }
    let reduces = sharded && !norm_test.is_some_and(|test| test.unsharded_accumulation);
    if reduces && adapters.is_none() {
        let reduced = if in_fixed_point {
            integers * (1.0 + 1.0 / shards)
        } else {
            1.0 / shards
        };
        gradients += (2.0 * largest + tied) * (1.0 + reduced);
    }
    [trained + below, gradients, 2.0 * trained].map(|elements| F32 * elements)
}

/// Bytes for a micro-batch of this number of tokens.
pub(super) fn activations(
    shape: &Shape,
    tokens: f64,
    checkpointing: bool,
    adapters: Option<&Adapters>,
) -> f64 {
    let (hidden, layers) = (shape.hidden as f64, shape.layers as f64);
    let (queries, inner) = (shape.queries() as f64, shape.intermediate as f64);
    let statistics = if shape.norm_bias { 2.0 } else { 1.0 };
    let block = shape.stashed() + shape.heads as f64 + hidden + 2.0 * statistics;
    let stashes = if checkpointing { 1.0 } else { layers };
    let wide = hidden.max(inner).max(shape.qkv() as f64);
    let residuals = if shape.parallel_residual { 2.0 } else { 1.0 };
    let scratch = hidden.max(queries) + wide + residuals * hidden;
    // Between the matrices of adapters, its gradient, and an input with dropout.
    let of_adapters = adapters.map_or(0.0, |it| 2.0 * it.rank + it.dropped(shape));
    let per_token = (layers + 1.0) * hidden + stashes * block + scratch + of_adapters;
    let vocabulary = shape.vocabulary as f64;
    let head_rows = (LOGITS / vocabulary).max(HEAD_ROWS).min(tokens);
    let normed = shape.norm().max(if shape.head_norms {
        2.0 * shape.head_dim as f64
    } else {
        0.0
    });
    let shared = head_rows * (vocabulary + hidden + statistics) + (tokens / ROWS).ceil() * normed;
    F32 * (tokens * per_token + shared)
}
