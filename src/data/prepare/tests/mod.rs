//! Preparation from end to end: ranks read the content of the sources.

mod answers;
mod documents;
mod faults;
mod preferences;
mod refused;
mod reuse;
mod shares;
mod synthetic;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::data::{Dataset, Phase, Sample};
use crate::recipe::schema::spec::{self, Data, DataSource, Objective};

/// A part of the prepared data.
enum Part {
    Train,
    Evaluation,
}

/// A recipe's data settings with a directory for the preparation.
struct Case {
    directory: tempfile::TempDir,
    data: Data,
    tokenizer: spec::Tokenizer,
    objective: Objective,
    seed: u64,
    vocab_size: Option<u64>,
    resume: bool,
    /// The recorded fingerprint of the data with which the run began.
    fingerprint: Option<String>,
    /// The dialect's spelling of keys.
    key: fn(&str) -> String,
    /// Checks for a stop that return `false` before one returns `true`.
    patience: Option<AtomicUsize>,
}

impl Case {
    fn new() -> Case {
        Case {
            directory: tempfile::tempdir().unwrap(),
            data: Data::default(),
            tokenizer: spec::Tokenizer {
                path: Some("byte".to_string()),
                chat_template: None,
            },
            objective: Objective::LanguageModelling,
            seed: 1,
            vocab_size: None,
            resume: false,
            fingerprint: None,
            key: str::to_owned,
            patience: None,
        }
    }

    fn stopped(&self) -> bool {
        let left = |n: usize| n.checked_sub(1);
        let asked = |patience: &AtomicUsize| {
            patience
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, left)
                .is_err()
        };
        self.patience.as_ref().is_some_and(asked)
    }

    /// Training on one file with this content.
    fn with(name: &str, content: impl AsRef<[u8]>) -> Case {
        let mut case = Case::new();
        case.write(name, content);
        case.data.train = vec![source(name)];
        case
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.directory.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    fn place(&self) -> PathBuf {
        self.directory.path().join("run/data")
    }

    fn prepare(&self) -> Result<Prepared, DataError> {
        self.prepare_into(&self.place())
    }

    fn prepare_into(&self, directory: &Path) -> Result<Prepared, DataError> {
        let request = PrepareRequest {
            data: &self.data,
            tokenizer: &self.tokenizer,
            objective: self.objective,
            seed: self.seed,
            model: None,
            vocab_size: self.vocab_size,
            base: self.directory.path(),
            directory,
            began_in: self.resume.then_some(directory),
            fingerprint: self.fingerprint.as_deref(),
            key: &self.key,
            stopped: &|| self.stopped(),
        };
        prepare(&request, &mut |_| {})
    }

    /// Prepares and reads all training samples.
    fn samples(&self) -> Vec<Sample> {
        self.prepare().unwrap();
        all(&self.open(Part::Train).unwrap())
    }

    /// The error's text without this machine's directory.
    fn refusal(&self) -> String {
        let base = self.directory.path().display().to_string();
        self.prepare()
            .unwrap_err()
            .to_string()
            .replace(&base, "DIR")
    }

    fn open(&self, part: Part) -> Option<Dataset> {
        match part {
            Part::Train => Some(Dataset::train(&self.place()).unwrap()),
            Part::Evaluation => Dataset::evaluation(&self.place()).unwrap(),
        }
    }
}

fn source(path: &str) -> DataSource {
    DataSource {
        path: path.to_string(),
        ..DataSource::default()
    }
}

fn all(data: &Dataset) -> Vec<Sample> {
    (0..data.len()).map(|i| data.sample(i).unwrap()).collect()
}

/// The counts of the prepared data.
fn counts(case: &Case) -> String {
    let manifest = Manifest::read(&case.place()).unwrap();
    let train = manifest.train;
    format!(
        "{} samples, {} tokens, {} of them targets, the longest sample {}, packing {}, tokenizer {} ({} ids), {}",
        train.samples,
        train.tokens,
        train.target_tokens,
        train.longest_sample,
        manifest.packing,
        manifest.tokenizer,
        manifest.vocabulary_size,
        manifest.skipped
    )
}

/// The number of a sample's targets.
fn target_count(data: &Dataset, index: u64) -> usize {
    let sample = data.sample(index).unwrap();
    sample.loss_mask[1..]
        .iter()
        .filter(|&&target| target)
        .count()
}

/// The text of byte-vocabulary tokens; special tokens are `^`, `$` and `_`.
fn spell(ids: impl IntoIterator<Item = u32>) -> String {
    let bytes: Vec<u8> = ids
        .into_iter()
        .map(|id| match id {
            256 => b'^',
            257 => b'$',
            258 => b'_',
            byte => byte as u8,
        })
        .collect();
    String::from_utf8(bytes).unwrap()
}

fn text(sample: &Sample) -> String {
    spell(sample.tokens.iter().copied())
}

/// The sample's targets; tokens without loss are `·`.
fn learned(sample: &Sample) -> String {
    let tokens = sample.tokens.iter().zip(&sample.loss_mask);
    tokens
        .map(|(&id, &target)| {
            if target {
                spell([id])
            } else {
                "·".to_string()
            }
        })
        .collect()
}
