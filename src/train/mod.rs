//! The training loop and its parts: data, schedules, checkpoints.
//!
//! [`trainer::Trainer`] is the loop, which is the same for every engine; [`rank`] is its process. This module
//! does not depend on Kubernetes.

pub mod adapter;
mod bits;
mod carry;
pub mod checkpoint_ref;
mod entry;
pub mod generate;
mod kernels;
mod kl;
mod message;
mod mismatched;
mod orders;
pub mod preferences;
pub mod rank;
mod references;
pub mod run;
pub mod run_files;
pub mod schedule;
mod stacks;
mod sums;
#[cfg(test)]
mod testing;
mod trainer;
mod watchdog;
pub mod weights;

pub use checkpoint_ref::TrainState;
pub use run::{BuiltIn, FORMAT, Run};

use std::path::PathBuf;

use crate::checkpoint;
use crate::comm::CommError;
use crate::data;
use crate::engine::EngineError;
use crate::util::durable::FileError;

/// Why training stopped before its budget was used up.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The engine failed: out of memory, a lost peer, a wrong shape.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The states of the model need too much memory for any micro-batch.
    #[error(
        "{0}: weights, gradients and optimiser states alone do not fit, whatever the micro-batch; \
         use more ranks and a sharded strategy (fsdp), more memory for each, or a smaller model"
    )]
    States(EngineError),
    /// The run belongs to an external trainer, which has no ledger.
    #[error(
        "an external trainer trains this run: it has no ledger, and the built-in \
         trainer cannot continue it"
    )]
    OwnProgram,
    /// Another version of evenkeel wrote the run directory.
    #[error(
        "{} was written by {} version of evenkeel (format {found}; this version reads format \
         {FORMAT}): start a new run, or use the version that wrote it",
        run.display(),
        if *found < FORMAT { "an earlier" } else { "a later" }
    )]
    Format {
        run: PathBuf,
        /// The `format` of its `run.json`.
        found: u64,
    },
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(checkpoint::CheckpointError),
    /// The data could not be read.
    #[error(transparent)]
    Data(#[from] data::DataError),
    /// The batch schedule does not fit the plan.
    #[error(transparent)]
    Schedule(#[from] crate::norm::ScheduleError),
    /// The order of the samples is not possible.
    #[error(transparent)]
    Order(#[from] crate::samples::OrderError),
    /// The ledger would have a gap or an overlap.
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
    /// The loss or the gradient is not finite.
    #[error(
        "{what} is {value} at step {step} (samples {from} to {to}); {}: lower the learning rate, clip the \
         gradient, or look at those samples",
        match last {
            Some(path) => format!("the last good checkpoint, {path}, is kept"),
            None => "no checkpoint was committed before it".to_owned(),
        }
    )]
    Diverged {
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// The value: NaN or an infinity.
        value: f64,
        /// The step that was not taken.
        step: u64,
        /// Index of its first sample.
        from: u64,
        /// One past its last sample.
        to: u64,
        /// Path of the newest committed checkpoint below the run directory.
        last: Option<String>,
    },
    /// A step has only padding and prompts.
    #[error(
        "step {step} (samples {from} to {to}) has no target token: every answer was cut off; \
         raise the sequence length or look at the data"
    )]
    NoTargets {
        step: u64,
        /// Index of its first sample.
        from: u64,
        /// One past its last sample.
        to: u64,
    },
    /// A message of another rank is malformed.
    #[error("a message from rank {rank} cannot be read: {error}; all ranks need the same build")]
    Message {
        /// The sender of the message.
        rank: usize,
        error: serde_json::Error,
    },
    /// A rank would compute other bits than the run.
    #[error(
        "rank {rank} has other kernels ({found}) than the run ({expected}), and `determinism: world` promises the same \
         bits: use machines and the version with the run's, or start a new run from its checkpoint"
    )]
    Kernels {
        rank: usize,
        found: Box<kernels::Kernels>,
        expected: Box<kernels::Kernels>,
    },
    /// The plan splits the batch into other micro-batches than single samples, whose bits depend on each other.
    #[error(
        "the plan has micro-batches of {micro_batch} samples, and `determinism: world` needs 1: plan again with this version"
    )]
    CoupledSamples { micro_batch: u64 },
    /// A file of the run directory cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The state in a checkpoint is invalid, or belongs to another version.
    #[error(
        "the training state in the checkpoint cannot be parsed: {error}; it was written by \
         another version: continue with that one"
    )]
    State {
        /// The first invalid part.
        error: serde_json::Error,
    },
}

impl TrainError {
    /// Whether the run directory or the bucket cannot be written. A repair lets a new process continue.
    pub fn is_of_the_volume(&self) -> bool {
        use checkpoint::CheckpointError;
        matches!(
            self,
            TrainError::Metrics(_)
                | TrainError::File(FileError::NoSpace { .. } | FileError::Io { .. })
                | TrainError::Checkpoint(
                    CheckpointError::NotWritten { .. }
                        | CheckpointError::OtherRank { .. }
                        | CheckpointError::File(_)
                        | CheckpointError::Bucket(_)
                )
        )
    }
}

/// A peer lost during the agreement on a checkpoint is an ordinary lost peer: the survivors continue.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_names_the_checkpoint_that_is_kept_if_there_is_one() {
        let diverged = |last: Option<&str>| TrainError::Diverged {
            what: "loss",
            value: f64::NAN,
            step: 1,
            from: 0,
            to: 12,
            last: last.map(str::to_owned),
        };
        insta::assert_snapshot!(diverged(None), @"loss is NaN at step 1 (samples 0 to 12); no checkpoint was committed before it: lower the learning rate, clip the gradient, or look at those samples");
        insta::assert_snapshot!(diverged(Some("gen-1/step-0000120")), @"loss is NaN at step 1 (samples 0 to 12); the last good checkpoint, gen-1/step-0000120, is kept: lower the learning rate, clip the gradient, or look at those samples");
    }
}
