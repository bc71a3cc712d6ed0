//! Launching on one machine: turns a recipe into a run directory, and a run directory into
//! generations of rank processes.
//!
//! [`prepare`] (for an existing run, `resume`) does all that can be refused before any process
//! starts. [`launcher`] is the loop around the pure state machine of [`crate::lifecycle`]. [`proof`]
//! checks the sample ledger against the data.

mod adapters;
mod begin;
pub mod checkpoints;
mod download;
pub mod export;
mod external;
pub mod generator;
pub mod history;
pub mod hosts;
pub mod index;
mod initial;
mod launcher;
mod model;
mod names;
pub mod port;
pub mod prepare;
pub mod proof;
pub mod report_input;
mod request;
mod resume;
pub mod run_dir;
pub mod run_path;
mod survey;
#[cfg(test)]
mod testing;
pub mod worlds;

use std::path::PathBuf;

pub use crate::launch::external::{Requirements, requirements, with_command_of_run};
pub use crate::launch::run_path::{RunLock, RunOptions};
pub use begin::base;
pub use download::download;
pub use launcher::Launcher;
pub use names::{Missing, MissingData, with_snapshots};
pub use request::{Planned, Prepared, Request};
pub use resume::{continued, refuse_ended};
pub use run_dir::{Phase, RunDir, RunState, Stop, Wanted};
pub use survey::{stated_flaws, survey, with_inputs};

use crate::bucket::BucketError;
use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::external_trainer::ExternalTrainerError;
use crate::hub::{Cause, HubError};
use crate::plan::Draft;
use crate::train::TrainError;
use crate::util::durable::FileError;

/// Reasons why a run could not be launched or read.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A rule refuses the plan.
    #[error(transparent)]
    Refused(#[from] Box<Draft>),
    /// The directory contains no run.
    #[error(
        "{}: no such file; the directory contains no evenkeel run; `evenkeel status` lists the runs",
        path.display()
    )]
    NoRun { path: PathBuf },
    /// The path cannot become a run directory.
    #[error(
        "{} cannot be the run's directory: {problem}; set another directory with --out",
        path.display()
    )]
    Directory { path: PathBuf, problem: String },
    /// A file cannot be read or written, or the directory is in use.
    #[error(transparent)]
    File(#[from] FileError),
    /// A checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint to resume from cannot be used.
    #[error("{error}; {way_out}")]
    Pinned {
        error: Box<TrainError>,
        /// What the user can do instead.
        way_out: String,
    },
    /// A bucket cannot be used.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    #[error(transparent)]
    Data(DataError),
    /// A model or a data set cannot be downloaded.
    #[error(transparent)]
    Hub(HubError),
    /// The command of the external trainer cannot be filled in.
    #[error(transparent)]
    ExternalTrainer(#[from] ExternalTrainerError),
    /// A signal arrived before a process started.
    #[error("stopped before a process was started")]
    Stopped,
    /// Training refused the run.
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Metrics(#[from] crate::telemetry::metrics::MetricsError),
    /// The sample order cannot be computed.
    #[error(transparent)]
    Order(#[from] crate::samples::OrderError),
    /// The initial weights cannot be used.
    #[error(transparent)]
    Weights(#[from] crate::train::weights::WeightsError),
    /// The model cannot be built.
    #[error("{message}")]
    Model { message: String },
    /// The request is not possible in this directory.
    #[error("{message}")]
    Usage { message: String },
    /// The path of the running executable is unknown.
    #[error(
        "cannot find the evenkeel executable, which every rank runs: {error}; call it by its full \
         path"
    )]
    Program { error: std::io::Error },
    /// A rank could not be started.
    #[error(
        "cannot start a rank: {error}; retry with fewer processes, or raise their limits \
         (ulimit -u, ulimit -n)"
    )]
    Spawn { error: std::io::Error },
    /// The ranks could not connect.
    #[error(
        "the ranks connect through 127.0.0.1, which is unreachable: {error}; bring the \
         loopback interface up (ip link set lo up), or train with --procs 1"
    )]
    Loopback { error: std::io::Error },
    #[error("no free port on 127.0.0.1: {error}; stop programs with many connections, or wait")]
    Port { error: std::io::Error },
}

impl LaunchError {
    /// A request that is not possible; the message states problem and remedy.
    fn usage(message: String) -> LaunchError {
        LaunchError::Usage { message }
    }
}

impl From<HubError> for LaunchError {
    fn from(error: HubError) -> Self {
        match *error.cause {
            Cause::Stopped => LaunchError::Stopped,
            _ => LaunchError::Hub(error),
        }
    }
}

impl From<DataError> for LaunchError {
    fn from(error: DataError) -> Self {
        match error {
            DataError::Stopped => LaunchError::Stopped,
            error => LaunchError::Data(error),
        }
    }
}
