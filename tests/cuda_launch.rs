//! `evenkeel launch` on emulated GPUs: the processes, libraries and kernels are those of a real GPU. Needs NVRTC.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel::checkpoint::{self, Checkpoint};
use evenkeel::engine::cuda::nvrtc::Nvrtc;
use evenkeel::engine::{ModelConfig, UnitState, layout};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
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

/// Waits of the streams in the first two walks of a sharded model with four units.
const WAITS: usize = 40;

/// The setting that shards the model.
const FSDP: &str = "evenkeel.parallel.strategy=fsdp";

/// Adapters of every linear layer, with dropout.
const ADAPTERS: &str = "evenkeel.model.adapters=true evenkeel.model.lora_rank=4 \
                        evenkeel.model.lora_target_modules=[all-linear] evenkeel.model.lora_dropout=0.2";

/// The proof of the recipe's eight steps.
const EIGHT_STEPS: &str = "8 steps consumed samples 0..64";

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

    /// What the emulated GPUs report, unless a test gives them another file.
    fn report(&self) -> PathBuf {
        self.path().join("gpu-report")
    }

    /// A launch of the recipe with these words and settings of the emulated GPU.
    fn command(&self, words: &str, settings: &[(&str, &str)]) -> Command {
        self.evenkeel(&format!("launch tiny.yaml --log json {words}"), settings)
    }

    fn evenkeel(&self, words: &str, settings: &[(&str, &str)]) -> Command {
        let libraries = self.path().join("libraries");
        let given = std::env::var_os("EVENKEEL_CUDA_LIBRARIES").unwrap_or_default();
        let places = [libraries.clone()]
            .into_iter()
            .chain(std::env::split_paths(&given));
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        command
            .current_dir(self.path())
            .args(words.split_whitespace())
            .env(
                "EVENKEEL_CUDA_LIBRARIES",
                std::env::join_paths(places).unwrap(),
            )
            .env("LD_LIBRARY_PATH", &libraries)
            .env(
                "XDG_CACHE_HOME",
                Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"),
            )
            // Plans assume this much; only the engine finds out that a device has less.
            .env("EMULATED_GPU_NVML_MEMORY", (1_u64 << 30).to_string())
            .env("EMULATED_GPU_REPORT", self.report())
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

    /// The bytes that the first rank out of memory needs.
    fn needed(&self, words: &str, settings: &[(&str, &str)]) -> u64 {
        let printed = String::from_utf8(self.launch(words, settings).stdout).unwrap();
        let (_, rest) = printed.split_once("out of memory: ").expect(&printed);
        rest.split(' ').next().unwrap().parse().unwrap()
    }

    /// The same, disturbed after the second step; returns the exit code.
    fn disturbed(
        &self,
        words: &str,
        settings: &[(&str, &str)],
        disturb: impl FnOnce(&Child),
    ) -> Option<i32> {
        let mut disturb = Some(disturb);
        observed(self.command(words, settings), |launcher, _, step| {
            if step >= 2
                && let Some(disturb) = disturb.take()
            {
                disturb(launcher);
            }
        })
    }

    /// Asks for another number of processes.
    fn resize(&self, run: &str, processes: u64) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        command.current_dir(self.path());
        command.args(["resize", run, &processes.to_string(), "--no-wait"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// The process of a rank in a generation of a run, by its log: it may have begun in an earlier one.
    fn rank(&self, run: &str, generation: u64, rank: usize) -> Pid {
        let log = format!("{run}/gen-{generation}/logs/rank-{rank}.log");
        let log = self.path().join(log);
        let of_rank = |process: &Path| {
            let words = std::fs::read_to_string(process.join("cmdline")).unwrap_or_default();
            let is_of_run = words
                .replace('\0', " ")
                .contains(&format!(" rank --run {run} "));
            let written = std::fs::read_link(process.join("fd/2"));
            is_of_run && written.is_ok_and(|written| written == log)
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

    /// Asserts that a run's steps consumed every sample once.
    fn prove(&self, run: &str, consumed: &str) {
        let status = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .current_dir(self.path())
            .args(["status", run, "--ledger"])
            .output()
            .unwrap();
        let proof = String::from_utf8(status.stdout).unwrap();
        assert!(proof.contains(consumed), "{proof}");
    }

    /// The rows of a run's generations.
    fn generations(&self, run: &str) -> Vec<Value> {
        let state = std::fs::read_to_string(self.path().join(run).join("state.json")).unwrap();
        let state: Value = serde_json::from_str(&state).unwrap();
        state["generations"].as_array().unwrap().clone()
    }

    /// The losses of a run's steps, by number. A step that was repeated has its last loss.
    fn losses(&self, run: &str) -> Vec<f64> {
        let steps = self.steps(run).into_values();
        steps.map(|step| step["loss"].as_f64().unwrap()).collect()
    }

    /// The batches of a run's steps.
    fn batches(&self, run: &str) -> Vec<u64> {
        let steps = self.steps(run).into_values();
        steps.map(|step| step["batch"].as_u64().unwrap()).collect()
    }

    /// The gradient norms of a run's steps.
    fn gradient_norms(&self, run: &str) -> Vec<f64> {
        let steps = self.steps(run).into_values();
        steps
            .map(|step| step["gradient_norm"].as_f64().unwrap())
            .collect()
    }

    /// The weights and moments of a run's newest checkpoint, by unit.
    fn state(&self, run: &str) -> Vec<UnitState> {
        let newest = checkpoint::latest(&self.path().join(run)).unwrap().unwrap();
        let checkpoint = Checkpoint::open(&newest.path, Some(newest.checksum)).unwrap();
        let units = 0..checkpoint.manifest().units.len();
        units
            .map(|unit| checkpoint.load_unit(unit).unwrap())
            .collect()
    }

    /// The last records of a run's steps, by number.
    fn steps(&self, run: &str) -> BTreeMap<u64, Value> {
        let steps = self.metrics(run, "step");
        let numbered = steps
            .into_iter()
            .map(|step| (step["step"].as_u64().unwrap(), step));
        numbered.collect()
    }

    /// The records of a kind, of all generations.
    fn metrics(&self, run: &str, kind: &str) -> Vec<Value> {
        let mut records = Vec::new();
        for generation in 1.. {
            let path = self
                .path()
                .join(format!("{run}/gen-{generation}/metrics.jsonl"));
            let Ok(lines) = std::fs::read_to_string(path) else {
                break;
            };
            for line in lines.lines() {
                let record: Value = serde_json::from_str(line).unwrap();
                if record["kind"] == kind {
                    records.push(record);
                }
            }
        }
        records
    }
}

impl Drop for Machine {
    /// A failed test shows what the GPUs found.
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let report = std::fs::read_to_string(self.report()).unwrap_or_default();
        let is_finding = |line: &&str| !line.contains(r#""kind":"summary""#);
        for finding in report.lines().filter(is_finding) {
            eprintln!("emulated GPU: {finding}");
        }
    }
}

/// Runs a launch to its end; `at_step` gets its process, the generation and the step of each step. Returns the
/// exit code.
fn observed(mut command: Command, mut at_step: impl FnMut(&Child, u64, u64)) -> Option<i32> {
    let mut launcher = command.stdout(Stdio::piped()).spawn().unwrap();
    let printed = BufReader::new(launcher.stdout.take().unwrap());
    let mut generation = 0;
    for line in printed.lines() {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if event["event"] == "generation_started" {
            generation = event["generation"].as_u64().unwrap();
        }
        if event["event"] == "step" {
            at_step(&launcher, generation, event["step"].as_u64().unwrap());
        }
    }
    launcher.wait().unwrap().code()
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
#[ignore = "takes minutes: scripts/nightly.sh"]
fn fifty_steps_on_one_to_four_gpus_have_the_cpus_losses() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let fifty = "evenkeel.budget.samples=400";
    machine.trained(&format!("--out cpu --device cpu {fifty}"), &[]);
    assert_eq!(machine.losses("cpu").len(), 50);
    for strategy in ["ddp", "fsdp"] {
        for world in 1..=4 {
            let run = format!("{strategy}-{world}");
            // Three ranks split no batch of 8.
            let words = if world == 3 {
                "--remainder uneven"
            } else {
                "--device cuda"
            };
            let words = format!(
                "--out {run} --procs {world} {words} {fifty} evenkeel.parallel.strategy={strategy}"
            );
            let events = machine.trained(&words, &[("EMULATED_GPU_DEVICES", "4")]);
            let planned = events
                .iter()
                .find(|event| event["event"] == "planned")
                .unwrap();
            assert_eq!(planned["devices"], format!("{world} × Emulated GPU"));
            assert_close(&machine.losses(&run), &machine.losses("cpu"), 1e-5);
        }
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn microllama_of_reduced_width_begins_on_gpus_as_on_cpus() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let example =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/microllama-300m-ddp-norm.yaml");
    std::fs::copy(example, machine.path().join("tiny.yaml")).unwrap();
    // The layers, workers and batches of the paper; few narrow heads, and short sequences.
    let reduced = "model.config={architectures: [LlamaForCausalLM], model_type: llama, hidden_size: 16, \
                   intermediate_size: 88, num_hidden_layers: 12, num_attention_heads: 2, \
                   num_key_value_heads: 1, vocab_size: 64, max_position_embeddings: 8, norm_eps: 1.0e-5, \
                   rope_theta: 10000, tie_word_embeddings: false}";
    let data =
        "data.train=[{path: synthetic, synthetic: {vocabulary: 64, branching: 4, samples: 4000}}]";
    let train = |run: &str, device: &str| {
        let words = format!(
            "--out {run} --procs 4 --device {device} batch.per_device_batch_size=16 data.sequence_length=8 budget.samples=768 \
             data.evaluation=[] evaluation.every_samples=null model.precision=f32 \
             schedule.after_warmup=false"
        );
        let mut command = machine.command(&words, &[("EMULATED_GPU_DEVICES", "4")]);
        let output = command.args([reduced, data]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        (machine.losses(run), machine.batches(run))
    };
    let (on_cpus, batches) = train("cpus", "cpu");
    assert_eq!(batches, [256, 512]);
    let on_gpus = train("gpus", "cuda");
    assert_close(&on_gpus.0, &on_cpus, 1e-5);
    assert_eq!(on_gpus.1, batches);
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
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
fn a_sharded_model_has_the_cpus_losses() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let four = [("EMULATED_GPU_DEVICES", "4")];
    // Five micro-batches of evaluation: some ranks have none in the last pass.
    let evaluation = "evenkeel.data.held_out=10 evenkeel.evaluation.every_samples=24";
    let evaluations = |run: &str| -> Vec<f64> {
        let records = machine.metrics(run, "evaluation").into_iter();
        records
            .map(|record| record["loss"].as_f64().unwrap())
            .collect()
    };
    for tied in [true, false] {
        let model = format!("evenkeel.model.config.tie_word_embeddings={tied} {evaluation}");
        let cpu = format!("cpu-{tied}");
        machine.trained(&format!("--out {cpu} --device cpu {model}"), &[]);
        assert_eq!(evaluations(&cpu).len(), 3);
        for world in 2..=4 {
            let run = format!("gpus-{world}-{tied}");
            // Of four micro-batches, three ranks have two, one and one.
            let words = match world {
                3 => "--remainder uneven",
                4 => "evenkeel.model.activation_checkpointing=true",
                _ => "--device cuda",
            };
            let words = format!("--out {run} --procs {world} {words} {model} {FSDP}");
            let events = machine.trained(&words, &four);
            let planned = events
                .iter()
                .find(|event| event["event"] == "planned")
                .unwrap();
            assert_eq!(planned["devices"], format!("{world} × Emulated GPU"));
            assert_close(&machine.losses(&run), &machine.losses(&cpu), 1e-5);
            assert_close(&evaluations(&run), &evaluations(&cpu), 1e-5);
        }
        // bf16 rounds as where every rank holds everything; only the order of gradients in sums differs.
        let bf16 = |run: &str, strategy: &str| {
            let words = format!("--out {run}-{tied} --procs 2 --device cuda {model} {strategy}");
            let precision = "evenkeel.model.precision=bf16";
            machine.trained(&format!("{words} {precision}"), &four);
            machine.losses(&format!("{run}-{tied}"))
        };
        let replicated = bf16("replicated", "evenkeel.parallel.strategy=ddp");
        let sharded = bf16("sharded", FSDP);
        assert_eq!(sharded[0], replicated[0]);
        assert_close(&sharded, &replicated, 1e-4);
    }
}

/// Norms of queries and keys; LayerNorm, biases and a parallel residual; learnt positions.
#[test]
fn sharded_models_of_other_families_have_the_cpus_losses() {
    let Some(machine) = Machine::new() else {
        return;
    };
    for family in ["qwen3", "gpt_neox", "gpt2"] {
        let mut model = format!("evenkeel.model.config.model_type={family}");
        if family == "gpt2" {
            for part in ["resid", "embd", "attn"] {
                model += &format!(" evenkeel.model.config.{part}_pdrop=0");
            }
        }
        let [cpu, gpus] = ["cpu", "gpus"].map(|place| format!("{family}-{place}"));
        machine.trained(&format!("--out {cpu} --device cpu {model}"), &[]);
        let sharded =
            format!("--procs 2 --device cuda {FSDP} evenkeel.model.activation_checkpointing=true");
        machine.trained(
            &format!("--out {gpus} {sharded} {model}"),
            &[("EMULATED_GPU_DEVICES", "2")],
        );
        assert_close(&machine.losses(&gpus), &machine.losses(&cpu), 1e-5);
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_sharded_model_communicates_what_the_formula_says() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let tiny = |tie_word_embeddings| ModelConfig {
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 16,
        vocab_size: 64,
        max_position_embeddings: 32,
        norm_eps: 1e-5,
        tie_word_embeddings,
        ..ModelConfig::default()
    };
    for (tied, precision) in [(true, "f32"), (false, "bf16")] {
        let report = machine.path().join(format!("report-{tied}"));
        let words = format!(
            "--out run-{tied} --procs 2 --device cuda {FSDP} \
             evenkeel.model.config.tie_word_embeddings={tied} evenkeel.model.precision={precision}"
        );
        let settings = [
            ("EMULATED_GPU_DEVICES", "2"),
            ("EMULATED_GPU_REPORT", report.to_str().unwrap()),
        ];
        machine.trained(&words, &settings);

        // Each rank has two micro-batches in eight steps, and two checkpoints.
        let (walks, exports) = (16, 2);
        let lens = layout(&tiny(tied))
            .units
            .into_iter()
            .map(|unit| unit.len as u64);
        // Both ranks hold equal parts.
        let lens: Vec<u64> = lens.map(|len| len.next_multiple_of(2)).collect();
        let (units, all) = (lens.len() as u64, lens.iter().sum::<u64>());
        let element = |unit: usize| {
            if precision == "bf16" && unit > 0 {
                2
            } else {
                4
            }
        };
        let forward: u64 = (0..lens.len()).map(|unit| element(unit) * lens[unit]).sum();
        let backward: u64 = (1..lens.len() - 2)
            .map(|unit| element(unit) * lens[unit])
            .sum();
        let norms = 5 * 32;
        let expected = json!({
            "all_gather": [
                walks * (2 * units - 3) + exports * 3 * units,
                walks * (forward + backward) + exports * 3 * 4 * all,
            ],
            "reduce_scatter": [walks * units, walks * 4 * all],
            "all_reduce": [walks, walks * 4 * norms],
        });
        let lines = std::fs::read_to_string(&report).unwrap();
        assert_eq!(lines.lines().count(), 2, "{lines}");
        for line in lines.lines() {
            let summary: Value = serde_json::from_str(line).unwrap();
            assert_eq!(summary["findings"], 0);
            let collectives = summary["nccl"].as_object().unwrap().iter();
            let measured = collectives
                .map(|(name, sums)| (name.clone(), json!([sums["operations"], sums["bytes"]])));
            assert_eq!(Value::Object(measured.collect()), expected);
        }
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn any_missing_wait_of_a_sharded_walk_is_found() {
    let Some(machine) = Machine::new() else {
        return;
    };
    // One step of two micro-batches for each rank. Returns whether a rank failed.
    let train = |wait: usize| {
        let run = format!("wait-{wait}");
        let words = format!("--out {run} --procs 2 --device cuda {FSDP} evenkeel.budget.samples=8");
        let wait = wait.to_string();
        let settings = [
            ("EMULATED_GPU_DEVICES", "2"),
            ("EMULATED_GPU_DROP_WAIT", wait.as_str()),
        ];
        let trained = machine.launch(&words, &settings).status.success();
        !trained || machine.path().join(run).join("gen-2").exists()
    };
    assert!(!train(0));
    let expected = machine.losses("wait-0");
    let (next, found) = (AtomicUsize::new(1), AtomicUsize::new(0));
    let check = || {
        loop {
            let wait = next.fetch_add(1, Ordering::Relaxed);
            if wait > WAITS {
                return;
            }
            if train(wait) {
                found.fetch_add(1, Ordering::Relaxed);
            } else {
                // Another wait has the same effect, or this order of the streams did not need it.
                assert_eq!(machine.losses(&format!("wait-{wait}")), expected);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(check);
        }
    });
    let found = found.into_inner();
    assert!(found >= 2 * WAITS / 5, "{found} of {WAITS}");
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn the_norm_test_decides_on_gpus_as_on_cpus() {
    let Some(machine) = Machine::new() else {
        return;
    };
    for (name, strategy, groups) in [
        ("ddp-workers", "ddp", "workers"),
        ("ddp-micro-batches", "ddp", "micro-batches"),
        ("fsdp-micro-batches", "fsdp", "micro-batches"),
        (
            "fsdp-workers",
            "fsdp",
            "workers, unsharded_accumulation: true",
        ),
        (
            "fsdp-unsharded",
            "fsdp",
            "micro-batches, unsharded_accumulation: true",
        ),
    ] {
        let train = |run: &str, device: &str| {
            let schedule = format!(
                "evenkeel.schedule={{kind: norm-test, eta: 0.5, interval: 2, max_batch: 32, \
                 groups: {groups}, coordinate_interval: 3}}"
            );
            let strategy = format!("evenkeel.parallel.strategy={strategy}");
            let words = format!("--out {run} --procs 2 --device {device} {strategy}");
            let mut command = machine.command(&words, &[("EMULATED_GPU_DEVICES", "2")]);
            let output = command.arg(schedule).output().unwrap();
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            machine.losses(run)
        };
        let gpus = train(&format!("{name}-gpus"), "cuda");
        let cpus = train(&format!("{name}-cpus"), "cpu");
        // The batch grew: a constant one takes eight steps.
        assert!(gpus.len() < 8, "{} steps", gpus.len());
        assert_close(&gpus, &cpus, 1e-5);
        let batches = |device| machine.batches(&format!("{name}-{device}"));
        assert_eq!(batches("gpus"), batches("cpus"));
        let coordinates = |device| -> Vec<f64> {
            let steps = machine.steps(&format!("{name}-{device}")).into_values();
            steps
                .filter_map(|step| step["coordinate_test"]["share"].as_f64())
                .collect()
        };
        assert!(!coordinates("gpus").is_empty());
        // A coordinate at the limit may fall on either side.
        assert_close(&coordinates("gpus"), &coordinates("cpus"), 1e-3);
    }
}

#[test]
fn a_killed_or_frozen_rank_of_several_gpus_costs_no_sample() {
    let Some(machine) = Machine::new() else {
        return;
    };
    machine.trained("--out cpu --device cpu", &[]);
    for strategy in ["ddp", "fsdp"] {
        for (name, signal) in [("killed", Signal::KILL), ("frozen", Signal::STOP)] {
            let run = format!("{strategy}-{name}");
            let words = format!(
                "--out {run} --procs 4 --device cuda evenkeel.checkpoint.every_samples=8 \
                 evenkeel.parallel.strategy={strategy}"
            );
            let code = machine.disturbed(&words, &[("EMULATED_GPU_DEVICES", "4")], |_| {
                kill_process(machine.rank(&run, 1, 2), signal).unwrap();
            });
            assert_eq!(code, Some(0), "{run}");
            assert!(machine.path().join(&run).join("gen-2").exists(), "{run}");
            assert_close(&machine.losses(&run), &machine.losses("cpu"), 1e-5);
            machine.prove(&run, EIGHT_STEPS);
        }
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_failed_collective_of_one_rank_ends_no_run_in_a_hang() {
    let Some(machine) = Machine::new() else {
        return;
    };
    // Many layers: the failure is noticed while the walk is still being enqueued.
    let layers = "evenkeel.model.config.num_hidden_layers=24";
    let settings = [
        ("EMULATED_GPU_DEVICES", "2"),
        ("EMULATED_NCCL_FAIL", "4"),
        ("EMULATED_NCCL_FAIL_RANK", "1"),
    ];
    for run in ["ddp", "fsdp"] {
        let strategy = format!("evenkeel.parallel.strategy={run}");
        let words = format!("--out {run} --procs 2 --device cuda {layers} {strategy}");
        let mut command = machine.command(&words, &settings);
        let mut launcher = command.stdout(Stdio::null()).spawn().unwrap();
        // Every generation of two ranks fails. The run ends by its restarts, or with one rank.
        let deadline = Instant::now() + Duration::from_secs(300);
        while launcher.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                kill_process(Pid::from_child(&launcher), Signal::KILL).unwrap();
                panic!("{run} hangs");
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_run_moves_from_the_cpu_over_two_and_four_gpus_to_three_and_back() {
    let Some(machine) = Machine::new() else {
        return;
    };
    for strategy in ["ddp", "fsdp"] {
        let launch = |words: &str| {
            let words = format!(
                "{words} evenkeel.parallel.strategy={strategy} evenkeel.budget.samples=1800"
            );
            let mut command = machine.command(&words, &[("EMULATED_GPU_DEVICES", "4")]);
            // Every one of the worlds splits the batch.
            command.arg("evenkeel.batch={global: 12, per_device_batch_size: 1}");
            command
        };
        let drain = |launcher: &Child| {
            let _ = kill_process(Pid::from_child(launcher), Signal::TERM);
        };
        let undisturbed = format!("{strategy}-undisturbed");
        let mut on_the_cpu = launch(&format!("--out {undisturbed} --device cpu"));
        assert!(on_the_cpu.output().unwrap().status.success());

        let run = format!("{strategy}-moved");
        let on_the_cpu = launch(&format!("--out {run} --device cpu --procs 1"));
        let code = observed(on_the_cpu, |launcher, _, _| drain(launcher));
        assert_eq!(code, Some(143));
        let on_gpus = launch(&format!("--out {run} --resume --device cuda --procs 2"));
        let mut disturbed = 1;
        let code = observed(on_gpus, |launcher, generation, _| {
            if generation == disturbed {
                return;
            }
            disturbed = generation;
            match generation {
                2 => machine.resize(&run, 4),
                // The three others continue.
                3 => kill_process(machine.rank(&run, 3, 1), Signal::KILL).unwrap(),
                _ => drain(launcher),
            }
        });
        assert_eq!(code, Some(143));
        let mut on_the_cpu = launch(&format!("--out {run} --resume --device cpu --procs 2"));
        assert!(on_the_cpu.output().unwrap().status.success());

        let generations = machine.generations(&run);
        let worlds: Vec<_> = generations
            .iter()
            .map(|row| row["world"].as_u64().unwrap())
            .collect();
        assert_eq!(worlds, [1, 2, 4, 3, 2]);
        assert_close(&machine.losses(&run), &machine.losses(&undisturbed), 1e-5);
        machine.prove(&run, "150 steps consumed samples 0..1800");
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
        machine.prove(run, EIGHT_STEPS);
        let generations = machine.generations(run);
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
    machine.prove("moved", EIGHT_STEPS);
}

/// The tiny recipe with these rows, as bytes, and settings of the data.
fn of_rows(machine: &Machine, objective: &str, settings: &str, rows: &[Value]) {
    let (before, after) = RECIPE.split_once("  data:\n").unwrap();
    let (_, after) = after.split_once("  budget:").unwrap();
    let before = before
        .replace("language-modelling", objective)
        .replace("vocab_size: 64", "vocab_size: 259");
    let data = "  tokenizer: {path: byte}\n  data:\n    sequence_length: 16\n    train: [{path: rows.jsonl}]\n";
    let recipe = format!("{before}{data}{settings}  budget:{after}");
    std::fs::write(machine.path().join("tiny.yaml"), recipe).unwrap();
    let rows: Vec<String> = rows.iter().map(Value::to_string).collect();
    std::fs::write(machine.path().join("rows.jsonl"), rows.join("\n")).unwrap();
}

/// AdamW hides a constant factor of the gradient; its moments do not. Each rank writes units of its own replica.
#[test]
fn ranks_with_uneven_targets_have_the_cpus_gradients_and_replicas() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let row = |i: usize| json!({"prompt": "n=", "completion": "1".repeat(1 + 5 * i % 12)});
    let rows: Vec<Value> = (0..80).map(row).collect();
    of_rows(&machine, "sft", "", &rows);
    let devices = [("EMULATED_GPU_DEVICES", "3")];
    let unclipped = "evenkeel.optimizer.gradient_clip=null";
    machine.trained(&format!("--out cpu --device cpu {unclipped}"), &[]);
    let expected = machine.state("cpu");
    for (run, words) in [
        ("two", "--procs 2 evenkeel.parallel.strategy=ddp"),
        (
            "three",
            "--procs 3 --remainder uneven evenkeel.parallel.strategy=ddp",
        ),
        ("sharded", "--procs 2 evenkeel.parallel.strategy=fsdp"),
    ] {
        let words = format!("--out {run} --device cuda {words} {unclipped}");
        machine.trained(&words, &devices);
        assert_close(&machine.losses(run), &machine.losses("cpu"), 1e-5);
        assert_close(
            &machine.gradient_norms(run),
            &machine.gradient_norms("cpu"),
            1e-4,
        );
        let state = machine.state(run);
        assert_eq!(state.len(), expected.len());
        for (unit, (got, expected)) in state.iter().zip(&expected).enumerate() {
            for (what, got, expected) in [
                ("weights", &got.parameters, &expected.parameters),
                ("first moments", &got.exp_avg, &expected.exp_avg),
                ("second moments", &got.exp_avg_sq, &expected.exp_avg_sq),
            ] {
                let distance = distance(got, expected);
                assert!(distance < 1e-3, "{run}: {what} of unit {unit}: {distance}");
            }
        }
    }
}

/// ‖one − other‖ / ‖other‖.
fn distance(one: &[f32], other: &[f32]) -> f64 {
    assert_eq!(one.len(), other.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = one.iter().zip(other);
    let error = norm(&mut pairs.map(|(&a, &b)| f64::from(a) - f64::from(b)));
    error / norm(&mut other.iter().map(|&x| f64::from(x)))
}

/// The tiny recipe with a loss over preferences between numbers.
fn of_preferences(machine: &Machine, objective: &str) {
    let row = |i: u32| {
        let (prompt, right, wrong) = (format!("{i}+1="), (i + 1).to_string(), (7 * i).to_string());
        let label = i % 3 != 1;
        let completion = if label { &right } else { &wrong };
        match objective {
            "kto" => json!({"prompt": prompt, "completion": completion, "label": label}),
            _ => json!({"prompt": prompt, "chosen": right, "rejected": wrong}),
        }
    };
    let settings = "    held_out: 8\n  evaluation: {every_samples: 32}\n";
    let rows: Vec<Value> = (0..80).map(row).collect();
    of_rows(machine, objective, settings, &rows);
}

/// Documents that are packed whole, of one that fills a sample to several in one.
#[test]
fn packed_documents_have_the_cpus_losses_on_gpus() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let row = |i: usize| json!({"text": format!("{i}").repeat(1 + i % 6)});
    let rows: Vec<Value> = (0..200).map(row).collect();
    let settings = "    packing: true\n    packing_strategy: bfd\n";
    of_rows(&machine, "language-modelling", settings, &rows);
    machine.trained("--out cpu --device cpu", &[]);
    let expected = machine.losses("cpu");
    assert_eq!(expected.len(), 8);
    let two = [("EMULATED_GPU_DEVICES", "2")];
    machine.trained("--out gpus --device cuda --procs 2", &two);
    assert_close(&machine.losses("gpus"), &expected, 1e-5);
    machine.prove("gpus", EIGHT_STEPS);
    machine.trained("--out bf16 evenkeel.model.precision=bf16", &[]);
    assert_close(&machine.losses("bf16"), &expected, 1e-2);
}

/// Norms are trained whole.
const NORMS: &str = "evenkeel.model.lora_modules_to_save=[norm]";
/// Weights in 4 bits with scales in 8 bits.
const CODES: &str = "evenkeel.model.load_in_4bit=true evenkeel.model.use_bnb_nested_quant=true";

/// Adapters with dropout over completions: on one GPU, on several, some of which have no micro-batch, over whole weights and
/// over those in 4 bits; and a run that moves from a GPU to two and to the CPU.
#[test]
fn adapters_have_the_cpus_losses_on_gpus() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let row = |i: u32| json!({"prompt": format!("{i}+1="), "completion": (i + 1).to_string()});
    let rows: Vec<Value> = (0..80).map(row).collect();
    of_rows(&machine, "sft", "", &rows);
    let devices = [("EMULATED_GPU_DEVICES", "3")];
    for (name, base) in [("whole", NORMS), ("codes", CODES)] {
        let of = |run: &str| format!("{name}-{run}");
        let train = |run: &str, words: &str| {
            let words = format!("--out {} {words} {ADAPTERS} {base}", of(run));
            machine.trained(words.trim(), &devices);
            (machine.losses(&of(run)), machine.batches(&of(run)))
        };
        let (expected, _) = train("cpu", "--device cpu");
        assert_eq!(expected.len(), 8);
        assert!(expected[7] < expected[0], "{expected:?}");
        for (run, words) in [
            ("one", "--procs 1"),
            ("replicated", "--procs 2 evenkeel.parallel.strategy=ddp"),
            ("sharded", "--procs 2 evenkeel.parallel.strategy=fsdp"),
            (
                "uneven",
                "--procs 3 --remainder uneven evenkeel.parallel.strategy=fsdp",
            ),
        ] {
            let (got, _) = train(run, &format!("--device cuda {words}"));
            assert_close(&got, &expected, 1e-5);
            machine.prove(&of(run), EIGHT_STEPS);
        }
        let half = "--device cuda --procs 2 evenkeel.model.precision=bf16";
        let (bf16, _) = train("bf16", &format!("{half} {FSDP}"));
        assert_close(&bf16, &expected, 1e-2);

        let moved = |words: &str| format!("--out {} {ADAPTERS} {base} {words}", of("moved"));
        let stop =
            |launcher: &Child| kill_process(Pid::from_child(launcher), Signal::TERM).unwrap();
        let code = machine.disturbed(&moved("--device cuda --procs 1"), &[], stop);
        assert_eq!(code, Some(143));
        let resumed = moved("--resume --device cuda --procs 2");
        let code = observed(machine.command(&resumed, &devices), |launcher, _, step| {
            if step >= 5 {
                stop(launcher);
            }
        });
        assert!([Some(143), Some(0)].contains(&code), "{code:?}");
        machine.trained(&moved("--resume --device cpu"), &[]);
        assert_close(&machine.losses(&of("moved")), &expected, 1e-5);
        machine.prove(&of("moved"), EIGHT_STEPS);

        let words = format!(
            "generate {} -p 1+1= --max-tokens 3 --device cuda",
            of("moved")
        );
        let generated = machine.evenkeel(&words, &[]).output().unwrap();
        assert!(generated.status.success(), "{generated:?}");

        let norm_test = "evenkeel.schedule.kind=norm-test evenkeel.schedule.max_batch=32";
        let grown = train("grown", &format!("--device cpu {norm_test}"));
        for strategy in ["ddp", "fsdp"] {
            let words = format!(
                "--device cuda --procs 2 {norm_test} evenkeel.parallel.strategy={strategy}"
            );
            let (losses, batches) = train(&format!("grown-{strategy}"), &words);
            assert_close(&losses, &grown.0, 1e-5);
            assert_eq!(batches, grown.1);
        }
    }
}

#[test]
fn a_loss_over_preferences_is_the_same_on_gpus_and_moves_to_the_cpu() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let two = [("EMULATED_GPU_DEVICES", "2")];
    for objective in ["dpo", "orpo", "kto"] {
        of_preferences(&machine, objective);
        let of = |run: &str| format!("{objective}-{run}");
        let out = |run: &str, words: &str| format!("--out {} {words}", of(run));
        machine.trained(&out("base", "--device cpu"), &[]);
        let expected = machine.losses(&of("base"));
        assert_eq!(expected.len(), 8);
        for (run, strategy) in [
            ("replicated", "evenkeel.parallel.strategy=ddp"),
            ("sharded", FSDP),
        ] {
            machine.trained(
                &out(run, &format!("--device cuda --procs 2 {strategy}")),
                &two,
            );
            assert_close(&machine.losses(&of(run)), &expected, 1e-5);
            machine.prove(&of(run), EIGHT_STEPS);
        }
        let code = machine.disturbed(&out("moved", "--device cuda"), &[], |launcher| {
            kill_process(Pid::from_child(launcher), Signal::TERM).unwrap();
        });
        assert_eq!(code, Some(143));
        machine.trained(&out("moved", "--resume --device cpu"), &[]);
        assert_close(&machine.losses(&of("moved")), &expected, 1e-5);
        machine.prove(&of("moved"), EIGHT_STEPS);
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_qwen3_of_a_folder_moves_from_one_rank_over_three_gpus_to_two() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let family = "evenkeel.model.config.model_type=qwen3 evenkeel.model.config.head_dim=24";
    machine.trained(&format!("--out base --device cpu {family}"), &[]);
    // The checkpoint is the model of another run.
    let (before, after) = RECIPE.split_once("  model:\n").unwrap();
    let (_, after) = after.split_once("  data:\n").unwrap();
    let recipe = format!(
        "{before}  model: {{path: base/gen-1/step-0000008}}\n  data:\n{}",
        after.replace("{samples: 64}", "{samples: 600}")
    );
    std::fs::write(machine.path().join("tiny.yaml"), recipe).unwrap();
    let launch = |words: &str| {
        let mut command = machine.command(words, &[("EMULATED_GPU_DEVICES", "3")]);
        // Every one of the worlds splits the batch.
        command.arg("evenkeel.batch={global: 12, per_device_batch_size: 1}");
        command
    };
    let ended = |mut command: Command| assert!(command.output().unwrap().status.success());
    ended(launch("--out undisturbed --device cpu"));
    let first = |run: &str| machine.losses(run)[0];

    let on_the_cpu = launch("--out moved --device cpu --procs 1");
    let code = observed(on_the_cpu, |launcher, _, _| {
        let _ = kill_process(Pid::from_child(launcher), Signal::TERM);
    });
    assert_eq!(code, Some(143));
    let on_gpus = launch("--out moved --resume --device cuda --procs 3");
    let mut is_resized = false;
    let code = observed(on_gpus, |_, _, _| {
        if !std::mem::replace(&mut is_resized, true) {
            machine.resize("moved", 2);
        }
    });
    assert_eq!(code, Some(0));
    let generations = machine.generations("moved");
    let worlds = generations.iter().map(|row| row["world"].as_u64().unwrap());
    assert_eq!(worlds.collect::<Vec<u64>>(), [1, 3, 2]);
    assert_close(
        &machine.losses("moved"),
        &machine.losses("undisturbed"),
        1e-5,
    );
    machine.prove("moved", "50 steps consumed samples 0..600");
    // The weights are those of the folder, not random ones.
    assert!(
        first("moved") < 0.95 * first("base"),
        "{} {}",
        first("moved"),
        first("base")
    );
}

#[test]
#[ignore = "takes a minute: scripts/nightly.sh"]
fn a_rank_that_waits_for_a_hanging_one_says_so() {
    let Some(machine) = Machine::new() else {
        return;
    };
    // Kernels may be compiled first, without a sign of progress.
    let words =
        "--out run --procs 2 --device cuda --progress-deadline 30 evenkeel.budget.samples=160";
    let mut tracer = None;
    let ended = machine.disturbed(words, &[("EMULATED_GPU_DEVICES", "2")], |_| {
        let hanging = machine.rank("run", 1, 1).as_raw_nonzero().to_string();
        let script = ["-c", include_str!("stop_main_thread.py"), &hanging];
        tracer = Some(Command::new("python3").args(script).spawn().unwrap());
    });
    assert_eq!(ended, Some(0));
    tracer.unwrap().wait().unwrap();
    let stacks = machine.path().join("run/gen-1/stacks/rank-0.txt");
    let stacks = std::fs::read_to_string(stacks).unwrap();
    assert!(stacks.starts_with("waiting for other ranks ("), "{stacks}");
    machine.prove("run", "20 steps consumed samples 0..160");
}

#[test]
fn a_small_gpu_gets_smaller_micro_batches_of_the_same_batch() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let devices = ("EMULATED_GPU_DEVICES", "2");
    let needed =
        |words: &str| machine.needed(words, &[("EMULATED_GPU_MEMORY", "4194304"), devices]);
    let sharded = format!("--procs 2 --device cuda {FSDP}");
    for (run, words, rows, formula) in [
        ("one", "--procs 1", 8, "1 × 4 × 2 = 8"),
        ("sharded", sharded.as_str(), 4, "2 × 2 × 2 = 8"),
    ] {
        let words = format!("{words} evenkeel.batch.per_device_batch_size={rows}");
        let memory = (needed(&format!("--out {run}-probe {words}")) - 1).to_string();
        let settings = [("EMULATED_GPU_MEMORY", memory.as_str()), devices];
        let events = machine.trained(&format!("--out {run} {words}"), &settings);
        let formulas = events
            .iter()
            .filter(|event| event["event"] == "generation_started");
        let formulas: Vec<_> = formulas.map(|event| &event["formula"]).collect();
        assert_eq!(formulas, [formula]);
        assert_eq!(machine.losses(run).len(), 8);
    }
}

/// Words with these settings in place of those of the same keys.
fn replacing(words: &str, settings: &[&str]) -> String {
    let own = settings.join(" ");
    let key = |word: &str| word.split('=').next().unwrap_or_default().to_owned();
    let replaced: Vec<String> = own.split_whitespace().map(key).collect();
    let kept = words
        .split_whitespace()
        .filter(|word| !replaced.contains(&key(word)));
    kept.chain(own.split_whitespace())
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn a_gpu_needs_the_memory_that_the_plan_states() {
    let Some(machine) = Machine::new() else {
        return;
    };
    // Large enough that what the plan leaves out is small.
    let model = "evenkeel.model.config.hidden_size=256 evenkeel.model.config.intermediate_size=512 \
                 evenkeel.model.config.num_attention_heads=4 evenkeel.model.config.num_key_value_heads=2 \
                 evenkeel.model.config.vocab_size=2048 evenkeel.model.config.max_position_embeddings=256 \
                 evenkeel.data.sequence_length=256 evenkeel.batch.per_device_batch_size=4";
    let (bf16, untied) = (
        "evenkeel.model.precision=bf16",
        "evenkeel.model.config.tie_word_embeddings=false",
    );
    let checkpointing = "evenkeel.model.activation_checkpointing=true";
    // The last place that a unit takes depends on the number of layers.
    let three_layers =
        "evenkeel.model.config.num_hidden_layers=3 evenkeel.model.config.vocab_size=4096";
    let norm_test = "evenkeel.schedule.kind=norm-test evenkeel.schedule.max_batch=64";
    let coordinates = "evenkeel.schedule.coordinate_interval=10";
    let unsharded = "evenkeel.schedule.unsharded_accumulation=true";
    macro_rules! family {
        ($model_type:literal) => {
            concat!("evenkeel.model.config.model_type=", $model_type)
        };
    }
    let no_dropout = "evenkeel.model.config.resid_pdrop=0 evenkeel.model.config.embd_pdrop=0 \
                      evenkeel.model.config.attn_pdrop=0";
    let in_4_bits = "evenkeel.model.load_in_4bit=true";
    let adapters_of_queries = "evenkeel.model.adapters=true evenkeel.model.lora_rank=16 \
                               evenkeel.model.lora_target_modules=[q_proj,v_proj]";
    let whole = "evenkeel.model.lora_modules_to_save=[embed_tokens,lm_head,norm]";
    let biases = "evenkeel.model.config.attention_bias=true evenkeel.model.config.mlp_bias=true";
    for (run, ranks, settings) in [
        ("f32", "1", vec![]),
        ("bf16", "1", vec![bf16]),
        ("untied", "1", vec![bf16, untied]),
        ("checkpointing", "1", vec![bf16, checkpointing]),
        ("replicated", "2", vec![bf16]),
        ("sharded", "2", vec![bf16, FSDP]),
        ("sharded-untied", "2", vec![bf16, FSDP, untied]),
        ("sharded-f32", "2", vec![FSDP]),
        (
            "three-layers",
            "3",
            vec![FSDP, bf16, untied, three_layers, "evenkeel.batch.global=12"],
        ),
        ("measured", "2", vec![norm_test]),
        (
            "workers",
            "2",
            vec![norm_test, "evenkeel.schedule.estimator=paper"],
        ),
        (
            "coordinates",
            "1",
            vec![bf16, untied, norm_test, coordinates],
        ),
        ("unsharded", "2", vec![FSDP, norm_test, unsharded]),
        ("qwen2", "1", vec![bf16, family!("qwen2")]),
        ("qwen3", "2", vec![bf16, FSDP, family!("qwen3")]),
        ("gemma", "1", vec![bf16, family!("gemma")]),
        ("gpt-neox", "1", vec![bf16, family!("gpt_neox")]),
        ("gpt-neox-f32", "2", vec![FSDP, family!("gpt_neox")]),
        ("gpt2", "2", vec![bf16, FSDP, family!("gpt2"), no_dropout]),
        (
            "starcoder2",
            "2",
            vec![bf16, FSDP, untied, family!("starcoder2")],
        ),
        ("biased", "1", vec![bf16, biases]),
        ("adapters", "1", vec![bf16, ADAPTERS]),
        ("adapters-f32", "1", vec![ADAPTERS]),
        (
            "adapters-untied",
            "1",
            vec![bf16, untied, adapters_of_queries, whole],
        ),
        (
            "adapters-replicated",
            "2",
            vec![bf16, ADAPTERS, norm_test, coordinates],
        ),
        ("adapters-sharded", "2", vec![bf16, FSDP, ADAPTERS]),
        (
            "adapters-sharded-f32",
            "2",
            vec![FSDP, untied, ADAPTERS, whole, norm_test],
        ),
        ("codes", "1", vec![bf16, ADAPTERS, in_4_bits]),
        ("codes-f32", "1", vec![ADAPTERS, whole, untied, CODES]),
        (
            "codes-sharded",
            "2",
            vec![bf16, FSDP, untied, ADAPTERS, CODES],
        ),
    ] {
        let words = replacing(model, &settings);
        let plan = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .current_dir(machine.path())
            .args(
                format!("plan tiny.yaml -o json --trainer built-in --gpus {ranks} {words}")
                    .split_whitespace(),
            )
            .output()
            .unwrap();
        assert!(plan.status.success(), "{plan:?}");
        let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
        let bytes = |part: &str| plan["memory"][part].as_u64().unwrap();
        // The model fits, the micro-batch does not.
        let memory = (bytes("total") - bytes("activations") / 2).to_string();
        let words = format!("--out {run} --device cuda --procs {ranks} {}", words.trim());
        let limit = ("EMULATED_GPU_MEMORY", memory.as_str());
        let needed = machine.needed(&words, &[limit, ("EMULATED_GPU_DEVICES", ranks)]);
        let error = needed as f64 / bytes("total") as f64 - 1.0;
        println!(
            "{run}: {needed} bytes, {:.2} % more than planned",
            100.0 * error
        );
        assert!(
            error.abs() < 0.01,
            "{run}: {needed}, not {}",
            bytes("total")
        );
    }
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

#[test]
fn the_doctor_trains_on_gpus_of_two_models() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let settings = [
        ("EMULATED_GPU_DEVICES", "2"),
        ("EMULATED_GPU_MODELS", "NVIDIA H100:90,NVIDIA A100:80"),
        ("HF_HUB_OFFLINE", "1"),
    ];
    let output = machine
        .evenkeel("doctor --gpus", &settings)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for line in [
        "ok  GPUs          1 × NVIDIA H100 of 1.00 GiB, 1 × NVIDIA A100 of 1.00 GiB",
        "--  devices       1 of 2 GPUs is used: the GPUs are of different models (NVIDIA H100, NVIDIA A100)",
        "ok  training      1 process on the GPUs took two steps of a tiny model",
    ] {
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn the_doctor_fails_for_a_missing_library_only_if_gpus_are_asked_for() {
    let Some(machine) = Machine::new() else {
        return;
    };
    std::fs::remove_file(machine.path().join("libraries/libnccl.so.2")).unwrap();
    let settings = [("EMULATED_GPU_DEVICES", "2"), ("HF_HUB_OFFLINE", "1")];
    for (words, code, mark) in [("doctor", 0, "--"), ("doctor --gpus", 1, "NO")] {
        let output = machine.evenkeel(words, &settings).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(
            text.contains(&format!("{mark}  CUDA          NCCL: missing")),
            "{text}"
        );
        assert!(
            text.contains("ok  training      1 process on the GPUs took two steps"),
            "{text}"
        );
    }
}
