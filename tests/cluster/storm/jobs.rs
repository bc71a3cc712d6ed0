//! The jobs of a storm, each with a volume whose faults the storm sets.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use crate::support::{self, IMAGE, Job, running};

/// Samples per optimiser step; the norm test raises it.
pub const BATCH: u64 = 24;
/// Steps of a job; with the norm test fewer of more samples.
pub const STEPS: u64 = 1_000;
/// GPUs of every node, as many as the four jobs use.
pub const GPUS: &str = "5";

/// File in a container by which its clock is stepped.
pub const CLOCK_FILE: &str = "/tmp/clock";

/// Environment of containers whose clocks the storm steps. libfaketime reads the step from the file.
pub const CLOCK: [(&str, &str); 6] = [
    ("LD_PRELOAD", "/lib/faketime.so"),
    ("FAKETIME_TIMESTAMP_FILE", CLOCK_FILE),
    ("FAKETIME_CACHE_DURATION", "1"),
    ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ("FAKETIME_DISABLE_SHM", "1"),
    ("NO_FAKE_STAT", "1"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Ddp,
    Fsdp,
    NormTest,
    External,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Ddp, Kind::Fsdp, Kind::NormTest, Kind::External];

    fn name(self) -> &'static str {
        match self {
            Kind::Ddp => "ddp",
            Kind::Fsdp => "fsdp",
            Kind::NormTest => "norm-test",
            Kind::External => "external",
        }
    }
}

/// Whether the jobs have the same bits in every world (`determinism: world`): with `EVENKEEL_STORM_BITS`.
pub fn is_exact() -> bool {
    std::env::var_os("EVENKEEL_STORM_BITS").is_some()
}

/// Recipe of a kind; that of DDP and FSDP is the same.
pub fn recipe(kind: Kind) -> Value {
    let mut recipe = support::recipe(STEPS * BATCH);
    let spec = &mut recipe["spec"];
    spec["batch"] = json!({"global": BATCH, "per_device_batch_size": 2});
    spec["checkpoint"]["every_samples"] = json!(10 * BATCH);
    let model = &mut spec["model"]["config"];
    model["hidden_size"] = json!(32);
    model["intermediate_size"] = json!(88);
    model["max_position_embeddings"] = json!(16);
    spec["data"]["sequence_length"] = json!(16);
    if is_exact() {
        spec["determinism"] = json!("world");
        spec["batch"]["per_device_batch_size"] = json!(1);
    }
    match kind {
        Kind::Ddp | Kind::Fsdp => {}
        Kind::NormTest => {
            spec["elasticity"] = json!({"spares": 1});
            spec["schedule"] =
                json!({"kind": "norm-test", "eta": 0.3, "interval": 20, "max_batch": 4 * BATCH});
        }
        Kind::External => spec["trainer"] = json!({"resume": ["--from", "{checkpoint}"]}),
    }
    recipe
}

/// The external trainer. Rank 0 takes `STEPS` steps, writes each with its generation into the run's file `steps`, and
/// saves every 20th; the others wait for its end.
fn program() -> String {
    format!(
        r#"trap 'exit 143' TERM
step=0
case "$2" in */step-*) step=${{2##*/step-}} ;; esac
if [ "$RANK" != 0 ]; then
  while [ ! -e "$EVENKEEL_RUN_DIR/finished" ]; do /bin/busybox sleep 0.2; done
  exit 0
fi
while [ "$step" -lt {STEPS} ]; do
  /bin/busybox sleep 0.04
  step=$((step + 1))
  echo "$EVENKEEL_GENERATION $step" >> "$EVENKEEL_RUN_DIR/steps" || exit 1
  if [ $((step % 20)) = 0 ]; then
    : > "$EVENKEEL_CHECKPOINT_DIR/.step-$step" || exit 1
    /bin/busybox mv "$EVENKEEL_CHECKPOINT_DIR/.step-$step" "$EVENKEEL_CHECKPOINT_DIR/step-$step" || exit 1
  fi
done
: > "$EVENKEEL_RUN_DIR/finished""#
    )
}

/// A job of the storm. It is deleted before its disk is unmounted.
pub struct StormJob {
    pub kind: Kind,
    pub name: String,
    pub job: Job,
    pub disk: Disk,
}

impl StormJob {
    /// Starts the `number`th job of a kind.
    pub fn start(kind: Kind, number: usize) -> StormJob {
        let name = format!("storm-{}-{number}", kind.name());
        let job = Job::with_volume(&name);
        let disk = Disk::mount(&job);
        let clock: Vec<Value> = CLOCK
            .map(|(name, value)| json!({"name": name, "value": value}))
            .into();
        let mut more = json!({
            "nodes": 3, "gpusPerNode": 1, "image": IMAGE,
            "elasticity": {"fenceAfterSeconds": 10},
            "podTemplate": {"spec": {"containers": [{"name": "trainer", "env": clock}]}},
        });
        match kind {
            Kind::Ddp => more["gpusPerNode"] = json!(2),
            Kind::Fsdp => {
                more["overrides"] = json!(["parallel.strategy=fsdp"]);
            }
            Kind::NormTest => {}
            Kind::External => {
                more["image"] = json!("evenkeel.test/busybox:1");
                more["trainer"] = json!({"command": [
                    "/bin/busybox", "sh", "-c", program(), &name, "{resume_args}"]});
            }
        }
        let job = job.start(&recipe(kind), more);
        StormJob {
            kind,
            name,
            job,
            disk,
        }
    }

    /// PIDs of its ranks on this machine.
    pub fn ranks(&self) -> Vec<String> {
        match self.kind {
            Kind::External => running(&format!("^/bin/busybox sh -c .* {}( |$)", self.name)),
            Kind::Ddp | Kind::Fsdp | Kind::NormTest => self.job.processes("rank"),
        }
    }
}

/// A file system over a temporary directory, whose faults `kit/faults/disk` plays.
pub struct Disk {
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    _data: tempfile::TempDir,
}

impl Disk {
    /// Mounts it on a job's volume.
    fn mount(job: &Job) -> Disk {
        let data = tempfile::tempdir().unwrap();
        let mode = std::fs::metadata(job.volume()).unwrap().permissions();
        std::fs::set_permissions(data.path(), mode).unwrap();
        let mut process = Command::new("disk")
            .args([data.path(), job.volume()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("scripts/cluster-tests.sh puts it on the path");
        let mut disk = Disk {
            orders: process.stdin.take(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            process,
            _data: data,
        };
        assert_eq!(disk.answer(), "mounted");
        disk
    }

    /// Sets its fault: `full`, `read-only`, `slow 200ms` or `sound`.
    pub fn set(&mut self, fault: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{fault}").unwrap();
        assert_eq!(self.answer(), fault);
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.orders = None;
        let _ = self.process.wait();
    }
}
