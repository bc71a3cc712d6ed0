//! Text to token ids: the built-in byte vocabulary, or a `tokenizer.json`.
//!
//! Chat templates write special tokens as text by their names (`</s>`), and encoding turns them into their
//! ids. Encoding adds no token by itself: the caller requests the tokens before and after a document
//! ([`Tokenizer::document_start`], [`Tokenizer::document_end`]), so that a document that is read in pieces
//! gets each of them once.

mod byte;
mod huggingface;

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::error::DataError;
use super::files;
use super::request::PrepareRequest;
use super::writer::Token;
use crate::util::input;

/// A tokenizer with its special tokens and template.
pub struct Tokenizer {
    /// Name for people: `byte`, or the path as the recipe names it.
    pub name: String,
    /// The special tokens that templates may name, by their Jinja variable (`eos_token`).
    pub specials: Vec<(String, String)>,
    /// The tokenizer's own chat template.
    pub chat_template: Option<String>,
    /// Checksum of all fields above and of the vocabulary.
    pub checksum: String,
    start: Vec<u32>,
    end: Vec<u32>,
    vocabulary_size: u64,
    encoder: Encoder,
}

enum Encoder {
    None,
    Byte,
    HuggingFace(Box<tokenizers::Tokenizer>),
}

/// Why a text has no tokens.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The data are ready-made token ids.
    #[error("there is no tokenizer")]
    NoTokenizer,
    /// The error of the crate `tokenizers`.
    #[error("{0}")]
    Failed(#[from] tokenizers::Error),
}

/// A piece of text that became one token.
type Piece = (u32, Range<usize>);

impl Tokenizer {
    /// The tokenizer that the recipe names, or else the model's own.
    pub fn load(request: &PrepareRequest<'_>) -> Result<Tokenizer, DataError> {
        let (name, key) = Tokenizer::named(request)?;
        match Tokenizer::place(request, name, key)? {
            Some(path) => huggingface::load(&path, name, &(request.key)("tokenizer.chat_template")),
            None => Ok(Tokenizer::byte()),
        }
    }

    /// The recipe's name of the tokenizer, and the native path of that setting.
    pub(super) fn named<'a>(
        request: &PrepareRequest<'a>,
    ) -> Result<(&'a str, &'static str), DataError> {
        match (&request.tokenizer.path, request.model) {
            (Some(path), _) => Ok((path.as_str(), "tokenizer.path")),
            (None, Some(model)) => Ok((model, "model.path")),
            (None, None) => Err(request.setting(
                "tokenizer.path",
                "no tokenizer is named, and no model with one",
                Tokenizer::ways(request),
            )),
        }
    }

    /// Path of a named tokenizer; `None` for the built-in one.
    pub(super) fn place(
        request: &PrepareRequest<'_>,
        name: &str,
        key: &str,
    ) -> Result<Option<PathBuf>, DataError> {
        if name == byte::NAME {
            return Ok(None);
        }
        let path = request.base.join(name);
        let special = files::special(&path);
        if special.is_some() || !path.exists() {
            let problem = if let Some(kind) = special {
                format!("{} is {kind}, not a tokenizer's file", path.display())
            } else if files::is_model_on_hub(request.base, name) {
                format!("the tokenizer of {name} is not on this machine, and nothing is downloaded")
            } else {
                format!("there is no {}", path.display())
            };
            return Err(request.setting(key, problem, Tokenizer::ways(request)));
        }
        Ok(Some(path))
    }

    /// The ways to name an available tokenizer, for messages.
    fn ways(request: &PrepareRequest<'_>) -> String {
        let key = (request.key)("tokenizer.path");
        format!(
            "set `{key}=DIRECTORY` with a tokenizer.json in it, or `{key}=byte` for the built-in \
             vocabulary of bytes"
        )
    }

    /// For messages: `the tokenizer byte`.
    pub(super) fn described(&self) -> String {
        format!("the tokenizer {}", self.name)
    }

    /// The built-in vocabulary of bytes: ids 0 to 255, then `<|bos|>`, `<|eos|>`, `<|pad|>`.
    pub fn byte() -> Tokenizer {
        byte::tokenizer()
    }

    /// A placeholder for data of ready-made token ids, which are below `vocabulary_size`.
    pub(super) fn none(vocabulary_size: u64) -> Tokenizer {
        Tokenizer {
            name: "none".to_string(),
            specials: Vec::new(),
            chat_template: None,
            checksum: "none".to_string(),
            start: Vec::new(),
            end: Vec::new(),
            vocabulary_size,
            encoder: Encoder::None,
        }
    }

    /// Texts that are always one token.
    pub(super) fn marks(&self) -> Vec<String> {
        let named = self.specials.iter().map(|(_, text)| text.clone());
        let added = match &self.encoder {
            Encoder::None | Encoder::Byte => Vec::new(),
            Encoder::HuggingFace(tokenizer) => tokenizer
                .get_added_tokens_decoder()
                .into_values()
                .map(|token| token.content)
                .collect(),
        };
        let mut marks: Vec<String> = named.chain(added).filter(|mark| !mark.is_empty()).collect();
        marks.sort();
        marks.dedup();
        marks
    }

    /// Upper bound of the ids: the largest plus one.
    pub fn vocabulary_size(&self) -> u64 {
        self.vocabulary_size
    }

    /// Tokens before a document, for example the beginning-of-sequence id.
    pub fn document_start(&self) -> &[u32] {
        &self.start
    }

    /// Tokens after a document: the end-of-sequence id. Empty if the tokenizer has none.
    pub fn document_end(&self) -> &[u32] {
        &self.end
    }

    /// The ids of a text, which may contain special tokens by name.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        Ok(self.pieces(text)?.into_iter().map(|(id, _)| id).collect())
    }

    /// The ids of a text of which only `spans` (in bytes, in order, disjoint) carry loss.
    ///
    /// The text is tokenised as a whole, like the model's input. Only where a token would cross a span's
    /// border, the text is cut there and both sides are tokenised separately, so that no token is half prompt
    /// and half answer.
    pub(super) fn encode_spans(
        &self,
        text: &str,
        spans: &[Range<usize>],
    ) -> Result<Vec<Token>, EncodeError> {
        let pieces = self.pieces(text)?;
        let crossed: Vec<usize> = borders(spans)
            .filter(|&border| {
                pieces
                    .iter()
                    .any(|(_, piece)| piece.start < border && border < piece.end)
            })
            .collect();
        let Some(&cut) = crossed.first() else {
            let target = |at: usize| spans.iter().any(|span| span.contains(&at));
            let token = |(id, piece): Piece| Token {
                id,
                target: target(piece.start),
            };
            return Ok(pieces.into_iter().map(token).collect());
        };
        // The rest may need further cuts; each call has one less.
        let (left, right) = (clip(spans, 0..cut), clip(spans, cut..text.len()));
        let mut tokens = self.encode_spans(&text[..cut], &left)?;
        tokens.extend(self.encode_spans(&text[cut..], &right)?);
        Ok(tokens)
    }

    fn pieces(&self, text: &str) -> Result<Vec<Piece>, EncodeError> {
        match &self.encoder {
            Encoder::None => Err(EncodeError::NoTokenizer),
            Encoder::Byte => Ok(byte::pieces(text)),
            Encoder::HuggingFace(tokenizer) => Ok(huggingface::pieces(tokenizer, text)?),
        }
    }
}

fn borders(spans: &[Range<usize>]) -> impl Iterator<Item = usize> {
    spans.iter().flat_map(|span| [span.start, span.end])
}

/// The parts of spans within a window, relative to its start.
fn clip(spans: &[Range<usize>], window: Range<usize>) -> Vec<Range<usize>> {
    spans
        .iter()
        .map(|span| span.start.max(window.start)..span.end.min(window.end))
        .filter(|span| span.start < span.end)
        .map(|span| span.start - window.start..span.end - window.start)
        .collect()
}

/// Reads a text file of a tokenizer with at most `limit` bytes.
fn read_text(path: &Path, limit: u64) -> Result<String, DataError> {
    let bytes = input::read(path, limit).map_err(|error| DataError::read(path, error))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        DataError::source(
            path,
            format!("it is not UTF-8 text: the first invalid byte is at offset {at}"),
            "save it as UTF-8",
        )
    })
}

#[cfg(test)]
mod tests;
