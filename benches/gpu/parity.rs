//! Gradients and losses of small models against the CPU engine; repeatability; options that must change no bit.

use anyhow::Context;
use evenkeel::engine::cpu::{CpuEngine, CpuOptions};
use evenkeel::engine::cuda::{CudaOptions, Precision};
use evenkeel::engine::{Engine, Measure, ModelConfig};
use serde_json::json;

use super::models::{Batch, cuda_options, engine, gradient_of, named, step};
use super::{Gpu, Options, Report};

pub fn run(gpu: &Gpu, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let tiny = named("tiny")?;
    let with = |heads, kv_heads, head_dim, tied| ModelConfig {
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        tie_word_embeddings: tied,
        ..tiny.clone()
    };
    let mut cases = vec![
        ("4x2x6 tied", with(4, 2, 6, true), (3, 70)),
        ("1x1x2", with(1, 1, 2, false), (3, 1)),
    ];
    if !options.tiny {
        // The last fills the device, with the shape of a real model.
        let wide = ModelConfig {
            num_hidden_layers: 1,
            vocab_size: 4096,
            ..named("microllama")?
        };
        cases.extend([
            ("4x4x32", with(4, 4, 32, false), (3, 33)),
            ("2x1x128 tied", with(2, 1, 128, true), (2, 65)),
            ("8m", named("8m")?, (4, 256)),
            ("microllama, 1 layer", wide, (2, 512)),
        ]);
    }
    for (name, config, shape) in &cases {
        gradients(gpu, options, report, name, config, *shape)?;
    }
    let config = with(4, 2, 6, false);
    losses(gpu, options, report, &config)?;
    if !options.tiny {
        unchanged(gpu, options, report, &config, Precision::F32)?;
    }
    unchanged(gpu, options, report, &config, Precision::Bf16)
}

fn with(options: &Options, precision: Precision) -> CudaOptions {
    CudaOptions {
        precision,
        ..cuda_options(options)
    }
}

/// Every gradient tensor of both precisions against the CPU engine's in f32.
fn gradients(
    gpu: &Gpu,
    options: &Options,
    report: &mut Report,
    name: &str,
    config: &ModelConfig,
    shape: (usize, usize),
) -> anyhow::Result<()> {
    let batch = Batch::new(config, shape, true, 3);
    let mut cpu = CpuEngine::new(config.clone(), CpuOptions::default(), None, Some(5))?;
    let (expected_loss, expected) = gradient_of(&mut cpu, batch.micro_batch())?;
    // In bf16 each product's operands are rounded to 8 bits: some 0.4 % each, more through the layers.
    for (precision, of_loss, of_gradient) in
        [(Precision::F32, 1e-5, 3e-5), (Precision::Bf16, 1e-2, 6e-2)]
    {
        let mut cuda = engine(gpu, config, with(options, precision))?;
        let (loss, got) = gradient_of(&mut cuda, batch.micro_batch())?;
        let loss_error = (loss - expected_loss).abs() / expected_loss.abs();
        let (mut worst, mut of) = (0.0, String::new());
        for (unit, (got, expected)) in cpu.layout().units.iter().zip(got.iter().zip(&expected)) {
            for parameter in &unit.parameters {
                let range = parameter.range();
                let error = relative(&got[range.clone()], &expected[range]);
                if error > worst {
                    (worst, of) = (error, parameter.name.clone());
                }
            }
        }
        report.line(&json!({
            "result": "gradients", "model": name, "precision": format!("{precision:?}"),
            "loss_error": loss_error, "worst_relative_error": worst, "tensor": of,
            "allowed": of_gradient, "ok": loss_error <= of_loss && worst <= of_gradient,
        }));
    }
    Ok(())
}

/// Losses of steps of AdamW on one batch.
fn train(
    engine: &mut dyn Engine,
    batch: &Batch,
    steps: u64,
) -> Result<Vec<f64>, evenkeel::engine::EngineError> {
    let micro_batches = [batch.micro_batch()];
    (1..=steps)
        .map(|number| step(engine, &micro_batches, Measure::default(), number))
        .collect()
}

fn losses(
    gpu: &Gpu,
    options: &Options,
    report: &mut Report,
    config: &ModelConfig,
) -> anyhow::Result<()> {
    let batch = Batch::new(config, (3, 40), true, 4);
    let mut cpu = CpuEngine::new(config.clone(), CpuOptions::default(), None, Some(5))?;
    let steps = if options.tiny { 10 } else { 50 };
    let expected = train(&mut cpu, &batch, steps)?;
    for (precision, allowed) in [(Precision::F32, 1e-3), (Precision::Bf16, 5e-2)] {
        let mut cuda = engine(gpu, config, with(options, precision))?;
        let got = train(&mut cuda, &batch, steps)?;
        let errors = got.iter().zip(&expected);
        let errors = errors.map(|(got, expected)| (got - expected).abs() / expected);
        let worst = errors.fold(0.0, |worst: f64, error| {
            if error.is_nan() {
                f64::INFINITY
            } else {
                worst.max(error)
            }
        });
        report.line(&json!({
            "result": "losses", "precision": format!("{precision:?}"), "steps": steps,
            "first": got.first(), "last": got.last(), "expected_last": expected.last(),
            "worst_relative_error": worst, "allowed": allowed, "ok": worst <= allowed,
        }));
    }
    Ok(())
}

/// A repetition, checkpointing and launches without graphs have the same bits.
fn unchanged(
    gpu: &Gpu,
    options: &Options,
    report: &mut Report,
    config: &ModelConfig,
    precision: Precision,
) -> anyhow::Result<()> {
    let batch = Batch::new(config, (3, 40), true, 6);
    let run = |options: CudaOptions| -> anyhow::Result<Vec<Vec<f32>>> {
        let mut engine = engine(gpu, config, options)?;
        train(&mut engine, &batch, 5)?;
        let units = 0..engine.layout().units.len();
        units
            .map(|unit| {
                let state = engine.export(unit, true)?.context("an export is wanted")?;
                Ok(state.parameters)
            })
            .collect()
    };
    let plain = with(options, precision);
    let expected = run(plain.clone())?;
    for (name, changed) in [
        ("repeated", plain.clone()),
        (
            "no graphs",
            CudaOptions {
                no_graphs: !plain.no_graphs,
                ..plain.clone()
            },
        ),
        (
            "checkpointing",
            CudaOptions {
                activation_checkpointing: !plain.activation_checkpointing,
                ..plain.clone()
            },
        ),
    ] {
        let got = run(changed)?;
        report.line(&json!({
            "result": "same-bits", "change": name, "precision": format!("{precision:?}"),
            "ok": got == expected,
        }));
    }
    Ok(())
}

/// ‖got − expected‖ / ‖expected‖; infinite if one of them has a NaN.
fn relative(got: &[f32], expected: &[f32]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (&got, &expected) in got.iter().zip(expected) {
        let (got, expected) = (f64::from(got), f64::from(expected));
        error += (got - expected).powi(2);
        size += expected.powi(2);
    }
    // Of a single token, queries and keys have no gradient but the rounding of terms that cancel.
    let ratio = error.sqrt() / size.sqrt().max(1e-2);
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}
