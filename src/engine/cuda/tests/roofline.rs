//! A prediction of a micro-batch's time from its shapes: FLOPs and bytes against a GPU's limits. The test
//! writes it to `docs/gpu.md`, to be compared with measurements.

use std::fmt::Write;

use super::assert_in_docs;
use crate::engine::cuda::options::Precision;
use crate::engine::{ModelConfig, layout};

/// Limits of a GPU.
struct Limits {
    name: &'static str,
    /// Dense bf16 FLOP/s of the tensor cores.
    flops: f64,
    /// Bytes of device memory a second.
    bandwidth: f64,
}

/// NVIDIA H200 SXM, from its data sheet.
const H200: Limits = Limits {
    name: "H200",
    flops: 989e12,
    bandwidth: 4.8e12,
};

/// The part of each limit that is expected: cuBLASLt's on large shapes, attention's FLOPs (what the kernels reach alone
/// on an H200 at head size 64 and sequence 2,048), and a copy's bandwidth.
const MATRIX: f64 = 0.75;
const ATTENTION: f64 = 0.35;
const COPY: f64 = 0.85;

/// A group of kernels of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    pub launches: usize,
    flops: f64,
    bytes: f64,
}

impl Cost {
    fn new(launches: usize, flops: f64, bytes: f64) -> Cost {
        Cost {
            launches,
            flops,
            bytes,
        }
    }

    fn times(self, n: usize) -> Cost {
        Cost {
            launches: self.launches * n,
            flops: self.flops * n as f64,
            bytes: self.bytes * n as f64,
        }
    }
}

/// The kernels of a micro-batch and of the optimiser step, in the groups of the table.
pub struct Step {
    /// Matrix products, forward and backward.
    pub products: Cost,
    /// Attention, forward and backward.
    pub attention: Cost,
    /// Norms, RoPE, gated linear units, embedding and cross-entropy.
    pub elementwise: Cost,
    /// AdamW; once a step.
    pub optimiser: Cost,
    /// Squared norms of every unit, if the step is one micro-batch; on the side stream.
    pub norm_test: Cost,
}

/// Costs of a micro-batch of `batch` × `seq_len` tokens in `precision`, as the walk launches it.
pub fn step(config: &ModelConfig, (batch, seq_len): (usize, usize), precision: Precision) -> Step {
    let real = precision.size() as f64;
    let float = 4.0;
    let n = (batch * seq_len) as f64;
    let [hidden, inner, vocabulary] = [
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
    ]
    .map(|size| size as f64);
    let queries = (config.num_attention_heads * config.head_dim) as f64;
    let rotated =
        ((config.num_attention_heads + config.num_key_value_heads) * config.head_dim) as f64;
    let qkv = config.qkv() as f64;
    let layers = config.num_hidden_layers;
    let parameters = layout(config).len() as f64;
    let units = layers + 2;

    // [rows, columns] = [rows, inner] · [inner, columns], with the bytes of a result's element.
    let product = |rows: f64, columns: f64, inner: f64, result: f64| {
        let bytes = real * (rows * inner + inner * columns) + result * rows * columns;
        Cost::new(1, 2.0 * rows * columns * inner, bytes)
    };
    let weights = [
        (qkv, hidden),
        (hidden, queries),
        (2.0 * inner, hidden),
        (hidden, inner),
    ];
    let mut products = sum(weights.map(|(out, width)| {
        // The residual stream is added to and kept in f32.
        let result = if out == hidden { 2.0 * float } else { real };
        sum([
            product(n, out, width, result),
            product(n, width, out, real),
            product(out, width, n, float),
        ])
    }))
    .times(layers);
    products = sum([
        products,
        product(n, vocabulary, hidden, real),
        product(n, hidden, vocabulary, real),
        product(vocabulary, hidden, n, float),
    ]);

    // Causal: half of the scores. Two products forward, five backward.
    let half = n * seq_len as f64 * queries;
    let attention = sum([
        Cost::new(1, 2.0 * half, real * n * (qkv + queries)),
        Cost::new(1, 0.0, real * 2.0 * n * queries),
        Cost::new(1, 5.0 * half, real * n * (2.0 * qkv + 2.0 * queries)),
    ])
    .times(layers);

    let bytes = |launches, bytes| Cost::new(launches, 0.0, bytes);
    let norm_forward = bytes(1, n * hidden * (float + real));
    let norm_backward = bytes(2, n * hidden * (3.0 * float + 3.0 * real));
    let of_layer = sum([
        norm_forward.times(2),
        norm_backward.times(2),
        bytes(2, 4.0 * real * n * rotated),
        bytes(1, 3.0 * real * n * inner),
        bytes(1, 6.0 * real * n * inner),
    ]);
    let elementwise = sum([
        of_layer.times(layers),
        norm_forward,
        norm_backward,
        bytes(1, 2.0 * float * n * hidden),
        bytes(1, 3.0 * float * n * hidden),
        bytes(2, 3.0 * real * n * vocabulary),
    ]);
    Step {
        products,
        attention,
        elementwise,
        optimiser: bytes(4 * layers + 3, parameters * (7.0 * float + real)),
        norm_test: bytes(2 * units, parameters * float),
    }
}

fn sum<const N: usize>(costs: [Cost; N]) -> Cost {
    costs.into_iter().fold(Cost::default(), |sum, cost| Cost {
        launches: sum.launches + cost.launches,
        flops: sum.flops + cost.flops,
        bytes: sum.bytes + cost.bytes,
    })
}

impl Cost {
    /// Milliseconds at the limits, or at the expected part of them.
    fn milliseconds(self, gpu: &Limits, (flops, bandwidth): (f64, f64)) -> f64 {
        let compute = self.flops / (gpu.flops * flops);
        1e3 * compute.max(self.bytes / (gpu.bandwidth * bandwidth))
    }
}

/// TinyLlama 1.1B, from its `config.json`.
fn tinyllama() -> ModelConfig {
    ModelConfig {
        hidden_size: 2048,
        intermediate_size: 5632,
        num_hidden_layers: 22,
        num_attention_heads: 32,
        num_key_value_heads: 4,
        head_dim: 64,
        vocab_size: 32000,
        max_position_embeddings: 2048,
        norm_eps: 1e-5,
        rope_theta: 10000.0,
        ..ModelConfig::default()
    }
}

/// MicroLlama 300M, from its `config.json`.
fn microllama() -> ModelConfig {
    ModelConfig {
        hidden_size: 1024,
        intermediate_size: 5632,
        num_hidden_layers: 12,
        num_attention_heads: 16,
        ..tinyllama()
    }
}

/// The section of `docs/gpu.md`.
fn page() -> String {
    let gpu = &H200;
    let mut page = String::new();
    for (name, config, shape) in [
        ("TinyLlama 1.1B", tinyllama(), (8, 2048)),
        ("MicroLlama 300M", microllama(), (16, 2048)),
    ] {
        let step = step(&config, shape, Precision::Bf16);
        let (batch, seq_len) = shape;
        let _ = writeln!(
            page,
            "\n{name}, one micro-batch of {batch} × {seq_len} tokens on an {}:\n",
            gpu.name
        );
        page += "| group | launches | TFLOP | GB | ms at the limits | ms expected |\n|---|---|---|---|---|---|\n";
        let ideal = (1.0, 1.0);
        let mut totals = [0.0; 2];
        let mut of_pass = 0.0;
        for (group, cost, expected) in [
            ("matrix products", step.products, (MATRIX, COPY)),
            ("attention", step.attention, (ATTENTION, COPY)),
            ("other kernels", step.elementwise, (1.0, COPY)),
            ("AdamW, once a step", step.optimiser, (1.0, COPY)),
            (
                "norm test, beside the backward pass",
                step.norm_test,
                (1.0, COPY),
            ),
        ] {
            let times = [ideal, expected].map(|part| cost.milliseconds(gpu, part));
            let _ = writeln!(
                page,
                "| {group} | {} | {:.1} | {:.1} | {:.1} | {:.1} |",
                cost.launches,
                cost.flops / 1e12,
                cost.bytes / 1e9,
                times[0],
                times[1],
            );
            if !group.starts_with("norm test") {
                totals[0] += times[0];
                totals[1] += times[1];
            }
            if !group.contains("once a step") && !group.starts_with("norm test") {
                of_pass += times[1];
            }
        }
        let tokens = (batch * seq_len) as f64;
        let flops = flops_per_token(&config, seq_len);
        let rate = tokens / (of_pass / 1e3);
        let _ = writeln!(
            page,
            "\nExpected with many micro-batches a step: {:.1} k tokens/s, {:.0} % of the peak of {:.0} TFLOP/s at \
             {:.2} GFLOP a token. With one micro-batch a step: {:.1} k tokens/s.",
            rate / 1e3,
            100.0 * rate * flops / gpu.flops,
            gpu.flops / 1e12,
            flops / 1e9,
            tokens / totals[1],
        );
    }
    page
}

/// FLOPs of a token as publications count them: 6N + 12·L·d·T, attention not halved by the causal mask.
fn flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    let parameters = layout(config).len() as f64;
    let queries = config.num_attention_heads * config.head_dim;
    6.0 * parameters + 12.0 * (config.num_hidden_layers * queries * seq_len) as f64
}

#[test]
fn the_prediction_in_the_docs_is_current() {
    assert_in_docs("roofline", page().trim_start());
}
