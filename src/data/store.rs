//! The token store of one part (`train/` or `evaluation/`) on disk.
//!
//! `tokens.bin` holds little-endian integers of 2 or 4 bytes. The top bit says whether the token carries
//! loss, the other bits are its id. `index.bin` holds 16 bytes a sample, little endian: the position of its
//! first token (u64, in tokens), the number of its tokens (u32), and how many of them after the first carry
//! loss (u32). Samples may share tokens: packed ones overlap by one, the last target of one and the first
//! input of the next.
//!
//! The store uses positioned reads instead of a memory map. The page cache serves both equally, and a sample
//! costs two system calls. A file that is truncated during training is an error of one sample instead of a
//! SIGBUS that kills the process.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::error::DataError;
use super::manifest::{FileRecord, PartRecord};
use super::request::Stopped;
use super::sample::Sample;
use crate::util::input;

/// Name of the file with the token ids.
pub(super) const TOKENS: &str = "tokens.bin";
/// Name of the file with the samples' entries.
pub(super) const INDEX: &str = "index.bin";
/// Bytes of one sample in `index.bin`.
pub(super) const ENTRY: u64 = 16;

/// Position of one sample in `tokens.bin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// Index of the first token.
    pub start: u64,
    /// Number of tokens, including the first.
    pub length: u32,
    /// Tokens after the first that carry loss.
    pub targets: u32,
}

impl Entry {
    fn from_bytes(bytes: [u8; ENTRY as usize]) -> Entry {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Entry {
            start: u64::from(word(0)) | u64::from(word(4)) << 32,
            length: word(8),
            targets: word(12),
        }
    }
}

/// A part opened for reading.
#[derive(Debug)]
pub(super) struct Store {
    directory: PathBuf,
    tokens: File,
    index: File,
    record: PartRecord,
    /// Upper bound of the ids, exclusive.
    vocabulary_size: u64,
}

impl Store {
    /// Opens a part and compares the sizes of its files with its record.
    pub fn open(
        directory: PathBuf,
        record: PartRecord,
        vocabulary_size: u64,
    ) -> Result<Store, DataError> {
        let open = |name: &str, expected: &FileRecord| {
            let path = directory.join(name);
            expected.verify_size(&path)?;
            input::open(&path).map_err(|error| DataError::read(&path, error))
        };
        let tokens = open(TOKENS, &record.tokens_file)?;
        let index = open(INDEX, &record.index_file)?;
        if !matches!(record.token_width, 2 | 4) || record.index_file.bytes != record.samples * ENTRY
        {
            return Err(DataError::store(
                &directory.join(INDEX),
                format!(
                    "{} bytes do not hold {} samples of {ENTRY} bytes with token ids of {} bytes",
                    record.index_file.bytes, record.samples, record.token_width
                ),
            ));
        }
        Ok(Store {
            directory,
            tokens,
            index,
            record,
            vocabulary_size,
        })
    }

    /// Reads all files and compares their checksums.
    pub fn verify(
        directory: &Path,
        record: &PartRecord,
        stopped: Stopped<'_>,
    ) -> Result<(), DataError> {
        record
            .tokens_file
            .verify(&directory.join(TOKENS), stopped)?;
        record.index_file.verify(&directory.join(INDEX), stopped)
    }

    /// The entry of a sample; `index` is below the number of samples.
    pub fn entry(&self, index: u64) -> Result<Entry, DataError> {
        let path = self.directory.join(INDEX);
        let mut bytes = [0; ENTRY as usize];
        self.index
            .read_exact_at(&mut bytes, index * ENTRY)
            .map_err(|error| DataError::read(&path, error))?;
        let entry = Entry::from_bytes(bytes);
        let tokens = self.record.tokens_file.bytes / self.record.token_width;
        let fits = entry.length >= 2
            && entry.targets < entry.length
            && u64::from(entry.length) <= self.record.longest_sample
            && entry
                .start
                .checked_add(u64::from(entry.length))
                .is_some_and(|end| end <= tokens);
        if !fits {
            return Err(DataError::store(
                &path,
                format!(
                    "sample {index} cannot be {} tokens from token {} on, there are {tokens}",
                    entry.length, entry.start
                ),
            ));
        }
        Ok(entry)
    }

    /// A sample; `index` is below the number of samples.
    pub fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let path = self.directory.join(TOKENS);
        let entry = self.entry(index)?;
        let width = self.record.token_width;
        let mut bytes = vec![0; entry.length as usize * width as usize];
        self.tokens
            .read_exact_at(&mut bytes, entry.start * width)
            .map_err(|error| DataError::read(&path, error))?;
        let flag = 1u32 << (8 * width - 1);
        let mut sample = Sample::with_capacity(entry.length as usize);
        for bytes in bytes.chunks_exact(width as usize) {
            let value = bytes
                .iter()
                .rev()
                .fold(0u32, |value, &byte| value << 8 | u32::from(byte));
            let id = value & !flag;
            if u64::from(id) >= self.vocabulary_size {
                return Err(DataError::store(
                    &path,
                    format!(
                        "sample {index} holds the id {id}, the vocabulary has {}",
                        self.vocabulary_size
                    ),
                ));
            }
            sample.push(id, value & flag != 0);
        }
        Ok(sample)
    }
}
