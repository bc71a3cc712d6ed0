//! Reads files against their size and checksum in the manifest. This module returns only bytes that it has
//! checked.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::checksum::{FileEntry, Hasher, PIECE};
use crate::util::input;

/// A damaged file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    pub file: PathBuf,
    /// The damage, for example `is missing`.
    pub reason: String,
    /// The file system did not give the file, which may be whole.
    pub is_unread: bool,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.file.file_name().unwrap_or(self.file.as_os_str());
        write!(f, "{} {}", name.display(), self.reason)
    }
}

/// A file that is checked against its entry in the manifest while it is read.
pub(super) struct VerifiedFile {
    path: PathBuf,
    file: File,
    entry: FileEntry,
    hasher: Hasher,
}

impl VerifiedFile {
    /// Opens a file; its size must match the entry.
    pub fn open(path: &Path, entry: FileEntry) -> Result<Self, Damage> {
        check_size(path, entry)?;
        let file = input::open(path).map_err(|error| unreadable(path, &error))?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            entry,
            hasher: Hasher::default(),
        })
    }

    /// Fills `bytes` from the current position. They are trustworthy only after [`VerifiedFile::finish`].
    pub fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Damage> {
        for piece in bytes.chunks_mut(PIECE) {
            self.file
                .read_exact(piece)
                .map_err(|error| unreadable(&self.path, &error))?;
            self.hasher.update(piece);
        }
        Ok(())
    }

    /// Checks the bytes read, which must be the whole file.
    pub fn finish(self) -> Result<(), Damage> {
        check_content(&self.path, self.entry, self.hasher.finish())
    }
}

/// The checked bytes of a small file.
pub(super) fn read(path: &Path, entry: FileEntry) -> Result<Vec<u8>, Damage> {
    let mut file = VerifiedFile::open(path, entry)?;
    let mut bytes = vec![0; entry.bytes as usize];
    file.fill(&mut bytes)?;
    file.finish()?;
    Ok(bytes)
}

/// Reads a whole file only to check it.
pub(super) fn verify(path: &Path, entry: FileEntry) -> Result<(), Damage> {
    check_size(path, entry)?;
    let found = input::open(path).and_then(FileEntry::of_stream);
    let found = found.map_err(|error| unreadable(path, &error))?;
    check_content(path, entry, found)
}

/// Checks that a file exists and has the right size.
pub(super) fn check_size(path: &Path, entry: FileEntry) -> Result<(), Damage> {
    let found = std::fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    let (found, written) = (found.len(), entry.bytes);
    if found == written {
        return Ok(());
    }
    let reason = format!("has {found} bytes where {written} were written");
    Err(damage(path, reason))
}

fn check_content(path: &Path, entry: FileEntry, found: FileEntry) -> Result<(), Damage> {
    if found == entry {
        return Ok(());
    }
    let (found, written) = (found.xxh3_128, entry.xxh3_128);
    let reason = format!("has checksum {found} where {written} was written");
    Err(damage(path, reason))
}

fn unreadable(path: &Path, error: &io::Error) -> Damage {
    match error.kind() {
        io::ErrorKind::NotFound => damage(path, "is missing".to_string()),
        _ => Damage {
            is_unread: true,
            ..damage(path, format!("cannot be read: {error}"))
        },
    }
}

pub(super) fn damage(path: &Path, reason: String) -> Damage {
    Damage {
        file: path.to_path_buf(),
        reason,
        is_unread: false,
    }
}
