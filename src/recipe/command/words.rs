//! The words of a command, with places, and what in them the text does not say.

use super::expansion::{self, Expansion};
use crate::recipe::source::Span;

/// One word of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::recipe) struct Word {
    /// The text without quotes and escapes; variables and substitutions as they are written.
    pub text: String,
    /// Where it stands, quotes included.
    pub span: Span,
    /// Every quote in it has its second one, and every backslash something behind it.
    pub closed: bool,
    /// Variables and substitutions in it, in the order of writing.
    pub holes: Vec<Hole>,
    /// The items of `NAME=(…)`.
    pub items: Option<Vec<Word>>,
    /// So many bytes at its start are written as they are, without quotes and escapes.
    pub(super) literal: usize,
}

/// A variable or a substitution within a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hole {
    /// Where it begins in the word's text.
    pub start: usize,
    /// Where it ends there.
    pub end: usize,
    /// The variable whose value it is, where it is that and nothing else.
    pub name: Option<String>,
    /// All items of a list, or of the script's own arguments: any number of words even in quotes.
    pub all: bool,
    /// It stands in double quotes, which keep its value one word.
    pub quoted: bool,
}

/// How much of a word is not said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unsaid {
    /// Some of it: it is one word all the same.
    Part,
    /// All of it, and it is one word.
    Whole,
    /// All of it, and how many words it is.
    Number,
}

impl Word {
    /// The name of an option, long or short, with `_` for every `-`, and the value that `=` ties to
    /// it.
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

    /// What follows the first bytes (`--key=`), where it stands if those are written as they are.
    pub fn after(&self, bytes: usize) -> Word {
        let mut span = self.span;
        if bytes <= self.literal {
            let columns = self.text[..bytes].chars().count();
            span.start += bytes;
            span.column += u32::try_from(columns).unwrap_or(0);
        }
        let holes = self.holes.iter().filter(|hole| hole.start >= bytes);
        let holes = holes.map(|hole| Hole {
            start: hole.start - bytes,
            end: hole.end - bytes,
            ..hole.clone()
        });
        Word {
            text: self.text[bytes..].to_owned(),
            span,
            closed: self.closed,
            holes: holes.collect(),
            items: self.items.clone(),
            literal: self.literal.saturating_sub(bytes),
        }
    }

    /// How much of it the text does not say; `None` where it says all.
    pub fn unsaid(&self) -> Option<Unsaid> {
        if self.holes.is_empty() {
            return None;
        }
        if self.holes.iter().any(|hole| hole.all) {
            return Some(Unsaid::Number);
        }
        let told: usize = self.holes.iter().map(|hole| hole.end - hole.start).sum();
        let quoted = self.holes.iter().all(|hole| hole.quoted);
        Some(match (told < self.text.len(), quoted) {
            (true, _) => Unsaid::Part,
            (false, true) => Unsaid::Whole,
            (false, false) => Unsaid::Number,
        })
    }

    /// Whether it is written as it is, without quotes, escapes and variables.
    pub fn is_literal(&self) -> bool {
        self.holes.is_empty() && self.literal == self.text.len()
    }

    /// The variable that a word such as `NAME=value` assigns, and its value; `NAME+=` adds to it.
    pub fn assignment(&self) -> Option<Assignment<'_>> {
        let at = self.text.find('=').filter(|at| *at < self.literal)?;
        self.assigned(at)
    }

    /// The same of a command's argument (`export "NAME=value"`), in which quotes change nothing.
    pub fn assigned_by_command(&self) -> Option<Assignment<'_>> {
        let at = self.text.find('=')?;
        let said = self.holes.iter().all(|hole| hole.start > at);
        self.assigned(at).filter(|_| said)
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

    /// Takes what looks like a variable for one though it stands in quotes: whoever typed the word
    /// meant the shell to expand it.
    pub(super) fn doubt(&mut self) {
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
            self.holes.push(Hole {
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
pub(super) struct Assignment<'w> {
    /// The variable.
    pub name: &'w str,
    /// The value, where it stands.
    pub value: Word,
    /// The value is all that the variable holds then.
    pub whole: bool,
}

/// Whether a text is a long option; numbers such as `-1` are values.
pub(super) fn is_long_option(text: &str) -> bool {
    let name = text.strip_prefix("--");
    name.is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// A command's words as one line that a shell splits into the same words again.
pub(in crate::recipe) fn join(words: &[String]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| quote(word)).collect();
    quoted.join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./=:,+@%^[]{}*?".contains(c);
    // A brace by itself begins or ends a group.
    if !word.is_empty() && word.chars().all(plain) && !["{", "}"].contains(&word) {
        return word.to_owned();
    }
    // A shell's own word with quotes in it can be read where it stands.
    let free = |c: char| !['"', '$', '`', '\\', '!'].contains(&c);
    if word.contains('\'') && word.chars().all(free) {
        return format!("\"{word}\"");
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
