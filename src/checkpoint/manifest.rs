//! The manifest: the content of a checkpoint, with a checksum of every file. It is written last.
//!
//! It has a seal, its own checksum, so that even a reader without an expected checksum detects an edited
//! manifest.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Checksum;
use super::checksum::FileEntry;
use super::error::{CheckpointError, ManifestError};
use super::names::{ADAPTER_CONFIG, CONFIG, Committed, INDEX, MANIFEST, STATE};
use super::unit_file::{Content, UnitShape, is_adapter};
use crate::lifecycle::files::is_partial;
use crate::util::durable::FileError;
use crate::util::input::{self, STATE_BYTES};

/// The format that this version writes, and the only one it reads.
pub const FORMAT: u64 = 1;

/// The files of one rank, as it reports them to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The rank that wrote them.
    pub rank: usize,
    /// Number of ranks in its world.
    pub world: usize,
    /// The generation that the files belong to.
    pub generation: u64,
    /// The step that the files belong to.
    pub step: u64,
    /// Names and contents of the files, which are already durable.
    pub files: BTreeMap<String, FileEntry>,
}

/// The content of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u64,
    /// The version of Evenkeel that wrote it.
    pub evenkeel: String,
    /// The generation that wrote it.
    pub generation: u64,
    /// Optimiser steps so far, over all generations.
    pub step: u64,
    /// Samples consumed so far.
    pub samples: u64,
    /// Number of ranks that wrote it; any number may read it.
    pub world: usize,
    /// Shapes of the model's units.
    pub units: Vec<UnitShape>,
    /// Every file except the manifest.
    pub files: BTreeMap<String, FileEntry>,
    /// Checksum of this manifest as compact JSON with an empty seal.
    pub seal: String,
}

impl Manifest {
    /// The committed checkpoint in a directory with this manifest.
    pub(super) fn committed(&self, path: &Path, checksum: Checksum) -> Committed {
        Committed {
            path: path.to_path_buf(),
            generation: self.generation,
            step: self.step,
            samples: self.samples,
            checksum,
        }
    }

    /// Sets the seal and returns the file's bytes.
    pub(super) fn seal(&mut self) -> Result<Vec<u8>, serde_json::Error> {
        self.seal = self.expected_seal()?;
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    fn expected_seal(&self) -> Result<String, serde_json::Error> {
        let mut unsealed = self.clone();
        unsealed.seal.clear();
        Ok(Checksum::of(&serde_json::to_vec(&unsealed)?).to_string())
    }

    /// Reads the manifest of the checkpoint in `directory` and checks that it is complete. Returns it with
    /// its checksum, which identifies the checkpoint.
    pub(super) fn read(directory: &Path) -> Result<(Self, Checksum), CheckpointError> {
        let path = directory.join(MANIFEST);
        let not_committed = |reason| CheckpointError::NotCommitted {
            path: directory.to_path_buf(),
            reason,
        };
        if is_partial(directory) {
            return Err(not_committed("its writing was never finished"));
        }
        let bytes = input::read(&path, STATE_BYTES).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound if directory.is_dir() => {
                not_committed("it has no manifest.json, which is written last")
            }
            io::ErrorKind::NotFound => not_committed("there is no such directory"),
            _ => FileError::from_io("read", &path, 0, error).into(),
        })?;
        Ok((Self::parse(directory, &bytes)?, Checksum::of(&bytes)))
    }

    /// Parses the manifest of the checkpoint at `path` and checks that it is complete.
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self, CheckpointError> {
        Self::parse_bytes(bytes).map_err(|reason| CheckpointError::Manifest {
            path: path.to_path_buf(),
            reason,
        })
    }

    fn parse_bytes(bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let Version { format } = serde_json::from_slice(bytes)?;
        if format != FORMAT {
            return Err(ManifestError::Format {
                found: format,
                read: FORMAT,
            });
        }
        let manifest: Manifest = serde_json::from_slice(bytes)?;
        let expected = manifest.expected_seal()?;
        if manifest.seal != expected {
            return Err(ManifestError::Seal {
                found: manifest.seal,
                expected,
            });
        }
        let outside = |name: &&String| name.contains('/') || name.as_str() == MANIFEST;
        if let Some(name) = manifest.files.keys().find(outside) {
            return Err(ManifestError::Outside(name.clone()));
        }
        manifest.check_files()?;
        Ok(manifest)
    }

    /// Checks that every file that the units need is listed and large enough.
    pub(super) fn check_files(&self) -> Result<(), ManifestError> {
        let described: &[&str] = match is_adapter(&self.units) {
            true => &[ADAPTER_CONFIG],
            false => &[CONFIG, INDEX],
        };
        for name in described.iter().chain(&[STATE]) {
            self.listed(name)?;
        }
        for (index, unit) in self.units.iter().enumerate() {
            for content in Content::ALL {
                let name = content.file_name(index, &self.units);
                let entry = self.listed(&name)?;
                let data = unit.checked_bytes(content.vectors_of_unit());
                if data.is_none_or(|data| data > entry.bytes) {
                    return Err(ManifestError::Short {
                        name,
                        bytes: entry.bytes,
                        unit: unit.name.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    pub(super) fn listed(&self, name: &str) -> Result<FileEntry, ManifestError> {
        let entry = self.files.get(name).copied();
        entry.ok_or_else(|| ManifestError::Unlisted(name.to_owned()))
    }
}
