//! Preparation: from the recipe's sources to a token store, once, before any rank starts.

use std::path::Path;

use serde_json::json;

use crate::recipe::spec::{self, Data, Objective};

use super::Part;
use super::error::DataError;
use super::manifest::{self, Manifest, PartRecord, Skipped};
use super::publish::Draft;
use super::store::Store;
use super::synthetic::Language;

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
    /// What it holds; its `notes` are for people.
    pub manifest: Manifest,
    /// The directory held it already, and nothing had changed.
    pub reused: bool,
}

/// Prepares the data of a recipe into `request.directory`, or finds it there unchanged. When this
/// fails, the directory is as it was before.
pub fn prepare(
    request: &PrepareRequest<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, DataError> {
    let _ = progress;
    if request.data.sequence_length == 0 {
        return Err(request.setting(
            "data.sequence_length",
            "0 tokens per sample",
            "set at least 1",
        ));
    }
    match request.data.train.as_slice() {
        [source] if source.path == "synthetic" => prepare_synthetic(request),
        _ => Err(request.setting(
            "data.train",
            "these sources cannot be read yet",
            "use the synthetic language",
        )),
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
        let count = if held_out < 1.0 {
            (held_out * samples as f64).ceil()
        } else {
            held_out.floor()
        } as u64;
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

/// Nothing is written but the manifest: samples are made when they are asked for. Held-out ones
/// are the last of the language's samples.
fn prepare_synthetic(request: &PrepareRequest<'_>) -> Result<Prepared, DataError> {
    let data = request.data;
    let settings = data
        .train
        .first()
        .and_then(|source| source.synthetic.clone())
        .unwrap_or_default();
    let key = (request.key)("data.train.0.synthetic");
    let language = Language::new(&settings, &key)?;
    let held_out = request.held_out(settings.samples)?;
    let tokens = data.sequence_length + 1;
    let part = |first_sample, samples| PartRecord {
        samples,
        tokens: samples * tokens,
        target_tokens: samples * data.sequence_length,
        longest_sample: tokens,
        first_sample,
        ..PartRecord::default()
    };
    let trained = settings.samples - held_out;
    let vocabulary = settings.vocabulary;
    let identity = json!({
        "sequence_length": data.sequence_length,
        "held_out": data.held_out,
        "synthetic": settings,
    });
    let manifest = Manifest {
        version: manifest::VERSION,
        fingerprint: manifest::fingerprint(&identity),
        identity,
        sequence_length: data.sequence_length,
        packing: false,
        tokenizer: "none".to_string(),
        vocabulary_size: vocabulary,
        used_vocabulary: vocabulary,
        sources: Vec::new(),
        train: part(0, trained),
        evaluation: (held_out > 0).then(|| part(trained, held_out)),
        skipped: Skipped::default(),
        notes: Vec::new(),
        synthetic: Some(settings),
    };
    debug_assert_eq!(language.vocabulary() as u64, vocabulary);
    if let Some(vocab_size) = request.vocab_size {
        manifest.check_vocabulary(vocab_size)?;
    }
    if let Some(prepared) = reuse(request, &manifest)? {
        return Ok(prepared);
    }
    let draft = Draft::begin(request.directory)?;
    finish(draft, &[], manifest)
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
        manifest: found,
        reused: true,
    }))
}

/// Writes the manifest, last, and puts the directory in its place.
fn finish(
    draft: Draft,
    directories: &[std::path::PathBuf],
    manifest: Manifest,
) -> Result<Prepared, DataError> {
    manifest.write(draft.path())?;
    draft.publish(directories)?;
    Ok(Prepared {
        manifest,
        reused: false,
    })
}

#[cfg(test)]
mod tests;
