//! The words of a command with their places and their unresolved parts.

use super::expansion::{self, Expansion};
use crate::recipe::syntax::source::Span;

/// One word of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Word {
    /// The text without quotes and escapes. Variables and substitutions are not expanded.
    pub text: String,
    /// The place in the source, quotes included.
    pub span: Span,
    /// Every quote is closed, and no backslash ends the word.
    pub closed: bool,
    /// Unresolved variables and substitutions, from left to right.
    pub unresolved: Vec<Unresolved>,
    /// The items of an array assignment, `NAME=(…)`.
    pub items: Option<Vec<Word>>,
    /// Bytes at the start of the word that have no quotes, escapes or variables.
    pub(crate) literal: usize,
}

/// An unresolved variable or substitution within a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unresolved {
    /// Byte offset of the first byte in the word's text.
    pub start: usize,
    /// Byte offset after the last byte.
    pub end: usize,
    /// The variable, if the expansion is exactly its value.
    pub name: Option<String>,
    /// All items of an array or of the script's arguments (`$@`): any number of words, even in quotes.
    pub all: bool,
    /// In double quotes, which keep the value one word.
    pub quoted: bool,
}

/// How much of a word is unresolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnresolvedExtent {
    /// A part of the text. It is one word.
    Part,
    /// The whole text. It is one word.
    Whole,
    /// The whole text and the number of words.
    Number,
}

impl Word {
    /// The name of a long or short option, with `_` for every `-`, and the value after `=`.
    pub fn option(&self) -> Option<(String, Option<Word>)> {
        let rest = self.text.strip_prefix('-').filter(|r| !r.is_empty())?;
        let dashes = 1 + usize::from(rest.starts_with('-'));
        let option = &self.text[dashes..];
        let (name, tied) = match option.split_once('=') {
            Some((name, _)) => (name, Some(self.after(dashes + name.len() + 1))),
            None => (option, None),
        };
        Some((name.replace('-', "_"), tied))
    }

    /// The word without its first bytes (`--key=`). Its span is exact if these bytes are literal; else it is
    /// the span of the whole word.
    pub fn after(&self, bytes: usize) -> Word {
        let mut span = self.span;
        if bytes <= self.literal {
            let columns = self.text[..bytes].chars().count();
            span.start += bytes;
            span.column += u32::try_from(columns).unwrap_or(0);
        }
        let unresolved = self.unresolved.iter().filter(|part| part.start >= bytes);
        let unresolved = unresolved.map(|part| Unresolved {
            start: part.start - bytes,
            end: part.end - bytes,
            ..part.clone()
        });
        Word {
            text: self.text[bytes..].to_owned(),
            span,
            closed: self.closed,
            unresolved: unresolved.collect(),
            items: self.items.clone(),
            literal: self.literal.saturating_sub(bytes),
        }
    }

    /// How much of the word is unresolved; `None`: nothing.
    pub fn unresolved_extent(&self) -> Option<UnresolvedExtent> {
        if self.unresolved.is_empty() {
            return None;
        }
        if self.unresolved.iter().any(|part| part.all) {
            return Some(UnresolvedExtent::Number);
        }
        let bytes: usize = self
            .unresolved
            .iter()
            .map(|part| part.end - part.start)
            .sum();
        let quoted = self.unresolved.iter().all(|part| part.quoted);
        Some(match (bytes < self.text.len(), quoted) {
            (true, _) => UnresolvedExtent::Part,
            (false, true) => UnresolvedExtent::Whole,
            (false, false) => UnresolvedExtent::Number,
        })
    }

    /// Whether the word has no quotes, escapes or variables.
    pub fn is_literal(&self) -> bool {
        self.unresolved.is_empty() && self.literal == self.text.len()
    }

    /// The variable that a word such as `NAME=value` assigns, and its value; `NAME+=` adds to it.
    pub fn assignment(&self) -> Option<Assignment<'_>> {
        let at = self.text.find('=').filter(|at| *at < self.literal)?;
        self.assigned(at)
    }

    /// As [`Word::assignment`], for an argument of a command (`export "NAME=value"`), which may be quoted.
    pub fn assigned_by_command(&self) -> Option<Assignment<'_>> {
        let at = self.text.find('=')?;
        let resolved = self.unresolved.iter().all(|part| part.start > at);
        self.assigned(at).filter(|_| resolved)
    }

    fn assigned(&self, at: usize) -> Option<Assignment<'_>> {
        let name = &self.text[..at];
        let adds = name.ends_with('+');
        let name = name.strip_suffix('+').unwrap_or(name);
        // `NAME[0]=value` changes an item.
        let (name, item) = match name.split_once('[') {
            Some((name, rest)) if rest.ends_with(']') => (name, true),
            _ => (name, false),
        };
        expansion::is_name(name).then(|| Assignment {
            name,
            value: self.after(at + 1),
            whole: !adds && !item,
        })
    }

    /// Treats text that looks like a variable as unresolved, although it is quoted: the user most likely
    /// expected the shell to expand it.
    pub(crate) fn doubt(&mut self) {
        let mut at = 0;
        while let Some(found) = self.text[at..].find(['$', '`']) {
            at += found;
            let Some(Expansion {
                bytes, name, all, ..
            }) = expansion::at(&self.text[at..])
            else {
                at += 1;
                continue;
            };
            self.literal = self.literal.min(at);
            self.unresolved.push(Unresolved {
                start: at,
                end: at + bytes,
                name: name.map(str::to_owned),
                all,
                quoted: false,
            });
            at += bytes;
        }
    }
}

/// `NAME=value`.
pub(crate) struct Assignment<'w> {
    pub name: &'w str,
    /// The value with its place.
    pub value: Word,
    /// The assignment replaces the whole value: neither `NAME+=value` nor `NAME[0]=value`.
    pub whole: bool,
}

/// Whether a text is a long option; numbers such as `-1` are values.
pub(crate) fn is_long_option(text: &str) -> bool {
    let name = text.strip_prefix("--");
    name.is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// The words as one command line. A shell splits it into the same words.
pub(crate) fn join(words: &[String]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| quote(word)).collect();
    quoted.join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./=:,+@%^[]{}*?".contains(c);
    // An unquoted `{` or `}` alone begins or ends a group.
    if !word.is_empty() && word.chars().all(plain) && !["{", "}"].contains(&word) {
        return word.to_owned();
    }
    // Double quotes keep an inline script with single quotes readable in place.
    let free = |c: char| !['"', '$', '`', '\\', '!'].contains(&c);
    if word.contains('\'') && word.chars().all(free) {
        return format!("\"{word}\"");
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
