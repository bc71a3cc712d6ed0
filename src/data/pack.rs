//! Cuts documents into samples and writes them as the token store of one part, whose layout is in [`super::dataset`].
//! A document is one sample, or documents are packed: concatenated and cut.
//!
//! A sample of a sequence length L holds L + 1 tokens: L inputs, and L targets that are the same tokens
//! shifted by one. Packed samples overlap by one token, so that every token of the stream except the first is
//! a target exactly once. Without the extra token, as upstream has it, a sample holds L tokens, of which the first
//! is no target, and packed samples do not overlap. The rest of a stream becomes a shorter sample. A sample without
//! a target token teaches nothing and is skipped.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::util::durable::FileError;

use super::dataset::{Entry, INDEX, TOKENS};
use super::error::DataError;
use super::manifest::{Checksum, FileRecord, PartRecord, Skipped};
use super::token::Token;

/// Bytes of a token id for a vocabulary; the top bit is reserved for the loss mark.
pub(super) fn token_width(vocabulary_size: u64) -> u64 {
    if vocabulary_size <= 1 << 15 { 2 } else { 4 }
}

/// A file that is written once, sequentially, with its checksum.
pub(super) struct Output {
    path: PathBuf,
    file: BufWriter<File>,
    checksum: Checksum,
    bytes: u64,
}

impl Output {
    pub fn create(path: PathBuf) -> Result<Output, DataError> {
        let file =
            File::create(&path).map_err(|error| FileError::from_io("create", &path, 0, error))?;
        Ok(Output {
            path,
            file: BufWriter::with_capacity(1 << 18, file),
            checksum: Checksum::default(),
            bytes: 0,
        })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.checksum.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file
            .write_all(bytes)
            .map_err(|error| FileError::from_io("write", &self.path, self.bytes, error).into())
    }

    pub fn finish(mut self) -> Result<FileRecord, DataError> {
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

/// Writes the samples of a part.
pub(super) struct SampleWriter {
    tokens: Output,
    index: IndexWriter,
    /// Bytes of a token id.
    width: u64,
    /// Tokens of a full sample.
    limit: u64,
    /// Tokens that a packed sample shares with the next one.
    overlap: u64,
    /// Number of tokens so far: the position of the next one.
    position: u64,
    /// Position at which the open sample of the stream begins; the end of the tokens if none is open.
    start: u64,
    /// Target tokens in the open sample.
    targets: u32,
    /// Full samples cut from streams.
    full: u64,
    used_vocabulary: u64,
    /// Counts of skipped records; readers add records that gave no tokens.
    pub skipped: Skipped,
}

impl SampleWriter {
    /// Starts a part in an existing directory.
    pub fn create(
        directory: &Path,
        width: u64,
        sequence_length: u64,
        extra_token: bool,
    ) -> Result<SampleWriter, DataError> {
        let overlap = u64::from(extra_token);
        Ok(SampleWriter {
            tokens: Output::create(directory.join(TOKENS))?,
            index: IndexWriter::create(directory.join(INDEX))?,
            width,
            limit: sequence_length + overlap,
            overlap,
            position: 0,
            start: 0,
            targets: 0,
            full: 0,
            used_vocabulary: 0,
            skipped: Skipped::default(),
        })
    }

    /// Number of samples so far.
    pub fn samples(&self) -> u64 {
        self.index.record.samples
    }

    /// A document that becomes one sample.
    pub fn document(&mut self, mut tokens: Vec<Token>) -> Result<(), DataError> {
        self.cut()?;
        if tokens.len() as u64 > self.limit {
            tokens.truncate(self.limit as usize);
            self.skipped.truncated += 1;
        }
        if tokens.iter().skip(1).all(|token| !token.target) {
            self.skipped.without_targets += 1;
            return Ok(());
        }
        self.pack(&tokens)?;
        self.cut()
    }

    /// More tokens of a stream, whose ids are below 2¹⁵ or 2³¹, depending on the width.
    pub fn pack(&mut self, tokens: &[Token]) -> Result<(), DataError> {
        for token in tokens {
            let flag = u32::from(token.target) << (8 * self.width - 1);
            let bytes = (token.id | flag).to_le_bytes();
            self.tokens.write(&bytes[..self.width as usize])?;
            self.used_vocabulary = self.used_vocabulary.max(u64::from(token.id) + 1);
            if self.open() > 0 {
                self.targets += u32::from(token.target);
            }
            self.position += 1;
            if self.open() == self.limit {
                self.full += 1;
                self.emit()?;
                // With an extra token the last target is the next sample's first input.
                self.start = self.position - self.overlap;
            }
        }
        Ok(())
    }

    /// Ends the stream; the rest becomes a shorter sample.
    pub fn cut(&mut self) -> Result<(), DataError> {
        if self.open() > 1 {
            self.emit()?;
        }
        self.start = self.position;
        Ok(())
    }

    /// Closes the part; returns its record and a summary.
    pub fn finish(mut self) -> Result<(PartRecord, Summary), DataError> {
        self.cut()?;
        let record = PartRecord {
            token_width: self.width,
            tokens_file: self.tokens.finish()?,
            ..self.index.finish()?
        };
        let summary = Summary {
            used_vocabulary: self.used_vocabulary,
            tokens: self.position,
            full: self.full,
            skipped: self.skipped,
        };
        Ok((record, summary))
    }

    /// Tokens in the open sample.
    fn open(&self) -> u64 {
        self.position - self.start
    }

    fn emit(&mut self) -> Result<(), DataError> {
        let entry = Entry {
            start: self.start,
            length: self.open() as u32,
            targets: std::mem::take(&mut self.targets),
        };
        if entry.targets == 0 {
            self.skipped.without_targets += 1;
            return Ok(());
        }
        self.index.append(entry)
    }
}

/// Summary of a part's preparation.
pub(super) struct Summary {
    /// The largest id plus one.
    pub used_vocabulary: u64,
    pub tokens: u64,
    /// Samples of the full sequence length.
    pub full: u64,
    /// Counts of skipped records.
    pub skipped: Skipped,
}

impl Summary {
    /// Adds the summary of another part.
    pub fn add(&mut self, other: &Summary) {
        self.used_vocabulary = self.used_vocabulary.max(other.used_vocabulary);
        self.tokens += other.tokens;
        self.full += other.full;
        self.skipped.empty += other.skipped.empty;
        self.skipped.without_answer += other.skipped.without_answer;
        self.skipped.without_targets += other.skipped.without_targets;
        self.skipped.truncated += other.skipped.truncated;
    }
}

#[cfg(test)]
mod tests {
    //! Packing: every token of the stream except the first is a target exactly once.

    use proptest::prelude::*;

    use super::super::dataset::Store;
    use super::*;

    /// Writes with `write` and reads the samples back as (id, target) pairs.
    fn samples(
        sequence_length: u64,
        extra_token: bool,
        write: impl FnOnce(&mut SampleWriter),
    ) -> (Vec<Vec<(u32, bool)>>, Summary) {
        let directory = tempfile::tempdir().unwrap();
        let mut writer =
            SampleWriter::create(directory.path(), 2, sequence_length, extra_token).unwrap();
        write(&mut writer);
        let (record, summary) = writer.finish().unwrap();
        let store = Store::open(directory.path().to_path_buf(), record.clone(), 1 << 15).unwrap();
        let read: Vec<Vec<(u32, bool)>> = (0..record.samples)
            .map(|index| {
                let sample = store.sample(index).unwrap();
                let targets = sample.loss_mask[1..]
                    .iter()
                    .filter(|&&target| target)
                    .count();
                assert_eq!(store.entry(index).unwrap().targets as usize, targets);
                sample.tokens.into_iter().zip(sample.loss_mask).collect()
            })
            .collect();
        let count =
            |of: fn(&[(u32, bool)]) -> usize| read.iter().map(|s| of(s) as u64).sum::<u64>();
        assert_eq!(record.tokens, count(|sample| sample.len()));
        assert_eq!(
            record.target_tokens,
            count(|sample| sample[1..].iter().filter(|token| token.1).count())
        );
        (read, summary)
    }

    fn tokens(flags: &[bool]) -> Vec<Token> {
        let ids = 0u32..;
        flags
            .iter()
            .zip(ids)
            .map(|(&target, id)| Token { id, target })
            .collect()
    }

    proptest! {
        // Every case fsyncs two files.
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn packing_loses_and_repeats_no_target(
            length in 1u64..20,
            extra in any::<bool>(),
            flags in prop::collection::vec(any::<bool>(), 0..200),
            pieces in prop::collection::vec(1usize..40, 1..20),
        ) {
            let stream = tokens(&flags);
            let (samples, _) = samples(length, extra, |writer| {
                let mut rest = &stream[..];
                for &piece in pieces.iter().cycle() {
                    let (now, later) = rest.split_at(piece.min(rest.len()));
                    writer.pack(now).unwrap();
                    rest = later;
                    if rest.is_empty() {
                        break;
                    }
                }
            });
            let mut learned = Vec::new();
            for sample in &samples {
                prop_assert!((2..=length as usize + usize::from(extra)).contains(&sample.len()));
                prop_assert!(sample.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0));
                learned.extend(sample[1..].iter().filter(|token| token.1).map(|token| token.0));
            }
            // Ids are positions. Samples that do not overlap begin with a token that is no target.
            let begins = |id: u32| if extra { id == 0 } else { u64::from(id) % length == 0 };
            let targets = stream.iter().filter(|token| token.target && !begins(token.id));
            let expected: Vec<u32> = targets.map(|token| token.id).collect();
            prop_assert_eq!(learned, expected);
        }

        #[test]
        fn documents_of_their_own_share_nothing(
            length in 1u64..20,
            extra in any::<bool>(),
            documents in prop::collection::vec(prop::collection::vec(any::<bool>(), 0..30), 0..20),
        ) {
            let (samples, summary) = samples(length, extra, |writer| {
                documents.iter().for_each(|flags| writer.document(tokens(flags)).unwrap());
            });
            let kept: Vec<Vec<(u32, bool)>> = documents
                .iter()
                .map(|flags| flags[..flags.len().min(length as usize + usize::from(extra))].to_vec())
                .filter(|flags| flags.iter().skip(1).any(|&target| target))
                .map(|flags| (0..).zip(flags).collect())
                .collect();
            prop_assert_eq!(&samples, &kept);
            prop_assert_eq!(
                summary.skipped.without_targets,
                (documents.len() - samples.len()) as u64
            );
        }
    }
}
