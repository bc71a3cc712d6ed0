//! Tokens a second and memory of training steps, and what the norm test adds.

use std::time::Instant;

use evenkeel::engine::cuda::CudaOptions;
use evenkeel::engine::{Engine, EngineError, Measure, MicroBatch, ModelConfig, layout};
use serde_json::{Value, json};

use super::models::{Batch, cuda_options, engine, named, step};
use super::{Gpu, Options, Report};

/// Steps on random tokens; one line in the fields of the PyTorch peer's.
pub fn speed(gpu: &Gpu, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let config = named(&options.model)?;
    let free = gpu.device.free_memory()?;
    let begin = Instant::now();
    let ran = (|| -> Result<_, EngineError> {
        let mut engine = engine(gpu, &config, cuda_options(options))?;
        engine.reserve(options.batch, options.seq)?;
        let created = begin.elapsed().as_secs_f64();
        let batches = batches(&config, options);
        let micro_batches: Vec<MicroBatch<'_>> = batches.iter().map(Batch::micro_batch).collect();
        let mut seconds = Vec::new();
        let mut loss = 0.0;
        let mut begin = Instant::now();
        for number in 1..=options.warmup + options.steps {
            loss = step(
                &mut engine,
                &micro_batches,
                Measure::default(),
                number as u64,
            )?;
            // From return to return: each step waits for the optimiser's kernels of the one before.
            let now = Instant::now();
            if number > options.warmup {
                seconds.push((now - begin).as_secs_f64());
            }
            begin = now;
        }
        let used = free.saturating_sub(gpu.device.free_memory()?);
        Ok((seconds, loss, engine.memory().1, used, created))
    })();
    let mut line = described(&config, options);
    match ran {
        Ok((seconds, loss, peak, used, created)) => {
            let tokens = (options.batch * options.seq * options.accumulation) as f64;
            let rate = tokens / median(&seconds);
            let flops = flops_per_token(&config, options.seq);
            line["tokens_per_second"] = json!(rate);
            line["best"] = json!(tokens / seconds.iter().copied().fold(f64::INFINITY, f64::min));
            line["milliseconds"] = json!(1e3 * median(&seconds));
            line["tflops"] = json!(rate * flops / 1e12);
            line["loss"] = json!(loss);
            line["engine_peak_bytes"] = json!(peak);
            line["device_bytes"] = json!(used);
            line["created_seconds"] = json!(created);
            line["ok"] = json!(loss.is_finite());
        }
        // A micro-batch that does not fit ends a sweep, and is no failure.
        Err(EngineError::OutOfMemory { needed, limit, .. }) => {
            line["out_of_memory"] = json!({"needed": needed, "limit": limit});
        }
        Err(error) => return Err(error.into()),
    }
    report.line(&line);
    Ok(())
}

fn batches(config: &ModelConfig, options: &Options) -> Vec<Batch> {
    let shape = (options.batch, options.seq);
    (0..options.accumulation)
        .map(|i| Batch::new(config, shape, false, i as u64))
        .collect()
}

fn described(config: &ModelConfig, options: &Options) -> Value {
    json!({
        "result": "speed", "model": options.model, "parameters": layout(config).len(),
        "micro_batch": options.batch, "seq": options.seq, "accumulation": options.accumulation,
        "graphs": !options.no_graphs, "checkpointing": options.checkpointing,
        "bf16": !options.f32, "steps": options.steps,
    })
}

/// FLOPs of a token as publications count them: 6N + 12·L·d·T, attention not halved by the causal mask.
fn flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    let queries = config.num_attention_heads * config.head_dim;
    let attention = 12 * config.num_hidden_layers * queries * seq_len;
    6.0 * layout(config).len() as f64 + attention as f64
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The time of a step that measures, against one that does not: alternating steps of one engine, at least two
/// micro-batches a step.
pub fn norm_test(gpu: &Gpu, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let config = named(&options.model)?;
    let options = Options {
        accumulation: options.accumulation.max(2),
        ..options.clone()
    };
    let batches = batches(&config, &options);
    let micro_batches: Vec<MicroBatch<'_>> = batches.iter().map(Batch::micro_batch).collect();
    for (name, measure) in [
        (
            "worker",
            Measure {
                worker: true,
                ..Measure::default()
            },
        ),
        (
            "micro-batches",
            Measure {
                micro_batches: true,
                ..Measure::default()
            },
        ),
        (
            "coordinates",
            Measure {
                micro_batches: true,
                coordinates: true,
                ..Measure::default()
            },
        ),
    ] {
        let reserving = CudaOptions {
            measure,
            ..cuda_options(&options)
        };
        let mut engine = engine(gpu, &config, reserving)?;
        engine.reserve(options.batch, options.seq)?;
        let mut times = [Vec::new(), Vec::new()];
        let mut begin = Instant::now();
        for number in 1..=2 * (options.warmup + options.steps) {
            let measured = number % 2;
            let measure = if measured == 1 {
                measure
            } else {
                Measure::default()
            };
            step(&mut engine, &micro_batches, measure, number as u64)?;
            let now = Instant::now();
            if number > 2 * options.warmup {
                times[measured].push((now - begin).as_secs_f64());
            }
            begin = now;
        }
        let [plain, measuring] = times.map(|times| median(&times));
        let mut line = described(&config, &options);
        line["result"] = json!("norm-test");
        line["measure"] = json!(name);
        line["plain_milliseconds"] = json!(1e3 * plain);
        line["measuring_milliseconds"] = json!(1e3 * measuring);
        line["cost"] = json!(measuring / plain - 1.0);
        line["engine_peak_bytes"] = json!(engine.memory().1);
        line["ok"] = json!(true);
        report.line(&line);
    }
    Ok(())
}
