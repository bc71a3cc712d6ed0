//! Models, micro-batches and comparisons for the tests of every engine.

pub mod adapters;
pub mod contract;
pub mod reference;

use super::{
    Activation, AdamW, BatchLoss, Engine, IGNORE, Kind, Measure, MicroBatch, ModelConfig, NormKind,
    Weigh,
};

/// A tiny model with grouped queries.
pub fn config() -> ModelConfig {
    ModelConfig {
        hidden_size: 24,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        vocab_size: 30,
        max_position_embeddings: 128,
        norm_eps: 1e-5,
        rope_theta: 10000.0,
        initializer_range: 0.2,
        ..ModelConfig::default()
    }
}

pub fn tied() -> ModelConfig {
    ModelConfig {
        tie_word_embeddings: true,
        ..config()
    }
}

/// With biases and norms of queries and keys, and a layer without rotation.
pub fn with_vectors() -> ModelConfig {
    ModelConfig {
        qkv_biases: true,
        query_key_norms: true,
        unrotated_layers: vec![1],
        ..config()
    }
}

/// As GPT-2 and GPT-NeoX together: LayerNorm, an MLP without gates, biases, position embeddings, heads that rotate in part
/// and a parallel residual.
pub fn plain() -> ModelConfig {
    ModelConfig {
        activation: Activation::Gelu,
        gated: false,
        norm: NormKind::Layer,
        mlp_biases: true,
        qkv_biases: true,
        output_bias: true,
        position_embeddings: true,
        partial_rotary_factor: 0.34,
        parallel_residual: true,
        ..tied()
    }
}

/// Tokens and targets; odd rows have padding from the middle on.
pub struct Batch {
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    pub rows: usize,
    pub seq_len: usize,
}

impl Batch {
    pub fn new(rows: usize, seq_len: usize) -> Batch {
        Batch::of_vocabulary(30, rows, seq_len)
    }

    /// Tokens below `vocabulary`.
    pub fn of_vocabulary(vocabulary: u32, rows: usize, seq_len: usize) -> Batch {
        let value = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as u32 % vocabulary;
        let padded = |i: usize| (i / seq_len) % 2 == 1 && i % seq_len >= seq_len / 2;
        let cells = || 0..rows * seq_len;
        Batch {
            tokens: cells().map(value).collect(),
            targets: cells()
                .map(|i| if padded(i) { IGNORE } else { value(i + 1) })
                .collect(),
            rows,
            seq_len,
        }
    }

    pub fn micro_batch(&self) -> MicroBatch<'_> {
        self.part(0, self.rows)
    }

    pub fn part(&self, from: usize, to: usize) -> MicroBatch<'_> {
        let range = from * self.seq_len..to * self.seq_len;
        MicroBatch {
            tokens: &self.tokens[range.clone()],
            targets: &self.targets[range],
            batch: to - from,
            seq_len: self.seq_len,
            ..MicroBatch::default()
        }
    }
}

pub const EVERYTHING: Measure = Measure {
    micro_batches: true,
    worker: true,
    coordinates: false,
};
pub const NOTHING: Measure = Measure {
    micro_batches: false,
    worker: false,
    coordinates: false,
};

/// An optimiser step that keeps the weights and copies the gradient into the first moments.
pub const REVEAL: AdamW = AdamW {
    learning_rate: 0.0,
    beta1: 0.0,
    beta2: 0.0,
    epsilon: 1.0,
    weight_decay: 0.0,
    vector_decay: 0.0,
    step: 1,
    gradient_scale: 1.0,
};

/// The step's gradient, by unit. Ends the step and resets the moments to zero.
pub fn take_gradient(engine: &mut dyn Engine) -> Vec<Vec<f32>> {
    engine.reduce(NOTHING).unwrap();
    engine.update(REVEAL).unwrap();
    (0..engine.layout().units.len())
        .map(|unit| {
            let mut state = engine.export(unit, true).unwrap().unwrap();
            let gradient = std::mem::replace(&mut state.exp_avg, vec![0.0; state.parameters.len()]);
            state.exp_avg_sq.fill(0.0);
            engine.import(unit, &state).unwrap();
            gradient
        })
        .collect()
}

pub fn gradient_of(engine: &mut dyn Engine, micro_batch: MicroBatch<'_>) -> (f64, Vec<Vec<f32>>) {
    let got = engine.accumulate(micro_batch, NOTHING, true).unwrap();
    (got.loss, take_gradient(engine))
}

pub fn squared_norm(gradient: &[Vec<f32>]) -> f64 {
    let elements = gradient.iter().flatten();
    elements.map(|&g| f64::from(g) * f64::from(g)).sum()
}

/// Asserts that every unit is within `tolerance` of the other, relative to the unit's largest element.
pub fn assert_close(one: &[Vec<f32>], two: &[Vec<f32>], tolerance: f32) {
    for (unit, (one, two)) in one.iter().zip(two).enumerate() {
        assert_eq!(one.len(), two.len());
        let largest = one.iter().fold(0.0f32, |most, g| most.max(g.abs()));
        for (i, (a, b)) in one.iter().zip(two).enumerate() {
            let error = (a - b).abs();
            assert!(error <= tolerance * largest, "unit {unit}, {i}: {a} {b}");
        }
    }
}
