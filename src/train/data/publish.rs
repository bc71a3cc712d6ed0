//! A directory that appears whole or not at all.
//!
//! It is filled under a temporary name beside its place and renamed when it is complete and
//! durable. A crash leaves at most the temporary one behind, which the next attempt removes. One
//! process at a time works on a directory: the run's lock sees to that.

use std::path::{Path, PathBuf};

use crate::durable::{FileError, create_directory, sync_directory};

use super::error::DataError;
use super::manifest;

/// A directory under construction; removed when dropped before [`Draft::publish`].
pub(super) struct Draft {
    place: PathBuf,
    draft: PathBuf,
    /// Directories in it.
    directories: Vec<PathBuf>,
}

impl Draft {
    /// Starts an empty directory beside `place`, whose parents are made if need be.
    pub fn begin(place: &Path) -> Result<Draft, DataError> {
        let draft = draft(place);
        if let Some(parent) = place.parent() {
            create_directory(parent)?;
        }
        remove(&draft)?;
        std::fs::create_dir(&draft)
            .map_err(|error| FileError::from_io("create", &draft, 0, error))?;
        Ok(Draft {
            place: place.to_path_buf(),
            draft,
            directories: Vec::new(),
        })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.draft
    }

    /// Makes a directory in it.
    pub fn create(&mut self, name: &str) -> Result<PathBuf, DataError> {
        let path = self.draft.join(name);
        std::fs::create_dir(&path)
            .map_err(|error| FileError::from_io("create", &path, 0, error))?;
        self.directories.push(path.clone());
        Ok(path)
    }

    /// Puts the directory in its place, instead of an older one if there is one. The files in it
    /// are durable already.
    pub fn publish(self) -> Result<(), DataError> {
        for directory in &self.directories {
            sync_directory(directory)?;
        }
        sync_directory(&self.draft)?;
        remove_ours(&self.place)?;
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
        // After `publish` there is nothing left; before it, the error that brought us here counts
        // more than one of cleaning up.
        let _ = std::fs::remove_dir_all(&self.draft);
    }
}

/// Where the directory that belongs in `place` is filled.
pub fn draft(place: &Path) -> PathBuf {
    let name = place.file_name().unwrap_or_default();
    place.with_file_name(format!(".{}.partial", name.display()))
}

/// Removes an older store. A directory of that name that is none is somebody's own, perhaps the
/// only copy of their data.
fn remove_ours(place: &Path) -> Result<(), DataError> {
    let ours = place.join(manifest::FILE).is_file();
    let empty = || std::fs::read_dir(place).is_ok_and(|mut entries| entries.next().is_none());
    if place.symlink_metadata().is_ok() && !ours && !empty() {
        return Err(DataError::source(
            place,
            "it is there already and holds no prepared data, which would take its place",
            "move it away, or start the run in another directory",
        ));
    }
    remove(place)
}

fn remove(path: &Path) -> Result<(), DataError> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(FileError::from_io("remove", path, 0, error).into())
        }
        _ => Ok(()),
    }
}
