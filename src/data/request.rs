//! The input of the preparation and its progress. The preparation's modules use these types and not their
//! callers'.

use std::path::Path;

use crate::engine::ModelConfig;
use crate::plan;
use crate::recipe::schema::spec::{self, Data, Objective, RowTokens, Spec};
use crate::util::format;

use super::error::DataError;
use super::kind::Kind;

/// The input of the preparation.
#[derive(Clone, Copy)]
pub struct PrepareRequest<'a> {
    /// The sources, and how samples are cut from them.
    pub data: &'a Data,
    /// The recipe's tokenizer settings.
    pub tokenizer: &'a spec::Tokenizer,
    /// The training objective: it decides whether only answers carry loss if the recipe does not say so.
    pub objective: Objective,
    /// The run's seed: it selects held-out samples and the share of a source.
    pub seed: u64,
    /// The model's path; its tokenizer is used unless the recipe names another.
    pub model: Option<&'a str>,
    /// The model's `vocab_size`, if known.
    pub vocab_size: Option<u64>,
    /// The directory that relative paths of the recipe refer to.
    pub base: &'a Path,
    /// Output directory; it is replaced as a whole unless it already holds the same data.
    pub directory: &'a Path,
    /// Directory of the data with which an existing run began: other data are refused.
    pub began_in: Option<&'a Path>,
    /// The recorded fingerprint of the data with which the run began.
    pub fingerprint: Option<&'a str>,
    /// The spelling of a native key in the recipe's dialect, for messages ([`crate::recipe::Recipe::key`]).
    pub key: &'a (dyn Fn(&str) -> String + Sync),
    /// Whether a stop was requested. Called between documents, from any thread.
    pub stopped: Stopped<'a>,
}

impl<'a> PrepareRequest<'a> {
    /// The data of a recipe with this `spec`, to be checked or prepared into `directory`. `key` maps to the recipe's
    /// keys ([`crate::recipe::Recipe::keys`]). Without a `model` the vocabulary size is not checked.
    pub fn of(
        spec: &'a Spec,
        key: &'a (dyn Fn(&str) -> String + Sync),
        model: Option<&ModelConfig>,
        base: &'a Path,
        directory: &'a Path,
    ) -> PrepareRequest<'a> {
        PrepareRequest {
            data: &spec.data,
            tokenizer: &spec.tokenizer,
            objective: spec.objective,
            seed: spec.seed,
            model: spec.model.path.as_deref(),
            vocab_size: model.map(|model| model.vocab_size as u64),
            base,
            directory,
            began_in: None,
            fingerprint: None,
            key,
            stopped: &|| false,
        }
    }
}

/// Returns whether a stop was requested.
pub type Stopped<'a> = &'a (dyn Fn() -> bool + Sync);

/// Fails once a stop was requested.
pub(super) fn check_stopped(stopped: Stopped<'_>) -> Result<(), DataError> {
    if stopped() {
        Err(DataError::Stopped)
    } else {
        Ok(())
    }
}

/// Progress of the preparation, for a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub phase: Phase,
    /// Bytes of the sources read so far.
    pub bytes: u64,
    /// Bytes of all sources.
    pub total: u64,
    /// Samples written so far.
    pub samples: u64,
}

/// The activity of the preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Computing the checksums of the sources.
    Checksums,
    /// Downloading objects, with their checksums.
    Downloading,
    /// Reading, tokenising and writing.
    Tokenising,
}

/// Reports progress over all parts of the data.
pub(super) struct Meter<'a> {
    pub state: Progress,
    pub report: &'a mut dyn FnMut(Progress),
    pub stopped: Stopped<'a>,
}

impl Meter<'_> {
    /// Adds bytes and samples. Fails once a stop was requested.
    pub fn add(&mut self, phase: Phase, bytes: u64, samples: u64) -> Result<(), DataError> {
        self.state.phase = phase;
        self.state.bytes = (self.state.bytes + bytes).min(self.state.total);
        self.state.samples += samples;
        (self.report)(self.state);
        check_stopped(self.stopped)
    }
}

impl PrepareRequest<'_> {
    /// What a row of the data becomes.
    pub(super) fn kind(&self) -> Kind {
        Kind::of(self.objective)
    }

    /// Whether rows become text again before they are trained on.
    pub(super) fn decodes_rows(&self) -> bool {
        self.data.rows.tokens == RowTokens::Decoded
    }

    /// Most tokens of a row.
    pub(super) fn row_limit(&self) -> u64 {
        self.data.sequence_length + u64::from(self.data.extra_token)
    }

    /// Whether only answers carry loss.
    pub(super) fn answers_only(&self) -> bool {
        let of_objective = self.objective == Objective::Sft;
        self.data.answers_only.unwrap_or(of_objective)
    }

    /// Whether only completions carry loss, where prompts are apart from them.
    pub(super) fn completions_only(&self) -> bool {
        self.data.completions_only.unwrap_or(self.answers_only())
    }

    /// An error about a setting, named as the recipe spells it.
    pub(super) fn setting(
        &self,
        path: &str,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> DataError {
        DataError::Setting {
            key: (self.key)(path),
            problem: problem.into(),
            help: help.into(),
        }
    }

    /// The error for a recipe without training data.
    pub(super) fn no_data(&self) -> DataError {
        self.setting(
            "data.train",
            "no key that is read names data to train on",
            format!(
                "give a file, `{key}=[{{path: data.jsonl}}]`, or `{key}=[{{path: synthetic}}]`",
                key = (self.key)("data.train")
            ),
        )
    }

    /// The number of samples to hold out of `samples`, from `data.held_out`.
    pub(super) fn held_out(&self, samples: u64) -> Result<u64, DataError> {
        let Some(held_out) = self.data.held_out else {
            return Ok(0);
        };
        if !held_out.is_finite() || held_out < 0.0 {
            return Err(self.setting(
                "data.held_out",
                format!("{held_out} samples"),
                "give a count, or a share below 1",
            ));
        }
        let count = plan::held_out(Some(held_out), samples);
        if count > 0 && count >= samples {
            return Err(self.setting(
                "data.held_out",
                format!(
                    "{held_out} of {} would leave none to train on",
                    format::count(samples, "sample")
                ),
                format!("hold out fewer than {samples}, or give more data"),
            ));
        }
        Ok(count)
    }
}
