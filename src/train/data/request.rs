//! What preparation is asked for, and what it says on its way. Its parts see this and not each
//! other's callers.

use std::path::Path;

use crate::batch;
use crate::recipe::spec::{self, Data, Objective};
use crate::words;

use super::error::DataError;

/// What to prepare and where.
#[derive(Clone, Copy)]
pub struct PrepareRequest<'a> {
    /// Sources and how samples are cut from them.
    pub data: &'a Data,
    /// How text becomes tokens.
    pub tokenizer: &'a spec::Tokenizer,
    /// What is optimised: decides whether only answers carry loss when the recipe does not say.
    pub objective: Objective,
    /// The run's seed: decides which samples are held out, and which share of a source is taken.
    pub seed: u64,
    /// The model's path, whose tokenizer is used unless the recipe names another.
    pub model: Option<&'a str>,
    /// The model's `vocab_size`, when it is known.
    pub vocab_size: Option<u64>,
    /// Relative paths of the recipe start here.
    pub base: &'a Path,
    /// Where the prepared data goes; replaced whole unless it holds just that already.
    pub directory: &'a Path,
    /// The run goes on: data that differs from what it began with is refused instead of replaced.
    pub resume: bool,
    /// The fingerprint of the data that the run began with, where it is on record beside the data.
    pub fingerprint: Option<&'a str>,
    /// How the recipe's dialect spells a native key, for messages ([`crate::recipe::Recipe::key`]).
    pub key: &'a dyn Fn(&str) -> String,
    /// Whether somebody wants the preparation to stop. Asked between documents, from any thread.
    pub stopped: Stopped<'a>,
}

/// Whether somebody wants the preparation to stop.
pub type Stopped<'a> = &'a (dyn Fn() -> bool + Sync);

/// An error once somebody wants the preparation to stop.
pub(super) fn go_on(stopped: Stopped<'_>) -> Result<(), DataError> {
    match stopped() {
        true => Err(DataError::Stopped),
        false => Ok(()),
    }
}

/// How far preparation is; for a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes of the sources so far.
    pub bytes: u64,
    /// Bytes of all sources.
    pub total: u64,
    /// Samples so far.
    pub samples: u64,
}

/// What preparation is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Computing the checksums of the sources.
    Checksums,
    /// Reading, tokenising and writing.
    Tokenising,
}

impl PrepareRequest<'_> {
    /// A setting that cannot be used, named as the recipe spells it.
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

    /// The recipe names nothing to train on.
    pub(super) fn no_data(&self) -> DataError {
        self.setting(
            "data.train",
            "no data to train on is named",
            format!(
                "give a file, `{key}=[{{path: data.jsonl}}]`, or `{key}=[{{path: synthetic}}]`",
                key = (self.key)("data.train")
            ),
        )
    }

    /// Samples to hold out of `samples`, from `data.held_out`.
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
        let count = batch::held_out(Some(held_out), samples);
        if count > 0 && count >= samples {
            return Err(self.setting(
                "data.held_out",
                format!(
                    "{held_out} of {} would leave none to train on",
                    words::count(samples, "sample")
                ),
                format!("hold out fewer than {samples}, or give more data"),
            ));
        }
        Ok(count)
    }
}
