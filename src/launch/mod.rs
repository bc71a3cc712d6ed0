//! Launching on one machine: a recipe becomes a run directory, a run directory becomes
//! generations of rank processes.
//!
//! [`prepare`] does everything that can be refused before anything is started; [`launcher`] is the
//! loop around the pure state machine of [`crate::job`]; [`proof`] checks the ledger against the
//! data.

pub mod history;
mod launcher;
mod model;
pub mod prepare;
pub mod proof;
pub mod resize;
pub mod run_dir;
mod survey;

pub mod view;
mod watch;

use std::path::PathBuf;

pub use launcher::Launcher;
pub use prepare::{Prepared, Request};
pub use run_dir::{Phase, RunDir, RunState};
pub use survey::survey;

use crate::batch::Refused;
use crate::train::checkpoint::CheckpointError;
use crate::train::data::DataError;
use crate::train::files::FileError;

/// Why a run could not be launched or looked at.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A rule says no.
    #[error(transparent)]
    Refused(Box<Refused>),
    /// The directory holds no run.
    #[error("{}: no such file: this directory holds no run of evenkeel", path.display())]
    NoRun {
        /// The file that is missing.
        path: PathBuf,
    },
    /// A file of the run directory is no JSON of ours.
    #[error(
        "{}: {error}: cut short, edited, or written by another version; put back a copy, or start a \
         new run with another --out",
        path.display()
    )]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        error: serde_json::Error,
    },
    /// A directory or file cannot be used.
    #[error("{}: {error}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A small file cannot be written, or the directory is in use.
    #[error(transparent)]
    File(#[from] FileError),
    /// A checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Training's own refusal.
    #[error(transparent)]
    Train(#[from] crate::train::TrainError),
    /// The metrics cannot be written or read.
    #[error(transparent)]
    Metrics(#[from] crate::telemetry::metrics::MetricsError),
    /// The order of the samples cannot be made.
    #[error(transparent)]
    Order(#[from] crate::samples::OrderError),
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
    #[error("cannot find this program's own file: {error}")]
    Program {
        /// Why.
        error: std::io::Error,
    },
    /// A rank could not be started.
    #[error("cannot start a rank: {error}")]
    Spawn {
        /// Why.
        error: std::io::Error,
    },
    /// No free port.
    #[error("no free port on 127.0.0.1: {error}")]
    Port {
        /// Why.
        error: std::io::Error,
    },
}
