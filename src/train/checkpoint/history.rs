//! Which checkpoints a run has, and which of them to keep.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::manifest::Manifest;
use super::names::Target;
use super::{CheckpointError, Checksum};
use crate::durable::{FileError, sync_directory};
use crate::job::files;

/// A committed checkpoint: what a generation's record pins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// Its directory.
    pub path: PathBuf,
    /// The generation that wrote it.
    pub generation: u64,
    /// Optimiser steps so far, over all generations.
    pub step: u64,
    /// Samples consumed so far.
    pub samples: u64,
    /// Of its manifest, which has the checksums of everything else.
    pub checksum: Checksum,
}

impl Committed {
    pub(super) fn new(path: &Path, manifest: &Manifest, checksum: Checksum) -> Self {
        Self {
            path: path.to_path_buf(),
            generation: manifest.generation,
            step: manifest.step,
            samples: manifest.samples,
            checksum,
        }
    }
}

/// A run's checkpoints.
#[derive(Debug, Default)]
pub struct History {
    /// Those with a good manifest, by generation, then step. Their files are not read here.
    pub committed: Vec<Committed>,
    /// Directories that should be checkpoints and are none, with the reason.
    pub damaged: Vec<CheckpointError>,
}

/// Lists the checkpoints of all generations of a run; none when there is no such directory.
/// Partial ones are passed over.
pub fn list(run_directory: &Path) -> Result<History, CheckpointError> {
    let mut history = History::default();
    for (_, generation) in numbered(run_directory, files::parse_generation)? {
        for (_, path) in numbered(&generation, committed_step)? {
            match Manifest::read(&path) {
                Ok((manifest, checksum)) => {
                    let found = Committed::new(&path, &manifest, checksum);
                    history.committed.push(found);
                }
                Err(error) => history.damaged.push(error),
            }
        }
    }
    Ok(history)
}

/// The newest checkpoint of a run: the last one of the highest generation that has any.
pub fn latest(run_directory: &Path) -> Result<Option<Committed>, CheckpointError> {
    Ok(list(run_directory)?.committed.pop())
}

/// Removes the oldest checkpoints of the whole run but the `keep` newest up to `pin`, the newest one
/// that is known to count. That one, all newer ones, and `start`, which the running generation
/// reads, always stay: whoever knows only of an old pin, behind a cut network, removes nothing that
/// a later generation may begin with. Returns what was removed.
pub fn retain_in_run(
    run_directory: &Path,
    keep: u64,
    pin: &Path,
    start: Option<&Path>,
) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut committed = list(run_directory)?.committed;
    let known = committed.iter().position(|one| one.path == pin);
    let known = known.map_or(0, |at| at + 1);
    let keep = usize::try_from(keep).unwrap_or(usize::MAX).max(1);
    committed.truncate(known.saturating_sub(keep));
    let mut removed = Vec::new();
    for Committed { path, .. } in committed {
        if start == Some(path.as_path()) {
            continue;
        }
        // Renamed first: half of a checkpoint under a checkpoint's name would look damaged.
        let partial = files::partial(&path);
        std::fs::rename(&path, &partial)
            .map_err(|error| FileError::from_io("rename", &path, 0, error))?;
        if let Some(parent) = path.parent() {
            sync_directory(parent)?;
        }
        remove_directory(&partial)?;
        removed.push(path);
    }
    Ok(removed)
}

/// Removes what generations before `generation` left unfinished. For the launcher, when it knows
/// that their ranks are gone. Returns what was removed.
pub fn sweep(run_directory: &Path, generation: u64) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut removed = Vec::new();
    for (number, directory) in numbered(run_directory, files::parse_generation)? {
        if number >= generation {
            break;
        }
        for (_, path) in numbered(&directory, partial_step)? {
            remove_directory(&path)?;
            removed.push(path);
        }
    }
    Ok(removed)
}

/// What to tell when writing a checkpoint failed: the cause, and what the run can fall back on.
pub(super) fn not_written(target: &Target, cause: FileError) -> CheckpointError {
    CheckpointError::NotWritten {
        cause,
        // A second error would only hide the first.
        last: latest(&target.run_directory).ok().flatten().map(Box::new),
    }
}

pub(super) fn remove_directory(path: &Path) -> Result<(), FileError> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(FileError::from_io("remove", path, 0, error))
        }
        _ => Ok(()),
    }
}

fn committed_step(name: &str) -> Option<u64> {
    files::parse_checkpoint(name).and_then(|(step, partial)| (!partial).then_some(step))
}

fn partial_step(name: &str) -> Option<u64> {
    files::parse_checkpoint(name).and_then(|(step, partial)| partial.then_some(step))
}

/// The entries whose names `parse` takes, by their numbers.
fn numbered(
    directory: &Path,
    parse: impl Fn(&str) -> Option<u64>,
) -> Result<Vec<(u64, PathBuf)>, FileError> {
    let failed = |error| FileError::from_io("list", directory, 0, error);
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if let Some(number) = entry.file_name().to_str().and_then(&parse) {
            found.push((number, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}
