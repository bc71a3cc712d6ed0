//! What is trained on.

use serde::{Deserialize, Serialize};

/// What is trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// Training sources.
    pub train: Vec<DataSource>,
    /// Evaluation sources; empty: `held_out` samples are taken off the training data.
    pub evaluation: Vec<DataSource>,
    /// Samples held out for evaluation when there is no evaluation source; below 1: a share.
    pub held_out: Option<f64>,
    /// Tokens per sample at most.
    pub sequence_length: u64,
    /// Put several documents into one sample.
    pub packing: bool,
    /// Loss on the answers only; `None`: as the objective has it (yes for SFT).
    pub answers_only: Option<bool>,
    /// Shuffle the order.
    pub shuffle: bool,
}

impl Default for Data {
    fn default() -> Self {
        Data {
            train: Vec::new(),
            evaluation: Vec::new(),
            held_out: None,
            sequence_length: 1024,
            packing: false,
            answers_only: None,
            shuffle: true,
        }
    }
}

/// The path of a source that is the synthetic language.
pub const SYNTHETIC: &str = "synthetic";

impl Data {
    /// The synthetic language, when it is what is trained on. It is always the only source.
    pub fn synthetic(&self) -> Option<Synthetic> {
        match self.train.as_slice() {
            [source] if source.path == SYNTHETIC => {
                Some(source.synthetic.clone().unwrap_or_default())
            }
            _ => None,
        }
    }
}

/// One source of samples.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSource {
    /// A file, a directory, a glob, a hub id, or `synthetic`.
    pub path: String,
    /// `None`: by the file's ending.
    pub format: Option<DataFormat>,
    /// The split that a recipe names.
    pub split: Option<String>,
    /// The hub configuration that a recipe names.
    pub config: Option<String>,
    /// Columns to read.
    pub columns: Vec<String>,
    /// Share of the source's samples to take, 0 to 1.
    pub weight: Option<f64>,
    /// The synthetic language, when `path` is `synthetic`.
    pub synthetic: Option<Synthetic>,
}

/// How a source is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataFormat {
    /// One JSON object a line.
    Jsonl,
    /// Apache Parquet.
    Parquet,
    /// Plain text: a document per blank-line-separated block.
    Text,
    /// Token ids, little endian u16 or u32.
    Bin,
}

/// The synthetic language: a seeded Markov source with a known entropy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Synthetic {
    /// Words of the language, V.
    pub vocabulary: u64,
    /// Successors that each state may have; smaller means lower entropy.
    pub branching: u64,
    /// Samples in the data set.
    pub samples: u64,
    /// Seed of the language itself, apart from the run's.
    pub seed: u64,
}

impl Default for Synthetic {
    fn default() -> Self {
        Synthetic {
            vocabulary: 256,
            branching: 8,
            samples: 100_000,
            seed: 0,
        }
    }
}
