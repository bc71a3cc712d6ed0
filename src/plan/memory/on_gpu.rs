//! What the built-in trainer keeps on a GPU. Its engine places every buffer before the first step
//! (`engine/cuda/state.rs` and `workspace.rs`), so the sums are known. They leave out less
//! than 1 %; `tests/cuda_launch.rs` compares them with the engine.

use super::shape::Shape;
use super::{Adapters, F32};
use crate::recipe::schema::spec::{Groups, NormTest};

/// Most logits that exist at a time.
const LOGITS: f64 = (1u64 << 27) as f64;
/// Bytes of cuBLASLt's workspace.
const WORKSPACE: f64 = (32u64 << 20) as f64;
/// Most blocks that sum up the gradient of vectors, each apart from the others.
const VECTOR_BLOCKS: f64 = 528.0;

/// Weights, gradients and optimiser states of a rank, bytes: the table of docs/gpu.md. The ranks share every unit if
/// `shards` is more than 1. Matrix products use elements of `size` bytes.
pub(super) fn states(
    shape: &Shape,
    shards: f64,
    size: f64,
    norm_test: Option<&NormTest>,
) -> [f64; 3] {
    let (all, embedding, block) = (shape.parameters(), shape.embeddings(), shape.block());
    let head = shape.norm() + shape.head();
    let sharded = shards > 1.0;
    let mut weights = F32 * all / shards;
    let mut gradients = F32 * all / shards;
    if size < F32 {
        // Tokens are looked up in f32. A tied head's copy of a sharded embedding has its own place.
        let looked_up = if shape.tied && !sharded {
            0.0
        } else {
            embedding
        };
        weights += size * (all - looked_up) / shards;
    }
    if sharded {
        weights += gathered(shape, size) + F32 * norms(shape);
        gradients += F32 * turns(shape, embedding, block, head);
    }
    let measured = norm_test.is_some_and(|test| test.measured_groups() == Groups::MicroBatches);
    if measured && !sharded {
        gradients += 2.0 * F32 * embedding.max(block).max(head);
    }
    if shape.tied && (measured || sharded) {
        gradients += F32 * embedding;
    }
    if let Some(test) = norm_test {
        if test.coordinate_interval > 0 {
            gradients += F32 * all;
        }
        if test.unsharded_accumulation {
            gradients += F32 * all * (1.0 - 1.0 / shards);
        }
    }
    [weights, gradients, 2.0 * F32 * all / shards]
}

/// The same for adapters, of which every rank trains all, over a frozen model.
pub(super) fn adapted_states(
    shape: &Shape,
    shards: f64,
    size: f64,
    norm_test: Option<&NormTest>,
    adapters: &Adapters,
) -> [f64; 3] {
    let (trained, in_4_bits) = (adapters.parameters, adapters.four_bits.is_some());
    let shards = if in_4_bits { 1.0 } else { shards };
    let (sharded, is_half) = (shards > 1.0, size < F32);
    let blocks = shape.layers as f64 * shape.block();
    let mut weights = (F32 * shape.embeddings() + size * (shape.norm() + shape.head())) / shards;
    weights += match adapters.four_bits {
        // A block is whole while it computes.
        Some(bytes) => bytes * blocks + size * shape.block(),
        None => size * blocks / shards,
    };
    if shape.tied && is_half && !sharded {
        weights += size * shape.embeddings();
    }
    if sharded {
        weights += gathered(shape, size);
    }
    // Vectors are in f32, apart from half and quantised weights, and whole.
    if sharded || is_half || in_4_bits {
        weights += F32 * norms(shape);
    }
    weights += (F32 + if is_half { size } else { 0.0 }) * trained;
    let mut gradients = F32 * trained;
    if let Some(test) = norm_test {
        let apart = test.measured_groups() == Groups::MicroBatches;
        gradients += if apart { 2.0 * F32 * trained } else { 0.0 };
        gradients += if test.coordinate_interval > 0 {
            F32 * trained
        } else {
            0.0
        };
    }
    [weights, gradients, 2.0 * F32 * trained]
}

/// Where a sharded model is whole: two places for its units, and another for a tied embedding.
fn gathered(shape: &Shape, size: f64) -> f64 {
    let embedding = shape.embeddings();
    let head = shape.norm() + shape.head();
    let of_tied = match shape.tied {
        true => (F32 + if size < F32 { size } else { 0.0 }) * embedding,
        false => 0.0,
    };
    turns(shape, F32 * embedding, size * shape.block(), size * head) + of_tied
}

/// Elements of all norms of the residual stream.
fn norms(shape: &Shape) -> f64 {
    (2.0 * shape.layers as f64 + 1.0) * shape.norm()
}

/// The sum of the two places in which the units take turns: the even ones in the first, the odd ones in the second. A
/// tied embedding is in neither.
fn turns(shape: &Shape, embedding: f64, block: f64, head: f64) -> f64 {
    let embedding = if shape.tied { 0.0 } else { embedding };
    let second_block = if shape.layers > 1 { block } else { 0.0 };
    let [mut even, mut odd] = [embedding.max(second_block), block];
    let of_head = if shape.layers.is_multiple_of(2) {
        &mut odd
    } else {
        &mut even
    };
    *of_head = of_head.max(head);
    even + odd
}

/// Bytes for a micro-batch of this number of tokens, whose activations have `size` bytes each.
pub(super) fn activations(
    shape: &Shape,
    tokens: f64,
    checkpointing: bool,
    size: f64,
    adapters: Option<&Adapters>,
) -> f64 {
    let (hidden, layers) = (shape.hidden as f64, shape.layers as f64);
    let (queries, inner) = (shape.queries() as f64, shape.intermediate as f64);
    let (heads, qkv) = (shape.heads as f64, shape.qkv() as f64);
    // The residual stream and its gradient are f32.
    let residual = (layers + 2.0) * F32 * hidden;
    let statistics = if shape.norm_bias { 4.0 } else { 2.0 };
    let block = size * shape.stashed() + F32 * (hidden + heads + statistics);
    let stashes = if checkpointing { 1.0 } else { layers };
    let has_operand = size < F32 || shape.parallel_residual;
    let gradient_operand = if has_operand { size * hidden } else { 0.0 };
    let scratch =
        size * (hidden.max(queries) + hidden.max(inner).max(qkv)) + gradient_operand + F32 * heads;
    let vocabulary = shape.vocabulary as f64;
    let logits = LOGITS.min(tokens * vocabulary) * size;
    let rows = (tokens / VECTOR_BLOCKS).ceil().max(1.0);
    let partials = F32 * (tokens / rows).ceil() * shape.widest_vectors();
    // Between the matrices of adapters, its gradient for three of them, and an input with dropout.
    let of_adapters = adapters.map_or(0.0, |it| size * (4.0 * it.rank + it.dropped(shape)));
    tokens * (residual + stashes * block + scratch + of_adapters) + logits + partials + WORKSPACE
}

#[cfg(test)]
mod tests {
    use super::super::Memory;
    use crate::plan::PlanRequest;
    use crate::recipe::schema::dialect::Dialect;
    use crate::recipe::schema::spec::{Precision, Spec};

    /// `benches/first_contact.sh sweep` on an H200, docs/gpu.md. The engine had a bf16 copy of the embedding then.
    #[test]
    fn it_is_what_an_h200_measured() {
        let tinyllama = [22_u64, 2048, 5632, 32, 4, 32_000];
        let microllama = [12, 1024, 5632, 16, 4, 32_000];
        for (sizes, rows, checkpointing, measured) in [
            (tinyllama, 8, false, 38_087_800_064_u64),
            (tinyllama, 8, true, 24_304_683_264),
            (microllama, 16, false, 20_677_917_952),
            (microllama, 4, false, 9_511_051_520),
        ] {
            let mut spec = Spec::default();
            spec.model.precision = Precision::Bf16;
            spec.model.activation_checkpointing = checkpointing;
            spec.data.sequence_length = 2048;
            let keys = [
                "num_hidden_layers",
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "vocab_size",
            ];
            let stated = keys.into_iter().zip(sizes);
            let config = stated.map(|(key, size)| (key.to_owned(), size.into()));
            let request = PlanRequest {
                model_config: Some(config.collect()),
                ..PlanRequest::gpus(1)
            };
            let memory = Memory::of(&spec, Dialect::Native, &request).unwrap();
            let bytes = memory.estimate(1, rows).total as f64;
            let embedding = 32_000 * sizes[1] * 2;
            let error = bytes / (measured - embedding) as f64 - 1.0;
            assert!(error.abs() < 0.002, "{bytes}, not {measured}: {error:.4}");
        }
    }
}
