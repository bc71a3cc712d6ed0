//! What the device and cuBLASLt reach: copy bandwidth, and every matrix product of a model's micro-batch.

use std::time::Instant;

use evenkeel::engine::cuda::cublaslt::{Blas, Operand, Product};
use evenkeel::engine::cuda::{CudaError, Precision, logits_rows};
use serde_json::json;

use super::models::named;
use super::{Gpu, Options, Report};

/// The shortest time over which a mean is taken, seconds.
const LEAST: f64 = 0.1;

/// Which product of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Role {
    /// Y = X · Wᵀ
    Forward,
    /// dX = dY · W
    Input,
    /// dW += dYᵀ · X, f32
    Weights,
}

/// A product of a layer, and how often a micro-batch needs it.
struct Case {
    layer: &'static str,
    role: Role,
    rows: usize,
    columns: usize,
    inner: usize,
    times: usize,
}

/// Seconds of all products: by cuBLASLt's first algorithms, and by the fastest.
#[derive(Default)]
struct Sum {
    first: f64,
    fastest: f64,
    flops: f64,
}

pub fn run(gpu: &Gpu, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let bytes = if options.tiny {
        1 << 16
    } else {
        (2u64 << 30).min(gpu.device.free_memory()? / 4)
    };
    let from = gpu.random(bytes, false)?;
    let to = gpu.device.allocate(bytes, "a copy")?;
    let seconds = mean(gpu, options, &mut || {
        // SAFETY: both memories have these bytes and live until the end.
        unsafe { (gpu.stream).copy(to.address(), from.address(), bytes as usize) }
    })?;
    drop((from, to));
    report.line(&json!({
        "result": "copy", "bytes": bytes, "milliseconds": seconds * 1e3,
        "gigabytes_per_second": 2.0 * bytes as f64 / seconds / 1e9, "ok": true,
    }));

    let blas = Blas::new(&gpu.device)?;
    let n = options.batch * options.seq;
    let models: &[&str] = if options.tiny {
        &["tiny"]
    } else {
        let (rows, columns, inner) = (8192, 8192, 8192);
        let square = Case {
            layer: "8192³",
            role: Role::Forward,
            rows,
            columns,
            inner,
            times: 1,
        };
        multiply(gpu, options, &blas, "square", &[square], report)?;
        &["tinyllama", "microllama"]
    };
    for &model in models {
        let config = named(model)?;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let queries = config.num_attention_heads * config.head_dim;
        let qkv = queries + 2 * config.num_key_value_heads * config.head_dim;
        let layers = config.num_hidden_layers;
        let part = n.min(logits_rows(config.vocab_size));
        let mut cases = Vec::new();
        for (layer, tokens, out, width, times) in [
            ("qkv", n, qkv, hidden, layers),
            ("output", n, hidden, queries, layers),
            ("gate_up", n, 2 * inner, hidden, layers),
            ("down", n, hidden, inner, layers),
            ("head", part, config.vocab_size, hidden, n.div_ceil(part)),
        ] {
            for (role, rows, columns, inner) in [
                (Role::Forward, tokens, out, width),
                (Role::Input, tokens, width, out),
                (Role::Weights, out, width, tokens),
            ] {
                cases.push(Case {
                    layer,
                    role,
                    rows,
                    columns,
                    inner,
                    times,
                });
            }
        }
        let sum = multiply(gpu, options, &blas, model, &cases, report)?;
        report.line(&json!({
            "result": "products", "model": model, "tokens": n, "milliseconds": sum.first * 1e3,
            "tflops": sum.flops / sum.first / 1e12, "fastest_tflops": sum.flops / sum.fastest / 1e12, "ok": true,
        }));
    }
    Ok(())
}

/// Times products by each of cuBLASLt's algorithms.
fn multiply(
    gpu: &Gpu,
    options: &Options,
    blas: &Blas,
    model: &str,
    cases: &[Case],
    report: &mut Report,
) -> anyhow::Result<Sum> {
    let scratch = gpu.device.allocate(Blas::WORKSPACE, "cuBLASLt")?;
    let workspace = (scratch.address(), Blas::WORKSPACE);
    let mut sum = Sum::default();
    for case in cases {
        let &Case {
            role,
            rows,
            columns,
            inner,
            ..
        } = case;
        let is_f32 = role == Role::Weights;
        let size = if is_f32 { 4 } else { 2 };
        let a = gpu.random(2 * (rows * inner) as u64, true)?;
        let b = gpu.random(2 * (inner * columns) as u64, true)?;
        let result = gpu.random(size * (rows * columns) as u64, !is_f32)?;
        let operand = |address, stride, transposed| Operand {
            address,
            element: Precision::Bf16,
            stride,
            transposed,
        };
        let product = Product {
            rows,
            columns,
            inner,
            a: match role {
                Role::Weights => operand(a.address(), rows, true),
                _ => operand(a.address(), inner, false),
            },
            b: match role {
                Role::Forward => operand(b.address(), inner, true),
                _ => operand(b.address(), columns, false),
            },
            added: is_f32.then_some(result.address()),
            factor: 1.0,
            result: result.address(),
            stride: columns,
            element: if is_f32 {
                Precision::F32
            } else {
                Precision::Bf16
            },
        };
        let mut seconds = Vec::new();
        for algorithm in 0..blas.choose(&product, workspace, 0)? {
            blas.choose(&product, workspace, algorithm)?;
            seconds.push(mean(gpu, options, &mut || {
                // SAFETY: the operands have the product's sizes and live until the end.
                unsafe { blas.multiply(&gpu.stream, &product, workspace) }
            })?);
        }
        let flops = 2.0 * (rows * columns * inner) as f64;
        let tflops: Vec<f64> = seconds.iter().map(|time| flops / time / 1e12).collect();
        let fastest = seconds.iter().copied().fold(f64::INFINITY, f64::min);
        report.line(&json!({
            "result": "product", "model": model, "layer": case.layer, "role": format!("{role:?}"),
            "rows": rows, "columns": columns, "inner": inner, "milliseconds": seconds[0] * 1e3,
            "tflops_by_algorithm": tflops,
        }));
        sum.first += seconds[0] * case.times as f64;
        sum.fastest += fastest * case.times as f64;
        sum.flops += flops * case.times as f64;
    }
    Ok(sum)
}

/// Mean seconds of work on the stream, after three runs.
fn mean(
    gpu: &Gpu,
    options: &Options,
    work: &mut dyn FnMut() -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let runs = if options.tiny { 1 } else { 3 };
    for _ in 0..runs {
        work()?;
    }
    gpu.stream.synchronize()?;
    let (begin, mut times) = (Instant::now(), 0);
    while times == 0 || !options.tiny && begin.elapsed().as_secs_f64() < LEAST {
        for _ in 0..runs {
            work()?;
        }
        gpu.stream.synchronize()?;
        times += runs;
    }
    Ok(begin.elapsed().as_secs_f64() / f64::from(times))
}
