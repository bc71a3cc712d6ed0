//! Preparation: from the recipe's sources to a token store, once, before any rank starts.

mod from_files;
mod synthetic;

use std::path::Path;

use crate::batch;
use crate::recipe::spec::{self, Data, Objective};

use super::Part;
use super::error::DataError;
use super::manifest::Manifest;
use super::publish::Draft;
use super::store::Store;

/// Longer samples would not fit the store's index, or any machine.
const MAX_SEQUENCE_LENGTH: u64 = 1 << 30;

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
    /// How the recipe's dialect spells a native key, for messages ([`crate::recipe::Recipe::key`]).
    pub key: &'a dyn Fn(&str) -> String,
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

/// Data that ranks can open.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// What it holds.
    pub manifest: Manifest,
    /// What a person should know about the sources and the preparation, one line each.
    pub notes: Vec<String>,
    /// The directory held it already, and nothing had changed.
    pub reused: bool,
}

/// Prepares the data of a recipe into `request.directory`, or finds it there unchanged. When this
/// fails, the directory is as it was before.
pub fn prepare(
    request: &PrepareRequest<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, DataError> {
    let data = request.data;
    if !(1..=MAX_SEQUENCE_LENGTH).contains(&data.sequence_length) {
        return Err(request.setting(
            "data.sequence_length",
            format!("{} tokens per sample", data.sequence_length),
            format!("set 1 to {MAX_SEQUENCE_LENGTH}"),
        ));
    }
    match data.train.as_slice() {
        [] => Err(request.no_data()),
        _ => match data.synthetic() {
            Some(language) => synthetic::prepare(request, language),
            None => from_files::prepare(request, progress),
        },
    }
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
                format!("{held_out} of {samples} samples would leave none to train on"),
                format!("hold out fewer than {samples}, or give more data"),
            ));
        }
        Ok(count)
    }
}

/// What the directory holds, if it was made from the same settings and sources and is whole.
fn reuse(request: &PrepareRequest<'_>, wanted: &Manifest) -> Result<Option<Prepared>, DataError> {
    let Ok(found) = Manifest::read(request.directory) else {
        return Ok(None);
    };
    if found.fingerprint != wanted.fingerprint {
        if request.resume {
            return Err(DataError::source(
                request.directory,
                format!(
                    "the run began with other data: {}",
                    found.differences(wanted)
                ),
                "undo the change, or start a new run",
            ));
        }
        return Ok(None);
    }
    let whole = [
        (Part::Train, Some(&found.train)),
        (Part::Evaluation, found.evaluation.as_ref()),
    ]
    .iter()
    .filter_map(|(part, record)| Some((part, (*record)?)))
    .filter(|_| found.synthetic.is_none())
    .all(|(part, record)| Store::verify(&request.directory.join(part.directory()), record).is_ok());
    Ok(whole.then_some(Prepared {
        notes: found.notes.clone(),
        manifest: found,
        reused: true,
    }))
}

/// Writes the manifest, last, and puts the directory in its place.
fn finish(draft: Draft, manifest: Manifest) -> Result<Prepared, DataError> {
    manifest.write(draft.path())?;
    draft.publish()?;
    Ok(Prepared {
        notes: manifest.notes.clone(),
        manifest,
        reused: false,
    })
}

#[cfg(test)]
mod tests;
