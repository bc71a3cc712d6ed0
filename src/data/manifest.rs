//! `manifest.json`: the content of a prepared data set, with sizes and checksums.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::recipe::schema::spec::{RowTokens, Rows, Synthetic};
use crate::util::durable::{FileError, write_atomically};
use crate::util::input::{self, STATE_BYTES};

use super::error::DataError;
use super::kind::Kind;
use super::request::{Stopped, check_stopped};

/// The manifest's file name.
pub(super) const FILE: &str = "manifest.json";

/// Version of the layout; a store of another version is prepared again.
const VERSION: u32 = 1;

/// The content of a prepared data set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the layout.
    pub version: u32,
    /// Checksum of `identity`. Equal fingerprints mean equal stores.
    pub fingerprint: String,
    /// Everything that determines the content: settings, tokenizer, template and sources.
    pub identity: serde_json::Value,
    /// Most input tokens per sample; a sample holds one token more, the last target, unless the recipe says
    /// `extra_token: false`.
    pub sequence_length: u64,
    /// Whether a sample may have several documents.
    pub packing: bool,
    /// What a sample is.
    #[serde(default, skip_serializing_if = "Kind::is_text")]
    pub kind: Kind,
    /// The tokenizer's name, for people.
    pub tokenizer: String,
    /// Number of token ids of the tokenizer or the language.
    pub vocabulary_size: u64,
    /// The largest id in the data plus one.
    pub used_vocabulary: u64,
    /// The source files that were read.
    pub sources: Vec<SourceRecord>,
    pub train: PartRecord,
    /// Evaluation samples, if any.
    pub evaluation: Option<PartRecord>,
    /// Counts of skipped and shortened records.
    pub skipped: Skipped,
    /// Notes on the content for people, one line each.
    pub notes: Vec<String>,
    /// The synthetic language, which needs no files.
    pub synthetic: Option<Synthetic>,
}

/// A source file and its checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceRecord {
    /// Path as the recipe names it.
    pub path: PathBuf,
    /// ETag of an object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    #[serde(flatten)]
    pub content: FileRecord,
}

/// One part of the data: training or evaluation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRecord {
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
    /// `packs.bin`, if samples have several documents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packs_file: Option<FileRecord>,
    /// The first sample of a synthetic language that belongs to this part.
    pub first_sample: u64,
}

/// Size and checksum of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Size of the file, in bytes.
    pub bytes: u64,
    /// XXH3 with 64 bits, in hex.
    pub checksum: String,
}

/// Counts of records that gave no sample or a shorter one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    pub empty: u64,
    /// Conversations without an answer.
    pub without_answer: u64,
    /// Samples in which no token carried loss, for example because truncation cut the answer off.
    pub without_targets: u64,
    /// Samples that were cut to the sequence length and are used.
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
        let counts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        f.write_str(&counts.join(", "))
    }
}

impl Manifest {
    /// The manifest of data with this identity, still without its content.
    pub(super) fn new(identity: serde_json::Value, sequence_length: u64) -> Manifest {
        let mut checksum = Checksum::default();
        checksum.update(identity.to_string().as_bytes());
        Manifest {
            version: VERSION,
            fingerprint: checksum.hex(),
            identity,
            sequence_length,
            ..Manifest::default()
        }
    }

    /// Reads the manifest of a prepared directory.
    pub fn read(directory: &Path) -> Result<Manifest, DataError> {
        let path = directory.join(FILE);
        let text =
            input::read(&path, STATE_BYTES).map_err(|error| DataError::read(&path, error))?;
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|error| DataError::store(&path, format!("it is not a manifest: {error}")))?;
        if manifest.version != VERSION {
            return Err(DataError::store(
                &path,
                format!("version {}, this program reads {VERSION}", manifest.version),
            ));
        }
        Ok(manifest)
    }

    /// Most tokens of a row.
    pub(super) fn row_limit(&self) -> u64 {
        let has_extra = self.identity.get("extra_token") != Some(&serde_json::Value::Bool(false));
        self.sequence_length + u64::from(has_extra)
    }

    /// How mismatched rows are made, if texts are needed for them, and the checksum of the tokenizer.
    pub(super) fn decoded_rows(&self) -> Option<(Rows, serde_json::Value)> {
        let rows = self.identity.get("rows")?;
        let rows: Rows = serde_json::from_value(rows.clone()).ok()?;
        let needs_texts = self.kind == Kind::Labelled && rows.tokens == RowTokens::Decoded;
        needs_texts.then(|| (rows, self.identity["tokenizer"][0].clone()))
    }

    /// Writes the manifest into a directory.
    pub(super) fn write(&self, directory: &Path) -> Result<(), DataError> {
        let path = directory.join(FILE);
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|error| FileError::from_io("write", &path, 0, error.into()))?;
        text.push(b'\n');
        Ok(write_atomically(&path, &text)?)
    }

    /// The differing parts of the identity, for messages.
    pub(super) fn differences(&self, other: &Manifest) -> String {
        let changed = |(name, value): (&String, &serde_json::Value)| {
            (self.identity.get(name) != Some(value)).then(|| name.replace('_', " "))
        };
        let fields = other.identity.as_object().into_iter().flatten();
        let names: Vec<String> = fields.filter_map(changed).collect();
        if names.is_empty() {
            return "settings changed".to_string();
        }
        format!("changed: {}", names.join(", "))
    }

    /// Refuses data with ids for which the model has no embedding; the error has both numbers.
    pub fn check_vocabulary(&self, vocab_size: u64) -> Result<(), DataError> {
        let what = match &self.synthetic {
            Some(_) => "the synthetic language".to_string(),
            None => format!("the tokenizer {}", self.tokenizer),
        };
        super::check_vocabulary(&what, self.vocabulary_size, vocab_size)?;
        super::check_vocabulary("the data", self.used_vocabulary, vocab_size)
    }
}

/// A checksum in progress.
#[derive(Clone, Default)]
pub(super) struct Checksum(Xxh3);

impl Checksum {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum so far, in hex.
    pub fn hex(&self) -> String {
        format!("{:016x}", self.0.digest())
    }
}

impl FileRecord {
    /// Reads a whole file and passes the bytes of every read to `progress`.
    pub(super) fn of(
        path: &Path,
        progress: &mut dyn FnMut(u64) -> Result<(), DataError>,
    ) -> Result<FileRecord, DataError> {
        let failed = |error| DataError::read(path, error);
        let mut file = input::open(path).map_err(failed)?;
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

    /// Checks the size and content of a file of the store.
    pub(super) fn verify(&self, path: &Path, stopped: Stopped<'_>) -> Result<(), DataError> {
        self.verify_size(path)?;
        let found = FileRecord::of(path, &mut |_| check_stopped(stopped))?;
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

    /// Checks the size of a file of the store.
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
