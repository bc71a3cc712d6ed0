//! A directory that appears completely or not at all.
//!
//! It is filled under a temporary name beside its final path and renamed when it is complete and durable. A
//! crash leaves at most the temporary directory, which the next attempt removes. The run lock ensures that
//! one process at a time works on a directory.

use std::path::{Path, PathBuf};

use crate::util::durable::{self, FileError, create_directory, sync_directory};
use crate::util::tree;

use super::error::DataError;
use super::manifest;

/// A directory under construction; removed when dropped before [`Draft::publish`].
pub(super) struct Draft {
    place: PathBuf,
    draft: PathBuf,
}

impl Draft {
    /// Starts an empty directory beside `place` and creates missing parents.
    pub fn begin(place: &Path) -> Result<Draft, DataError> {
        let draft = draft(place);
        if let Some(parent) = place.parent() {
            create_directory(parent)?;
        }
        durable::remove(&draft)?;
        create_directory(&draft)?;
        let place = place.to_path_buf();
        Ok(Draft { place, draft })
    }

    /// The temporary path to write to.
    pub fn path(&self) -> &Path {
        &self.draft
    }

    /// Creates a directory in the draft.
    pub fn create(&self, name: &str) -> Result<PathBuf, DataError> {
        let path = self.draft.join(name);
        create_directory(&path)?;
        Ok(path)
    }

    /// Renames the directory to its final path and replaces an older one. Its files are already durable.
    pub fn publish(self) -> Result<(), DataError> {
        for path in tree::entries(&self.draft)? {
            if path.is_dir() {
                sync_directory(&path)?;
            }
        }
        sync_directory(&self.draft)?;
        remove_older_store(&self.place)?;
        std::fs::rename(&self.draft, &self.place)
            .map_err(|error| FileError::from_io("rename", &self.draft, 0, error))?;
        if let Some(parent) = self.place.parent().filter(|p| *p != Path::new("")) {
            sync_directory(parent)?;
        }
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After `publish` nothing is left; before it, the original error matters more than one of the
        // removal.
        let _ = std::fs::remove_dir_all(&self.draft);
    }
}

/// The temporary path of the directory for `place`.
pub fn draft(place: &Path) -> PathBuf {
    beside(place, "partial")
}

/// A hidden path beside `place`, for what is temporary.
pub(super) fn beside(place: &Path, ending: &str) -> PathBuf {
    let name = place.file_name().unwrap_or_default();
    place.with_file_name(format!(".{}.{ending}", name.display()))
}

/// Removes an older store. A directory that is not a store belongs to the user and may be the only copy of
/// their data.
fn remove_older_store(place: &Path) -> Result<(), DataError> {
    let is_store = place.join(manifest::FILE).is_file();
    let empty = || std::fs::read_dir(place).is_ok_and(|mut entries| entries.next().is_none());
    if place.symlink_metadata().is_ok() && !is_store && !empty() {
        return Err(DataError::source(
            place,
            "it is there already and holds no prepared data, which would take its place",
            "move it away, or start the run in another directory",
        ));
    }
    Ok(durable::remove(place)?)
}
