//! Time and peak memory of loading a model's weights as f32, as one JSON line: the counterpart of `from_pretrained`.
//!
//! ```text
//! cargo bench --bench load -- DIRECTORY
//! ```
//!
//! All weights are in memory at the end, as in a model that was loaded. With `--engine` they are imported into a CPU
//! engine, which a rank does: its gradients and AdamW's moments take three times as much memory.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use evenkeel::engine::cpu::{CpuEngine, CpuOptions};
use evenkeel::engine::{Engine, ModelConfig, layout};
use evenkeel::train::weights::Weights;
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let with_engine = arguments.iter().any(|argument| argument == "--engine");
    let directory = arguments
        .iter()
        .find(|argument| !argument.starts_with("--"));
    let directory = Path::new(directory.ok_or("name a directory with config.json and weights")?);
    let config = serde_json::from_slice(&std::fs::read(directory.join("config.json"))?)?;
    let config = ModelConfig::from_json(&config)?;
    let layout = layout(&config);

    let began = Instant::now();
    let mut held = Vec::new();
    let mut engine = None;
    if with_engine {
        let made = CpuEngine::new(config, CpuOptions::default(), None, None)?;
        Weights::open(directory)?.restore(engine.insert(made))?;
    } else {
        let weights = Weights::open(directory)?;
        weights.check(&layout)?;
        for unit in &layout.units {
            held.push(weights.load_unit(unit)?);
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let elements = held.iter().map(|unit| unit.len() as u64).sum();
    let elements = engine.map_or(elements, |engine| engine.layout().len());
    println!(
        "{}",
        json!({"seconds": seconds, "parameters": elements, "peak_rss_mb": peak_rss_mb()})
    );
    Ok(())
}

/// Peak resident memory of this process, MiB.
fn peak_rss_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib >> 10)
}
