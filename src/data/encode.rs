//! Encodes one document into tokens and marks which of them carry loss.

use std::sync::atomic::{AtomicBool, Ordering};

use super::chat::{ChatError, ChatTemplate, MalformedTemplate, Origin};
use super::error::DataError;
use super::read::{Content, Document, parse_json};
use super::record::{Fault, Record};
use super::request::PrepareRequest;
use super::tokenizer::{EncodeError, Tokenizer};
use super::writer::Token;
use crate::recipe::schema::spec::Objective;

/// A document or a part of one, with its position in the stream of chosen documents.
pub(super) struct Piece {
    pub document: Document,
    /// Whether it begins a document.
    pub starts: bool,
    /// Whether it ends a document.
    pub ends: bool,
    /// Index of its source.
    pub source: usize,
}

/// The result of encoding a document.
pub(super) enum Outcome {
    /// Tokens of a document or of a piece.
    Tokens(Vec<Token>),
    /// The document has no text.
    Empty,
    /// The conversation has no answer.
    WithoutAnswer,
}

/// Settings and models for encoding, shared by threads.
pub(super) struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a Result<ChatTemplate, MalformedTemplate>,
    answers_only: bool,
    /// Whether the recipe sets `answers_only` itself.
    asked_for: bool,
    /// Key of the template in the recipe, for messages.
    template_key: String,
    /// Key of `answers_only` in the recipe, for messages.
    answers_key: String,
    saw_chat: AtomicBool,
}

/// Whether only answers carry loss.
pub(super) fn answers_only(request: &PrepareRequest<'_>) -> bool {
    request
        .data
        .answers_only
        .unwrap_or(request.objective == Objective::Sft)
}

impl<'a> Encoder<'a> {
    pub fn new(
        request: &PrepareRequest<'_>,
        tokenizer: &'a Tokenizer,
        template: &'a Result<ChatTemplate, MalformedTemplate>,
    ) -> Encoder<'a> {
        Encoder {
            tokenizer,
            template,
            answers_only: answers_only(request),
            asked_for: request.data.answers_only == Some(true),
            template_key: (request.key)("tokenizer.chat_template"),
            answers_key: (request.key)("data.answers_only"),
            saw_chat: AtomicBool::new(false),
        }
    }

    /// Encodes a piece; `columns` are those that the recipe names for its source.
    pub fn encode(&self, piece: &Piece, columns: &[String]) -> Result<Outcome, DataError> {
        let fault = |fault: Fault| {
            DataError::record(piece.document.place.clone(), fault.problem, fault.help)
        };
        let record = match &piece.document.content {
            Content::Ids(ids) => return Ok(Outcome::Tokens(all_targets(ids))),
            Content::Text(text) => return self.text(text, piece.starts, piece.ends).map_err(fault),
            Content::Json(line) => parse_json(line).and_then(|row| Record::from_row(row, columns)),
            Content::Row(row) => Record::from_row(row.clone(), columns),
        };
        record
            .and_then(|record| self.record(&record))
            .map_err(fault)
    }

    /// A note on the template, if the data has conversations and the built-in template renders them.
    pub fn note(&self) -> Option<String> {
        let built_in = matches!(self.template, Ok(t) if t.origin == Origin::BuiltIn);
        (built_in && self.saw_chat.load(Ordering::Relaxed)).then(|| {
            format!(
                "the tokenizer {} has no chat template, the built-in one is used; {} sets another",
                self.tokenizer.name, self.template_key
            )
        })
    }

    fn record(&self, record: &Record) -> Result<Outcome, Fault> {
        match record {
            Record::Text(text) => self.text(text, true, true),
            Record::Completion { prompt, completion } => self.completion(prompt, completion),
            Record::Chat {
                messages,
                first_answer,
            } => self.chat(messages, *first_answer),
        }
    }

    fn text(&self, text: &str, starts: bool, ends: bool) -> Result<Outcome, Fault> {
        if self.asked_for {
            return Err(Fault::new(
                "loss on the answers only is asked for, and plain text has no answers",
                format!(
                    "set {}=false, or give messages or prompt and completion",
                    self.answers_key
                ),
            ));
        }
        if starts && ends && text.trim().is_empty() {
            return Ok(Outcome::Empty);
        }
        let mut tokens = Vec::new();
        if starts {
            tokens.extend(all_targets(self.tokenizer.document_start()));
        }
        let ids = self.tokenizer.encode(text).map_err(cannot_encode)?;
        tokens.extend(all_targets(&ids));
        if ends {
            self.end(&mut tokens);
        }
        Ok(Outcome::Tokens(tokens))
    }

    fn completion(&self, prompt: &str, completion: &str) -> Result<Outcome, Fault> {
        if completion.is_empty() {
            return Ok(Outcome::WithoutAnswer);
        }
        let text = format!("{prompt}{completion}");
        let answer = prompt.len()..text.len();
        let mut tokens = all_targets(self.tokenizer.document_start());
        tokens.extend(self.spans(&text, &[answer])?);
        if self.answers_only {
            let before = self.tokenizer.document_start().len();
            tokens[..before]
                .iter_mut()
                .for_each(|token| token.target = false);
        }
        self.end(&mut tokens);
        Ok(Outcome::Tokens(tokens))
    }

    fn chat(&self, messages: &[serde_json::Value], first: usize) -> Result<Outcome, Fault> {
        self.saw_chat.store(true, Ordering::Relaxed);
        let template = self.template.as_ref().map_err(|error| {
            Fault::new(
                format!("the chat template is malformed: {error}"),
                format!("repair it, or set {}", self.template_key),
            )
        })?;
        let failed = |error: ChatError| {
            let help = error.help(&self.template_key, &self.answers_key);
            Fault::new(error.to_string(), help)
        };
        if !self.answers_only {
            let text = template.render(messages).map_err(failed)?;
            if text.trim().is_empty() {
                return Ok(Outcome::Empty);
            }
            let ids = self.tokenizer.encode(&text).map_err(cannot_encode)?;
            return Ok(Outcome::Tokens(all_targets(&ids)));
        }
        if !messages[first..]
            .iter()
            .any(|message| message["role"] == "assistant")
        {
            return Ok(Outcome::WithoutAnswer);
        }
        let conversation = template.answers(messages, first).map_err(failed)?;
        let tokens = self.spans(&conversation.text, &conversation.answers)?;
        Ok(Outcome::Tokens(tokens))
    }

    /// Tokens with loss on the spans, or on all tokens if the prompt carries loss too.
    fn spans(&self, text: &str, spans: &[std::ops::Range<usize>]) -> Result<Vec<Token>, Fault> {
        if !self.answers_only {
            let ids = self.tokenizer.encode(text).map_err(cannot_encode)?;
            return Ok(all_targets(&ids));
        }
        self.tokenizer
            .encode_spans(text, spans)
            .map_err(cannot_encode)
    }

    /// Ends a document, unless its text already ends with the end-of-sequence token.
    fn end(&self, tokens: &mut Vec<Token>) {
        let end = self.tokenizer.document_end();
        let ids = tokens.iter().map(|token| token.id);
        if !ids.rev().take(end.len()).eq(end.iter().rev().copied()) {
            tokens.extend(all_targets(end));
        }
    }
}

fn all_targets(ids: &[u32]) -> Vec<Token> {
    ids.iter().map(|&id| Token { id, target: true }).collect()
}

fn cannot_encode(error: EncodeError) -> Fault {
    Fault::new(
        format!("the tokenizer cannot encode it: {error}"),
        "repair or remove the text, or use another tokenizer",
    )
}
