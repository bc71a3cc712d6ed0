//! Writes the token store of one part; [`super::store`] describes the layout and reads it.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::util::durable::FileError;

use super::error::DataError;
use super::manifest::{Checksum, FileRecord, PartRecord};
use super::store::{ENTRY, Entry, TOKENS};

/// Bytes of a token id for a vocabulary; the top bit is reserved for the loss mark.
pub(super) fn token_width(vocabulary_size: u64) -> u64 {
    if vocabulary_size <= 1 << 15 { 2 } else { 4 }
}

/// A token and whether it carries loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    /// Id in the vocabulary.
    pub id: u32,
    /// Whether a model learns to predict it.
    pub target: bool,
}

/// A file that is written once, sequentially, with its checksum.
struct Output {
    path: PathBuf,
    file: BufWriter<File>,
    checksum: Checksum,
    bytes: u64,
}

impl Output {
    fn create(path: PathBuf) -> Result<Output, DataError> {
        let file =
            File::create(&path).map_err(|error| FileError::from_io("create", &path, 0, error))?;
        Ok(Output {
            path,
            file: BufWriter::with_capacity(1 << 18, file),
            checksum: Checksum::default(),
            bytes: 0,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.checksum.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file
            .write_all(bytes)
            .map_err(|error| FileError::from_io("write", &self.path, self.bytes, error).into())
    }

    fn finish(mut self) -> Result<FileRecord, DataError> {
        self.file
            .flush()
            .and_then(|()| self.file.get_ref().sync_all())
            .map_err(|error| FileError::from_io("write", &self.path, self.bytes, error))?;
        Ok(FileRecord {
            bytes: self.bytes,
            checksum: self.checksum.hex(),
        })
    }
}

/// Writes the tokens of a part; the index follows when the final samples are known.
pub(super) struct TokenWriter {
    output: Output,
    width: u64,
    tokens: u64,
    used_vocabulary: u64,
}

impl TokenWriter {
    /// Starts `tokens.bin` in an existing directory.
    pub fn create(directory: &Path, width: u64) -> Result<TokenWriter, DataError> {
        Ok(TokenWriter {
            output: Output::create(directory.join(TOKENS))?,
            width,
            tokens: 0,
            used_vocabulary: 0,
        })
    }

    /// Number of tokens so far: the position of the next one.
    pub fn position(&self) -> u64 {
        self.tokens
    }

    /// Appends tokens, whose ids are below 2¹⁵ or 2³¹, depending on the width.
    pub fn append(&mut self, tokens: &[Token]) -> Result<(), DataError> {
        for token in tokens {
            let flag = u32::from(token.target) << (8 * self.width - 1);
            let bytes = (token.id | flag).to_le_bytes();
            self.output.write(&bytes[..self.width as usize])?;
            self.used_vocabulary = self.used_vocabulary.max(u64::from(token.id) + 1);
        }
        self.tokens += tokens.len() as u64;
        Ok(())
    }

    /// The largest id so far plus one.
    pub fn used_vocabulary(&self) -> u64 {
        self.used_vocabulary
    }

    /// Closes the file and adds it to the record of an index.
    pub fn finish(self, record: PartRecord) -> Result<PartRecord, DataError> {
        Ok(PartRecord {
            token_width: self.width,
            tokens_file: self.output.finish()?,
            ..record
        })
    }
}

/// Writes `index.bin` and counts its entries.
pub(super) struct IndexWriter {
    output: Output,
    record: PartRecord,
}

impl IndexWriter {
    pub fn create(path: PathBuf) -> Result<IndexWriter, DataError> {
        Ok(IndexWriter {
            output: Output::create(path)?,
            record: PartRecord::default(),
        })
    }

    /// Number of samples so far.
    pub fn samples(&self) -> u64 {
        self.record.samples
    }

    pub fn append(&mut self, entry: Entry) -> Result<(), DataError> {
        self.output.write(&entry.to_bytes())?;
        self.record.samples += 1;
        self.record.tokens += u64::from(entry.length);
        self.record.target_tokens += u64::from(entry.targets);
        self.record.longest_sample = self.record.longest_sample.max(u64::from(entry.length));
        Ok(())
    }

    /// Closes the file; returns the counts.
    pub fn finish(self) -> Result<PartRecord, DataError> {
        Ok(PartRecord {
            index_file: self.output.finish()?,
            ..self.record
        })
    }
}

impl Entry {
    fn to_bytes(self) -> [u8; ENTRY as usize] {
        let mut bytes = [0; ENTRY as usize];
        bytes[..8].copy_from_slice(&self.start.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..].copy_from_slice(&self.targets.to_le_bytes());
        bytes
    }
}
