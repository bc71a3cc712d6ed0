//! Real external trainers: a PyTorch script with DistributedDataParallel on gloo, and Hugging
//! Face's Trainer. Both are resized, lose a rank, are stopped and resumed. Their samples are
//! compared one by one with those of an undisturbed run.
//!
//! The tests need a Python with torch (and transformers and accelerate): `EVENKEEL_PYTHON`, or
//! `python3`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::support::{Launched, Run, wait_for_with};

/// The global batch of both recipes: 2 × 6 × 1, 1 × 6 × 2, 3 × 4 × 1.
pub(super) const BATCH: usize = 12;

/// The absolute path of the Python interpreter for the tests, since they run in other folders; `None` and a
/// message if it lacks a module.
pub(super) fn python(modules: &str) -> Option<PathBuf> {
    let python =
        std::env::var_os("EVENKEEL_PYTHON").map_or_else(|| "python3".into(), PathBuf::from);
    let imported = Command::new(&python)
        .args([
            "-c",
            &format!("import {modules}, sys; print(sys.executable)"),
        ])
        .stdin(Stdio::null())
        .output();
    let Some(output) = imported.ok().filter(|output| output.status.success()) else {
        println!(
            "SKIPPED: {} cannot import {modules} (set EVENKEEL_PYTHON)",
            python.display()
        );
        return None;
    };
    // DeepSpeed prints lines when it is imported.
    let printed = String::from_utf8(output.stdout).unwrap();
    Some(PathBuf::from(printed.lines().last().unwrap()))
}

pub(super) fn own_file(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join(path).display().to_string()
}

/// What the ranks recorded of a step.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub samples: Vec<u64>,
    /// Sum over the ranks; a rank records the loss of the step, or one part a micro-batch.
    losses: f64,
    /// Ranks that recorded a loss.
    ranks: u32,
}

impl Step {
    /// `None` if the trainer records no loss.
    fn loss(&self) -> Option<f64> {
        (self.ranks > 0).then(|| self.losses / f64::from(self.ranks))
    }
}

/// What was recorded, by step of a generation.
pub(super) type Fed = BTreeMap<u64, Step>;

/// A run of an external trainer.
pub(super) struct Trainer {
    pub run: Run,
    /// Directory where it records its samples.
    pub record: PathBuf,
    pub command: Vec<String>,
    /// What the number in a checkpoint's name counts: 1 for steps, [`BATCH`] for samples.
    pub named: u64,
}

impl Trainer {
    pub fn new(run: Run, command: Vec<String>) -> Trainer {
        let record = run.scratch().join("fed");
        Trainer {
            run,
            record,
            command,
            named: 1,
        }
    }

    /// Arguments of a launch with this number of steps.
    pub fn arguments(&self, more: &[&str], steps: u64, option: &str) -> Vec<String> {
        let mut arguments: Vec<String> = more.iter().map(|&word| word.to_owned()).collect();
        arguments.push("--".to_owned());
        arguments.extend(self.command.clone());
        arguments.extend([option.to_owned(), steps.to_string()]);
        arguments.extend(["--record".to_owned(), self.record.display().to_string()]);
        arguments
    }

    /// The recorded samples of every generation. An incomplete line is skipped.
    pub fn fed(&self) -> BTreeMap<u64, Fed> {
        let mut generations: BTreeMap<u64, Fed> = BTreeMap::new();
        let Ok(entries) = std::fs::read_dir(&self.record) else {
            return generations;
        };
        for entry in entries.flatten() {
            let name = entry.file_name().into_string().unwrap();
            let number = name.split('-').nth(1).unwrap().parse().unwrap();
            let generation = generations.entry(number).or_default();
            let mut with_loss = BTreeSet::new();
            let text = std::fs::read_to_string(entry.path()).unwrap();
            for line in text
                .lines()
                .filter_map(|l| serde_json::from_str::<Value>(l).ok())
            {
                let step = line["step"].as_u64().unwrap();
                let fed = generation.entry(step).or_default();
                // A rank records its samples before the ranks exchange anything, the loss afterwards.
                let samples = line["samples"].as_array().into_iter().flatten();
                fed.samples
                    .extend(samples.map(|sample| sample.as_u64().unwrap()));
                if let Some(loss) = line["loss"].as_f64() {
                    fed.losses += loss;
                    fed.ranks += u32::from(with_loss.insert(step));
                }
            }
        }
        generations
    }

    pub fn wait_for_steps(&self, generation: u64, steps: usize) {
        let what = || {
            format!(
                "{steps} steps of generation {generation}: {}",
                self.run.log()
            )
        };
        wait_for_with(what, || {
            let log = self.run.log();
            // A launch that was refused takes no step any more.
            assert!(!log.contains("\nerror: "), "{log}");
            let fed = self.fed().remove(&generation)?;
            (fed.len() > steps).then_some(())
        });
    }

    pub fn resize(&self, processes: &str) {
        let resized = self.run.call("resize", &[processes]);
        assert!(resized.status.success(), "{resized:?} {}", self.run.log());
    }

    /// From 2 processes to 4, one of the four killed, finished by the three others.
    pub fn grow_and_lose_a_rank(&self, launched: Launched) {
        self.wait_for_steps(1, 24);
        self.resize("4");
        self.wait_for_steps(2, 24);
        kill_process(self.rank(2, 1), Signal::KILL).unwrap();
        assert!(launched.wait().success(), "{}", self.run.log());
        let formulas = ["2 × 6 × 1 = 12", "4 × 3 × 1 = 12", "3 × 4 × 1 = 12"];
        assert_eq!(self.run.proofs(), formulas);
    }

    /// Process of a rank, found by its environment.
    pub fn rank(&self, generation: u64, rank: u64) -> Pid {
        let expected = [
            format!("EVENKEEL_RUN_DIR={}", self.run.out().display()),
            format!("EVENKEEL_GENERATION={generation}"),
            format!("RANK={rank}"),
        ];
        let found = std::fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .find_map(|entry| {
                let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
                let environment = std::fs::read(entry.path().join("environ")).ok()?;
                let environment = String::from_utf8_lossy(&environment).into_owned();
                let all = expected
                    .iter()
                    .all(|wanted| environment.split('\0').any(|v| v == wanted));
                all.then(|| Pid::from_raw(pid))?
            });
        found.unwrap_or_else(|| panic!("no rank {rank} of generation {generation}"))
    }

    /// The step of the checkpoint that a generation resumed from, by the number at the end of its name.
    fn began_at(&self, generation: u64) -> u64 {
        let state = self.run.state().unwrap();
        let rows = state["generations"].as_array().unwrap();
        let row = rows.iter().find(|row| row["number"] == generation).unwrap();
        let Some(checkpoint) = row["call"]["checkpoint"].as_str() else {
            return 0;
        };
        let digits = checkpoint.trim_end_matches(".pt").rsplit('-').next();
        digits.unwrap().parse::<u64>().unwrap() / self.named
    }

    /// The committed history: of each generation the steps before the start of the next one.
    pub fn committed(&self) -> Fed {
        let mut committed = Fed::new();
        for (number, mut fed) in self.fed() {
            let began = self.began_at(number);
            let first = *fed.keys().next().unwrap();
            assert_eq!(
                first,
                began + 1,
                "generation {number} starts at its checkpoint"
            );
            committed.retain(|step, _| *step <= began);
            let last = committed.keys().last().copied().unwrap_or(0);
            assert_eq!(
                last, began,
                "generation {number} starts where the previous one saved"
            );
            committed.append(&mut fed);
        }
        committed
    }
}

/// 2 → 1 → 3 processes, one of the three killed, stopped, resumed by one, finished.
fn disturbed(trainer: &Trainer, option: &str, more: &[&str]) -> u64 {
    let start = |first: &[&str], steps: u64| {
        let mut all = more.to_vec();
        all.extend(first);
        let arguments = trainer.arguments(&all, steps, option);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        trainer.run.start(&arguments)
    };
    let launched = start(&["--procs", "2"], 1_000_000);
    trainer.wait_for_steps(1, 8);
    trainer.resize("1");
    trainer.wait_for_steps(2, 8);
    trainer.resize("3");
    trainer.wait_for_steps(3, 12);
    kill_process(trainer.rank(3, 1), Signal::KILL).unwrap();
    trainer.wait_for_steps(4, 8);
    trainer.run.drain(launched);
    let state = trainer.run.state().unwrap();
    let last = trainer
        .fed()
        .remove(&4)
        .unwrap()
        .into_keys()
        .last()
        .unwrap();
    assert_eq!(state["generations"].as_array().unwrap().len(), 4);
    // Every generation has committed steps.
    let began: Vec<u64> = (1..=4).map(|number| trainer.began_at(number)).collect();
    assert!(
        began.is_sorted_by(|a, b| a < b) && began[3] < last,
        "{began:?}"
    );
    // The command may change between two launches: here its number of steps.
    let launched = start(&["--procs", "1", "--resume"], last + 10);
    assert!(launched.wait().success(), "{}", trainer.run.log());
    assert_eq!(trainer.run.worlds(), [2, 1, 3, 2, 1]);
    assert_eq!(
        trainer.run.proofs(),
        [
            "2 × 6 × 1 = 12",
            "1 × 6 × 2 = 12",
            "3 × 4 × 1 = 12",
            "2 × 6 × 1 = 12",
            "1 × 6 × 2 = 12"
        ]
    );
    last + 10
}

/// Compares the history with an undisturbed one: the same samples in every step. Returns the largest relative
/// difference of losses; `None` if none is recorded.
pub(super) fn same_samples(fed: &Fed, expected: &Fed, steps: u64, rows: usize) -> Option<f64> {
    let numbers: Vec<u64> = (1..=steps).collect();
    assert_eq!(fed.keys().copied().collect::<Vec<_>>(), numbers);
    assert_eq!(expected.keys().copied().collect::<Vec<_>>(), numbers);
    let sorted = |step: &Step| {
        let mut samples = step.samples.clone();
        samples.sort_unstable();
        samples
    };
    let mut apart: Option<f64> = None;
    for (number, step) in fed {
        let other = &expected[number];
        assert_eq!(step.samples.len(), rows, "step {number}");
        assert_eq!(sorted(step), sorted(other), "step {number}");
        if let (Some(a), Some(b)) = (step.loss(), other.loss()) {
            apart = Some(apart.unwrap_or(0.0).max((a - b).abs() / b.abs()));
        }
    }
    apart
}

/// Compares a disturbed run with an undisturbed one, whose command has the additional words `alone`. Returns the latter.
fn against_undisturbed(
    trainer: impl Fn() -> Trainer,
    option: &str,
    more: &[&str],
    alone: &[&str],
) -> Trainer {
    let disturbed_one = trainer();
    let steps = disturbed(&disturbed_one, option, more);
    let mut undisturbed = trainer();
    let alone = alone.iter().map(|word| (*word).to_owned());
    undisturbed.command.extend(alone);
    let mut all = more.to_vec();
    all.extend(["--procs", "1"]);
    let arguments = undisturbed.arguments(&all, steps, option);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = undisturbed.run.launch(&arguments);
    assert!(output.status.success(), "{output:?}");
    let (fed, expected) = (disturbed_one.committed(), undisturbed.committed());
    let apart = same_samples(&fed, &expected, steps, BATCH);
    let losses = apart.map_or("not compared".to_owned(), |apart| {
        format!("apart by {apart:.1e}")
    });
    let fed = steps * BATCH as u64;
    println!("{steps} steps, {fed} samples as in one process; losses {losses}");
    assert!(apart.unwrap_or(0.0) < 1e-5, "{apart:?}");
    undisturbed
}

/// A PyTorch script of this repository with these additional words.
pub(super) fn own_trainer(python: &Path, script: &str, more: &[&str]) -> Trainer {
    let run = Run::of(json!({
        "batch": {"global": BATCH, "per_device_batch_size": 6},
        "trainer": {"resume": ["--resume={checkpoint}"], "drain_seconds": 30},
    }));
    let (python, script) = (python.display().to_string(), own_file(script));
    let mut words = vec![
        &*python,
        &*script,
        "--per-device-batch-size={per_device_batch_size}",
        "--gradient-accumulation-steps={gradient_accumulation_steps}",
        "--checkpoints={checkpoint_dir}",
    ];
    words.extend(more);
    words.push("{resume_args}");
    Trainer::new(run, words.into_iter().map(str::to_owned).collect())
}

/// Starts a trainer twice with 2 processes, moves one of the two to 4 and to 3, and compares both over all steps.
pub(super) fn grown_and_shrunk(name: &str, steps: u64, start: impl Fn() -> (Trainer, Launched)) {
    let (disturbed, launched) = start();
    disturbed.grow_and_lose_a_rank(launched);
    let (undisturbed, launched) = start();
    assert!(launched.wait().success(), "{}", undisturbed.run.log());
    let (fed, expected) = (disturbed.committed(), undisturbed.committed());
    let apart = same_samples(&fed, &expected, steps, BATCH).unwrap();
    println!(
        "{name}, 2 → 4 → 3, {steps} steps of {BATCH} samples as undisturbed, losses apart by {apart:.1e}"
    );
    assert!(apart < 1e-5, "{apart}");
}

#[test]
fn pytorch_ddp_consumes_the_same_samples_despite_lost_processes() {
    let Some(python) = python("torch") else {
        return;
    };
    let script = "examples/pytorch/train_ddp.py";
    let trainer = || own_trainer(&python, script, &["--save-every=5"]);
    against_undisturbed(trainer, "--steps", &[], &[]);
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_program_with_dcp_checkpoints_consumes_the_same_samples_in_other_worlds() {
    let Some(python) = python("torch") else {
        return;
    };
    let steps = 300;
    grown_and_shrunk("DCP", steps, || {
        let trainer = own_trainer(&python, "tests/trainers/train_dcp.py", &[]);
        let arguments = trainer.arguments(&["--procs", "2"], steps, "--steps");
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let launched = trainer.run.start(&arguments);
        (trainer, launched)
    });
}

#[test]
fn hugging_face_trainer_consumes_the_same_samples_despite_lost_processes() {
    let Some(python) = python("torch, transformers, accelerate") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("recipe.yaml");
    let text =
        "per_device_train_batch_size: 6\ngradient_accumulation_steps: 1\nlearning_rate: 1.0e-3\n";
    std::fs::write(&recipe, text).unwrap();
    let trainer = || {
        let words = [
            &python.display().to_string(),
            &own_file("tests/trainers/hf_trainer.py"),
            "{args}",
            "{resume_args}",
            "--output_dir",
            "{checkpoint_dir}",
            "--learning_rate=1e-3",
            "--save_steps=5",
            "--save_total_limit=3",
            "--enable_jit_checkpoint=true",
            "--use_cpu=true",
            "--report_to=kubeflow",
            "--logging_steps=5",
            "--disable_tqdm=true",
        ];
        Trainer::new(Run::of_file(&recipe), words.map(str::to_owned).to_vec())
    };
    // Without checkpoints there is no `trainer_state.json`: what is shown was posted.
    let (recipe_gpus, alone) = (["--recipe-gpus", "2"], ["--save_strategy=no"]);
    let undisturbed = against_undisturbed(trainer, "--max_steps", &recipe_gpus, &alone);
    let status = String::from_utf8(undisturbed.run.call("status", &[]).stdout).unwrap();
    let (_, progress) = status.split_once("  progress    ").unwrap();
    assert!(progress.contains("loss "), "{progress}");
}
