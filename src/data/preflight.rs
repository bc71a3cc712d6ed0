//! Checks of a recipe's data without reading it: whether the files exist (those of a bucket are not looked up), whether the synthetic language is
//! valid, whether the model has an embedding for every token id.
//!
//! Preparation refuses the same faults with the same messages. Planners use these checks to report all faults
//! at once, with their places in the recipe.

use std::path::Path;

use crate::bucket::{self, is_url};
use crate::recipe::schema::spec::{DataFormat, DataSource, SYNTHETIC};

use super::error::DataError;
use super::files::{self, Resolved};
use super::request::PrepareRequest;
use super::sources;
use super::synthetic::Language;
use super::tokenizer::Tokenizer;

/// A fault that preparation would refuse.
#[derive(Debug)]
pub struct Finding {
    /// The subject of the fault.
    pub about: About,
    /// Native paths of its causes, the likeliest first.
    pub paths: Vec<String>,
    /// The source is a data set or model of the hub, which other machines may have.
    pub on_hub: bool,
    /// The error of the preparation.
    pub error: DataError,
}

/// The subject of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// The recipe names no data, or they are not on this machine.
    Data,
    /// The synthetic language is not valid.
    Language,
    /// The recipe names no tokenizer, or it is not on this machine.
    Tokenizer,
    /// The tokenizer has more ids than the model has embeddings.
    Vocabulary,
}

/// All faults that are visible without reading a file. Directories are listed for names.
pub fn find_problems(request: &PrepareRequest<'_>) -> Vec<Finding> {
    let data = request.data;
    if data.train.is_empty() {
        let error = request.no_data();
        return vec![finding(About::Data, &["data.train"], error)];
    }
    if data.synthetic().is_some() {
        return synthetic(request);
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
                found.push(finding(About::Language, &paths, error));
                continue;
            }
            if is_url(&source.path) {
                // A check sends no request.
                text |= holds_text(source, None);
                let refused = bucket::split(&source.path).err();
                found.extend(refused.map(|error| finding(About::Data, &paths, error.into())));
                continue;
            }
            let resolved = files::resolve(request, source, &path);
            text |= holds_text(source, resolved.as_ref().ok());
            if let Err(error) = resolved {
                found.push(Finding {
                    on_hub: files::is_on_hub(request.base, &source.path),
                    ..finding(About::Data, &paths, error)
                });
            }
        }
    }
    if text {
        found.extend(tokenizer(request));
    }
    found
}

fn finding(about: About, paths: &[&str], error: DataError) -> Finding {
    Finding {
        about,
        paths: paths.iter().map(|&path| path.to_owned()).collect(),
        on_hub: false,
        error,
    }
}

fn synthetic(request: &PrepareRequest<'_>) -> Vec<Finding> {
    let settings = request.data.synthetic().unwrap_or_default();
    let path = "data.train.0.synthetic";
    let mut found = Vec::new();
    if let Err(flaw) = Language::check(&settings) {
        let paths = [&*format!("{path}.{}", flaw.key), path, "data.train.0.path"];
        let error = flaw.into_error(&(request.key)(path));
        found.push(finding(About::Language, &paths, error));
    }
    let words = format!("{path}.vocabulary");
    let paths = ["model.config.vocab_size", &words, "model.path"];
    found.extend(vocabulary(request, "the data", settings.vocabulary, &paths));
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
            let format = format.or_else(|| files::format_of(Path::new(&source.path)));
            let may_be_text = || is_url(&source.path) || files::is_hub_id(&source.path);
            format.map_or_else(may_be_text, is_text)
        }
    }
}

fn tokenizer(request: &PrepareRequest<'_>) -> Option<Finding> {
    let (name, key) = match Tokenizer::named(request) {
        Ok(named) => named,
        Err(error) => {
            let paths = ["tokenizer.path", "model.path"];
            return Some(finding(About::Tokenizer, &paths, error));
        }
    };
    match Tokenizer::place(request, name, key) {
        Err(error) => Some(Finding {
            on_hub: files::is_model_on_hub(request.base, name),
            ..finding(
                About::Tokenizer,
                &[key, "tokenizer.path", "model.path"],
                error,
            )
        }),
        // Only the built-in vocabulary is known without reading a file.
        Ok(Some(_)) => None,
        Ok(None) => {
            let byte = Tokenizer::byte();
            let what = byte.described();
            let paths = ["model.config.vocab_size", "tokenizer.path", "model.path"];
            vocabulary(request, &what, byte.vocabulary_size(), &paths)
        }
    }
}

fn vocabulary(
    request: &PrepareRequest<'_>,
    what: &str,
    tokens: u64,
    paths: &[&str],
) -> Option<Finding> {
    super::check_vocabulary(what, tokens, request.vocab_size?)
        .err()
        .map(|error| finding(About::Vocabulary, paths, error))
}
