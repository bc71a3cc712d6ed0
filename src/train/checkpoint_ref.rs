//! A checkpoint reference: a checkpoint's path below the run directory and its checksum; and the state of training that a
//! checkpoint holds besides the weights, which is the same on every rank.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::TrainError;
use super::kernels::Kernels;
use super::references::Pins;
use crate::bucket::Bucket;
use crate::checkpoint::{self, bucket_copy};
use crate::checkpoint::{Checkpoint, CheckpointError, Checksum, Committed};
use crate::lifecycle::CheckpointRef;
use crate::norm::Controller;
use crate::samples::Ledger;

/// The reference to a committed checkpoint of a run; `batch` is that of the next step, in samples.
pub fn with_batch(committed: &Committed, run: &Path, batch: u64) -> CheckpointRef {
    let path = committed.path.strip_prefix(run).unwrap_or(&committed.path);
    CheckpointRef {
        path: path.display().to_string(),
        step: committed.step,
        samples: committed.samples,
        batch,
        checksum: committed.checksum.to_string(),
    }
}

/// The reference to a committed checkpoint; its state supplies the batch.
pub fn of(committed: &Committed, run: &Path) -> Result<CheckpointRef, TrainError> {
    let checkpoint = Checkpoint::open_lazily(&committed.path, Some(committed.checksum))?;
    let state = TrainState::from_checkpoint(&checkpoint)?;
    Ok(with_batch(committed, run, state.controller.batch()))
}

/// Opens a referenced checkpoint and verifies all of it.
pub fn open(run: &Path, checkpoint_ref: &CheckpointRef) -> Result<Checkpoint, CheckpointError> {
    let expected = checksum(checkpoint_ref)?;
    Checkpoint::open(&run.join(&checkpoint_ref.path), Some(expected))
}

/// Opens a referenced checkpoint and verifies each file as it is read.
pub fn open_lazily(
    run: &Path,
    checkpoint_ref: &CheckpointRef,
) -> Result<Checkpoint, CheckpointError> {
    let expected = checksum(checkpoint_ref)?;
    Checkpoint::open_lazily(&run.join(&checkpoint_ref.path), Some(expected))
}

/// The reference to a committed checkpoint in a bucket, whose path is below the run's prefix.
pub fn in_bucket(bucket: &Bucket, committed: &Committed) -> Result<CheckpointRef, CheckpointError> {
    let path = committed.path.display().to_string();
    let state = state_in_bucket(bucket, &path, committed.checksum)?;
    Ok(with_batch(
        committed,
        Path::new(""),
        state.controller.batch(),
    ))
}

/// The state of training in a checkpoint of a bucket, whose manifest has this checksum.
pub fn state_in_bucket(
    bucket: &Bucket,
    path: &str,
    manifest: Checksum,
) -> Result<TrainState, CheckpointError> {
    let bytes = bucket_copy::read(bucket, path, Some(manifest), checkpoint::STATE)?;
    TrainState::parse(&bytes).map_err(|error| CheckpointError::Misuse(error.to_string()))
}

/// The checksum that a reference states.
pub fn checksum(checkpoint_ref: &CheckpointRef) -> Result<Checksum, CheckpointError> {
    let checksum = checkpoint_ref.checksum.parse::<Checksum>();
    checksum.map_err(|error| CheckpointError::Misuse(error.to_string()))
}

/// The state of training between two steps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainState {
    /// Number of optimiser steps taken.
    pub step: u64,
    pub samples: u64,
    /// Chooses the next batch.
    pub controller: Controller,
    /// The ledger of the committed history, from the first sample on.
    pub ledger: Ledger,
    /// The log-probabilities of the reference model with which the run has trained.
    #[serde(default, skip_serializing_if = "Pins::is_empty")]
    pub references: Pins,
    /// The kernels that decide the bits of the run, where these must be the same in every world.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels: Option<Kernels>,
}

impl TrainState {
    /// The state that a checkpoint holds.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<TrainState, TrainError> {
        serde_json::from_value(checkpoint.state()?).map_err(|error| TrainError::State { error })
    }

    /// The state in the bytes of a checkpoint's file.
    pub fn parse(bytes: &[u8]) -> Result<TrainState, TrainError> {
        serde_json::from_slice(bytes).map_err(|error| TrainError::State { error })
    }

    /// The JSON form in checkpoints.
    pub(super) fn to_json(&self) -> Result<serde_json::Value, TrainError> {
        serde_json::to_value(self).map_err(|error| TrainError::State { error })
    }
}
