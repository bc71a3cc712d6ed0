//! A checkpoint reference: a checkpoint's path below the run directory and its checksum.

use std::path::Path;

use super::TrainError;
use super::state::TrainState;
use crate::checkpoint::{Checkpoint, CheckpointError, Checksum, Committed};
use crate::lifecycle::CheckpointRef;

/// The reference to a committed checkpoint of a run; `batch` is that of the next step, in samples.
pub fn pin(committed: &Committed, run: &Path, batch: u64) -> CheckpointRef {
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
    let unknown = pin(committed, run, 0);
    let state = TrainState::from_checkpoint(&open_lazily(run, &unknown)?)?;
    Ok(CheckpointRef {
        batch: state.controller.batch(),
        ..unknown
    })
}

/// Opens a referenced checkpoint and verifies all of it.
pub fn open(run: &Path, pin: &CheckpointRef) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(&run.join(&pin.path), Some(checksum(pin)?))
}

/// Opens a referenced checkpoint and verifies each file as it is read.
pub fn open_lazily(run: &Path, pin: &CheckpointRef) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open_lazily(&run.join(&pin.path), Some(checksum(pin)?))
}

fn checksum(pin: &CheckpointRef) -> Result<Checksum, CheckpointError> {
    pin.checksum
        .parse()
        .map_err(|error: crate::checkpoint::NoChecksum| CheckpointError::Misuse(error.to_string()))
}
