//! A checkpoint as generation records pin it: by its path below the run and its checksum.

use std::path::Path;

use super::checkpoint::{Checkpoint, CheckpointError, Checksum, Committed};
use crate::job::Pin;

/// The pin of a committed checkpoint of a run.
pub fn pin(committed: &Committed, run: &Path) -> Pin {
    let path = committed.path.strip_prefix(run).unwrap_or(&committed.path);
    Pin {
        path: path.display().to_string(),
        step: committed.step,
        samples: committed.samples,
        checksum: committed.checksum.to_string(),
    }
}

/// Opens a pinned checkpoint and verifies all of it.
pub fn open(run: &Path, pin: &Pin) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(&run.join(&pin.path), Some(checksum(pin)?))
}

/// Opens a pinned checkpoint and verifies each file as it is read.
pub fn open_lazily(run: &Path, pin: &Pin) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open_lazily(&run.join(&pin.path), Some(checksum(pin)?))
}

fn checksum(pin: &Pin) -> Result<Checksum, CheckpointError> {
    pin.checksum
        .parse()
        .map_err(|error: super::checkpoint::NoChecksum| CheckpointError::Misuse(error.to_string()))
}
