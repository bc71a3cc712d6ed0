//! A run's directory: what stands where, and the small files that the launcher, `resize` and
//! `status` share.
//!
//! ```text
//! RUN/run.json               the run: written once
//! RUN/state.json             where it stands: written by its launcher only
//! RUN/desired.json           how many ranks somebody asks for
//! RUN/data/                  the prepared data
//! RUN/gen-N/record.json      the generation's record: written once
//! RUN/gen-N/metrics.jsonl    its steps and evaluations
//! RUN/gen-N/logs/rank-R.log  what its ranks printed
//! RUN/gen-N/step-…/          its checkpoints
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::LaunchError;
use crate::job::{Generation, Pin, Reason};
use crate::train::Setup;
use crate::train::files::{Lock, write_atomically};

/// A run's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir(PathBuf);

/// How many ranks somebody asks for (`desired.json`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Desired {
    /// Ranks.
    pub ranks: u64,
    /// One more with every request, so that the same number asked for again is seen.
    pub request: u64,
}

/// Where a run stands (`state.json`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// What it is doing.
    pub phase: Phase,
    /// The launcher's process id.
    pub launcher: u32,
    /// The newest committed checkpoint of the lineage that counts.
    pub pin: Option<Pin>,
    /// The last request of `desired.json` that was answered.
    pub request: u64,
    /// Micro-batches must not be above this any more.
    pub micro_limit: Option<u64>,
    /// Every generation so far.
    pub generations: Vec<GenerationRow>,
}

/// What a run is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum Phase {
    /// Between two generations.
    Starting,
    /// Training.
    Running,
    /// Its ranks commit and leave.
    Draining,
    /// Stopped on request; `--resume` goes on.
    Drained,
    /// The budget is reached.
    Finished,
    /// It cannot go on.
    Failed {
        /// In words.
        why: String,
    },
}

/// One generation in the run's history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerationRow {
    /// Its number.
    pub number: u64,
    /// Why it exists.
    pub reason: Reason,
    /// Its ranks.
    pub world: u64,
    /// Its batch arithmetic.
    pub proof: String,
    /// Samples consumed before its first step.
    pub start_samples: u64,
    /// Seconds since the Unix epoch.
    pub created: f64,
    /// From the moment its reason was seen to the end of its first step, seconds.
    pub first_step_seconds: Option<f64>,
}

impl RunDir {
    /// The directory at `path`, which need not exist yet.
    pub fn at(path: impl Into<PathBuf>) -> RunDir {
        RunDir(path.into())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it holds a run.
    pub fn holds_a_run(&self) -> bool {
        self.0.join("run.json").exists()
    }

    /// Locks it for this process.
    pub fn lock(&self) -> Result<Lock, LaunchError> {
        Ok(Lock::acquire(&self.0)?)
    }

    /// Whether a launcher works in it now.
    pub fn in_use(&self) -> bool {
        matches!(
            Lock::acquire(&self.0),
            Err(crate::train::files::FileError::HeldBy { .. })
        )
    }

    /// The run.
    pub fn setup(&self) -> Result<Setup, LaunchError> {
        self.read("run.json")
    }

    /// Writes the run, once.
    pub fn write_setup(&self, setup: &Setup) -> Result<(), LaunchError> {
        self.write("run.json", setup)
    }

    /// Where it stands; `None` before its first generation.
    pub fn state(&self) -> Result<Option<RunState>, LaunchError> {
        self.read_if_there("state.json")
    }

    /// Writes where it stands.
    pub fn write_state(&self, state: &RunState) -> Result<(), LaunchError> {
        self.write("state.json", state)
    }

    /// What somebody asks for.
    pub fn desired(&self) -> Result<Option<Desired>, LaunchError> {
        self.read_if_there("desired.json")
    }

    /// Asks for a number of ranks; returns the request's number.
    pub fn write_desired(&self, ranks: u64) -> Result<Desired, LaunchError> {
        let request = self.desired()?.map_or(1, |desired| desired.request + 1);
        let desired = Desired { ranks, request };
        self.write("desired.json", &desired)?;
        Ok(desired)
    }

    /// A generation's own directory.
    pub fn generation(&self, number: u64) -> PathBuf {
        self.0.join(Generation::directory(number))
    }

    /// A generation's record.
    pub fn record(&self, number: u64) -> Result<Generation, LaunchError> {
        self.read(&format!("{}/record.json", Generation::directory(number)))
    }

    /// Publishes a generation's record.
    pub fn write_record(&self, record: &Generation) -> Result<(), LaunchError> {
        let directory = self.generation(record.number);
        fs::create_dir_all(&directory).map_err(|error| LaunchError::Directory {
            path: directory.clone(),
            error,
        })?;
        self.write(
            &format!("{}/record.json", Generation::directory(record.number)),
            record,
        )
    }

    /// A generation's metrics file.
    pub fn metrics(&self, number: u64) -> PathBuf {
        self.generation(number).join("metrics.jsonl")
    }

    /// The number after the highest generation directory that exists, whoever made it.
    pub fn next_generation(&self) -> u64 {
        let numbers = fs::read_dir(&self.0).into_iter().flatten().flatten();
        numbers
            .filter_map(|entry| {
                let name = entry.file_name();
                name.to_str()?.strip_prefix("gen-")?.parse::<u64>().ok()
            })
            .max()
            .map_or(1, |highest| highest + 1)
    }

    fn write(&self, name: &str, value: &impl Serialize) -> Result<(), LaunchError> {
        let path = self.0.join(name);
        let bytes = serde_json::to_vec_pretty(value).map_err(|error| LaunchError::Unreadable {
            path: path.clone(),
            error,
        })?;
        Ok(write_atomically(&path, &bytes)?)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<T, LaunchError> {
        let path = self.0.join(name);
        self.read_if_there(name)?.ok_or(LaunchError::NoRun { path })
    }

    fn read_if_there<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, LaunchError> {
        let path = self.0.join(name);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(LaunchError::Directory { path, error }),
        };
        match serde_json::from_slice(&bytes) {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(LaunchError::Unreadable { path, error }),
        }
    }
}
