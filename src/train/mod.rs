//! The training loop and what it stands on: data, schedules, checkpoints.
//!
//! [`trainer::Trainer`] is the loop, the same for every engine; [`rank`] is the process around
//! it. Nothing here knows Kubernetes.

pub mod checkpoint;
mod coordinates;
pub mod data;
mod message;
mod orders;
pub mod pin;
pub mod rank;
mod saving;
pub mod schedule;
pub mod setup;
mod signs_of_life;
pub mod state;
pub mod tensor_file;
mod trainer;
pub mod weights;

pub use setup::Setup;
pub use state::TrainState;

use crate::comm::CommError;
use crate::durable::FileError;
use crate::engine::EngineError;

/// Why training stopped before its budget.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The engine: out of memory, a lost peer, a shape.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The states of the model do not fit: no micro-batch is small enough.
    #[error(
        "{0}: weights, gradients and optimiser states alone do not fit, whatever the micro-batch; \
         use more ranks and a sharded strategy (fsdp), more memory for each, or a smaller model"
    )]
    States(EngineError),
    /// What only the built-in trainer's runs have.
    #[error(
        "the user's own program trains in this run: it has no ledger, metrics or report of ours, and \
         the built-in trainer cannot go on with it"
    )]
    OwnProgram,
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(checkpoint::CheckpointError),
    /// The data could not be read.
    #[error(transparent)]
    Data(#[from] data::DataError),
    /// The batch schedule does not fit the plan.
    #[error(transparent)]
    Schedule(#[from] crate::norm::ScheduleError),
    /// The order of the samples cannot be made.
    #[error(transparent)]
    Order(#[from] crate::samples::OrderError),
    /// The ledger would not be contiguous.
    #[error(
        "the ledger would not prove every sample any more: {0}; this is a bug, please report it"
    )]
    Ledger(#[from] crate::samples::Fault),
    /// The metrics cannot be written.
    #[error(transparent)]
    Metrics(#[from] crate::telemetry::metrics::MetricsError),
    /// The initial weights cannot be used.
    #[error(transparent)]
    Weights(#[from] weights::WeightsError),
    /// The loss or the gradient is no number any more.
    #[error(
        "{what} is {value} at step {step} (samples {from} to {to}); the last good checkpoint is \
         kept: lower the learning rate, clip the gradient, or look at those samples"
    )]
    Diverged {
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// NaN or an infinity.
        value: f64,
        /// The step that was not taken.
        step: u64,
        /// Its first sample.
        from: u64,
        /// After its last sample.
        to: u64,
    },
    /// A step of nothing but padding and prompts.
    #[error(
        "step {step} (samples {from} to {to}) has no target token: every answer was cut off; \
         raise the sequence length or look at the data"
    )]
    NoTargets {
        /// The step.
        step: u64,
        /// Its first sample.
        from: u64,
        /// After its last sample.
        to: u64,
    },
    /// A message of another rank cannot be read.
    #[error(
        "a message from rank {rank} cannot be read: {error}; all ranks have to be of the same build"
    )]
    Message {
        /// From whom.
        rank: usize,
        /// Why.
        error: serde_json::Error,
    },
    /// A file of the run directory cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The prepared data has no part to train on.
    #[error("{} holds no training data: launch the recipe again", directory.display())]
    NoData {
        /// Where it should be.
        directory: std::path::PathBuf,
    },
    /// The state in a checkpoint is not this program's.
    #[error(
        "the training state in the checkpoint cannot be understood: {error}; it was written by \
         another version: go on with that one"
    )]
    State {
        /// What does not fit.
        error: serde_json::Error,
    },
}

/// A peer that is lost while a checkpoint is agreed on is a lost peer like any other: the survivors
/// go on.
impl From<checkpoint::CheckpointError> for TrainError {
    fn from(error: checkpoint::CheckpointError) -> Self {
        match error {
            checkpoint::CheckpointError::Comm(error) => error.into(),
            checkpoint::CheckpointError::Engine(error) => error.into(),
            error => TrainError::Checkpoint(error),
        }
    }
}

impl From<CommError> for TrainError {
    fn from(error: CommError) -> Self {
        TrainError::Engine(EngineError::Comm(error))
    }
}
