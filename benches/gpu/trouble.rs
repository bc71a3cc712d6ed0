//! Out of memory on a real device: an error from which the process continues.

use anyhow::bail;
use evenkeel::engine::cuda::{CudaError, CudaOptions};
use evenkeel::engine::{Engine, EngineError, Measure};
use serde_json::json;

use super::models::{Batch, cuda_options, engine, named, step};
use super::{Gpu, Options, Report};

/// Allocates too much in every place that can, and checks after each that the device still computes the same.
pub fn out_of_memory(gpu: &Gpu, options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let config = named("tiny")?;
    let batch = Batch::new(&config, (3, 40), true, 8);
    let compute = |gpu: &Gpu| -> anyhow::Result<f64> {
        let mut engine = engine(gpu, &config, cuda_options(options))?;
        step(&mut engine, &[batch.micro_batch()], Measure::default(), 1)?;
        Ok(step(
            &mut engine,
            &[batch.micro_batch()],
            Measure::default(),
            2,
        )?)
    };
    let expected = compute(gpu)?;
    let before = gpu.device.free_memory()?;
    let mut line = |gpu: &Gpu, what: &str, message: String| -> anyhow::Result<()> {
        let loss = compute(gpu)?;
        let free = gpu.device.free_memory()?;
        report.line(&json!({
            "result": "out-of-memory", "of": what, "message": message, "same_loss": loss == expected,
            "free_before": before, "free_after": free,
            // The driver keeps some memory of a context.
            "ok": loss == expected && free + (64 << 20) >= before,
        }));
        Ok(())
    };

    let total = gpu.device.total_memory;
    match gpu.device.allocate(2 * total, "twice the device") {
        Err(error @ CudaError::OutOfMemory { .. }) => {
            line(gpu, "one allocation", error.to_string())?;
        }
        Err(error) => return Err(error.into()),
        Ok(_) => bail!("the device allocated {} bytes of {total}", 2 * total),
    }

    // A full device: the engine's own allocations fail, whichever comes first.
    let message = {
        let mut held = Vec::new();
        let mut chunk = (total / 64).next_multiple_of(2 << 20);
        while chunk >= 2 << 20 {
            match gpu.device.allocate(chunk, "the rest of the device") {
                Ok(memory) => held.push(memory),
                Err(CudaError::OutOfMemory { .. }) => chunk /= 2,
                Err(error) => return Err(error.into()),
            }
        }
        let config = named(if options.tiny { "8m" } else { "tinyllama" })?;
        match engine(gpu, &config, cuda_options(options)) {
            Err(error @ EngineError::OutOfMemory { .. }) => error.to_string(),
            Err(error) => return Err(error.into()),
            Ok(_) => bail!("an engine was created on a full device"),
        }
    };
    line(gpu, "an engine on a full device", message)?;

    // A micro-batch that the engine believes to fit: the driver refuses, and a smaller one runs.
    let config = named(if options.tiny { "tiny" } else { "microllama" })?;
    let unlimited = CudaOptions {
        memory_limit: Some(u64::MAX),
        ..cuda_options(options)
    };
    let seq_len = config.max_position_embeddings;
    let message = {
        let mut engine = engine(gpu, &config, unlimited)?;
        let rows = (1 << 30) / seq_len;
        let message = match engine.reserve(rows, seq_len) {
            Err(error @ EngineError::OutOfMemory { .. }) => error.to_string(),
            Err(error) => return Err(error.into()),
            Ok(()) => bail!("{rows} rows of {seq_len} tokens fit"),
        };
        let small = Batch::new(&config, (1, seq_len), false, 9);
        let loss = step(&mut engine, &[small.micro_batch()], Measure::default(), 1)?;
        if !loss.is_finite() {
            bail!("the loss after a refused micro-batch is {loss}");
        }
        message
    };
    line(gpu, "a micro-batch", message)
}
