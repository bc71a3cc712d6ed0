//! A run directory: its layout, and the small files that the launcher, `resize` and `status` share.
//!
//! ```text
//! RUN/run.json               the run ([`crate::lifecycle::files`] has the names that ranks also use)
//! RUN/state.json             progress and phase; only the launcher writes it
//! RUN/desired.json           the newest request (desired.lock serializes requests)
//! RUN/data/                  the prepared data
//! RUN/gen-N/                 files of one generation
//! ```

use std::fmt;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::LaunchError;
use crate::external_trainer::Call;
use crate::lifecycle::{CheckpointRef, Generation, Reason, files};
use crate::plan::{DeviceKind, Reached};
use crate::train::{Run, TrainError};
use crate::util::durable::{FileError, Lock, read_json, write_json};
use crate::util::format::count;

const STATE: &str = "state.json";
const DESIRED: &str = "desired.json";
const DESIRED_LOCK: &str = "desired.lock";

/// Access to a run directory and its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir(PathBuf);

/// A request for a number of ranks, or to stop (`desired.json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Desired {
    #[serde(flatten)]
    pub wanted: Wanted,
    /// Increases with every request, so that a repeated number is noticed.
    pub request: u64,
    /// The hosts of the run in place of those of its launch, as after `--on ssh:`. Later requests keep them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<String>,
}

/// What is requested of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    /// To train on this number of ranks.
    Ranks(u64),
    /// To train on as many ranks as the hosts have devices for.
    All,
    Stop(Stop),
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wanted::Ranks(ranks) => f.write_str(&DeviceKind::Cpu.count(*ranks)),
            Wanted::All => f.write_str("other hosts"),
            Wanted::Stop(Stop::Suspend) => f.write_str("a suspension"),
            Wanted::Stop(Stop::Cancel) => f.write_str("a cancellation"),
        }
    }
}

/// How a run stops on request: in both cases its ranks commit a checkpoint first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stop {
    /// Until it is resumed.
    Suspend,
    /// Permanently: it is not resumed.
    Cancel,
}

impl fmt::Display for Stop {
    /// The verb on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stop::Suspend => "suspend",
            Stop::Cancel => "cancel",
        })
    }
}

/// State of a run (`state.json`).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RunState {
    pub phase: Phase,
    /// The newest committed checkpoint of the current lineage.
    pub checkpoint_ref: Option<CheckpointRef>,
    /// Number of the last answered request of `desired.json`.
    pub request: u64,
    /// Upper limit of micro-batches after out-of-memory. A resume with another memory limit drops
    /// it.
    pub per_device_batch_size_limit: Option<u64>,
    /// All generations so far, oldest first.
    pub generations: Vec<GenerationRow>,
    /// Why the run waits for hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// The hosts of the run; none if all its ranks are on the launcher's machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostRow>,
}

/// A host of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRow {
    pub name: String,
    /// Ranks that it can run now.
    pub slots: u64,
    /// Why it runs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl fmt::Display for HostRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problem {
            Some(problem) => f.write_str(problem),
            None if self.slots > 0 => write!(f, "{}, {}", self.name, count(self.slots, "rank")),
            None => write!(f, "{}, not there", self.name),
        }
    }
}

impl HostRow {
    /// Whether the launcher knows if it can use it.
    pub fn is_settled(&self) -> bool {
        self.slots > 0 || self.problem.is_some()
    }
}

impl RunState {
    /// Samples of the committed checkpoint; 0 if there is none.
    pub fn committed_samples(&self) -> u64 {
        self.checkpoint_ref
            .as_ref()
            .map_or(0, |checkpoint_ref| checkpoint_ref.samples)
    }

    /// Constraints on every further plan of the run.
    pub fn reached(&self, run: &Run) -> Reached {
        Reached {
            global_batch_size: Some(run.global_batch_size),
            per_device_batch_size_limit: self.per_device_batch_size_limit,
            batch: self
                .checkpoint_ref
                .as_ref()
                .map(|checkpoint_ref| checkpoint_ref.batch),
        }
    }
}

/// Phase of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum Phase {
    /// The ranks of a generation start, connect and load their state.
    #[default]
    Starting,
    Running,
    /// Its ranks commit and exit.
    Draining,
    /// Stopped on request, until it is resumed.
    Drained,
    /// Stopped on request, permanently.
    Cancelled,
    /// The budget is exhausted.
    Finished,
    Failed {
        /// Reason for the user.
        message: String,
    },
}

/// One generation in the run's history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerationRow {
    pub number: u64,
    pub reason: Reason,
    /// Number of its ranks.
    pub world: u64,
    /// The formula of its initial batch.
    pub formula: String,
    /// Samples consumed before its first step; `None` for an external trainer, which does not report them.
    pub start_samples: Option<u64>,
    /// Seconds since the Unix epoch.
    pub created: f64,
    /// Seconds from the detection of its reason to the end of its first step.
    pub first_step_seconds: Option<f64>,
    /// Command of every rank of an external trainer; `None` for the built-in trainer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<Call>,
}

impl GenerationRow {
    /// Whether it has taken a step; an external trainer, which does not report steps, counts once
    /// started.
    pub fn trains(&self) -> bool {
        self.first_step_seconds.is_some() || self.call.is_some()
    }
}

impl RunDir {
    /// The run directory at `path`, which need not exist.
    pub fn at(path: impl Into<PathBuf>) -> RunDir {
        RunDir(path.into())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it contains a run.
    pub fn contains_run(&self) -> bool {
        self.0.join(files::RUN).exists()
    }

    /// Whether a launcher holds the run lock now.
    pub fn in_use(&self) -> Result<bool, LaunchError> {
        Ok(Lock::is_held(&self.0)?)
    }

    pub fn run(&self) -> Result<Run, LaunchError> {
        Run::read(&self.0).map_err(|error| match error {
            TrainError::File(error) if error.is_absent() => LaunchError::NoRun {
                path: self.0.join(files::RUN),
            },
            TrainError::File(error) => error.into(),
            error => error.into(),
        })
    }

    /// Writes `run.json`: once, and again when a resume changes it.
    pub fn write_run(&self, run: &Run) -> Result<(), LaunchError> {
        self.write(files::RUN, run)
    }

    /// Reads `state.json`; `None` before the first generation.
    pub fn state(&self) -> Result<Option<RunState>, LaunchError> {
        self.read(STATE)
    }

    pub fn write_state(&self, state: &RunState) -> Result<(), LaunchError> {
        self.write(STATE, state)
    }

    /// Reads the request in `desired.json`.
    pub fn desired(&self) -> Result<Option<Desired>, LaunchError> {
        self.read(DESIRED)
    }

    /// Requests something of the run's launcher. Concurrent requests get consecutive numbers. `hosts`: other hosts than before.
    pub fn request(&self, wanted: Wanted, hosts: Option<String>) -> Result<Desired, LaunchError> {
        self.ask(|before, request| Desired {
            wanted,
            request: request + 1,
            hosts: hosts.or(before.and_then(|before| before.hosts)),
        })
    }

    /// Keeps the hosts of a resume for the next one.
    pub fn keep_hosts(&self, hosts: String) -> Result<(), LaunchError> {
        let desired = |before: Option<Desired>, request| Desired {
            wanted: before.map_or(Wanted::All, |before| before.wanted),
            request,
            hosts: Some(hosts),
        };
        self.ask(desired).map(drop)
    }

    /// Writes a request, made from the one before and its number.
    fn ask(
        &self,
        make: impl FnOnce(Option<Desired>, u64) -> Desired,
    ) -> Result<Desired, LaunchError> {
        let path = self.0.join(DESIRED_LOCK);
        // With `read` opening a named pipe does not wait for its reader.
        let _numbering = File::options()
            .read(true)
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|file| file.lock().map(|()| file))
            .map_err(|error| FileError::from_io("lock", &path, 0, error))?;
        let (before, request) = match self.desired() {
            Ok(before) => {
                let request = before.as_ref().map_or(0, |before| before.request);
                (before, request)
            }
            // This request replaces a damaged one and must be newer than the last answered one.
            Err(_) => (None, self.state()?.map_or(0, |state| state.request)),
        };
        let desired = make(before, request);
        self.write(DESIRED, &desired)?;
        Ok(desired)
    }

    /// Directory of a generation.
    pub fn generation(&self, number: u64) -> PathBuf {
        self.0.join(files::generation(number))
    }

    pub fn record(&self, number: u64) -> Result<Generation, LaunchError> {
        Ok(read_json(&self.generation(number).join(files::RECORD))?)
    }

    /// Path of a generation's metrics file.
    pub fn metrics(&self, number: u64) -> PathBuf {
        self.generation(number).join(files::METRICS)
    }

    /// The highest generation that has a directory or appears in `state`; 0 if there is none. An
    /// unreadable directory is an error, since a reused number would overwrite a generation's
    /// record.
    pub fn last_generation(&self, state: &RunState) -> Result<u64, LaunchError> {
        let known = state.generations.iter().map(|row| row.number);
        let last = self.generations()?.last().copied();
        Ok(known.max().max(last).unwrap_or(0))
    }

    /// Numbers of the generations that have a directory, ascending; none if the run has no directory.
    pub fn generations(&self) -> Result<Vec<u64>, LaunchError> {
        let cannot = |error| FileError::from_io("list", &self.0, 0, error);
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(cannot(error).into()),
        };
        let mut numbers = Vec::new();
        for entry in entries {
            let name = entry.map_err(cannot)?.file_name();
            numbers.extend(name.to_str().and_then(files::parse_generation));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn write(&self, name: &str, value: &impl Serialize) -> Result<(), LaunchError> {
        Ok(write_json(&self.0.join(name), value)?)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, LaunchError> {
        match read_json(&self.0.join(name)) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::thread;

    use super::*;

    #[test]
    fn concurrent_requests_get_different_numbers() {
        let directory = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(directory.path());
        let ask = || (0..5).map(|_| run_dir.request(Wanted::Ranks(2), None).unwrap().request);
        let numbers: BTreeSet<u64> = thread::scope(|scope| {
            let asking: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| ask().collect::<Vec<u64>>()))
                .collect();
            let asked = asking.into_iter().flat_map(|thread| thread.join().unwrap());
            asked.collect()
        });
        assert_eq!(numbers, (1..=40).collect());
        assert_eq!(run_dir.desired().unwrap().unwrap().request, 40);
    }

    fn after(number: u64) -> RunState {
        RunState {
            generations: vec![GenerationRow {
                number,
                reason: Reason::Started,
                world: 1,
                formula: String::new(),
                start_samples: Some(0),
                created: 0.0,
                first_step_seconds: None,
                call: None,
            }],
            ..RunState::default()
        }
    }

    #[test]
    fn the_last_generation_is_the_highest_on_disk_or_in_the_state() {
        let directory = tempfile::tempdir().unwrap();
        let none = RunState::default();
        let last = |path: &Path, state: &RunState| RunDir::at(path).last_generation(state).unwrap();
        assert_eq!(last(&directory.path().join("none"), &none), 0);
        assert_eq!(last(directory.path(), &none), 0);
        for name in ["gen-2", "gen-10", "gen-x", "data"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        assert_eq!(last(directory.path(), &none), 10);
        assert_eq!(last(directory.path(), &after(3)), 10);
        assert_eq!(last(directory.path(), &after(12)), 12);
    }

    #[test]
    fn an_unreadable_directory_has_no_last_generation() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run");
        fs::write(&path, "no directory").unwrap();
        let run_dir = RunDir::at(&path);
        let message = run_dir.last_generation(&after(3)).unwrap_err().to_string();
        assert!(message.starts_with("cannot list "), "{message}");
    }
}
