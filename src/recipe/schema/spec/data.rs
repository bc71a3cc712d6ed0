//! The training and evaluation data.

use serde::{Deserialize, Serialize};

/// The training and evaluation data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// Sources of training samples.
    pub train: Vec<DataSource>,
    /// Evaluation sources; empty: `held_out` samples of the training data are held out.
    pub evaluation: Vec<DataSource>,
    /// Samples held out for evaluation without an evaluation source; below 1: a share of the data.
    pub held_out: Option<f64>,
    /// Maximum tokens per sample.
    pub sequence_length: u64,
    /// Pack several documents into one sample.
    pub packing: bool,
    /// Loss on the answers only; default: the objective's (`true` for SFT).
    pub answers_only: Option<bool>,
    /// Shuffle the sample order, by `seed`.
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

/// The `path` of the synthetic language.
pub const SYNTHETIC: &str = "synthetic";

impl Data {
    /// The synthetic language, where it is the training data. It is always the only source.
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
    /// The file format; default: by the file's extension.
    pub format: Option<DataFormat>,
    /// Upstream's split of the data set.
    pub split: Option<String>,
    /// Upstream's configuration of the data set on the hub.
    pub config: Option<String>,
    /// Upstream's columns of the data set.
    pub columns: Vec<String>,
    /// Share of the source's samples, 0 to 1.
    pub weight: Option<f64>,
    /// The synthetic language, when `path` is `synthetic`.
    pub synthetic: Option<Synthetic>,
}

/// The file format of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataFormat {
    /// One JSON object a line.
    Jsonl,
    /// Columnar files of Apache Parquet.
    Parquet,
    /// Plain text; blank lines separate documents.
    Text,
    /// Token ids, little endian u16 or u32.
    Bin,
}

/// The synthetic language: a seeded Markov source with a known entropy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Synthetic {
    /// Vocabulary size V of the language.
    pub vocabulary: u64,
    /// Successors of each state; fewer mean lower entropy.
    pub branching: u64,
    /// Samples in the data set.
    pub samples: u64,
    /// Seed of the language, separate from the run's.
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
