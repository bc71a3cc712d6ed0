//! Encodes one document into tokens and marks which of them carry loss.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, Value};

use super::chat::{ChatError, ChatTemplate};
use super::conversion::single_spaced;
use super::decoded::{Decoding, cannot_encode};
use super::error::DataError;
use super::kind::Kind;
use super::preference::{self, Preference};
use super::read::{Content, Document, Reading};
use super::record::{Fault, Record, Turns, check_messages, turns};
use super::request::PrepareRequest;
use super::sources::Source;
use super::token::Token;
use super::tokenizer::Tokenizer;
use crate::recipe::schema::spec::{Conversion, RowCut, RowTokens};

/// A document or a part of one, with its position in the stream of chosen documents.
pub(super) struct Piece<'a> {
    pub document: Document,
    /// Whether it begins a document.
    pub starts: bool,
    /// Whether it ends a document.
    pub ends: bool,
    pub source: &'a Source,
}

/// The result of encoding a document.
pub(super) enum Outcome {
    /// Tokens of a document or of a piece.
    Tokens(Vec<Token>),
    /// The rows of a sample, with its label if it has one, of which some were cut or not.
    Rows { tokens: Vec<Token>, is_cut: bool },
    /// No token of a completion is left after the cut.
    WithoutTargets,
    /// The document has no text.
    Empty,
    /// The conversation has no answer.
    WithoutAnswer,
}

/// Settings and models for encoding, shared by threads.
pub(super) struct Encoder<'a> {
    pub request: &'a PrepareRequest<'a>,
    pub tokenizer: &'a Tokenizer,
    pub template: Result<ChatTemplate, ChatError>,
    /// Whether the data has conversations.
    pub saw_chat: AtomicBool,
}

impl<'a> Encoder<'a> {
    /// How sources are read for this encoder.
    pub fn reading(&self) -> Reading<'a> {
        Reading {
            packing: self.request.data.wraps(),
            vocabulary_size: self.tokenizer.vocabulary_size,
            stopped: self.request.stopped,
        }
    }

    /// The outcomes of a document: one, or more or fewer of a row of preferences.
    pub fn encode(&self, piece: &Piece) -> Result<Vec<Outcome>, DataError> {
        let takes_text = self.request.kind() == Kind::Text && !self.request.decodes_rows();
        let needs_rows = !takes_text || piece.source.conversion.is_some();
        let outcomes = match &piece.document.content {
            Content::Ids(ids) if !needs_rows => Ok(vec![Outcome::Tokens(all_targets(ids))]),
            Content::Text(text) if !needs_rows => self
                .text(text, piece.starts, piece.ends)
                .map(|outcome| vec![outcome]),
            content => content.row().and_then(|row| self.row(row, piece.source)),
        };
        let place = &piece.document.place;
        outcomes.map_err(|fault| DataError::record(place, fault.problem, fault.help))
    }

    /// The outcomes of a row with columns.
    fn row(&self, row: Map<String, Value>, source: &Source) -> Result<Vec<Outcome>, Fault> {
        let kind = self.request.kind();
        let (row, columns) = match source.conversion {
            None => (row, source.columns.as_slice()),
            Some(conversion) => match conversion.convert(&row, &self.request.data.marks)? {
                Some(converted) => (converted.into_row(kind), &[][..]),
                None => return Ok(Vec::new()),
            },
        };
        if kind == Kind::Text && self.request.decodes_rows() {
            let record = Record::from_row(row, columns)?;
            return Ok(vec![self.decoded_record(record)?]);
        }
        if source.conversion == Some(Conversion::Conversation) {
            return self.conversation(row, kind);
        }
        if kind == Kind::Text {
            let record = Record::from_row(row, columns)?;
            return Ok(vec![self.record(&record)?]);
        }
        let split = source.feedback_split.as_deref();
        let preferences = Preference::of_row(row, columns, split, kind)?;
        preferences
            .into_iter()
            .map(|one| self.preference(one))
            .collect()
    }

    /// Everything after the first message is trained on.
    fn conversation(&self, row: Map<String, Value>, kind: Kind) -> Result<Vec<Outcome>, Fault> {
        if kind != Kind::Text {
            return Err(Fault::new(
                "the rows are conversations, without preferences",
                "train on them with loss=sft, or name data with preferences",
            ));
        }
        self.saw_chat.store(true, Ordering::Relaxed);
        let take = |name: &str| turns(name, row.get(name).cloned().unwrap_or_default());
        let (prompt, completions) = self.together(&take("prompt")?, &[take("completion")?])?;
        if completions.iter().all(Vec::is_empty) {
            return Ok(vec![Outcome::WithoutAnswer]);
        }
        let with = |target: bool| move |id: u32| Token { id, target };
        let tokens = prompt.into_iter().map(with(false));
        let completion = completions.into_iter().flatten().map(with(true));
        let tokens: Vec<Token> = tokens.chain(completion).collect();
        self.refuse_long_prompt(&tokens)?;
        Ok(vec![Outcome::Tokens(tokens)])
    }

    /// The recipe's key of the chat template, for messages.
    fn template_key(&self) -> String {
        (self.request.key)("tokenizer.chat_template")
    }

    /// The recipe's key of `answers_only`, for messages.
    fn answers_key(&self) -> String {
        (self.request.key)("data.answers_only")
    }

    /// A note on the template, if the data has conversations and the built-in template renders them.
    pub fn note(&self) -> Option<String> {
        let built_in = self.template.as_ref().is_ok_and(|t| t.built_in);
        (built_in && self.saw_chat.load(Ordering::Relaxed)).then(|| {
            format!(
                "the tokenizer {} has no chat template, the built-in one is used; {} sets another",
                self.tokenizer.name,
                self.template_key()
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
        if self.request.data.answers_only == Some(true) {
            return Err(Fault::new(
                "loss on the answers only is asked for, and plain text has no answers",
                format!(
                    "set {}=false, or give messages or prompt and completion",
                    self.answers_key()
                ),
            ));
        }
        if starts && ends && text.trim().is_empty() {
            return Ok(Outcome::Empty);
        }
        let mut tokens = Vec::new();
        if starts {
            tokens.extend(all_targets(&self.tokenizer.start));
        }
        tokens.extend(self.whole(text)?);
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
        let mut tokens = all_targets(&self.tokenizer.start);
        let only = self.request.completions_only();
        for token in &mut tokens {
            token.target = !only;
        }
        if only {
            tokens.extend(self.spans(&text, &[answer])?);
            self.refuse_long_prompt(&tokens)?;
        } else {
            tokens.extend(self.whole(&text)?);
        }
        self.end(&mut tokens);
        Ok(Outcome::Tokens(tokens))
    }

    fn chat(&self, messages: &[serde_json::Value], first: usize) -> Result<Outcome, Fault> {
        self.saw_chat.store(true, Ordering::Relaxed);
        let failed = |error: ChatError| self.failed(&error);
        let template = self.template.as_ref().map_err(|error| self.failed(error))?;
        // Messages before the first answer are a prompt that is apart from its completion.
        let only = match first {
            0 => self.request.answers_only(),
            _ => self.request.completions_only(),
        };
        if !only {
            let text = template.render(messages, false).map_err(failed)?;
            if text.trim().is_empty() {
                return Ok(Outcome::Empty);
            }
            return Ok(Outcome::Tokens(self.whole(&text)?));
        }
        let mut answers = messages[first..].iter();
        if !answers.any(|message| message["role"] == "assistant") {
            return Ok(Outcome::WithoutAnswer);
        }
        let conversation = template.answers(messages, first).map_err(failed)?;
        let tokens = self.spans(&conversation.text, &conversation.answers)?;
        self.refuse_long_prompt(&tokens)?;
        Ok(Outcome::Tokens(tokens))
    }

    /// The rows of a prompt with its completions, one after the other, and the label.
    fn preference(&self, preference: Preference) -> Result<Outcome, Fault> {
        let (mut prompt, mut completions, label) = match preference {
            Preference::Pair {
                prompt,
                chosen,
                rejected,
            } => (prompt, vec![chosen, rejected], None),
            Preference::Labelled {
                prompt,
                completion,
                is_desirable,
            } => (prompt, vec![completion], Some(is_desirable)),
        };
        let rules = self.request.data.rows;
        if self.request.decodes_rows() {
            return self.decoded(&prompt, &completions, label);
        }
        let mut is_cut = false;
        if rules.cut == RowCut::Turns {
            is_cut = self.cut_turns(&mut prompt, &mut completions)?;
        }
        let (prompt, completions) = match rules.tokens {
            RowTokens::Together | RowTokens::TogetherEnded => {
                self.together(&prompt, &completions)?
            }
            RowTokens::Apart | RowTokens::ApartEnded | RowTokens::Decoded => {
                self.apart(&prompt, &completions)?
            }
        };
        let most = self.request.row_limit();
        let slices: Vec<&[u32]> = completions.iter().map(Vec::as_slice).collect();
        let Some(rows) = preference::rows_of(&prompt, &slices, rules, most) else {
            return Ok(Outcome::WithoutTargets);
        };
        let mut tokens = Vec::new();
        for (row, completion) in rows.into_iter().zip(&completions) {
            self.refuse_long_prompt(&row)?;
            is_cut |= row.len() < prompt.len() + completion.len();
            tokens.extend(row);
        }
        tokens.extend(label.map(mark_of));
        Ok(Outcome::Rows { tokens, is_cut })
    }

    /// The same where rows are decoded.
    fn decoded(
        &self,
        prompt: &Turns,
        completions: &[Turns],
        label: Option<bool>,
    ) -> Result<Outcome, Fault> {
        let rules = self.request.data.rows;
        let decoding = Decoding::new(self.tokenizer, rules, self.request.row_limit())?;
        let prompt = self.marked(prompt, true)?;
        let prompt = decoding.of_prompt(&prompt)?;
        let (mut tokens, mut is_cut) = (Vec::new(), false);
        for completion in completions {
            let completion = self.marked(completion, false)?;
            let completion = decoding.of_completion(&completion)?;
            let row = decoding.row(&prompt, &completion)?;
            if !row.has_targets {
                return Ok(Outcome::WithoutTargets);
            }
            is_cut |= row.is_cut;
            tokens.extend(&row.tokens);
            if let Some(label) = label {
                tokens.push(mark_of(label));
                tokens.extend(decoding.parts(&row)?);
            }
        }
        Ok(Outcome::Rows { tokens, is_cut })
    }

    /// A record of which the prompt is apart from its completion.
    fn decoded_record(&self, record: Record) -> Result<Outcome, Fault> {
        let (prompt, completion) = match record {
            Record::Completion { prompt, completion } => {
                (Turns::Text(prompt), Turns::Text(completion))
            }
            Record::Chat {
                mut messages,
                first_answer,
            } if first_answer > 0 => {
                let completion = messages.split_off(first_answer);
                (Turns::Chat(messages), Turns::Chat(completion))
            }
            Record::Text(_) | Record::Chat { .. } => {
                return Err(Fault::new(
                    "it has no prompt and completion, which upstream makes tokens of apart",
                    "give rows with the columns prompt and completion",
                ));
            }
        };
        self.decoded(&prompt, &[completion], None)
    }

    /// A text, or a conversation with the recipe's marks around its turns, with one space in place of several.
    fn marked(&self, turns: &Turns, is_prompt: bool) -> Result<String, Fault> {
        let messages = match turns {
            Turns::Text(text) => return Ok(text.clone()),
            Turns::Chat(messages) => messages,
        };
        let marks = &self.request.data.marks;
        let mut text = String::new();
        for (index, message) in messages.iter().enumerate() {
            let given = |name: &str| message[name].as_str();
            let (before, after, content) = match (given("role"), given("content")) {
                (Some("user"), Some(content)) => (&marks.user, &marks.user_end, content),
                (Some("assistant"), Some(content)) => {
                    (&marks.assistant, &marks.assistant_end, content)
                }
                _ => {
                    return Err(Fault::new(
                        format!("message {} is no text of a user or an assistant", index + 1),
                        "upstream has marks for these only: remove it",
                    ));
                }
            };
            // The mark before an answer is part of the prompt.
            if is_prompt || index > 0 {
                text.push_str(before);
            }
            text.push_str(content);
            text.push_str(after);
        }
        if is_prompt {
            text.push_str(&marks.assistant);
        }
        Ok(single_spaced(&text))
    }

    /// Cuts turns that are too long, each counted as if the template rendered it by itself (HALOs 4831988,
    /// `train/dataloader.py`, `tokenize_batch_element`). Returns whether one was cut or left out.
    fn cut_turns(&self, prompt: &mut Turns, completions: &mut [Turns]) -> Result<bool, Fault> {
        let most = self.request.data.sequence_length;
        let most_of_prompt = self.request.data.rows.max_prompt_length.unwrap_or(most);
        let (used, mut is_cut) = self.cut_after(prompt, 0, most_of_prompt, true)?;
        for completion in completions {
            is_cut |= self.cut_after(completion, used, most, false)?.1;
        }
        Ok(is_cut)
    }

    /// Cuts turns that follow `used` tokens to `most` tokens in all. Returns the tokens then used, and whether something was
    /// cut.
    fn cut_after(
        &self,
        turns: &mut Turns,
        mut used: u64,
        most: u64,
        are_prompt: bool,
    ) -> Result<(u64, bool), Fault> {
        let Turns::Chat(messages) = turns else {
            return Ok((used, false));
        };
        let template = self.template.as_ref().map_err(|error| self.failed(error))?;
        let encode = |text: &str| self.tokenizer.encode(text).map_err(cannot_encode);
        for (index, message) in messages.iter_mut().enumerate() {
            let text = template.render(std::slice::from_ref(message), are_prompt);
            let length = encode(&text.map_err(|error| self.failed(&error))?)?.len() as u64;
            if used + length <= most {
                used += length;
                continue;
            }
            let content = message["content"].as_str().unwrap_or_default();
            let mut ids = encode(content)?;
            ids.truncate(ids.len().saturating_sub((used + length - most) as usize));
            message["content"] = self.tokenizer.decode(&ids).into();
            messages.truncate(index + 1);
            return Ok((most, true));
        }
        Ok((used, false))
    }

    /// The tokens of a prompt and of its completions. A completion begins where the tokens of its prompt end. If these are not
    /// the beginning of the whole row's, because tokens merge at the border or the template renders the prompt differently
    /// alone, it begins where they differ, in both rows of a pair (TRL 1.16, `DPOTrainer._prepare_dataset`).
    fn together(
        &self,
        prompt: &Turns,
        completions: &[Turns],
    ) -> Result<(Vec<u32>, Vec<Vec<u32>>), Fault> {
        let of_prompt = self.ids(prompt, None)?;
        let wholes = completions
            .iter()
            .map(|completion| self.ids(prompt, Some(completion)));
        let mut wholes: Vec<Vec<u32>> = wholes.collect::<Result<_, _>>()?;
        let common = wholes.iter().map(|whole| {
            let both = of_prompt.iter().zip(whole);
            both.take_while(|(one, other)| one == other).count()
        });
        let border = common.min().unwrap_or(0);
        let completions = wholes.iter_mut().map(|whole| whole.split_off(border));
        let completions = completions.collect();
        let prompt = wholes.pop().unwrap_or_default();
        Ok((prompt, completions))
    }

    /// The same where each becomes tokens by itself. The template's text of a completion begins where that of the prompt ends,
    /// or differs (TRL 0.19, `apply_chat_template`).
    fn apart(
        &self,
        prompt: &Turns,
        completions: &[Turns],
    ) -> Result<(Vec<u32>, Vec<Vec<u32>>), Fault> {
        let is_text = matches!(prompt, Turns::Text(_));
        let mut before = self.rendered(prompt, None)?;
        let wholes = completions
            .iter()
            .map(|completion| self.rendered(prompt, Some(completion)));
        let wholes: Vec<String> = wholes.collect::<Result<_, _>>()?;
        let encode = |text: &str| self.tokenizer.encode(text).map_err(cannot_encode);
        let mut of_completions = Vec::new();
        for whole in &wholes {
            let border = preference::first_difference(&before, whole);
            before.truncate(border.unwrap_or(before.len()));
            let mut ids = encode(whole.get(before.len()..).unwrap_or_default())?;
            if is_text || self.request.data.rows.tokens == RowTokens::ApartEnded {
                ids.extend(&self.tokenizer.end);
            }
            of_completions.push(ids);
        }
        Ok((encode(&before)?, of_completions))
    }

    /// The ids of a prompt, or of a prompt with its completion.
    fn ids(&self, prompt: &Turns, completion: Option<&Turns>) -> Result<Vec<u32>, Fault> {
        let text = self.rendered(prompt, completion)?;
        let mut ids = self.tokenizer.encode(&text).map_err(cannot_encode)?;
        let is_text = matches!(prompt, Turns::Text(_));
        if is_text || self.request.data.rows.tokens == RowTokens::TogetherEnded {
            let start = &self.tokenizer.start;
            if is_text || !ids.starts_with(start) {
                ids.splice(0..0, start.iter().copied());
            }
            if completion.is_some() && !ids.ends_with(&self.tokenizer.end) {
                ids.extend(&self.tokenizer.end);
            }
        }
        Ok(ids)
    }

    /// A prompt, or a prompt with its completion, as the template renders conversations.
    fn rendered(&self, prompt: &Turns, completion: Option<&Turns>) -> Result<String, Fault> {
        match (prompt, completion) {
            (Turns::Text(prompt), Some(Turns::Text(completion))) => {
                Ok(format!("{prompt}{completion}"))
            }
            (Turns::Text(prompt), _) => Ok(prompt.clone()),
            (Turns::Chat(prompt), completion) => {
                self.saw_chat.store(true, Ordering::Relaxed);
                let mut messages = prompt.clone();
                if let Some(Turns::Chat(completion)) = completion {
                    messages.extend(completion.iter().cloned());
                    check_messages(&messages)?;
                }
                let template = self.template.as_ref().map_err(|error| self.failed(error))?;
                let text = template.render(&messages, completion.is_none());
                text.map_err(|error| self.failed(&error))
            }
        }
    }

    fn failed(&self, error: &ChatError) -> Fault {
        let help = error.help(&self.template_key(), &self.answers_key());
        Fault::new(error.to_string(), help)
    }

    /// Refuses a prompt that upstream would cut: the tokens before the last answer. HALOs counts every turn as if it were
    /// rendered by itself, so that prompts of several turns are a little longer to it.
    fn refuse_long_prompt(&self, tokens: &[Token]) -> Result<(), Fault> {
        let mut last = tokens.iter().rev().skip_while(|token| !token.target);
        let before = last.by_ref().skip_while(|token| token.target);
        let prompt = before.count() as u64;
        match self.request.data.max_prompt_length {
            Some(most) if prompt > most => Err(Fault::new(
                format!(
                    "the prompt has {prompt} tokens; the recipe cuts prompts to {most}, and the built-in trainer cuts none"
                ),
                format!(
                    "shorten it, or set {}={}",
                    (self.request.key)("data.max_prompt_length"),
                    self.request.data.sequence_length.max(prompt)
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Tokens with loss on all of them.
    fn whole(&self, text: &str) -> Result<Vec<Token>, Fault> {
        let ids = self.tokenizer.encode(text).map_err(cannot_encode)?;
        Ok(all_targets(&ids))
    }

    /// Tokens with loss on the spans.
    fn spans(&self, text: &str, spans: &[Range<usize>]) -> Result<Vec<Token>, Fault> {
        self.tokenizer
            .encode_spans(text, spans)
            .map_err(cannot_encode)
    }

    /// Ends a document, unless its text already ends with the end-of-sequence token.
    fn end(&self, tokens: &mut Vec<Token>) {
        let end = &self.tokenizer.end;
        let ids = tokens.iter().map(|token| token.id);
        if !ids.rev().take(end.len()).eq(end.iter().rev().copied()) {
            tokens.extend(all_targets(end));
        }
    }
}

/// The token that states a label.
fn mark_of(is_desirable: bool) -> Token {
    Token {
        id: u32::from(is_desirable),
        target: false,
    }
}

fn all_targets(ids: &[u32]) -> Vec<Token> {
    ids.iter().map(|&id| Token { id, target: true }).collect()
}
