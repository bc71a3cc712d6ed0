//! The files below a directory.

use std::io;
use std::path::{Path, PathBuf};

use super::durable::FileError;

/// The paths right below a directory, sorted; none if it does not exist.
pub fn entries(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let failed = |error| FileError::from_io("list", directory, 0, error);
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let paths: Result<Vec<PathBuf>, FileError> = entries
        .map(|entry| Ok(entry.map_err(failed)?.path()))
        .collect();
    let mut paths = paths?;
    paths.sort();
    Ok(paths)
}

/// The regular files below a path, or the path itself if it is one; none if it does not exist. Links are not followed.
pub fn files_below(path: &Path) -> Result<Vec<PathBuf>, FileError> {
    let Ok(about) = path.symlink_metadata() else {
        return Ok(Vec::new());
    };
    if about.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    if !about.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for below in entries(path)? {
        found.extend(files_below(&below)?);
    }
    Ok(found)
}

/// A path below a directory as text.
pub fn relative(path: &Path, directory: &Path) -> String {
    path.strip_prefix(directory)
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned()
}
