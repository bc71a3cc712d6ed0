//! Tokens per second and peak memory of training steps on random tokens, as one JSON line: the
//! counterpart of the PyTorch script that it is measured against.
//!
//! ```text
//! cargo bench --bench trainer -- --layers 12 --width 512 --ff 1376 --vocab 8192 --seq 512
//! ```
//!
//! `--processes 2 --parallel ddp|fsdp` runs that number of ranks over TCP, which share the cores.
//! `RAYON_NUM_THREADS` or `--threads` sets the threads. With `--measure` every second step measures the norms
//! of its micro-batches and of its worker's gradient. `measuring` is the median, over adjacent pairs, of the
//! extra time of the measured step. With `--determinism` every step is followed by one of a second engine, which adds the
//! gradients of single samples in fixed point (`determinism: world`); `price` is the median share of the tokens per second
//! that it loses in a pair of steps.

use std::net::TcpListener;
use std::process::{Command, ExitCode};
use std::time::Instant;

use evenkeel::comm::tcp::{self, Greeting, TcpOptions};
use evenkeel::comm::{Collective, CommError, World};
use evenkeel::engine::cpu::{CpuEngine, CpuOptions};
use evenkeel::engine::{AdamW, Engine, EngineError, Measure, MicroBatch, ModelConfig, Strategy};

/// The shape and the length of the run; the defaults are those of the PyTorch script.
struct Options {
    layers: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    ff: usize,
    vocab: usize,
    seq: usize,
    micro_batch: usize,
    accumulation: usize,
    steps: usize,
    warmup: usize,
    threads: usize,
    measure: bool,
    determinism: bool,
    checkpointing: bool,
    tied: bool,
    processes: usize,
    sharded: bool,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            layers: 8,
            width: 256,
            heads: 8,
            kv_heads: 0,
            ff: 688,
            vocab: 4096,
            seq: 256,
            micro_batch: 4,
            accumulation: 1,
            steps: 20,
            warmup: 5,
            threads: 0,
            measure: false,
            determinism: false,
            checkpointing: false,
            tied: false,
            processes: 1,
            sharded: false,
        };
        while let Some(argument) = arguments.next() {
            let number = match argument.as_str() {
                // cargo adds this argument.
                "--bench" => continue,
                "--parallel" => {
                    options.sharded = match arguments.next().as_deref() {
                        Some("ddp") => false,
                        Some("fsdp") => true,
                        _ => return Err("--parallel is ddp or fsdp".into()),
                    };
                    continue;
                }
                "--measure" => {
                    options.measure = true;
                    continue;
                }
                "--determinism" => {
                    options.determinism = true;
                    continue;
                }
                "--activation-checkpointing" => {
                    options.checkpointing = true;
                    continue;
                }
                "--tied" => {
                    options.tied = true;
                    continue;
                }
                "--layers" => &mut options.layers,
                "--width" => &mut options.width,
                "--heads" => &mut options.heads,
                "--kv-heads" => &mut options.kv_heads,
                "--ff" => &mut options.ff,
                "--vocab" => &mut options.vocab,
                "--seq" => &mut options.seq,
                "--micro-batch" => &mut options.micro_batch,
                "--accumulation" => &mut options.accumulation,
                "--steps" => &mut options.steps,
                "--warmup" => &mut options.warmup,
                "--threads" => &mut options.threads,
                "--processes" => &mut options.processes,
                _ => return Err(format!("unknown argument {argument}")),
            };
            *number = arguments
                .next()
                .and_then(|value| value.parse().ok())
                .ok_or_else(|| format!("{argument} needs a whole number"))?;
        }
        if options.kv_heads == 0 {
            options.kv_heads = options.heads;
        }
        Ok(options)
    }

    fn config(&self) -> ModelConfig {
        ModelConfig {
            hidden_size: self.width,
            intermediate_size: self.ff,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            head_dim: self.width / self.heads.max(1),
            vocab_size: self.vocab,
            max_position_embeddings: self.seq,
            norm_eps: 1e-5,
            rope_theta: 10000.0,
            tie_word_embeddings: self.tied,
            initializer_range: 0.02,
            ..ModelConfig::default()
        }
    }
}

/// Rank of a process that rank 0 starts.
const RANK: &str = "EVENKEEL_BENCH_RANK";
/// Port on which rank 0 listens.
const PORT: &str = "EVENKEEL_BENCH_PORT";

fn main() -> ExitCode {
    let rank: usize = std::env::var(RANK).map_or(0, |rank| rank.parse().unwrap_or(0));
    let result = Options::parse(std::env::args().skip(1))
        .and_then(|options| start(&options, rank).map_err(|error| error.to_string()));
    match result {
        Ok(line) => {
            if rank == 0 {
                println!("{line}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs alone, or connects to the other ranks first; rank 0 starts them from this program.
fn start(options: &Options, rank: usize) -> Result<serde_json::Value, EngineError> {
    if options.processes == 1 {
        return run(options, None);
    }
    let rendezvous = |error: std::io::Error| CommError::Rendezvous(error.to_string());
    let mut others = Vec::new();
    let port = match std::env::var(PORT) {
        Ok(port) => port.parse().unwrap_or(0),
        Err(_) => {
            let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(rendezvous)?;
            let port = listener.local_addr().map_err(rendezvous)?.port();
            let program = std::env::current_exe().map_err(rendezvous)?;
            for rank in 1..options.processes {
                let mut command = Command::new(&program);
                command.args(std::env::args().skip(1));
                command
                    .env(RANK, rank.to_string())
                    .env(PORT, port.to_string());
                others.push(command.spawn().map_err(rendezvous)?);
            }
            port
        }
    };
    let world = tcp::connect(&TcpOptions::new(
        "127.0.0.1",
        port,
        Greeting {
            rank,
            world: options.processes,
        },
        // Every process of the benchmark has it.
        "0".repeat(64).parse().expect("64 digits"),
    ))?;
    let result = run(options, Some(world.clone()));
    world.close()?;
    for mut other in others {
        other.wait().map_err(rendezvous)?;
    }
    result
}

/// The norms that a measured step computes. Full sharding keeps no whole gradient of a rank.
fn measure(measured: bool, sharded: bool) -> Measure {
    Measure {
        micro_batches: measured,
        worker: measured && !sharded,
        coordinates: false,
    }
}

fn run(options: &Options, world: Option<World>) -> Result<serde_json::Value, EngineError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let engine_options = CpuOptions {
        threads: match (options.threads, options.processes) {
            (0, 1) => None,
            (0, processes) => Some((cores / processes).max(1)),
            (threads, _) => Some(threads),
        },
        activation_checkpointing: options.checkpointing,
        strategy: match options.sharded {
            true => Strategy::Sharded {
                unsharded_accumulation: false,
            },
            false => Strategy::Replicated,
        },
        measure: measure(options.measure, options.sharded),
        ..CpuOptions::default()
    };
    let in_fixed_point = CpuOptions {
        in_fixed_point: true,
        measure: measure(options.measure, true),
        ..engine_options.clone()
    };
    let config = options.config();
    let mut engine = CpuEngine::new(config.clone(), engine_options, world.clone(), Some(0))?;
    engine.reserve(options.micro_batch, options.seq)?;
    let mut exact = None;
    if options.determinism {
        let mut engine = CpuEngine::new(config, in_fixed_point, world, Some(0))?;
        engine.reserve(1, options.seq)?;
        exact = Some(engine);
    }

    let tokens = random_tokens(options, 1);
    let targets = random_tokens(options, 2);
    let whole = MicroBatch {
        tokens: &tokens,
        targets: &targets,
        batch: options.micro_batch,
        seq_len: options.seq,
        ..MicroBatch::default()
    };
    let rows = tokens.chunks(options.seq).zip(targets.chunks(options.seq));
    let samples: Vec<MicroBatch<'_>> = rows
        .map(|(tokens, targets)| MicroBatch {
            tokens,
            targets,
            batch: 1,
            ..whole
        })
        .collect();
    let whole = vec![whole; options.accumulation];
    let samples = samples.repeat(options.accumulation);
    let (mut seconds, mut prices) = (Vec::new(), Vec::new());
    let mut loss = 0.0;
    for number in 1..=options.warmup + options.steps {
        let measured = options.measure && number % 2 == 0;
        let measure = |sharded| measure(measured, sharded);
        let (mean, took) = step(
            &mut engine,
            &whole,
            measure(options.sharded),
            (number, options.processes),
        )?;
        loss = mean;
        let took_exact = match &mut exact {
            Some(engine) => {
                let of = (number, options.processes);
                Some(step(engine, &samples, measure(true), of)?.1)
            }
            None => None,
        };
        if number > options.warmup {
            seconds.push(took);
            prices.extend(took_exact.map(|exact| 1.0 - took / exact));
        }
    }
    let measuring = options.measure.then(|| measuring(options.warmup, &seconds));
    seconds.sort_by(f64::total_cmp);
    prices.sort_by(f64::total_cmp);
    let price = (!prices.is_empty()).then(|| (median(&prices) * 1e3).round() / 1e3);
    let tokens = (tokens.len() * options.accumulation * options.processes) as f64;
    let per_second = |seconds: f64| (tokens / seconds * 10.0).round() / 10.0;
    Ok(serde_json::json!({
        "parameters": engine.layout().len(),
        "tokens_per_second": per_second(median(&seconds)),
        "best": per_second(seconds.first().copied().unwrap_or(f64::NAN)),
        "loss": (loss * 1e4).round() / 1e4,
        "peak_rss_mb": peak_rss_mb(),
        "engine_mb": engine.memory().1 >> 20,
        "measuring": measuring,
        "price": price,
    }))
}

/// One step of these micro-batches: the mean loss over all processes if they have the same, and the seconds.
fn step(
    engine: &mut CpuEngine,
    micro_batches: &[MicroBatch<'_>],
    measure: Measure,
    (number, processes): (usize, usize),
) -> Result<(f64, f64), EngineError> {
    let start = Instant::now();
    let (mut sum, mut targets) = (0.0, 0);
    for (index, micro_batch) in (1..).zip(micro_batches) {
        let got = engine.accumulate(*micro_batch, measure, index == micro_batches.len())?;
        sum += got.loss;
        targets += got.targets;
    }
    let reduced = engine.reduce(measure)?;
    let mean = 1.0 / (targets * processes as u64) as f64;
    let norm = reduced.squared_norm.sqrt() * mean;
    engine.update(AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        vector_decay: 0.0,
        step: number as u64,
        gradient_scale: mean * (1.0 / (norm + 1e-6)).min(1.0),
    })?;
    Ok((sum * mean * processes as f64, start.elapsed().as_secs_f64()))
}

/// Relative extra time of measured steps over adjacent steps. The first of `seconds` is step `warmup + 1`;
/// even steps are measured.
fn measuring(warmup: usize, seconds: &[f64]) -> f64 {
    let mut ratios: Vec<f64> = seconds
        .windows(2)
        .enumerate()
        .map(|(i, pair)| match (warmup + 1 + i) % 2 {
            0 => pair[0] / pair[1],
            _ => pair[1] / pair[0],
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    median(&ratios) - 1.0
}

/// The median of a sorted, non-empty list.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

fn random_tokens(options: &Options, seed: u64) -> Vec<u32> {
    let mut state = seed;
    (0..options.micro_batch * options.seq)
        .map(|_| {
            // The multiplier of Knuth's MMIX.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % options.vocab.max(1) as u64) as u32
        })
        .collect()
}

/// Peak resident memory of this process, MiB.
fn peak_rss_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib >> 10)
}
