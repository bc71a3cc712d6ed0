//! The checkpoints of a run, and the choice of those to keep.

use std::path::{Path, PathBuf};

use super::CheckpointError;
use super::manifest::Manifest;
use super::names::{Committed, Target};
use crate::lifecycle::files;
use crate::util::durable::{self, FileError, sync_directory};
use crate::util::tree;

/// All checkpoints of a run.
#[derive(Debug, Default)]
pub struct History {
    /// Checkpoints with a valid manifest, by generation, then step. Listing does not read their files.
    pub committed: Vec<Committed>,
    /// Directories with the name of a checkpoint that are not valid ones, with the reason.
    pub damaged: Vec<CheckpointError>,
}

/// Lists the checkpoints of all generations of a run, without partial ones; empty if the directory does not
/// exist.
pub fn list(run_directory: &Path) -> Result<History, CheckpointError> {
    let mut history = History::default();
    for (_, generation) in numbered(run_directory, files::parse_generation)? {
        for (_, path) in numbered(&generation, committed_step)? {
            match Manifest::read(&path) {
                Ok((manifest, checksum)) => {
                    let found = manifest.committed(&path, checksum);
                    history.committed.push(found);
                }
                Err(error) => history.damaged.push(error),
            }
        }
    }
    Ok(history)
}

/// The newest checkpoint of a run: the last one of the highest generation with a checkpoint.
pub fn latest(run_directory: &Path) -> Result<Option<Committed>, CheckpointError> {
    Ok(list(run_directory)?.committed.pop())
}

/// The newest checkpoint of one generation with a valid manifest. A manifest that the file system does not give is an error:
/// it may be valid.
pub fn newest(run_directory: &Path, generation: u64) -> Result<Option<Committed>, CheckpointError> {
    let directory = run_directory.join(files::generation(generation));
    for (_, path) in numbered(&directory, committed_step)?.into_iter().rev() {
        match Manifest::read(&path) {
            Ok((manifest, checksum)) => return Ok(Some(manifest.committed(&path, checksum))),
            Err(error) if error.is_unread() => return Err(error),
            Err(_) => {}
        }
    }
    Ok(None)
}

/// Removes the oldest checkpoints of the whole run except the `keep` newest up to `newest`, the newest known
/// to be committed. `newest`, all newer checkpoints, and `start`, which the running generation reads,
/// always stay: a process with an outdated reference, behind a cut network, removes no checkpoint that a
/// later generation may start from. Returns the removed ones.
pub fn retain_in_run(
    run_directory: &Path,
    keep: u64,
    newest: &Path,
    start: Option<&Path>,
) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut committed = list(run_directory)?.committed;
    let known = committed.iter().position(|one| one.path == newest);
    let known = known.map_or(0, |at| at + 1);
    let keep = usize::try_from(keep).unwrap_or(usize::MAX).max(1);
    committed.truncate(known.saturating_sub(keep));
    let mut removed = Vec::new();
    for Committed { path, .. } in committed {
        if start == Some(path.as_path()) {
            continue;
        }
        // Renamed first: a partly removed checkpoint under its final name would look damaged.
        let partial = files::partial(&path);
        std::fs::rename(&path, &partial)
            .map_err(|error| FileError::from_io("rename", &path, 0, error))?;
        if let Some(parent) = path.parent() {
            sync_directory(parent)?;
        }
        durable::remove(&partial)?;
        removed.push(path);
    }
    Ok(removed)
}

/// Removes what a pod's disk has of checkpoints before `newest` except `start`, finished or not: the bucket has those
/// that are kept.
pub fn remove_copies(
    run_directory: &Path,
    newest: &str,
    start: Option<&str>,
) -> Result<(), CheckpointError> {
    let kept = [Some(newest), start].map(|path| path.map(|path| run_directory.join(path)));
    let newest = files::parse_checkpoint_path(newest);
    for (number, generation) in numbered(run_directory, files::parse_generation)? {
        let any = |name: &str| files::parse_checkpoint(name).map(|(step, _)| step);
        for (step, path) in numbered(&generation, any)? {
            if newest.is_some_and(|newest| (number, step) < newest)
                && !kept.contains(&Some(path.clone()))
            {
                durable::remove(&path)?;
            }
        }
    }
    Ok(())
}

/// Removes unfinished checkpoints of generations before `generation`. The launcher calls it when it knows
/// that their ranks have ended. Returns the removed directories.
pub fn sweep(run_directory: &Path, generation: u64) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut removed = Vec::new();
    for (number, directory) in numbered(run_directory, files::parse_generation)? {
        if number >= generation {
            break;
        }
        for (_, path) in numbered(&directory, partial_step)? {
            durable::remove(&path)?;
            removed.push(path);
        }
    }
    Ok(removed)
}

/// Takes the partial checkpoints of a generation away: their ranks cannot commit them any more.
pub(super) fn withdraw(run_directory: &Path, generation: u64) -> Result<(), CheckpointError> {
    let directory = run_directory.join(files::generation(generation));
    for (_, partial) in numbered(&directory, partial_step)? {
        let withdrawn = files::withdrawn(&partial);
        durable::remove(&withdrawn)?;
        match std::fs::rename(&partial, &withdrawn) {
            Ok(()) => {}
            // It is committed, or another pod has withdrawn it.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(FileError::from_io("rename", &partial, 0, error).into()),
        }
        sync_directory(&directory)?;
    }
    let entries = tree::entries(&directory)?.into_iter();
    for withdrawn in entries.filter(|entry| files::is_withdrawn(entry)) {
        // What cannot be removed takes space, and is no checkpoint.
        let _ = durable::remove(&withdrawn);
    }
    Ok(())
}

/// The error of a failed write: a cause of the file system, with the checkpoint that the run can start from.
pub(super) fn not_written(target: &Target, error: CheckpointError) -> CheckpointError {
    let CheckpointError::File(cause) = error else {
        return error;
    };
    CheckpointError::NotWritten {
        cause,
        // A second error would only hide the first.
        last: latest(&target.run_directory).ok().flatten().map(Box::new),
    }
}

fn committed_step(name: &str) -> Option<u64> {
    files::parse_checkpoint(name).and_then(|(step, partial)| (!partial).then_some(step))
}

fn partial_step(name: &str) -> Option<u64> {
    files::parse_checkpoint(name).and_then(|(step, partial)| partial.then_some(step))
}

/// The entries whose names `parse` accepts, ordered by their numbers.
pub(super) fn numbered(
    directory: &Path,
    parse: impl Fn(&str) -> Option<u64>,
) -> Result<Vec<(u64, PathBuf)>, FileError> {
    let number = |path: PathBuf| Some((parse(path.file_name()?.to_str()?)?, path));
    let mut found: Vec<_> = tree::entries(directory)?
        .into_iter()
        .filter_map(number)
        .collect();
    found.sort();
    Ok(found)
}
