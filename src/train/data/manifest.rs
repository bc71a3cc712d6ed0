//! `manifest.json`: what a prepared data set holds, with sizes and checksums.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::durable::{FileError, write_atomically};
use crate::recipe::spec::Synthetic;

use super::error::DataError;
use super::request::{Stopped, go_on};

/// The manifest's file name.
pub(super) const FILE: &str = "manifest.json";

/// Version of the layout; a store of another version is made anew.
pub(super) const VERSION: u32 = 1;

/// What a prepared data set holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the layout.
    pub version: u32,
    /// Checksum of `identity`. Equal fingerprints mean equal stores.
    pub fingerprint: String,
    /// Everything that decides what the store holds: settings, tokenizer, template and sources.
    pub identity: serde_json::Value,
    /// Input tokens per sample at most; a sample holds one token more, the last target.
    pub sequence_length: u64,
    /// Whether documents were put one after the other and cut.
    pub packing: bool,
    /// The tokenizer, for people.
    pub tokenizer: String,
    /// Token ids that the tokenizer (or the language) has.
    pub vocabulary_size: u64,
    /// The largest id in the data plus one.
    pub used_vocabulary: u64,
    /// The files that were read.
    pub sources: Vec<SourceRecord>,
    /// Training samples.
    pub train: PartRecord,
    /// Evaluation samples, when there are any.
    pub evaluation: Option<PartRecord>,
    /// Records that gave no sample or a shorter one.
    pub skipped: Skipped,
    /// What a person should know about the content, one line each.
    pub notes: Vec<String>,
    /// The synthetic language, which needs no files.
    pub synthetic: Option<Synthetic>,
}

/// A file that was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceRecord {
    /// As the recipe names it.
    pub path: PathBuf,
    /// Its content.
    #[serde(flatten)]
    pub content: FileRecord,
}

/// One part of the data: training or evaluation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRecord {
    /// Samples.
    pub samples: u64,
    /// Tokens of all samples.
    pub tokens: u64,
    /// Tokens that carry loss.
    pub target_tokens: u64,
    /// Tokens of the longest sample.
    pub longest_sample: u64,
    /// Bytes of one token id in `tokens.bin`, 2 or 4. 0 for a synthetic language.
    pub token_width: u64,
    /// `tokens.bin`.
    pub tokens_file: FileRecord,
    /// `index.bin`.
    pub index_file: FileRecord,
    /// The first sample of a synthetic language that belongs to this part.
    pub first_sample: u64,
}

/// Size and checksum of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Bytes.
    pub bytes: u64,
    /// XXH3 with 64 bits, in hex.
    pub checksum: String,
}

/// Records that gave no sample, or a shorter one than they hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Documents without text.
    pub empty: u64,
    /// Conversations without an answer.
    pub without_answer: u64,
    /// Samples in which no token carried loss, for example because truncation cut the answer off.
    pub without_targets: u64,
    /// Samples that were cut to the sequence length (they are used).
    pub truncated: u64,
}

impl fmt::Display for Skipped {
    /// `3 truncated to the sequence length, 1 without an answer skipped`; empty when all are 0.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.truncated, "truncated to the sequence length"),
            (self.empty, "without text skipped"),
            (self.without_answer, "without an answer skipped"),
            (self.without_targets, "without a target token skipped"),
        ];
        let said: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        f.write_str(&said.join(", "))
    }
}

impl Manifest {
    /// Reads the manifest of a prepared directory.
    pub fn read(directory: &Path) -> Result<Manifest, DataError> {
        let path = directory.join(FILE);
        let text = std::fs::read(&path).map_err(|error| DataError::read(&path, error))?;
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|error| DataError::store(&path, format!("it is no manifest: {error}")))?;
        if manifest.version != VERSION {
            return Err(DataError::store(
                &path,
                format!("version {}, this program reads {VERSION}", manifest.version),
            ));
        }
        Ok(manifest)
    }

    /// Writes the manifest into a directory.
    pub(super) fn write(&self, directory: &Path) -> Result<(), DataError> {
        let path = directory.join(FILE);
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|error| FileError::from_io("write", &path, 0, error.into()))?;
        text.push(b'\n');
        Ok(write_atomically(&path, &text)?)
    }

    /// Which parts of the identity differ, for messages.
    pub(super) fn differences(&self, other: &Manifest) -> String {
        let changed = |(name, value): (&String, &serde_json::Value)| {
            (self.identity.get(name) != Some(value)).then(|| name.replace('_', " "))
        };
        let names: Vec<String> = other
            .identity
            .as_object()
            .map(|fields| fields.iter().filter_map(changed).collect())
            .unwrap_or_default();
        match names.as_slice() {
            [] => "settings changed".to_string(),
            names => format!("changed: {}", names.join(", ")),
        }
    }

    /// Refuses data whose ids the model has no embedding for, with both numbers.
    pub fn check_vocabulary(&self, vocab_size: u64) -> Result<(), DataError> {
        let what = match &self.synthetic {
            Some(_) => "the synthetic language".to_string(),
            None => format!("the tokenizer {}", self.tokenizer),
        };
        super::check_vocabulary(&what, self.vocabulary_size, vocab_size)?;
        super::check_vocabulary("the data", self.used_vocabulary, vocab_size)
    }
}

/// The checksum of an identity.
pub(super) fn fingerprint(identity: &serde_json::Value) -> String {
    let mut checksum = Checksum::default();
    checksum.update(identity.to_string().as_bytes());
    checksum.hex()
}

/// A checksum under way.
#[derive(Clone, Default)]
pub(super) struct Checksum(Xxh3);

impl Checksum {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum so far, in hex.
    pub fn hex(&self) -> String {
        format!("{:016x}", self.0.digest())
    }
}

impl FileRecord {
    /// Reads a file through, telling `progress` about every stretch of bytes.
    pub(super) fn of(
        path: &Path,
        progress: &mut dyn FnMut(u64) -> Result<(), DataError>,
    ) -> Result<FileRecord, DataError> {
        let failed = |error| DataError::read(path, error);
        let mut file = File::open(path).map_err(failed)?;
        let mut buffer = vec![0; 1 << 20];
        let mut checksum = Checksum::default();
        let mut bytes = 0;
        loop {
            let read = file.read(&mut buffer).map_err(failed)?;
            if read == 0 {
                break;
            }
            checksum.update(&buffer[..read]);
            bytes += read as u64;
            progress(read as u64)?;
        }
        Ok(FileRecord {
            bytes,
            checksum: checksum.hex(),
        })
    }

    /// Whether a file of the store has this size and content.
    pub(super) fn verify(&self, path: &Path, stopped: Stopped<'_>) -> Result<(), DataError> {
        self.verify_size(path)?;
        let found = FileRecord::of(path, &mut |_| go_on(stopped))?;
        if found.checksum != self.checksum {
            return Err(DataError::store(
                path,
                format!(
                    "its checksum is {}, the manifest says {}",
                    found.checksum, self.checksum
                ),
            ));
        }
        Ok(())
    }

    /// Whether a file of the store has this size.
    pub(super) fn verify_size(&self, path: &Path) -> Result<(), DataError> {
        let found = match std::fs::metadata(path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(DataError::store(path, "it is missing"));
            }
            Err(error) => return Err(DataError::read(path, error)),
        };
        if found != self.bytes {
            return Err(DataError::store(
                path,
                format!("it has {found} bytes, the manifest says {}", self.bytes),
            ));
        }
        Ok(())
    }
}
