//! A checkpoint reference: a checkpoint's path below the run directory and its checksum.

use std::path::Path;

use super::TrainError;
use super::state::TrainState;
use crate::bucket::Bucket;
use crate::checkpoint::{self, bucket_copy};
use crate::checkpoint::{Checkpoint, CheckpointError, Checksum, Committed};
use crate::lifecycle::CheckpointRef;

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
    let unknown = with_batch(committed, run, 0);
    let state = TrainState::from_checkpoint(&open_lazily(run, &unknown)?)?;
    Ok(CheckpointRef {
        batch: state.controller.batch(),
        ..unknown
    })
}

/// Opens a referenced checkpoint and verifies all of it.
pub fn open(run: &Path, checkpoint_ref: &CheckpointRef) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(
        &run.join(&checkpoint_ref.path),
        Some(checksum(checkpoint_ref)?),
    )
}

/// Opens a referenced checkpoint and verifies each file as it is read.
pub fn open_lazily(
    run: &Path,
    checkpoint_ref: &CheckpointRef,
) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open_lazily(
        &run.join(&checkpoint_ref.path),
        Some(checksum(checkpoint_ref)?),
    )
}

/// The reference to a committed checkpoint in a bucket, whose path is below the run's prefix.
pub fn in_bucket(bucket: &Bucket, committed: &Committed) -> Result<CheckpointRef, CheckpointError> {
    let unknown = with_batch(committed, Path::new(""), 0);
    let state = bucket_copy::read(bucket, &unknown.path, checkpoint::STATE)?;
    let state = TrainState::parse(&state);
    let state = state.map_err(|error| CheckpointError::Misuse(error.to_string()))?;
    Ok(CheckpointRef {
        batch: state.controller.batch(),
        ..unknown
    })
}

/// The checksum that a reference states.
pub fn checksum(checkpoint_ref: &CheckpointRef) -> Result<Checksum, CheckpointError> {
    checkpoint_ref
        .checksum
        .parse()
        .map_err(|error: crate::checkpoint::NoChecksum| CheckpointError::Misuse(error.to_string()))
}
