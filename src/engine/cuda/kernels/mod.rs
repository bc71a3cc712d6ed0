//! Kernels in CUDA C. Each source is compiled once for each precision; attention also for each head size.
//!
//! The first comment of a source states the shapes, and each kernel's grid and threads. The tests of the
//! package `emulated-gpu` run the PTX and compare it with plain formulas.

pub mod attention;
#[cfg(test)]
mod compiled;

use super::nvrtc::Source;

/// A source and the names of its launchable kernels.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    pub source: Source,
    pub names: &'static [&'static str],
}

/// The headers that sources may include.
const HEADERS: &[(&str, &str)] = &[
    ("attention_bf16.cuh", include_str!("attention_bf16.cuh")),
    ("block.cuh", include_str!("block.cuh")),
    ("random.cuh", include_str!("random.cuh")),
    ("real.cuh", include_str!("real.cuh")),
    ("sequences.cuh", include_str!("sequences.cuh")),
    ("wgmma.cuh", include_str!("wgmma.cuh")),
];

macro_rules! kernels {
    ($file:literal: $($name:literal),*) => {
        Kernels {
            source: Source {
                file: $file,
                text: include_str!($file),
                headers: HEADERS,
            },
            names: &[$($name),*],
        }
    };
}

/// Every source but attention of micro-batches.
pub const SOURCES: [Kernels; 14] = [
    kernels!("embedding.cu": "embedding_forward", "embedding_backward", "positions_backward"),
    kernels!("rmsnorm.cu": "rmsnorm_forward", "rmsnorm_backward", "column_sums"),
    kernels!("layernorm.cu": "layernorm_forward", "layernorm_backward"),
    kernels!("bias.cu": "add_bias", "add_bias_to_sum", "row_sums"),
    kernels!("head_norms.cu": "head_norms_forward", "head_norms_backward"),
    kernels!("rope.cu": "rope"),
    kernels!("cached_attention.cu": "fill_cache", "cached_attention"),
    kernels!(
        "mlp.cu": "gated_silu_forward", "gated_silu_backward", "gated_gelu_tanh_forward",
        "gated_gelu_tanh_backward", "gated_gelu_forward", "gated_gelu_backward", "plain_silu_forward",
        "plain_silu_backward", "plain_gelu_tanh_forward", "plain_gelu_tanh_backward",
        "plain_gelu_forward", "plain_gelu_backward"
    ),
    kernels!("cross_entropy.cu": "cross_entropy", "sum_losses"),
    kernels!("adamw.cu": "adamw"),
    kernels!(
        "squares.cu": "squared_norm", "add_gradient", "add_gradient_measuring", "add_squares",
        "sum_partials"
    ),
    kernels!("cast.cu": "cast"),
    kernels!("adapter.cu": "dropout", "dropout_backward"),
    kernels!("nf4.cu": "dequantise", "dequantise_scales"),
];

pub const ATTENTION_F32: Kernels = kernels!(
    "attention_f32.cu": "attention_forward", "attention_delta", "attention_backward_queries",
    "attention_backward_keys"
);

/// Attention on tensor cores.
pub const ATTENTION_BF16: Kernels = kernels!(
    "attention_bf16.cu": "attention_forward", "attention_delta", "attention_backward_queries",
    "attention_backward_keys"
);

/// Attention on Hopper's tensor cores.
pub const ATTENTION_WGMMA: Kernels = kernels!(
    "attention_wgmma.cu": "attention_forward", "attention_delta", "attention_backward"
);
