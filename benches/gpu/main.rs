//! What only a GPU shows of the engine, one JSON line a result. `benches/first_contact.sh` runs it.
//!
//! ```text
//! gpu device
//! gpu ceilings --batch 8 --seq 2048
//! gpu parity
//! gpu speed --model tinyllama --batch 8 --seq 2048 --steps 20 [--no-graphs] [--checkpointing] [--f32]
//! gpu norm-test --model microllama --batch 8 --seq 2048 --steps 10
//! gpu oom
//! gpu nccl
//! ```
//!
//! It runs on whatever driver the process loads: with the emulated GPU's directory in `EVENKEEL_CUDA_LIBRARIES` and
//! `LD_LIBRARY_PATH`, and `--tiny`, that is the emulator. A line with `"ok": false` makes the exit status 1.

mod ceilings;
mod models;
mod nccl;
mod parity;
mod speed;
mod trouble;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, ValueEnum};
use evenkeel::engine::cuda::CudaError;
use evenkeel::engine::cuda::driver::{Device, Driver, Memory, Stream};
use evenkeel::util::random;
use serde_json::{Value, json};

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Command {
    /// What the driver says of the device
    Device,
    /// Copy bandwidth, and every matrix product of the models by each algorithm of cuBLASLt
    Ceilings,
    /// Gradients, losses and repeatability of small models
    Parity,
    /// Tokens a second and memory
    Speed,
    /// What a step that measures costs
    NormTest,
    /// Out of memory, from which the process must continue
    Oom,
    /// Collectives of one rank, and what NCCL says of a rank that never comes and of two ranks on one GPU
    Nccl,
}

#[derive(Debug, Clone, Parser)]
#[command(args_override_self = true)]
struct Options {
    command: Command,
    /// tinyllama, microllama, 8m or tiny
    #[arg(long, default_value = "tinyllama")]
    model: String,
    /// Rows of a micro-batch
    #[arg(long, default_value_t = 8)]
    batch: usize,
    #[arg(long, default_value_t = 2048)]
    seq: usize,
    /// Steps that are timed, after the warm-up
    #[arg(long, default_value_t = 20)]
    steps: usize,
    #[arg(long, default_value_t = 3)]
    warmup: usize,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    #[arg(long)]
    no_graphs: bool,
    /// Take cuBLASLt's first algorithms.
    #[arg(long)]
    unmeasured: bool,
    #[arg(long)]
    checkpointing: bool,
    #[arg(long)]
    f32: bool,
    /// Sizes for the emulated GPU
    #[arg(long)]
    tiny: bool,
    /// Directory of compiled kernels
    #[arg(long)]
    cache: Option<PathBuf>,
    /// `cargo bench` adds this.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Prints results and remembers whether all are good.
struct Report {
    failed: usize,
}

impl Report {
    /// Prints a line. `ok: false` in it fails the program.
    fn line(&mut self, line: &Value) {
        if line["ok"] == false {
            self.failed += 1;
        }
        println!("{line}");
    }
}

/// The first visible device.
struct Gpu {
    device: Arc<Device>,
    stream: Stream,
}

impl Gpu {
    fn open() -> Result<Gpu, CudaError> {
        let device = Device::open(&Driver::load()?, 0)?;
        Ok(Gpu {
            stream: device.stream()?,
            device,
        })
    }

    /// Memory of random numbers in [−1, 1), bf16 or f32: a pattern that repeats.
    fn random(&self, bytes: u64, is_bf16: bool) -> Result<Memory, CudaError> {
        let memory = self.device.allocate(bytes, "random numbers")?;
        let len = bytes.min(1 << 20);
        let mut staging = self.device.pinned(len as usize, "random numbers")?;
        let mut random = Random::seeded(1);
        for word in staging.bytes_mut().as_chunks_mut::<4>().0 {
            *word = if is_bf16 {
                let [[a, b], [c, d]] = [(); 2]
                    .map(|()| half::bf16::from_f32(random.float()))
                    .map(half::bf16::to_le_bytes);
                [a, b, c, d]
            } else {
                random.float().to_le_bytes()
            };
        }
        // SAFETY: the memory has these bytes, and both live until the synchronisation.
        unsafe { (self.stream).upload(memory.address(), &staging, 0..len as usize)? };
        let mut done = len;
        while done < bytes {
            let len = done.min(bytes - done);
            // SAFETY: the memory has these bytes and lives until the synchronisation; the parts are disjoint.
            unsafe {
                let to = memory.address() + done;
                self.stream.copy(to, memory.address(), len as usize)?;
            }
            done += len;
        }
        self.stream.synchronize()?;
        Ok(memory)
    }
}

/// The same numbers in every run.
struct Random(random::Random);

impl Random {
    fn seeded(seed: u64) -> Random {
        Random(random::Random::seeded(seed))
    }

    /// A number in [−1, 1) with 24 random bits.
    fn float(&mut self) -> f32 {
        (self.0.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.0.next_u64() % limit as u64) as usize
    }
}

fn main() -> ExitCode {
    let mut report = Report { failed: 0 };
    match run(&Options::parse(), &mut report) {
        Ok(()) if report.failed == 0 => ExitCode::SUCCESS,
        Ok(()) => {
            eprintln!("error: {} results are not as expected", report.failed);
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let gpu = Gpu::open()?;
    match options.command {
        Command::Device => report.line(&device(&gpu)?),
        Command::Ceilings => ceilings::run(&gpu, options, report)?,
        Command::Parity => parity::run(&gpu, options, report)?,
        Command::Speed => speed::speed(&gpu, options, report)?,
        Command::NormTest => speed::norm_test(&gpu, options, report)?,
        Command::Oom => trouble::out_of_memory(&gpu, options, report)?,
        Command::Nccl => nccl::run(&gpu, report)?,
    }
    Ok(())
}

fn device(gpu: &Gpu) -> anyhow::Result<Value> {
    let (device, driver) = (&gpu.device, &gpu.device.driver);
    let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    Ok(json!({
        "result": "device", "name": device.name, "uuid": device.uuid,
        "capability": version(device.capability), "multiprocessors": device.multiprocessors,
        "total_bytes": device.total_memory, "free_bytes": device.free_memory()?,
        "devices": driver.device_count()?, "cuda": driver.version.to_string(), "ok": true,
    }))
}
