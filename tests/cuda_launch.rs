//! `evenkeel launch` on emulated GPUs: the processes, libraries and kernels are those of a real GPU. Needs NVRTC.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use evenkeel::engine::cuda::nvrtc::Nvrtc;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const RECIPE: &str = "
apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata: {name: tiny}
spec:
  objective: language-modelling
  seed: 1
  batch: {global: 8, per_device_batch_size: 2}
  model:
    config:
      {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2,
       num_key_value_heads: 1, vocab_size: 64, max_position_embeddings: 32, tie_word_embeddings: true}
  data:
    sequence_length: 16
    train: [{path: synthetic, synthetic: {vocabulary: 64, branching: 4, samples: 2000}}]
  budget: {samples: 64}
  learning_rate: {peak: 3.0e-3}
  checkpoint: {every_samples: 32, keep: 2}
";

/// A directory with the recipe and the emulated libraries.
struct Machine {
    directory: TempDir,
}

impl Machine {
    /// `None`, after printing the reason, without NVRTC.
    fn new() -> Option<Machine> {
        if let Err(problem) = Nvrtc::load(None) {
            // In CI, scripts/test.sh has installed NVRTC.
            assert!(std::env::var_os("CI").is_none(), "{problem}");
            eprintln!("skipped: nothing was launched on an emulated GPU, {problem}");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("libraries")).unwrap();
        emulated_gpu::install(&directory.path().join("libraries")).unwrap();
        std::fs::write(directory.path().join("tiny.yaml"), RECIPE).unwrap();
        Some(Machine { directory })
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A launch of the recipe with these words and settings of the emulated GPU.
    fn command(&self, words: &str, settings: &[(&str, &str)]) -> Command {
        let libraries = self.path().join("libraries");
        let given = std::env::var_os("EVENKEEL_CUDA_LIBRARIES").unwrap_or_default();
        let places = [libraries.clone()]
            .into_iter()
            .chain(std::env::split_paths(&given));
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        command
            .current_dir(self.path())
            .args("launch tiny.yaml --log json".split(' '))
            .args(words.split(' '))
            .env(
                "EVENKEEL_CUDA_LIBRARIES",
                std::env::join_paths(places).unwrap(),
            )
            .env("LD_LIBRARY_PATH", &libraries)
            .env(
                "XDG_CACHE_HOME",
                Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"),
            )
            .envs(settings.iter().copied());
        command
    }

    fn launch(&self, words: &str, settings: &[(&str, &str)]) -> Output {
        self.command(words, settings).output().unwrap()
    }

    /// The same, to a successful end; returns the events.
    fn trained(&self, words: &str, settings: &[(&str, &str)]) -> Vec<Value> {
        let output = self.launch(words, settings);
        let printed = String::from_utf8(output.stdout).unwrap();
        let problems = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}: {printed}{problems}");
        let events = printed
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        events.collect()
    }

    /// The same, disturbed after the second step; returns the exit code.
    fn disturbed(
        &self,
        words: &str,
        settings: &[(&str, &str)],
        disturb: impl FnOnce(&Child),
    ) -> Option<i32> {
        let mut command = self.command(words, settings);
        let mut launcher = command.stdout(Stdio::piped()).spawn().unwrap();
        let printed = BufReader::new(launcher.stdout.take().unwrap());
        let mut disturb = Some(disturb);
        for line in printed.lines() {
            let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
            if event["event"] == "step"
                && event["step"].as_u64() >= Some(2)
                && let Some(disturb) = disturb.take()
            {
                disturb(&launcher);
            }
        }
        launcher.wait().unwrap().code()
    }

    /// The process of a rank in the first generation of a run.
    fn rank(&self, run: &str, rank: usize) -> Pid {
        let of_rank = |process: &Path| {
            let read = |file| std::fs::read_to_string(process.join(file)).unwrap_or_default();
            let words = read("cmdline").replace('\0', " ");
            let cwd = std::fs::read_link(process.join("cwd"));
            let is_of_run = words.contains(&format!(" rank --run {run} --generation 1"));
            let is_rank = read("environ")
                .split('\0')
                .any(|set| set == format!("RANK={rank}"));
            is_of_run && is_rank && cwd.is_ok_and(|cwd| cwd == self.path())
        };
        let processes = std::fs::read_dir("/proc")
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let process = processes
            .into_iter()
            .find(|process| of_rank(process))
            .unwrap();
        let name = process.file_name().unwrap().to_str().unwrap();
        Pid::from_raw(name.parse().unwrap()).unwrap()
    }

    /// Asserts that a run's eight steps consumed every sample once.
    fn prove(&self, run: &str) {
        let status = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .current_dir(self.path())
            .args(["status", run, "--ledger"])
            .output()
            .unwrap();
        let proof = String::from_utf8(status.stdout).unwrap();
        assert!(proof.contains("8 steps consumed samples 0..64"), "{proof}");
    }

    /// The losses of a run's steps, by number.
    fn losses(&self, run: &str) -> Vec<f64> {
        let mut losses = Vec::new();
        for generation in 1.. {
            let path = self
                .path()
                .join(format!("{run}/gen-{generation}/metrics.jsonl"));
            let Ok(lines) = std::fs::read_to_string(path) else {
                break;
            };
            for line in lines.lines() {
                let record: Value = serde_json::from_str(line).unwrap();
                if record["kind"] == "step" {
                    losses.push(record["loss"].as_f64().unwrap());
                }
            }
        }
        losses
    }
}

/// Asserts losses within a relative difference.
fn assert_close(one: &[f64], two: &[f64], tolerance: f64) {
    assert_eq!(one.len(), two.len());
    for (step, (one, two)) in one.iter().zip(two).enumerate() {
        assert!(
            (one - two).abs() <= tolerance * two,
            "step {}: {one} {two}",
            step + 1
        );
    }
}

#[test]
fn a_gpu_is_used_where_there_is_one_and_has_the_cpus_losses() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let events = machine.trained("--out gpu", &[]);
    let planned = events
        .iter()
        .find(|event| event["event"] == "planned")
        .unwrap();
    assert_eq!(planned["devices"], "1 × Emulated GPU");
    machine.trained("--out cpu --device cpu", &[]);
    let (gpu, cpu) = (machine.losses("gpu"), machine.losses("cpu"));
    assert_eq!(gpu.len(), 8);
    assert_close(&gpu, &cpu, 1e-5);

    // bf16 rounds, but trains.
    machine.trained("--out bf16 evenkeel.model.precision=bf16", &[]);
    assert_close(&machine.losses("bf16"), &cpu, 1e-2);
    assert_ne!(machine.losses("bf16"), gpu);
}

#[test]
fn several_gpus_have_the_cpus_losses() {
    let Some(machine) = Machine::new() else {
        return;
    };
    machine.trained("--out cpu --device cpu", &[]);
    for world in 2..=4 {
        let run = format!("gpus-{world}");
        // Three ranks split no batch of 8.
        let words = if world == 3 {
            "--remainder uneven"
        } else {
            "--device cuda"
        };
        let settings = [("EMULATED_GPU_DEVICES", "4")];
        let events = machine.trained(&format!("--out {run} --procs {world} {words}"), &settings);
        let planned = events
            .iter()
            .find(|event| event["event"] == "planned")
            .unwrap();
        assert_eq!(planned["devices"], format!("{world} × Emulated GPU"));
        assert_close(&machine.losses(&run), &machine.losses("cpu"), 1e-5);
    }
}

#[test]
fn several_gpus_exchange_each_gradient_once_and_beside_the_backward_pass() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let report = machine.path().join("report");
    let settings = [
        ("EMULATED_GPU_DEVICES", "2"),
        ("EMULATED_GPU_TIMELINE", "1"),
        ("EMULATED_GPU_REPORT", report.to_str().unwrap()),
    ];
    machine.trained("--out run --procs 2 --device cuda", &settings);
    let report = std::fs::read_to_string(&report).unwrap();
    let lines: Vec<Value> = report
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of_kind = |kind: &'static str| lines.iter().filter(move |line| line["kind"] == kind);

    // Embedding, and in each of two layers queries, keys, values, output, SwiGLU and two norms; the last norm.
    let layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48 + 2 * 32;
    let parameters = 64 * 32 + 2 * layer + 32;
    assert_eq!(of_kind("summary").count(), 2);
    for summary in of_kind("summary") {
        assert_eq!(summary["findings"], 0);
        assert_eq!(summary["nccl"]["all_reduce"]["bytes"], 8 * 4 * parameters);

        let of_rank = |name: &'static str| -> Vec<u64> {
            let operations = of_kind("timeline").filter(|line| line["pid"] == summary["pid"]);
            let named =
                operations.filter(|line| line["operation"].as_str().unwrap().contains(name));
            named.map(|line| line["issued"].as_u64().unwrap()).collect()
        };
        let sums = of_rank("all_reduce");
        assert_eq!(sums.len(), 8 * 4, "one for each unit and step");
        let backward = of_rank("attention_backward_keys");
        for step in sums.chunks(4) {
            let beside = backward
                .iter()
                .filter(|&&issued| step[0] < issued && issued < step[3]);
            assert_eq!(
                beside.count(),
                2,
                "the layers whose gradients are not in the first sum"
            );
        }
    }
}

#[test]
fn the_norm_test_decides_on_gpus_as_on_cpus() {
    let Some(machine) = Machine::new() else {
        return;
    };
    for groups in ["workers", "micro-batches"] {
        let train = |run: &str, device: &str| {
            let schedule = format!(
                "evenkeel.schedule={{kind: norm-test, eta: 0.5, interval: 2, max_batch: 32, \
                 groups: {groups}, coordinate_interval: 3}}"
            );
            let words = format!("--out {run} --procs 2 --device {device}");
            let mut command = machine.command(&words, &[("EMULATED_GPU_DEVICES", "2")]);
            let output = command.arg(schedule).output().unwrap();
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            machine.losses(run)
        };
        let gpus = train(&format!("{groups}-gpus"), "cuda");
        let cpus = train(&format!("{groups}-cpus"), "cpu");
        // The batch grew: a constant one takes eight steps.
        assert!(gpus.len() < 8, "{} steps", gpus.len());
        assert_close(&gpus, &cpus, 1e-5);
    }
}

#[test]
fn a_killed_or_frozen_rank_of_several_gpus_costs_no_sample() {
    let Some(machine) = Machine::new() else {
        return;
    };
    machine.trained("--out cpu --device cpu", &[]);
    for (run, signal) in [("killed", Signal::KILL), ("frozen", Signal::STOP)] {
        let words = format!("--out {run} --procs 4 --device cuda");
        let code = machine.disturbed(&words, &[("EMULATED_GPU_DEVICES", "4")], |_| {
            kill_process(machine.rank(run, 2), signal).unwrap();
        });
        assert_eq!(code, Some(0), "{run}");
        assert!(machine.path().join(run).join("gen-2").exists(), "{run}");
        assert_close(&machine.losses(run), &machine.losses("cpu"), 1e-5);
        machine.prove(run);
    }
}

#[test]
fn a_lost_gpu_is_named_and_another_takes_its_place() {
    let Some(machine) = Machine::new() else {
        return;
    };
    machine.trained("--out cpu --device cpu", &[]);
    // With a third GPU the world keeps its size; without, it shrinks.
    for (run, devices, formulas) in [
        ("replaced", "3", ["2 × 2 × 2 = 8", "2 × 2 × 2 = 8"]),
        ("shrunk", "2", ["2 × 2 × 2 = 8", "1 × 2 × 4 = 8"]),
    ] {
        let faults = machine.path().join(format!("{run}.json"));
        std::fs::write(&faults, "{}").unwrap();
        let settings = [
            ("EMULATED_GPU_DEVICES", devices),
            ("EMULATED_GPU_FAULTS", faults.to_str().unwrap()),
        ];
        let words = format!("--out {run} --procs 2 --device cuda");
        let code = machine.disturbed(&words, &settings, |_| {
            let lost = machine.path().join("lost.json");
            std::fs::write(&lost, r#"{"1": {"lost": true, "xid": 79}}"#).unwrap();
            std::fs::rename(lost, &faults).unwrap();
        });
        assert_eq!(code, Some(0), "{run}");
        assert_close(&machine.losses(run), &machine.losses("cpu"), 1e-5);
        machine.prove(run);
        let state = std::fs::read_to_string(machine.path().join(run).join("state.json")).unwrap();
        let state: Value = serde_json::from_str(&state).unwrap();
        let generations = state["generations"].as_array().unwrap();
        let found: Vec<_> = generations
            .iter()
            .map(|row| row["formula"].as_str().unwrap())
            .collect();
        assert_eq!(found, formulas, "{run}");
        let reason = generations[1]["reason"].to_string();
        assert!(
            reason.contains("its GPU GPU-") && reason.contains(" is lost "),
            "{reason}"
        );
    }
}

#[test]
fn a_run_moves_from_a_gpu_to_the_cpu_with_its_ledger() {
    let Some(machine) = Machine::new() else {
        return;
    };
    machine.trained("--out undisturbed --device cpu", &[]);
    let code = machine.disturbed("--out moved --device cuda", &[], |launcher| {
        kill_process(Pid::from_child(launcher), Signal::TERM).unwrap();
    });
    assert_eq!(code, Some(143));
    let on_the_gpu = machine.losses("moved").len();
    assert!((2..8).contains(&on_the_gpu), "{on_the_gpu} steps");
    machine.trained("--out moved --resume --device cpu", &[]);
    assert_close(
        &machine.losses("moved"),
        &machine.losses("undisturbed"),
        1e-5,
    );
    machine.prove("moved");
}

#[test]
fn a_small_gpu_gets_smaller_micro_batches_of_the_same_batch() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let needed = |words: &str| {
        let output = machine.launch(words, &[("EMULATED_GPU_MEMORY", "4194304")]);
        let printed = String::from_utf8(output.stdout).unwrap();
        let (_, rest) = printed.split_once("out of memory: ").unwrap();
        rest.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let eight = "evenkeel.batch.per_device_batch_size=8";
    let memory = (needed(&format!("--out probe {eight}")) - 1).to_string();
    let events = machine.trained(
        &format!("--out run {eight}"),
        &[("EMULATED_GPU_MEMORY", &memory)],
    );
    let formulas = events
        .iter()
        .filter(|event| event["event"] == "generation_started");
    let formulas: Vec<_> = formulas.map(|event| &event["formula"]).collect();
    assert_eq!(formulas, ["1 × 4 × 2 = 8"]);
    assert_eq!(machine.losses("run").len(), 8);
}

#[test]
fn a_gpu_that_was_asked_for_and_is_missing_is_one_message() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let refused = |words: &str, settings: &[(&str, &str)]| {
        let output = machine.launch(words, settings);
        assert!(!machine.path().join("run").exists());
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let more = refused("--out run --device cuda --procs 2", &[]);
    insta::assert_snapshot!(more, @"error: `--device cuda` is not possible: 1 GPU for 2 processes; or remove --device cuda");
    let none = refused("--out run --device cuda", &[("EMULATED_GPU_DEVICES", "0")]);
    insta::assert_snapshot!(none, @"error: `--device cuda` is not possible: the driver lists no GPU; or remove --device cuda");
    let hidden = refused("--out run --device cuda", &[("CUDA_VISIBLE_DEVICES", "")]);
    insta::assert_snapshot!(hidden, @r#"error: `--device cuda` is not possible: CUDA_VISIBLE_DEVICES="" hides every GPU; or remove --device cuda"#);
}
