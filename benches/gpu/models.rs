//! Models and micro-batches.

use anyhow::bail;
use evenkeel::engine::cuda::{CudaEngine, CudaOptions, Precision};
use evenkeel::engine::{AdamW, Engine, EngineError, IGNORE, Measure, MicroBatch, ModelConfig};

use super::{Gpu, Options, Random};

/// Published models by name, and a tiny one with grouped queries.
pub fn named(name: &str) -> anyhow::Result<ModelConfig> {
    let tinyllama = ModelConfig {
        hidden_size: 2048,
        intermediate_size: 5632,
        num_hidden_layers: 22,
        num_attention_heads: 32,
        num_key_value_heads: 4,
        head_dim: 64,
        vocab_size: 32000,
        // Beyond the published 2,048, for long sequences.
        max_position_embeddings: 32768,
        norm_eps: 1e-5,
        rope_theta: 10000.0,
        tie_word_embeddings: false,
        initializer_range: 0.02,
        ..ModelConfig::default()
    };
    let tiny = ModelConfig {
        hidden_size: 24,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        vocab_size: 30,
        max_position_embeddings: 256,
        initializer_range: 0.2,
        ..tinyllama.clone()
    };
    Ok(match name {
        "tinyllama" => tinyllama,
        "microllama" => ModelConfig {
            hidden_size: 1024,
            num_hidden_layers: 12,
            num_attention_heads: 16,
            ..tinyllama
        },
        "8m" => ModelConfig {
            hidden_size: 256,
            intermediate_size: 688,
            num_hidden_layers: 8,
            num_attention_heads: 8,
            num_key_value_heads: 8,
            head_dim: 32,
            vocab_size: 4096,
            max_position_embeddings: 256,
            ..tinyllama
        },
        "tiny" => tiny,
        // Hopper's attention.
        "tiny-64" => ModelConfig {
            intermediate_size: 1024,
            head_dim: 64,
            ..tiny
        },
        _ => bail!("unknown model {name}: tinyllama, microllama, 8m, tiny or tiny-64"),
    })
}

/// Random tokens and targets.
pub struct Batch {
    pub tokens: Vec<u32>,
    pub targets: Vec<u32>,
    pub rows: usize,
    pub seq_len: usize,
}

impl Batch {
    /// With padding, every second row has targets in its first half only.
    pub fn new(
        config: &ModelConfig,
        (rows, seq_len): (usize, usize),
        padding: bool,
        seed: u64,
    ) -> Batch {
        let mut random = Random::seeded(seed);
        let mut token = |_| random.below(config.vocab_size) as u32;
        let tokens: Vec<u32> = (0..rows * seq_len).map(&mut token).collect();
        let mut targets: Vec<u32> = (0..rows * seq_len).map(&mut token).collect();
        if padding {
            for (i, target) in targets.iter_mut().enumerate() {
                if i / seq_len % 2 == 1 && i % seq_len >= seq_len / 2 {
                    *target = IGNORE;
                }
            }
        }
        Batch {
            tokens,
            targets,
            rows,
            seq_len,
        }
    }

    pub fn micro_batch(&self) -> MicroBatch<'_> {
        MicroBatch {
            tokens: &self.tokens,
            targets: &self.targets,
            batch: self.rows,
            seq_len: self.seq_len,
            ..MicroBatch::default()
        }
    }
}

/// The engine's options from the command line's.
pub fn cuda_options(options: &Options) -> CudaOptions {
    CudaOptions {
        precision: if options.f32 {
            Precision::F32
        } else {
            Precision::Bf16
        },
        activation_checkpointing: options.checkpointing,
        no_graphs: options.no_graphs,
        kernel_cache: options.cache.clone(),
        products: options
            .cache
            .as_ref()
            .filter(|_| !options.unmeasured)
            .map(|cache| vec![cache.join("products.json")]),
        ..CudaOptions::default()
    }
}

pub fn engine(
    gpu: &Gpu,
    config: &ModelConfig,
    options: CudaOptions,
) -> Result<CudaEngine, EngineError> {
    CudaEngine::new(config.clone(), options, &gpu.device, None, Some(5))
}

/// A whole step; returns the mean loss.
pub fn step(
    engine: &mut dyn Engine,
    micro_batches: &[MicroBatch<'_>],
    measure: Measure,
    number: u64,
) -> Result<f64, EngineError> {
    let (mut loss, mut targets) = (0.0, 0);
    for (i, &micro_batch) in micro_batches.iter().enumerate() {
        let last = i + 1 == micro_batches.len();
        let got = engine.accumulate(micro_batch, measure, last)?;
        loss += got.loss;
        targets += got.targets;
    }
    let reduced = engine.reduce(measure)?;
    let mean = 1.0 / targets.max(1) as f64;
    let norm = reduced.squared_norm.sqrt() * mean;
    engine.update(AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        vector_decay: 0.0,
        step: number,
        // Clipping to a norm of 1, as the peer does.
        gradient_scale: mean * (1.0 / norm.max(1.0)),
    })?;
    Ok(loss * mean)
}

/// Gradient of every unit for a first micro-batch, and its summed loss. AdamW's first moment after a step with
/// β₁ = 0 and no learning rate is the gradient.
pub fn gradient_of(
    engine: &mut dyn Engine,
    micro_batch: MicroBatch<'_>,
) -> Result<(f64, Vec<Vec<f32>>), EngineError> {
    let got = engine.accumulate(micro_batch, Measure::default(), true)?;
    engine.reduce(Measure::default())?;
    engine.update(AdamW {
        learning_rate: 0.0,
        beta1: 0.0,
        beta2: 0.0,
        epsilon: 1e-8,
        weight_decay: 0.0,
        vector_decay: 0.0,
        step: 1,
        gradient_scale: 1.0,
    })?;
    let mut gradients = Vec::new();
    for unit in 0..engine.layout().units.len() {
        let state = engine.export(unit, true)?.unwrap_or_default();
        gradients.push(state.exp_avg);
    }
    Ok((got.loss, gradients))
}
