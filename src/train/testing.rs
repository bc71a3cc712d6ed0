//! A model for tests of the training, and a micro-batch of it.

use crate::engine::{MicroBatch, ModelConfig};

pub const MICRO_BATCH: MicroBatch<'_> = MicroBatch {
    tokens: &[1, 2, 3, 4],
    targets: &[2, 3, 4, 5],
    batch: 1,
    seq_len: 4,
    dropout: &[],
    noise: &[],
    starts: &[],
};

pub fn tiny_model() -> ModelConfig {
    ModelConfig {
        hidden_size: 8,
        intermediate_size: 8,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 2,
        head_dim: 4,
        vocab_size: 16,
        max_position_embeddings: 8,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        initializer_range: 0.1,
        ..ModelConfig::default()
    }
}
