//! Checks of a recipe's data without reading it: whether the files exist (those of a bucket are not looked up), whether the synthetic language is
//! valid, whether the model has an embedding for every token id.
//!
//! Preparation refuses the same faults with the same messages. Planners use these checks to report all faults
//! at once, with their places in the recipe.

use std::path::Path;

use crate::bucket::{self, is_url};
use crate::hub;
use crate::plan::Flaw;
use crate::recipe::schema::spec::{Conversion, DataFormat, DataSource, SYNTHETIC, Synthetic};

use super::conversion;
use super::error::DataError;
use super::files::{self, Place, Resolved};
use super::names;
use super::read::{self, Reading};
use super::request::PrepareRequest;
use super::sources;
use super::synthetic::Language;
use super::tokenizer::Tokenizer;

/// All faults that preparation would refuse and that are visible without reading a file, with the rules that report
/// them. Directories are listed for names. `elsewhere`: data sets and models of the hub may be on another machine.
pub fn find_problems(request: &PrepareRequest<'_>, elsewhere: bool) -> Vec<Flaw> {
    let data = request.data;
    if data.train.is_empty() {
        return vec![flaw("data-missing", &["data.train"], &request.no_data())];
    }
    if let Some(language) = data.synthetic() {
        return synthetic(request, &language);
    }
    let mut found = Vec::new();
    let mut text = false;
    for (part, list) in [
        ("data.train", &data.train),
        ("data.evaluation", &data.evaluation),
    ] {
        for (index, source) in list.iter().enumerate() {
            let path = format!("{part}.{index}");
            let paths = [&*format!("{path}.path"), &path, part];
            if source.path == SYNTHETIC {
                let error = sources::mixed(request, &path);
                found.push(flaw("synthetic-language", &paths, &error));
                continue;
            }
            if is_url(&source.path) {
                // A check sends no request.
                text |= holds_text(source, None);
                let refused = bucket::split(&source.path).err();
                found.extend(refused.map(|error| flaw("data-missing", &paths, &error.into())));
                continue;
            }
            if source.conversion == Some(Conversion::Unknown) && !elsewhere {
                found.push(Flaw {
                    rule: "data-missing",
                    paths: paths.map(str::to_owned).into(),
                    message: format!("`{}`: {}", source.path, conversion::UNKNOWN),
                    help: conversion::OWN_ROWS.to_owned(),
                });
                continue;
            }
            let resolved = files::resolve(request, source, &path);
            text |= holds_text(source, resolved.as_ref().ok());
            if let Err(error) = resolved
                && !(elsewhere && files::is_on_hub(request.base, &source.path))
            {
                found.push(flaw("data-missing", &paths, &error));
            }
        }
    }
    if text {
        found.extend(tokenizer(request, elsewhere));
    }
    found
}

/// Whether the data have text, which needs a tokenizer. A source that is missing or in a bucket counts by its name.
pub fn needs_tokenizer(request: &PrepareRequest<'_>) -> bool {
    let data = request.data;
    let is_text = |source: &DataSource| {
        let resolved = files::resolve(request, source, "data").ok();
        let resolved = resolved.filter(|_| !is_url(&source.path));
        holds_text(source, resolved.as_ref())
    };
    data.synthetic().is_none() && data.train.iter().chain(&data.evaluation).any(is_text)
}

/// The most bytes of files whose rows are counted for a plan: a few milliseconds.
const COUNTED_BYTES: u64 = 1 << 20;

/// The rows that the training sources have in small local files. `None`: a source is large, elsewhere, cut to a share,
/// or no file of rows.
pub fn few_rows(request: &PrepareRequest<'_>) -> Option<u64> {
    let reading = Reading {
        packing: false,
        vocabulary_size: u64::MAX,
        stopped: request.stopped,
    };
    let (mut bytes, mut rows) = (0, 0);
    let sources = &request.data.train;
    for (index, source) in sources.iter().enumerate() {
        let elsewhere = source.path == SYNTHETIC || is_url(&source.path);
        if elsewhere || source.weight.is_some() || source.conversion.is_some() {
            return None;
        }
        let resolved = files::resolve(request, source, &format!("data.train.{index}")).ok()?;
        for file in &resolved.files {
            let of_rows = [DataFormat::Jsonl, DataFormat::Parquet].contains(&file.format);
            let Place::Disk(path) = &file.place else {
                return None;
            };
            bytes += path.metadata().ok().filter(|_| of_rows)?.len();
            if bytes > COUNTED_BYTES {
                return None;
            }
            rows += read::count(file, reading).ok()?;
        }
    }
    (!sources.is_empty()).then_some(rows)
}

/// `paths`: native paths of the causes, the likeliest first.
fn flaw(rule: &'static str, paths: &[&str], error: &DataError) -> Flaw {
    let (message, help) = error.problem_and_help();
    Flaw {
        rule,
        paths: paths.iter().map(|&path| path.to_owned()).collect(),
        message,
        help,
    }
}

fn synthetic(request: &PrepareRequest<'_>, language: &Synthetic) -> Vec<Flaw> {
    let path = "data.train.0.synthetic";
    let mut found = Vec::new();
    if let Err((key, fault)) = Language::check(language) {
        let paths = [&*format!("{path}.{key}"), path, "data.train.0.path"];
        let error = request.setting(path, fault.problem, fault.help);
        found.push(flaw("synthetic-language", &paths, &error));
    }
    let words = format!("{path}.vocabulary");
    let paths = ["model.config.vocab_size", &words, "model.path"];
    found.extend(vocabulary(request, "the data", language.vocabulary, &paths));
    found
}

/// Whether a source holds text that needs a tokenizer. A missing source counts as text only if its name says
/// so.
fn holds_text(source: &DataSource, resolved: Option<&Resolved>) -> bool {
    let is_text = |format: DataFormat| format != DataFormat::Bin;
    match resolved {
        Some(resolved) => resolved.files.iter().any(|file| is_text(file.format)),
        None => {
            let format = source.format;
            let format = format.or_else(|| names::format_of(Path::new(&source.path)));
            let may_be_text = || is_url(&source.path) || hub::is_id(&source.path);
            format.map_or_else(may_be_text, is_text)
        }
    }
}

fn tokenizer(request: &PrepareRequest<'_>, elsewhere: bool) -> Option<Flaw> {
    let (name, key) = match Tokenizer::named(request) {
        Ok(named) => named,
        Err(error) => {
            let paths = ["tokenizer.path", "model.path"];
            return Some(flaw("tokenizer-missing", &paths, &error));
        }
    };
    match Tokenizer::place(request, name, key) {
        Err(_) if elsewhere && files::is_model_on_hub(request.base, name) => None,
        Err(error) => {
            let paths = [key, "tokenizer.path", "model.path"];
            Some(flaw("tokenizer-missing", &paths, &error))
        }
        // Only the built-in vocabulary is known without reading a file.
        Ok(Some(_)) => None,
        Ok(None) => {
            let byte = Tokenizer::byte();
            let what = byte.described();
            let paths = ["model.config.vocab_size", "tokenizer.path", "model.path"];
            vocabulary(request, &what, byte.vocabulary_size, &paths)
        }
    }
}

fn vocabulary(
    request: &PrepareRequest<'_>,
    what: &str,
    tokens: u64,
    paths: &[&str],
) -> Option<Flaw> {
    let refused = super::check_vocabulary(what, tokens, request.vocab_size?).err();
    refused.map(|error| flaw("vocabulary-too-small", paths, &error))
}
