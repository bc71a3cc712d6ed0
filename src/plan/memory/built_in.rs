//! The activations that the built-in trainer keeps on a GPU. Its engine places every buffer before the first step
//! (`engine/cuda/workspace.rs`), so the sum is exact but for rounding.

use super::shape::{Biases, Shape};

/// Most logits that exist at a time.
const LOGITS: f64 = (1u64 << 27) as f64;
/// Bytes of cuBLASLt's workspace.
const WORKSPACE: f64 = (32u64 << 20) as f64;
const F32: f64 = 4.0;

/// Whether the built-in trainer has this architecture: a dense Llama.
pub(super) fn has_engine(shape: &Shape) -> bool {
    shape.experts == 1 && shape.gated && shape.biases == Biases::None && !shape.norm_bias
}

/// Bytes for a micro-batch of this number of tokens, whose activations have `size` bytes each.
pub(super) fn activations(shape: &Shape, tokens: f64, checkpointing: bool, size: f64) -> f64 {
    let (hidden, layers) = (shape.hidden as f64, shape.layers as f64);
    let (queries, inner) = (shape.queries() as f64, shape.intermediate as f64);
    let (heads, qkv) = (shape.heads as f64, queries + 2.0 * shape.keys() as f64);
    // The residual stream and its gradient are f32.
    let residual = (layers + 2.0) * F32 * hidden;
    let block = size * (qkv + queries + 2.0 * inner) + F32 * (hidden + heads + 2.0);
    let stashes = if checkpointing { 1.0 } else { layers };
    let gradient_operand = if size < F32 { size * hidden } else { 0.0 };
    let scratch = size * (hidden.max(queries) + inner.max(qkv)) + gradient_operand + F32 * heads;
    let vocabulary = shape.vocabulary as f64;
    let logits = LOGITS.min(tokens * vocabulary) * size;
    tokens * (residual + stashes * block + scratch) + logits + WORKSPACE
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
