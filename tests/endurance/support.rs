//! Shared parts of tests that drive the real binary: runs in temporary directories, and ways to
//! watch and disturb them. Every wait has a condition and a deadline.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longer than any step here takes on a busy machine; reaching it is a failure.
const DEADLINE: Duration = Duration::from_secs(480);

/// The binary under test.
pub fn evenkeel() -> Command {
    Command::new(env!("CARGO_BIN_EXE_evenkeel"))
}

/// A run in a temporary directory.
pub struct Run {
    directory: tempfile::TempDir,
    /// `None`: the command after `--` is the recipe.
    recipe: Option<PathBuf>,
    out: PathBuf,
    /// Variables of the launches.
    environment: BTreeMap<String, String>,
}

/// A launched run; dropping it kills the launcher.
pub struct Launched {
    child: Child,
}

impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Launched {
    /// Sends a signal to the launcher.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Process id of the launcher.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for the end; returns the exit status.
    pub fn wait(mut self) -> ExitStatus {
        wait_for("the launcher to end", || self.child.try_wait().unwrap())
    }
}

/// Waits until `look` returns a value.
pub fn wait_for<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_for_with(|| what.to_owned(), look)
}

/// The same; `what` is asked only after a timeout, so that it can say what is there then.
pub fn wait_for_with<T>(what: impl Fn() -> String, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            start.elapsed() < DEADLINE,
            "timeout while waiting for {}",
            what()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Run {
    /// A run of a native recipe with this `spec`.
    pub fn of(spec: Value) -> Run {
        let directory = tempfile::tempdir().unwrap();
        let recipe = directory.path().join("recipe.yaml");
        let document = serde_json::json!({
            "apiVersion": "evenkeel.dev/v1alpha1",
            "kind": "Recipe",
            "metadata": {"name": "run"},
            "spec": spec,
        });
        // YAML parsers read JSON.
        std::fs::write(&recipe, document.to_string()).unwrap();
        Run {
            out: directory.path().join("out"),
            directory,
            recipe: Some(recipe),
            environment: BTreeMap::new(),
        }
    }

    /// The file of its recipe.
    pub fn recipe(&self) -> &Path {
        self.recipe.as_deref().unwrap()
    }

    /// A run of a command without a recipe.
    pub fn of_command() -> Run {
        let directory = tempfile::tempdir().unwrap();
        Run {
            out: directory.path().join("out"),
            directory,
            recipe: None,
            environment: BTreeMap::new(),
        }
    }

    /// Moves the run directory to `out`.
    pub fn placed(self, out: PathBuf) -> Run {
        Run { out, ..self }
    }

    /// Renames the run directory to `name`.
    pub fn beside(self, name: &std::ffi::OsStr) -> Run {
        let out = self.directory.path().join(name);
        self.placed(out)
    }

    /// A run of an existing recipe file.
    pub fn of_file(recipe: &Path) -> Run {
        let directory = tempfile::tempdir().unwrap();
        Run {
            out: directory.path().join("out"),
            directory,
            recipe: Some(recipe.to_path_buf()),
            environment: BTreeMap::new(),
        }
    }

    /// Launches with these variables.
    pub fn with_environment(self, environment: BTreeMap<String, String>) -> Run {
        Run {
            environment,
            ..self
        }
    }

    /// Temporary directory for the recipe's files.
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    pub fn out(&self) -> PathBuf {
        self.out.clone()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = evenkeel();
        command
            .arg("launch")
            .args(&self.recipe)
            .arg("--out")
            .arg(self.out())
            .args(arguments)
            .envs(&self.environment);
        command
    }

    /// Launches and waits for the end.
    pub fn launch(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Launches in the background.
    pub fn start(&self, arguments: &[&str]) -> Launched {
        self.start_by(self.command(arguments))
    }

    /// Launches in the background with SIGHUP enabled, even if the tests run under `nohup`.
    pub fn start_with_hangups(&self, arguments: &[&str]) -> Launched {
        let launch = self.command(arguments);
        let mut env = Command::new("env");
        env.arg("--default-signal=HUP")
            .arg(launch.get_program())
            .args(launch.get_args());
        self.start_by(env)
    }

    /// Launches in the background with SIGHUP ignored, as under `nohup`.
    pub fn start_without_hangups(&self, arguments: &[&str]) -> Launched {
        self.start_in_shell("trap '' HUP", arguments)
    }

    /// Launches in the background through a shell that first runs `first`.
    pub fn start_in_shell(&self, first: &str, arguments: &[&str]) -> Launched {
        let launch = self.command(arguments);
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &format!("{first}; exec \"$0\" \"$@\"")])
            .arg(launch.get_program())
            .args(launch.get_args());
        self.start_by(shell)
    }

    /// Launches in the background through a program that runs another one.
    pub fn start_in(&self, program: &[&str], arguments: &[&str]) -> Launched {
        self.start_by(self.command_in(program, arguments))
    }

    /// The same, and waits for the end.
    pub fn launch_in(&self, program: &[&str], arguments: &[&str]) -> Output {
        self.command_in(program, arguments).output().unwrap()
    }

    fn command_in(&self, program: &[&str], arguments: &[&str]) -> Command {
        let launch = self.command(arguments);
        let mut command = Command::new(program[0]);
        command
            .args(&program[1..])
            .arg(launch.get_program())
            .args(launch.get_args())
            .envs(&self.environment);
        command
    }

    /// Launches, lets the first generation take some steps, and drains it by an interrupt.
    pub fn drained(&self, arguments: &[&str]) {
        let launched = self.start(arguments);
        self.wait_for_steps(1, 5);
        self.drain(launched);
    }

    /// Interrupts a launch, which ends resumable.
    pub fn drain(&self, launched: Launched) {
        launched.signal(rustix::process::Signal::INT);
        assert_eq!(launched.wait().code(), Some(143), "{}", self.log());
    }

    fn start_by(&self, mut command: Command) -> Launched {
        let log = std::fs::File::create(self.scratch().join("launch.log")).unwrap();
        let child = command
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Launched { child }
    }

    /// Output of a launch in the background.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.scratch().join("launch.log")).unwrap_or_default()
    }

    /// `evenkeel NAME RUN …`
    pub fn call(&self, name: &str, arguments: &[&str]) -> Output {
        self.calling(name, arguments).wait_with_output().unwrap()
    }

    /// As [`Self::call`], through a program that runs another one, and with the variables of the launches.
    pub fn call_in(&self, program: &[&str], name: &str, arguments: &[&str]) -> Output {
        Command::new(program[0])
            .args(&program[1..])
            .arg(env!("CARGO_BIN_EXE_evenkeel"))
            .arg(name)
            .arg(self.out())
            .args(arguments)
            .envs(&self.environment)
            .output()
            .unwrap()
    }

    /// As [`Self::call`], in the background.
    pub fn calling(&self, name: &str, arguments: &[&str]) -> Child {
        evenkeel()
            .arg(name)
            .arg(self.out())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// The run's `state.json`.
    pub fn state(&self) -> Option<Value> {
        serde_json::from_slice(&std::fs::read(self.out().join("state.json")).ok()?).ok()
    }

    /// The worlds of its generations.
    pub fn worlds(&self) -> Vec<u64> {
        let state = self.state().expect("a state");
        let generations = state["generations"].as_array().unwrap();
        generations
            .iter()
            .map(|g| g["world"].as_u64().unwrap())
            .collect()
    }

    /// The formulas of its generations.
    pub fn proofs(&self) -> Vec<String> {
        let state = self.state().expect("a state");
        let generations = state["generations"].as_array().unwrap();
        generations
            .iter()
            .map(|g| g["formula"].as_str().unwrap().to_owned())
            .collect()
    }

    /// The steps of the committed history by number: of each generation those before the start of
    /// the next one.
    pub fn steps(&self) -> BTreeMap<u64, Value> {
        let state = self.state().expect("a state");
        let generations = state["generations"].as_array().unwrap();
        let mut steps = BTreeMap::new();
        for generation in generations {
            let start = generation["start_samples"].as_u64().unwrap();
            steps.retain(|_, step: &mut Value| step["samples"].as_u64().unwrap() <= start);
            for step in self.generation_steps(generation["number"].as_u64().unwrap()) {
                steps.insert(step["step"].as_u64().unwrap(), step);
            }
        }
        steps
    }

    /// The losses of the committed history's evaluations, by the samples consumed before them.
    pub fn evaluations(&self) -> BTreeMap<u64, f64> {
        let state = self.state().expect("a state");
        let mut losses = BTreeMap::new();
        for generation in state["generations"].as_array().unwrap() {
            let start = generation["start_samples"].as_u64().unwrap();
            losses.retain(|samples, _| *samples <= start);
            let number = generation["number"].as_u64().unwrap();
            for evaluation in self.metrics(number, "evaluation") {
                let samples = evaluation["samples"].as_u64().unwrap();
                losses.insert(samples, evaluation["loss"].as_f64().unwrap());
            }
        }
        losses
    }

    /// The steps that a generation has logged so far, committed or not.
    pub fn generation_steps(&self, number: u64) -> Vec<Value> {
        self.metrics(number, "step")
    }

    fn metrics(&self, number: u64, kind: &str) -> Vec<Value> {
        let path = self.out().join(format!("gen-{number}/metrics.jsonl"));
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|metric| metric["kind"] == kind)
            .collect()
    }

    /// Waits until a generation has taken a number of steps.
    pub fn wait_for_steps(&self, generation: u64, steps: usize) {
        wait_for(&format!("step {steps} of generation {generation}"), || {
            (self.generation_steps(generation).len() >= steps).then_some(())
        });
    }

    /// The process of a rank of a generation.
    pub fn rank(&self, generation: u64, rank: u64) -> rustix::process::Pid {
        wait_for(&format!("rank {rank} of generation {generation}"), || {
            find_rank(&self.out(), generation, rank)
        })
    }

    /// Sends a signal to the process that holds the run's lock.
    pub fn signal_launcher(&self, signal: rustix::process::Signal) {
        let text = std::fs::read_to_string(self.out().join("lock")).unwrap();
        let pid = rustix::process::Pid::from_raw(text.trim().parse().unwrap());
        rustix::process::kill_process(pid.unwrap(), signal).unwrap();
    }

    /// Sends a signal to a rank.
    pub fn signal_rank(&self, generation: u64, rank: u64, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.rank(generation, rank), signal).unwrap();
    }

    /// Kills a rank, unless its generation has ended.
    pub fn kill_rank_if_there(&self, generation: u64, rank: u64) {
        if let Some(pid) = find_rank(&self.out(), generation, rank) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    /// Stops a rank of the first generation once its process exists. Finding a process is faster
    /// than its start.
    pub fn freeze_at_birth(&self, rank: u64) -> rustix::process::Pid {
        let start = Instant::now();
        let pid = loop {
            if let Some(pid) = find_rank(&self.out(), 1, rank) {
                break pid;
            }
            assert!(start.elapsed() < DEADLINE, "rank {rank} did not start");
        };
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        pid
    }

    /// Proves the ledger and returns the result.
    pub fn prove(&self) -> Value {
        let output = self.call("status", &["--ledger", "-o", "json"]);
        let formula: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        assert_eq!(output.status.code() == Some(0), formula["proved"] == true);
        formula
    }
}

/// Finds a rank's process by its command line and its log: it may have begun in an earlier generation.
fn find_rank(run: &Path, generation: u64, rank: u64) -> Option<rustix::process::Pid> {
    let log = run.join(format!("gen-{generation}/logs/rank-{rank}.log"));
    let run = run.display().to_string();
    let arguments = ["rank", "--run", &run];
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .find_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let read = |name: &str| std::fs::read(entry.path().join(name)).ok();
            let command = String::from_utf8(read("cmdline")?).ok()?;
            let command: Vec<&str> = command.trim_end_matches('\0').split('\0').skip(1).collect();
            let written = std::fs::read_link(entry.path().join("fd/2")).ok()?;
            (command.starts_with(&arguments) && written == log)
                .then(|| rustix::process::Pid::from_raw(pid))?
        })
}

/// Standard error of a command.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A small model on a synthetic language, at some tens of steps a second.
pub fn small(changes: Value) -> Value {
    let mut spec = serde_json::json!({
        "objective": "language-modelling",
        "seed": 7,
        "batch": {"global": 12, "per_device_batch_size": 2},
        "model": {"config": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
            "max_position_embeddings": 64,
        }},
        "data": {
            "sequence_length": 32,
            "train": [{"path": "synthetic", "synthetic": {"vocabulary": 64, "branching": 4, "samples": 5000}}],
        },
        "budget": {"samples": 2400},
        "learning_rate": {"peak": 3e-3, "shape": "cosine", "warmup_samples": 120},
        "checkpoint": {"every_samples": 600, "keep": 2},
    });
    merge(&mut spec, changes);
    spec
}

/// Sets the keys of `from`.
pub fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

/// Asserts that two runs consumed the same samples in the same steps and were evaluated after the
/// same samples, with losses that agree to 1e-5 relative.
pub fn same_losses(one: &Run, other: &Run) {
    let agree = |a: f64, b: f64| (a - b).abs() <= 1e-5 * a.abs();
    let (evaluated, others) = (one.evaluations(), other.evaluations());
    assert_eq!(
        evaluated.keys().collect::<Vec<_>>(),
        others.keys().collect::<Vec<_>>()
    );
    for (samples, a) in &evaluated {
        let b = others[samples];
        assert!(agree(*a, b), "evaluation after {samples}: {a} and {b}");
    }
    assert_eq!(
        one.steps().keys().collect::<Vec<_>>(),
        other.steps().keys().collect::<Vec<_>>()
    );
    same_losses_so_far(one, other);
}

/// Asserts that a run has taken all steps from the first one on, each as a longer run has taken it.
pub fn same_losses_so_far(one: &Run, longer: &Run) {
    let agree = |a: f64, b: f64| (a - b).abs() <= 1e-5 * a.abs();
    let (one, longer) = (one.steps(), longer.steps());
    assert!(one.keys().copied().eq(1..=one.len() as u64));
    for (step, a) in &one {
        let b = &longer[step];
        assert_eq!(a["samples"], b["samples"], "step {step}");
        let (a, b) = (a["loss"].as_f64().unwrap(), b["loss"].as_f64().unwrap());
        assert!(agree(a, b), "step {step}: {a} and {b}");
    }
}
