//! Launching on one machine: a recipe becomes a run directory, a run directory becomes
//! generations of rank processes.
//!
//! [`prepare`] (for a run that goes on, `resume`) does everything that can be refused before anything
//! is started; [`launcher`] is the
//! loop around the pure state machine of [`crate::job`]; [`proof`] checks the ledger against the
//! data.

mod begin;
pub mod history;
mod initial;
mod launcher;
mod model;
mod own;
pub mod place;
pub mod port;
pub mod prepare;
pub mod proof;
mod request;
mod resume;
pub mod run_dir;
mod survey;
#[cfg(test)]
mod testing;
pub mod view;
mod watch;
pub mod worlds;

use std::path::PathBuf;

pub use begin::base;
pub use launcher::Launcher;
pub use own::{check_own, own_trainer};
pub use place::Claim;
pub use request::{Planned, Prepared, Request};
pub use resume::{reached, refuse_finished};
pub use run_dir::{Phase, RunDir, RunState};
pub use survey::survey;

use crate::agent::ForeignError;
use crate::batch::Refused;
use crate::durable::FileError;
use crate::train::TrainError;
use crate::train::checkpoint::CheckpointError;
use crate::train::data::DataError;

/// Why a run could not be launched or looked at.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A rule says no.
    #[error(transparent)]
    Refused(Box<Refused>),
    /// The directory holds no run.
    #[error(
        "{}: no such file: this directory holds no run of evenkeel; `evenkeel status` lists the runs",
        path.display()
    )]
    NoRun {
        /// The file that is missing.
        path: PathBuf,
    },
    /// A place that cannot become a run's directory.
    #[error(
        "{} cannot be the run's directory: {problem}; give another place with --out",
        path.display()
    )]
    Place {
        /// Which.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// A file cannot be read or written, or the directory is in use.
    #[error(transparent)]
    File(#[from] FileError),
    /// A checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint to go on from cannot be used.
    #[error("{error}; {way_out}")]
    Pinned {
        /// Why.
        error: TrainError,
        /// What is left.
        way_out: String,
    },
    /// The data cannot be used.
    #[error(transparent)]
    Data(DataError),
    /// The command of the user's own program cannot be filled in.
    #[error(transparent)]
    Foreign(#[from] ForeignError),
    /// A signal came before anything was started.
    #[error("stopped before anything was started")]
    Stopped,
    /// Training's own refusal.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The metrics cannot be read.
    #[error(transparent)]
    Metrics(#[from] crate::telemetry::metrics::MetricsError),
    /// The order of the samples cannot be made.
    #[error(transparent)]
    Order(#[from] crate::samples::OrderError),
    /// The weights that it starts from cannot be used.
    #[error(transparent)]
    Weights(#[from] crate::train::weights::WeightsError),
    /// The model cannot be built.
    #[error("{message}")]
    Model {
        /// What is wrong and what to do.
        message: String,
    },
    /// What was asked for is not possible in this directory.
    #[error("{message}")]
    Usage {
        /// What is wrong and what to do.
        message: String,
    },
    /// This program's own path is unknown.
    #[error(
        "cannot find this program's own file, which every rank runs: {error}; call it by its full \
         path"
    )]
    Program {
        /// Why.
        error: std::io::Error,
    },
    /// A rank could not be started.
    #[error(
        "cannot start a rank: {error}; try again with fewer processes, or see what limits them \
         (ulimit -u, ulimit -n)"
    )]
    Spawn {
        /// Why.
        error: std::io::Error,
    },
    /// Ranks could not meet.
    #[error(
        "ranks of this machine meet at 127.0.0.1, which cannot be reached: {error}; bring the \
         loopback interface up (ip link set lo up), or train with --procs 1"
    )]
    Loopback {
        /// Why.
        error: std::io::Error,
    },
    /// No free port.
    #[error("no free port on 127.0.0.1: {error}; end programs that hold many connections, or wait")]
    Port {
        /// Why.
        error: std::io::Error,
    },
}

impl From<Refused> for LaunchError {
    fn from(refused: Refused) -> Self {
        LaunchError::Refused(Box::new(refused))
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
