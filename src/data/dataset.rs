//! The data set of the ranks: samples by index, and micro-batches of them.

use std::path::Path;

use crate::engine::IGNORE;
use crate::util::format::count;

use super::error::DataError;
use super::manifest::{Manifest, PartRecord};
use super::sample::Sample;
use super::store::Store;
use super::synthetic::Language;

/// The padded columns of a micro-batch are a multiple of this, for the kernels' speed.
const COLUMNS: usize = 8;

/// The part of a prepared data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Train,
    Evaluation,
}

impl Part {
    /// The part's directory in the prepared data set.
    pub(super) fn directory(self) -> &'static str {
        match self {
            Part::Train => "train",
            Part::Evaluation => "evaluation",
        }
    }
}

/// A micro-batch that owns its tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collated {
    /// Token ids, `[batch, seq_len]` row-major; padding is 0.
    pub tokens: Vec<u32>,
    /// Next-token targets, `[batch, seq_len]`; [`IGNORE`] carries no loss.
    pub targets: Vec<u32>,
    pub batch: usize,
    /// Tokens per padded row.
    pub seq_len: usize,
    /// Columns of each row before the padding.
    lengths: Vec<usize>,
}

impl Collated {
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
    manifest: Manifest,
    record: PartRecord,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Store(Store),
    Synthetic(Box<Language>),
}

impl Dataset {
    /// Opens a part of a directory that [`super::prepare()`] made; `None` when the data has no samples for
    /// evaluation. It compares sizes with the manifest but not checksums: [`super::prepare()`] does that once
    /// for all ranks.
    pub fn open(directory: &Path, part: Part) -> Result<Option<Dataset>, DataError> {
        let manifest = Manifest::read(directory)?;
        let record = match part {
            Part::Train => manifest.train.clone(),
            Part::Evaluation => match manifest.evaluation.clone() {
                Some(record) => record,
                None => return Ok(None),
            },
        };
        let source = match &manifest.synthetic {
            Some(settings) => Source::Synthetic(Box::new(Language::new(settings, "synthetic")?)),
            None => Source::Store(Store::open(
                directory.join(part.directory()),
                record.clone(),
                manifest.vocabulary_size,
            )?),
        };
        Ok(Some(Dataset {
            manifest,
            record,
            source,
        }))
    }

    pub fn len(&self) -> u64 {
        self.record.samples
    }

    /// Whether there are no samples; a prepared data set has at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The manifest of the data set.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Counts of this part.
    pub fn record(&self) -> &PartRecord {
        &self.record
    }

    /// The synthetic language, if the data is synthetic.
    pub fn language(&self) -> Option<&Language> {
        match &self.source {
            Source::Synthetic(language) => Some(language),
            Source::Store(_) => None,
        }
    }

    /// The sample with this index, below [`Dataset::len`].
    pub fn sample(&self, index: u64) -> Result<Sample, DataError> {
        self.check(index)?;
        match &self.source {
            Source::Store(store) => store.sample(index),
            Source::Synthetic(language) => {
                let tokens = self.record.longest_sample as usize;
                Ok(Sample {
                    tokens: language.sample(self.record.first_sample + index, tokens),
                    loss_mask: vec![true; tokens],
                })
            }
        }
    }

    /// The number of targets of a sample, without reading its tokens.
    pub fn targets(&self, index: u64) -> Result<u64, DataError> {
        self.check(index)?;
        match &self.source {
            Source::Store(store) => Ok(u64::from(store.entry(index)?.targets)),
            Source::Synthetic(_) => Ok(self.record.longest_sample - 1),
        }
    }

    fn check(&self, index: u64) -> Result<(), DataError> {
        if index < self.len() {
            return Ok(());
        }
        Err(DataError::OutOfRange {
            index,
            samples: self.len(),
        })
    }

    /// Collates samples into one micro-batch, padded on the right to the longest of them. The width is
    /// rounded up to a multiple of 8 columns, but never exceeds the sequence length.
    pub fn collate(&self, indices: impl IntoIterator<Item = u64>) -> Result<Collated, DataError> {
        let samples: Vec<Sample> = indices
            .into_iter()
            .map(|index| self.sample(index))
            .collect::<Result<_, _>>()?;
        let lengths: Vec<usize> = samples.iter().map(|s| s.tokens.len() - 1).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let limit = self.manifest.sequence_length as usize;
        let seq_len = longest.next_multiple_of(COLUMNS).min(limit).max(longest);
        let mut tokens = vec![0; samples.len() * seq_len];
        let mut targets = vec![IGNORE; samples.len() * seq_len];
        for (row, sample) in samples.iter().enumerate() {
            let start = row * seq_len;
            for (column, (input, target)) in sample.next_token().enumerate() {
                tokens[start + column] = input;
                targets[start + column] = target;
            }
        }
        Ok(Collated {
            tokens,
            targets,
            batch: samples.len(),
            seq_len,
            lengths,
        })
    }

    /// A one-line summary for people: amount and source of the data.
    pub fn describe(&self) -> String {
        let PartRecord {
            samples,
            tokens,
            target_tokens,
            ..
        } = self.record;
        let manifest = &self.manifest;
        let samples_text = count(samples, "sample");
        if let Some(language) = self.language() {
            return format!(
                "{samples_text} of {} tokens, synthetic language of {} words, \
                 entropy {:.4} nats per token (single words {:.4})",
                self.record.longest_sample,
                language.vocabulary(),
                language.entropy(),
                language.unigram_entropy(),
            );
        }
        let mut line = format!("{samples_text}, {tokens} tokens");
        if target_tokens + samples != tokens {
            line += &format!(", {target_tokens} of them targets");
        }
        if manifest.packing {
            line += &format!(", packed to {}", manifest.sequence_length);
        } else {
            line += &format!(", the longest {}", self.record.longest_sample);
        }
        line += &format!(
            ", tokenizer {} ({} ids)",
            manifest.tokenizer, manifest.vocabulary_size
        );
        let skipped = manifest.skipped.to_string();
        if !skipped.is_empty() {
            line += &format!(" ({skipped})");
        }
        line
    }
}
