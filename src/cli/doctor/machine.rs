//! This machine: program, memory, disk, GPUs with their libraries, and a training of two processes.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Check, Checks, Next};
use crate::cli::processes::{Asked, DeviceChoice};
use crate::engine::cuda::libraries;
use crate::inventory::{Devices, DriverState, Inventory, tally};
use crate::plan::DeviceKind;
use crate::util::child;
use crate::util::durable::free_space;
use crate::util::format::{bytes, count};
use crate::util::input;

pub(super) const TRAINING: &str = "training";

/// Longest time of the training. Compiling the kernels of a new GPU takes up to two minutes.
const LIMIT: Duration = Duration::from_secs(300);

pub(super) fn check(needs_gpus: bool, checks: &mut Checks) -> anyhow::Result<()> {
    let program = std::env::current_exe()
        .map_or_else(|error| error.to_string(), |path| path.display().to_string());
    let version = env!("CARGO_PKG_VERSION");
    checks.add(Check::works("evenkeel", format!("{version}, {program}")))?;
    let inventory = Inventory::discover();
    checks.add(processors(&inventory))?;
    checks.add(disk())?;
    checks.add(gpus(&inventory, needs_gpus))?;
    let has_gpus = matches!(inventory.devices(), Devices::Gpus { .. });
    for check in cuda(has_gpus, needs_gpus) {
        checks.add(check)?;
    }
    let asked = Asked {
        procs: None,
        world: None,
        device: DeviceChoice::Auto,
    };
    let processes = asked.here(false, &inventory)?;
    if let Some(note) = &processes.note {
        checks.add(Check::absent(
            "devices",
            note,
            Some(Next::command("evenkeel gpus")),
            false,
        ))?;
    }
    let (device, ranks) = match processes.device {
        DeviceKind::Cuda => ("cuda", processes.count.min(2)),
        DeviceKind::Cpu => ("cpu", 2),
    };
    checks.add(training(device, ranks))?;
    Ok(())
}

fn processors(inventory: &Inventory) -> Check {
    let cpu = &inventory.cpu;
    let cores = count(cpu.cores, "core");
    let found = match (cpu.memory_available, cpu.memory_total) {
        (Some(free), Some(all)) => format!("{cores}, {} of {} free", bytes(free), bytes(all)),
        _ => cores,
    };
    Check::works("memory", found)
}

/// Whether runs can be written in this directory.
fn disk() -> Check {
    let here = Path::new(".");
    let written = tempfile::tempfile_in(here).and_then(|mut file| {
        std::io::Write::write_all(&mut file, &[1; 1 << 20])?;
        file.sync_all()
    });
    match (written, free_space(here)) {
        (Ok(()), Ok(free)) => Check::works(
            "disk",
            format!("{} free for runs in this directory", bytes(free)),
        ),
        (Ok(()), Err(_)) => Check::works("disk", "this directory can be written"),
        (Err(error), _) => Check::fails(
            "disk",
            format!("this directory cannot be written: {error}"),
            "free some space, or work in another directory (`cd`, or `--out DIR` of a launch)",
        ),
    }
}

fn gpus(inventory: &Inventory, needed: bool) -> Check {
    const NAME: &str = "GPUs";
    match (&inventory.driver, inventory.devices()) {
        (DriverState::Absent { missing, install }, _) => {
            Check::absent(NAME, missing, Some(install.as_str().into()), needed)
        }
        (DriverState::TooOld { message } | DriverState::Broken { message }, _) => {
            Check::absent(NAME, message, Some(Next::command("nvidia-smi")), needed)
        }
        (DriverState::Present { .. }, Devices::Gpus { devices }) => {
            let shown = tally(devices.into_iter().map(|device| {
                let name = device.name.unwrap_or_else(|| "GPU".to_owned());
                match device.memory {
                    Some(memory) => format!("{name} of {}", bytes(memory)),
                    None => name,
                }
            }));
            let unusable = inventory.gpus.iter().filter_map(|gpu| gpu.problem.as_ref());
            let unusable: Vec<&str> = unusable.map(String::as_str).collect();
            if unusable.is_empty() {
                Check::works(NAME, shown)
            } else {
                let found = format!("{shown}; another one: {}", unusable.join("; "));
                Check::absent(NAME, found, Some(Next::command("evenkeel gpus")), needed)
            }
        }
        (DriverState::Present { .. }, Devices::CpuRanks { why, .. }) => {
            Check::absent(NAME, why, Some(Next::command("evenkeel gpus")), needed)
        }
    }
}

/// The libraries that training on GPUs needs; one line if GPUs are neither here nor needed.
fn cuda(has_gpus: bool, needed: bool) -> Vec<Check> {
    const NAME: &str = "CUDA";
    let found = libraries::find();
    if !has_gpus && !needed {
        let missing = found
            .iter()
            .filter(|library| library.problem.is_some())
            .count();
        let about = format!(
            "{missing} of {} libraries are missing, and no GPU needs them",
            found.len()
        );
        return vec![Check::absent(NAME, about, None, false)];
    }
    let check = |library: &libraries::LibraryCheck| match (&library.problem, &library.version) {
        (Some(problem), _) => {
            let found = format!("{}: {}", library.name, problem.fault);
            Check::absent(NAME, found, Some(problem.install.into()), needed)
        }
        (None, Some(version)) => Check::works(NAME, format!("{} {version}", library.name)),
        (None, None) => Check::works(NAME, library.name),
    };
    found.iter().map(check).collect()
}

/// Two steps of a tiny model in processes that exchange their gradients, by this program.
fn training(device: &str, ranks: u64) -> Check {
    let began = Instant::now();
    let place = if device == "cpu" {
        "the CPU"
    } else {
        "the GPUs"
    };
    let what = format!("{} on {place}", count(ranks, "process"));
    match train(device, ranks) {
        Ok(()) => {
            let seconds = began.elapsed().as_secs_f64();
            let found = format!("{what} took two steps of a tiny model ({seconds:.1} s)");
            Check::works(TRAINING, found)
        }
        Err(why) => {
            let next = match device {
                "cpu" => "free memory or disk space, then `evenkeel doctor`",
                _ => "correct what is above, or train with `evenkeel launch --device cpu`",
            };
            Check::fails(TRAINING, format!("{what}: {why}"), next)
        }
    }
}

fn train(device: &str, ranks: u64) -> Result<(), String> {
    let said = |error: std::io::Error| error.to_string();
    let place = tempfile::Builder::new()
        .prefix(".evenkeel-doctor-")
        .tempdir_in(".");
    let place = place.map_err(said)?;
    let recipe = json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "doctor"},
        "spec": {
            "batch": {"global": 4, "per_device_batch_size": 1},
            "model": {"init": "random", "config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
                "max_position_embeddings": 16, "tie_word_embeddings": true}},
            "data": {"sequence_length": 16, "train": [{"path": "synthetic",
                "synthetic": {"vocabulary": 64, "branching": 4, "samples": 64}}]},
            "budget": {"samples": 8},
        },
    });
    let [recipe_file, said_file] = ["recipe.json", "errors"].map(|name| place.path().join(name));
    fs::write(&recipe_file, recipe.to_string()).map_err(said)?;
    let mut launched = Command::new(std::env::current_exe().map_err(said)?)
        .arg("launch")
        .arg(&recipe_file)
        .args(["--device", device, "--procs", &ranks.to_string()])
        .args(["--quiet", "--out"])
        .arg(place.path().join("run"))
        // The index of runs is in there.
        .env("XDG_STATE_HOME", place.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&said_file).map_err(said)?)
        .spawn()
        .map_err(said)?;
    let Some(status) = child::ended_within(&mut launched, LIMIT).map_err(said)? else {
        let _ = launched.kill();
        let _ = launched.wait();
        return Err(format!("no end within {} s", LIMIT.as_secs()));
    };
    if status.success() {
        return Ok(());
    }
    let text = input::read(&said_file, 1 << 20).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let error = lines.clone().find(|line| line.contains("error"));
    let last = error.or(lines.next_back());
    Err(last.map_or_else(|| status.to_string(), |line| line.trim().to_owned()))
}
