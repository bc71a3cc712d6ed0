//! Text to token ids: the built-in byte vocabulary, or a `tokenizer.json`.
//!
//! Chat templates write special tokens as text by their names (`</s>`), and encoding turns them into their
//! ids. Encoding adds no token by itself: the caller requests the tokens before and after a document
//! ([`Tokenizer::start`], [`Tokenizer::end`]), so that a document that is read in pieces
//! gets each of them once.

mod huggingface;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::error::DataError;
use super::files;
use super::request::PrepareRequest;
use super::token::Token;
use crate::util::input;

/// Name of the built-in vocabulary in a recipe.
pub const BYTE: &str = "byte";

/// Name, Jinja variable and id of the special tokens of the built-in vocabulary.
const SPECIALS: [(&str, &str, u32); 3] = [
    ("<|bos|>", "bos_token", 256),
    ("<|eos|>", "eos_token", 257),
    ("<|pad|>", "pad_token", 258),
];

/// What transformers replaces in a decoded text, one after the other.
const CLEANED: [(&str, &str); 10] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

/// Name of the file of a tokenizer.
const FILE: &str = "tokenizer.json";

/// A tokenizer with its special tokens and template.
pub struct Tokenizer {
    /// Name for people: `byte`, or the path as the recipe names it.
    pub name: String,
    /// The special tokens that templates may name, by their Jinja variable (`eos_token`).
    pub specials: BTreeMap<String, String>,
    /// The tokenizer's own chat template.
    pub chat_template: Option<String>,
    /// Checksum of all fields above and of the vocabulary.
    pub checksum: String,
    /// Tokens before a document, for example the beginning-of-sequence id.
    pub start: Vec<u32>,
    /// Tokens after a document: the end-of-sequence id. Empty if the tokenizer has none.
    pub end: Vec<u32>,
    /// Upper bound of the ids: the largest plus one.
    pub vocabulary_size: u64,
    /// transformers removes spaces before punctuation when it decodes (`clean_up_tokenization_spaces`).
    pub cleans_up: bool,
    encoder: Encoder,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tokenizer").field(&self.name).finish()
    }
}

enum Encoder {
    Ids,
    Byte,
    HuggingFace(Box<tokenizers::Tokenizer>),
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

    /// The tokenizer of a directory, or of a `tokenizer.json`.
    pub fn open(path: &Path, name: &str) -> Result<Tokenizer, DataError> {
        huggingface::load(path, name, "tokenizer.chat_template")
    }

    /// The tokenizer among the files of a run, or the built-in one if the recipe names it.
    ///
    /// # Errors
    /// The run has none.
    pub fn of_run(named: Option<&str>, files: &[PathBuf]) -> Result<Tokenizer, DataError> {
        if named == Some(BYTE) {
            return Ok(Tokenizer::byte());
        }
        let mut files = files.iter();
        match files.find(|file| file.file_name().is_some_and(|name| name == FILE)) {
            Some(file) => Tokenizer::open(file, &file.display().to_string()),
            None => Err(DataError::record(
                named.unwrap_or("the model"),
                format!("the run has no {FILE}, of which mismatched rows are made"),
                format!("put {FILE} into the directory that the recipe names, and launch again"),
            )),
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
        if name == BYTE {
            return Ok(None);
        }
        let path = request.base.join(name);
        let special = files::special(&path);
        if special.is_some() || !path.exists() {
            let problem = if let Some(kind) = special {
                format!("{} is {kind}, not a tokenizer's file", path.display())
            } else if files::is_model_on_hub(request.base, name) {
                format!("the tokenizer of {name} is not on this machine")
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
    pub fn described(&self) -> String {
        format!("the tokenizer {}", self.name)
    }

    /// The built-in vocabulary: ids 0 to 255 are the bytes, 256 begins and 257 ends a sequence, 258 pads. It
    /// needs no files and represents every text without loss.
    pub fn byte() -> Tokenizer {
        let special = |(name, variable, _): (&str, &str, u32)| (variable.into(), name.into());
        Tokenizer {
            name: BYTE.to_string(),
            specials: SPECIALS.map(special).into(),
            chat_template: None,
            checksum: BYTE.to_string(),
            start: vec![256],
            end: vec![257],
            vocabulary_size: 259,
            cleans_up: false,
            encoder: Encoder::Byte,
        }
    }

    /// For data of ready-made token ids, which are below `vocabulary_size`: texts are ids with blanks between them.
    pub(super) fn ids(vocabulary_size: u64) -> Tokenizer {
        Tokenizer {
            name: "none".to_string(),
            specials: BTreeMap::new(),
            chat_template: None,
            checksum: "none".to_string(),
            start: Vec::new(),
            end: Vec::new(),
            vocabulary_size,
            cleans_up: false,
            encoder: Encoder::Ids,
        }
    }

    /// Texts that are always one token.
    pub(super) fn marks(&self) -> Vec<String> {
        let mut marks: BTreeSet<String> = self.specials.values().cloned().collect();
        if let Encoder::HuggingFace(tokenizer) = &self.encoder {
            let added = tokenizer.get_added_tokens_decoder();
            marks.extend(added.into_values().map(|token| token.content));
        }
        marks.remove("");
        marks.into_iter().collect()
    }

    /// The ids of a text, which may contain special tokens by name.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, tokenizers::Error> {
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
    ) -> Result<Vec<Token>, tokenizers::Error> {
        let pieces = self.pieces(text)?;
        let mut borders = spans.iter().flat_map(|span| [span.start, span.end]);
        let is_crossed = |border: &usize| {
            let crosses = |(_, piece): &Piece| piece.start < *border && *border < piece.end;
            pieces.iter().any(crosses)
        };
        let Some(cut) = borders.find(is_crossed) else {
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

    /// The text of ids, without special tokens; a character that is cut is U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.encoder {
            Encoder::Ids => ids.iter().map(|id| format!(" {id}")).collect(),
            Encoder::Byte => {
                let bytes = ids.iter().filter_map(|&id| u8::try_from(id).ok());
                String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
            }
            Encoder::HuggingFace(tokenizer) => tokenizer.decode(ids, true).unwrap_or_default(),
        }
    }

    /// The text of ids as transformers decodes them: without special tokens, and cleaned up by default (4.35,
    /// `clean_up_tokenization`).
    pub(super) fn decode_cleaned(&self, ids: &[u32]) -> String {
        let text = self.decode(ids);
        if self.cleans_up { cleaned(text) } else { text }
    }

    fn pieces(&self, text: &str) -> Result<Vec<Piece>, tokenizers::Error> {
        match &self.encoder {
            Encoder::Ids => pieces_of_ids(text, self.vocabulary_size),
            Encoder::Byte => Ok(pieces_of_bytes(text)),
            Encoder::HuggingFace(tokenizer) => huggingface::pieces(tokenizer, text),
        }
    }
}

fn cleaned(mut text: String) -> String {
    for (spaced, cleaned) in CLEANED {
        text = text.replace(spaced, cleaned);
    }
    text
}

fn pieces_of_ids(text: &str, vocabulary_size: u64) -> Result<Vec<Piece>, tokenizers::Error> {
    let words = text.split_whitespace();
    let ids = words.map(|word| {
        let id = word.parse::<u32>().ok();
        let id = id.filter(|&id| u64::from(id) < vocabulary_size);
        id.ok_or_else(|| {
            format!("`{word}` is none of the ids below {vocabulary_size} that texts are here")
        })
    });
    let ids: Result<Vec<u32>, String> = ids.collect();
    // Ids have no places in a text that something else could refer to.
    Ok(ids?.into_iter().map(|id| (id, 0..0)).collect())
}

fn pieces_of_bytes(text: &str) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(&byte) = text.as_bytes().get(at) {
        let special = SPECIALS
            .iter()
            .find(|(name, _, _)| text.as_bytes()[at..].starts_with(name.as_bytes()));
        let (id, length) = special.map_or((u32::from(byte), 1), |(name, _, id)| (*id, name.len()));
        pieces.push((id, at..at + length));
        at += length;
    }
    pieces
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
