//! The data set of the ranks: samples by index, and micro-batches of them.
//!
//! The token store of one part (`train/` or `evaluation/`) has two files.
//! `tokens.bin` holds little-endian integers of 2 or 4 bytes. The top bit says whether the token carries
//! loss, the other bits are its id. `index.bin` holds 16 bytes a sample, little endian: the position of its
//! first token (u64, in tokens), the number of its tokens (u32), and how many of them after the first carry
//! loss (u32). Samples may share tokens: packed ones overlap by one, the last target of one and the first
//! input of the next. Where samples have several documents that do not see each other, `index.bin` has an entry for each
//! document, and `packs.bin` the first document of each sample (u64, little endian), and at its end their number.
//!
//! The store uses positioned reads instead of a memory map. The page cache serves both equally, and a sample
//! costs two system calls. A file that is truncated during training is an error of one sample instead of a
//! SIGBUS that kills the process.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::decoded::Decoding;
use super::error::DataError;
use super::kind::Kind;
use super::manifest::{FileRecord, Manifest, PartRecord};
use super::request::Stopped;
use super::synthetic::Language;
use super::tokenizer::Tokenizer;
use crate::engine::{IGNORE, MicroBatch};
use crate::recipe::schema::spec::Rows;
use crate::samples::Digest;
use crate::util::input;

/// The padded columns of a micro-batch are a multiple of this, for the kernels' speed.
const COLUMNS: usize = 8;

/// Directories of the parts in a prepared data set.
pub(super) const TRAIN: &str = "train";
pub(super) const EVALUATION: &str = "evaluation";

/// A micro-batch that owns its tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collated {
    /// Token ids, `[batch, seq_len]` row-major; padding is 0.
    pub tokens: Vec<u32>,
    /// Next-token targets, `[batch, seq_len]`; [`IGNORE`] carries no loss.
    pub targets: Vec<u32>,
    /// Number of rows.
    pub batch: usize,
    /// Number of samples, of one or several rows each.
    pub samples: usize,
    /// Tokens per padded row.
    pub seq_len: usize,
    /// Columns of each row before the padding.
    lengths: Vec<usize>,
    starts: Vec<u32>,
    /// Whether the completion of each row is desirable, if the data has labels.
    pub labels: Vec<bool>,
}

impl Collated {
    /// Rows of tokens and targets, each a sample, padded to the longest.
    #[cfg(test)]
    pub fn of_rows(rows: &[(&[u32], &[u32])]) -> Collated {
        let seq_len = rows
            .iter()
            .map(|(tokens, _)| tokens.len())
            .max()
            .unwrap_or(0);
        let padded = |row: &[u32], with| {
            let rest = std::iter::repeat_n(with, seq_len - row.len());
            row.iter().copied().chain(rest).collect::<Vec<u32>>()
        };
        Collated {
            tokens: rows
                .iter()
                .flat_map(|(tokens, _)| padded(tokens, 0))
                .collect(),
            targets: rows
                .iter()
                .flat_map(|(_, targets)| padded(targets, IGNORE))
                .collect(),
            batch: rows.len(),
            samples: rows.len(),
            seq_len,
            lengths: rows.iter().map(|(tokens, _)| tokens.len()).collect(),
            ..Collated::default()
        }
    }

    /// As an engine takes it.
    pub fn micro_batch(&self) -> MicroBatch<'_> {
        MicroBatch {
            tokens: &self.tokens,
            targets: &self.targets,
            batch: self.batch,
            seq_len: self.seq_len,
            starts: &self.starts,
            ..MicroBatch::default()
        }
    }

    /// Tokens of each row before the padding.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The digest of a sample, which is at this position of the global order: of its rows, and of its label.
    pub fn digest(&self, sample: usize, position: u64) -> Digest {
        let rows = self.batch / self.samples;
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for row in sample * rows..(sample + 1) * rows {
            let (of_row, targets_of_row) = self.row(row);
            tokens.extend(of_row);
            targets.extend(targets_of_row);
        }
        if let Some(&label) = self.labels.get(sample) {
            tokens.push(u32::from(label));
            targets.push(u32::from(label));
        }
        Digest::of(position, &tokens, &targets, IGNORE)
    }

    /// Tokens and targets of a row without its padding, so that they do not depend on the other rows.
    pub fn row(&self, row: usize) -> (&[u32], &[u32]) {
        let start = row * self.seq_len;
        let columns = start..start + self.lengths[row];
        (&self.tokens[columns.clone()], &self.targets[columns])
    }
}

/// A part of a prepared data set, opened by a rank.
#[derive(Debug)]
pub struct Dataset {
    sequence_length: usize,
    /// Most tokens of a row.
    row_limit: usize,
    kind: Kind,
    /// Counts of this part.
    pub(super) record: PartRecord,
    source: Source,
    decoded: Option<DecodedRows>,
}

/// How rows were decoded, where mismatched ones need it.
#[derive(Debug)]
struct DecodedRows {
    rules: Rows,
    /// Of the data's tokenizer.
    checksum: Value,
    tokenizer: Option<Arc<Tokenizer>>,
}

#[derive(Debug)]
enum Source {
    Store(Store),
    Synthetic(Box<Language>),
}

impl Dataset {
    /// Opens the training part of a directory that [`super::prepare()`] made. It compares sizes with the manifest but
    /// not checksums: [`super::prepare()`] does that once for all ranks.
    pub fn train(directory: &Path) -> Result<Dataset, DataError> {
        let manifest = Manifest::read(directory)?;
        Dataset::open(&directory.join(TRAIN), manifest.train.clone(), &manifest)
    }

    /// Opens the evaluation part; `None` when the data has no samples for evaluation.
    pub fn evaluation(directory: &Path) -> Result<Option<Dataset>, DataError> {
        let manifest = Manifest::read(directory)?;
        let record = manifest.evaluation.clone();
        let open = |record| Dataset::open(&directory.join(EVALUATION), record, &manifest);
        record.map(open).transpose()
    }

    fn open(part: &Path, record: PartRecord, manifest: &Manifest) -> Result<Dataset, DataError> {
        let source = match &manifest.synthetic {
            Some(settings) => Source::Synthetic(Box::new(Language::new(settings, "synthetic")?)),
            None => Source::Store(Store::open(
                part.to_path_buf(),
                record.clone(),
                manifest.vocabulary_size,
            )?),
        };
        Ok(Dataset {
            sequence_length: manifest.sequence_length as usize,
            row_limit: manifest.row_limit() as usize,
            kind: manifest.kind,
            record,
            source,
            decoded: manifest
                .decoded_rows()
                .map(|(rules, checksum)| DecodedRows {
                    rules,
                    checksum,
                    tokenizer: None,
                }),
        })
    }

    /// Whether [`Dataset::collate_mismatched`] needs the tokenizer of the data ([`Dataset::set_tokenizer`]).
    pub fn needs_tokenizer(&self) -> bool {
        self.decoded.is_some()
    }

    /// Gives it the tokenizer of the data, where it needs one.
    ///
    /// # Errors
    /// It is another tokenizer.
    pub fn set_tokenizer(&mut self, tokenizer: Arc<Tokenizer>) -> Result<(), DataError> {
        let Some(decoded) = &mut self.decoded else {
            return Ok(());
        };
        if decoded.checksum != tokenizer.checksum {
            return Err(DataError::record(
                &tokenizer.name,
                "it is another tokenizer than that of the prepared data",
                "restore its files, or begin a new run",
            ));
        }
        decoded.tokenizer = Some(tokenizer);
        Ok(())
    }

    pub fn len(&self) -> u64 {
        self.record.samples
    }

    /// Whether there are no samples; a prepared data set has at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample with this index, below [`Dataset::len`].
    pub fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let samples = self.len();
        if index >= samples {
            return Err(DataError::OutOfRange { index, samples });
        }
        match &self.source {
            Source::Store(store) => store.sample(index),
            Source::Synthetic(language) => {
                let tokens = self.record.longest_sample as usize;
                Ok(Sample {
                    tokens: language.sample(self.record.first_sample + index, tokens),
                    loss_mask: vec![true; tokens],
                    starts: Vec::new(),
                })
            }
        }
    }

    /// What a sample is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The rows of a sample, and its label if it has one.
    pub fn rows(&self, index: u64) -> Result<(Vec<Sample>, Option<bool>), DataError> {
        Ok(rows(self.sample(index)?, self.kind))
    }

    /// Collates the rows of samples into one micro-batch, padded on the right to the longest of them. The width is
    /// rounded up to a multiple of 8 columns, but never exceeds the sequence length.
    pub fn collate(&self, indices: impl IntoIterator<Item = u64>) -> Result<Collated, DataError> {
        let mut samples = Vec::new();
        let mut labels = Vec::new();
        let mut count = 0;
        for index in indices {
            count += 1;
            let (rows, label) = self.rows(index)?;
            samples.extend(rows);
            labels.extend(label);
        }
        Ok(self.padded(samples, count, labels))
    }

    /// Collates the prompt of one sample with the completion of another, for each of these pairs of samples with one row.
    pub fn collate_mismatched(
        &self,
        pairs: impl IntoIterator<Item = [u64; 2]>,
    ) -> Result<Collated, DataError> {
        let mut rows = Vec::new();
        for [prompt, completion] in pairs {
            if let Some(decoded) = &self.decoded {
                rows.push(self.mismatched_text(decoded, prompt, completion)?);
                continue;
            }
            let mut row = self.row(prompt)?;
            let other = self.row(completion)?;
            row.tokens.truncate(row.first_target());
            row.loss_mask.truncate(row.tokens.len());
            let completion = other.first_target()..;
            row.tokens.extend(&other.tokens[completion.clone()]);
            row.loss_mask.extend(&other.loss_mask[completion]);
            row.tokens.truncate(self.row_limit);
            row.loss_mask.truncate(self.row_limit);
            rows.push(row);
        }
        let count = rows.len();
        Ok(self.padded(rows, count, Vec::new()))
    }

    /// The same for a pair of samples whose rows are decoded. The completion was decoded before, so that it has a second space
    /// before its end token.
    fn mismatched_text(
        &self,
        decoded: &DecodedRows,
        prompt: u64,
        completion: u64,
    ) -> Result<Sample, DataError> {
        let place = format!("sample {prompt} with the completion of {completion}");
        let Some(tokenizer) = &decoded.tokenizer else {
            return Err(DataError::record(
                &place,
                "its mismatched rows need the tokenizer of the data",
                "launch again",
            ));
        };
        let (prompt, completion) = (parts(self.sample(prompt)?), parts(self.sample(completion)?));
        let row = Decoding::new(tokenizer, decoded.rules, self.row_limit as u64).and_then(|it| {
            let prompt = &prompt.tokens[..prompt.first_target()];
            let completion = &completion.tokens[completion.first_target()..];
            it.row(prompt, completion)
        });
        let row = row.map_err(|fault| DataError::record(&place, fault.problem, fault.help))?;
        Ok(Sample {
            tokens: row.tokens.iter().map(|token| token.id).collect(),
            loss_mask: row.tokens.iter().map(|token| token.target).collect(),
            ..Sample::default()
        })
    }

    /// The first row of a sample.
    fn row(&self, index: u64) -> Result<Sample, DataError> {
        let (mut rows, _) = self.rows(index)?;
        Ok(rows.swap_remove(0))
    }

    fn padded(&self, samples: Vec<Sample>, count: usize, labels: Vec<bool>) -> Collated {
        let lengths: Vec<usize> = samples.iter().map(Sample::inputs).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let seq_len = longest.next_multiple_of(COLUMNS);
        let seq_len = seq_len.min(self.sequence_length).max(longest);
        let mut tokens = vec![0; samples.len() * seq_len];
        let mut targets = vec![IGNORE; samples.len() * seq_len];
        let mut starts = Vec::new();
        for (row, sample) in samples.iter().enumerate() {
            let mut at = row * seq_len;
            for document in sample.documents() {
                starts.push(at as u32);
                // The input at position t predicts the token at t + 1. Nothing else shifts tokens.
                for t in document.start..document.end - 1 {
                    tokens[at] = sample.tokens[t];
                    if sample.loss_mask[t + 1] {
                        targets[at] = sample.tokens[t + 1];
                    }
                    at += 1;
                }
            }
        }
        if starts.len() == samples.len() {
            starts.clear();
        }
        Collated {
            tokens,
            targets,
            batch: samples.len(),
            samples: count,
            seq_len,
            lengths,
            starts,
            labels,
        }
    }
}

/// The rows of a sample, and its label.
pub(super) fn rows(mut sample: Sample, kind: Kind) -> (Vec<Sample>, Option<bool>) {
    match kind {
        Kind::Text => (vec![sample], None),
        Kind::Labelled => {
            let at = sample.end_of_row();
            let label = sample.tokens.get(at) == Some(&1);
            sample.tokens.truncate(at);
            sample.loss_mask.truncate(at);
            (vec![sample], Some(label))
        }
        Kind::Pair => {
            let at = sample.end_of_row();
            let rejected = Sample {
                tokens: sample.tokens.split_off(at),
                loss_mask: sample.loss_mask.split_off(at),
                ..Sample::default()
            };
            (vec![sample, rejected], None)
        }
    }
}

/// What follows the label of a sample: the tokens of its prompt, and with loss those of its completion.
fn parts(mut sample: Sample) -> Sample {
    let at = (sample.end_of_row() + 1).min(sample.tokens.len());
    Sample {
        tokens: sample.tokens.split_off(at),
        loss_mask: sample.loss_mask.split_off(at),
        ..Sample::default()
    }
}

/// Name of the file with the token ids.
pub(super) const TOKENS: &str = "tokens.bin";
/// Name of the file with the entries of samples, or of their documents.
pub(super) const INDEX: &str = "index.bin";
/// Name of the file that says which documents each sample has.
pub(super) const PACKS: &str = "packs.bin";
/// Bytes of one entry in `index.bin`.
pub(super) const ENTRY: u64 = 16;
/// Bytes of one number in `packs.bin`.
const PACK: u64 = 8;

/// Position of one sample, or of one document of it, in `tokens.bin`.
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
    pub fn to_bytes(self) -> [u8; ENTRY as usize] {
        let (length, targets) = (u128::from(self.length), u128::from(self.targets));
        (u128::from(self.start) | length << 64 | targets << 96).to_le_bytes()
    }

    pub fn from_bytes(bytes: [u8; ENTRY as usize]) -> Entry {
        let entry = u128::from_le_bytes(bytes);
        Entry {
            start: entry as u64,
            length: (entry >> 64) as u32,
            targets: (entry >> 96) as u32,
        }
    }
}

/// One sample: tokens, and for each of them whether a model learns to predict it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// Token ids; at least two.
    pub tokens: Vec<u32>,
    /// Whether each token carries loss; as long as `tokens`. The first token never does, whatever its value
    /// here: no token precedes it.
    pub loss_mask: Vec<bool>,
    /// Where its documents after the first begin, which do not see those before them.
    pub starts: Vec<usize>,
}

impl Sample {
    /// The tokens of each document.
    pub fn documents(&self) -> impl Iterator<Item = Range<usize>> {
        let ends = self.starts.iter().copied().chain([self.tokens.len()]);
        let starts = [0].into_iter().chain(self.starts.iter().copied());
        starts.zip(ends).map(|(start, end)| start..end)
    }

    /// The number of tokens that a model reads: all but the last of each document.
    pub fn inputs(&self) -> usize {
        self.tokens.len() - 1 - self.starts.len()
    }

    /// Where the first row of several, or of one with a label, ends.
    fn end_of_row(&self) -> usize {
        let mut marks = self.loss_mask.windows(2);
        let border = marks.position(|pair| pair == [true, false]);
        border.map_or(self.tokens.len(), |border| border + 1)
    }

    /// Where its first target is: the number of tokens of its prompt.
    pub fn first_target(&self) -> usize {
        let mut marks = self.loss_mask.iter();
        marks
            .position(|&target| target)
            .unwrap_or(self.tokens.len())
    }
}

/// A part opened for reading.
#[derive(Debug)]
pub(super) struct Store {
    directory: PathBuf,
    tokens: File,
    index: File,
    /// If samples have several documents.
    packs: Option<File>,
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
        let packs = record.packs_file.as_ref();
        let packs = packs.map(|record| open(PACKS, record)).transpose()?;
        let entries = match &record.packs_file {
            None => record.samples,
            Some(packs) if packs.bytes == (record.samples + 1) * PACK => {
                record.index_file.bytes / ENTRY
            }
            Some(packs) => {
                return Err(DataError::store(
                    &directory.join(PACKS),
                    format!(
                        "{} bytes do not hold {} samples",
                        packs.bytes, record.samples
                    ),
                ));
            }
        };
        if !matches!(record.token_width, 2 | 4) || record.index_file.bytes != entries * ENTRY {
            return Err(DataError::store(
                &directory.join(INDEX),
                format!(
                    "{} bytes do not hold {} samples of {ENTRY} bytes with token ids of {} bytes",
                    record.index_file.bytes, entries, record.token_width
                ),
            ));
        }
        Ok(Store {
            directory,
            tokens,
            index,
            packs,
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
        record.index_file.verify(&directory.join(INDEX), stopped)?;
        match &record.packs_file {
            Some(packs) => packs.verify(&directory.join(PACKS), stopped),
            None => Ok(()),
        }
    }

    /// The entries of a sample; `index` is below the number of samples.
    fn entries(&self, index: u64) -> Result<Range<u64>, DataError> {
        let Some(packs) = &self.packs else {
            return Ok(index..index + 1);
        };
        let path = self.directory.join(PACKS);
        let mut bytes = [0; 2 * PACK as usize];
        packs
            .read_exact_at(&mut bytes, index * PACK)
            .map_err(|error| DataError::read(&path, error))?;
        let [start, end] = [0, 1].map(|at| {
            let part = bytes.as_chunks().0[at];
            u64::from_le_bytes(part)
        });
        let documents = self.record.index_file.bytes / ENTRY;
        // Each has at least two tokens.
        if start < end && end <= documents && end - start <= self.record.longest_sample {
            return Ok(start..end);
        }
        Err(DataError::store(
            &path,
            format!("sample {index} cannot be documents {start} to {end}, there are {documents}"),
        ))
    }

    /// An entry of the index: of a sample, or of a document.
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
        let mut sample = Sample::default();
        for entry in self.entries(index)? {
            if !sample.tokens.is_empty() {
                sample.starts.push(sample.tokens.len());
            }
            self.read(index, self.entry(entry)?, &mut sample)?;
        }
        Ok(sample)
    }

    /// Adds the tokens of an entry of this sample.
    fn read(&self, index: u64, entry: Entry, sample: &mut Sample) -> Result<(), DataError> {
        let path = self.directory.join(TOKENS);
        let (width, length) = (self.record.token_width, entry.length as usize);
        let mut bytes = vec![0; length * width as usize];
        self.tokens
            .read_exact_at(&mut bytes, entry.start * width)
            .map_err(|error| DataError::read(&path, error))?;
        let flag = 1u32 << (8 * width - 1);
        sample.tokens.reserve(length);
        sample.loss_mask.reserve(length);
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
            sample.tokens.push(id);
            sample.loss_mask.push(value & flag != 0);
        }
        Ok(())
    }
}
