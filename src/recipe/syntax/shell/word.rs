//! The words of a command with their places and their unresolved parts.

use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;

/// One word of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Word {
    /// The text without quotes and escapes. Variables and substitutions are not expanded.
    pub text: String,
    /// The place in the source, quotes included.
    pub span: Span,
    /// Unresolved variables and substitutions, from left to right.
    pub unresolved: Vec<Unresolved>,
    /// Variables that the environment may set, with the default that is taken (`${N:-8}`). Only the first of
    /// several words from one has them.
    pub defaults: Vec<(String, String)>,
    /// Variables by which arithmetic divided the value, with their values (`$((BATCH / GPUS))`).
    pub divisors: Vec<(String, i64)>,
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
    /// A word without unresolved parts.
    pub fn new(text: impl Into<String>, span: Span, literal: usize) -> Word {
        Word {
            text: text.into(),
            span,
            unresolved: Vec::new(),
            defaults: Vec::new(),
            divisors: Vec::new(),
            literal,
        }
    }

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

    /// As [`Word::option`], for a long option only.
    pub fn long_option(&self) -> Option<(String, Option<Word>)> {
        self.option().filter(|_| self.text.starts_with("--"))
    }

    /// The last part of the word as a path: the name of a program.
    pub fn file_name(&self) -> &str {
        self.text.rsplit('/').next().unwrap_or_default()
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
            unresolved: unresolved.collect(),
            defaults: self.defaults.clone(),
            divisors: self.divisors.clone(),
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

    /// Whether the whole text is unresolved.
    pub fn is_unresolved(&self) -> bool {
        !matches!(
            self.unresolved_extent(),
            None | Some(UnresolvedExtent::Part)
        )
    }

    /// The variable that a word such as `NAME=value` assigns, and its value.
    pub fn assignment(&self) -> Option<Assignment<'_>> {
        let at = self.text.find('=').filter(|at| *at < self.literal)?;
        let name = &self.text[..at];
        // `NAME+=value` adds to a value, `NAME[0]=value` changes an item.
        let name = name.strip_suffix('+').unwrap_or(name);
        let name = name.split('[').next().unwrap_or_default();
        is_name(name).then(|| Assignment {
            name,
            value: self.after(at + 1),
        })
    }
}

/// The values that words give to a long option, tied to its name or as the next word.
pub(crate) fn values_of<'w>(
    words: &'w [Word],
    name: &'w str,
) -> impl DoubleEndedIterator<Item = Word> + 'w {
    words.iter().enumerate().filter_map(move |(at, word)| {
        let (found, tied) = word.long_option()?;
        let value = tied.or_else(|| words.get(at + 1).cloned());
        value.filter(|_| found == name)
    })
}

/// `NAME=value`.
pub(crate) struct Assignment<'w> {
    pub name: &'w str,
    /// The value with its place.
    pub value: Word,
}

/// The variable that is the whole of a text: `$N`, `${N}` or `${N:-8}`.
pub(crate) fn variable(text: &str) -> Option<&str> {
    let inside = text.strip_prefix('$')?;
    let inside = inside.strip_prefix('{').unwrap_or(inside);
    let name = identifier(inside);
    let rest = &inside[name.len()..];
    let ends = rest.is_empty() || rest == "}" || rest.starts_with([':', '-']);
    (!name.is_empty() && ends).then_some(name)
}

/// Whether a text can be a variable's name.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty() && identifier(text) == text
}

/// The name at the start of a text; empty: there is none.
pub(crate) fn identifier(text: &str) -> &str {
    if text.starts_with(|c: char| c.is_ascii_digit()) {
        return "";
    }
    let end = text.find(|c| !is_of_name(c)).unwrap_or(text.len());
    &text[..end]
}

/// Whether a variable's name may have this character.
pub(crate) fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Whether a text is a long option; numbers such as `-1` are values.
pub(crate) fn is_long_option(text: &str) -> bool {
    let name = text.strip_prefix("--");
    name.is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// Words that begin no simple command, or another one than their quoted text.
pub(super) const RESERVED: Words = Words(
    "! { } [ [[ ]] case coproc declare do done elif else esac export fi for function if local readonly select then \
     typeset unset until while",
);

/// The words as one command line. A shell splits it into the same words.
pub(crate) fn join(words: &[String]) -> String {
    written(words).join(" ")
}

/// Each word as [`join`] writes it: unchanged, or as a whole in quotes.
pub(super) fn written(words: &[String]) -> Vec<String> {
    // The parser knows no assignment to `_`.
    let assigned = |name: &str| is_name(name) && name != "_";
    let assigns = |word: &String| (word.split_once('=')).is_some_and(|(name, _)| assigned(name));
    let program = words.iter().position(|word| !assigns(word));
    let mut line = Vec::new();
    for (at, word) in words.iter().enumerate() {
        // In front of the arguments the parser takes more characters for its own syntax.
        line.push(match program {
            Some(program) if at > program => quote(word, "@%:^[]{}*?=+"),
            // It would take `--key=value` for an assignment, and `g+` for the beginning of one.
            Some(program) if at == program => quote(word, ""),
            _ => quote(word, "@%:=+"),
        });
    }
    line
}

/// A single quote within single quotes.
pub(super) const ESCAPED: &str = "'\\''";

/// A word in quotes, unless its characters need none. `more`: further such characters.
fn quote(word: &str, more: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./,".contains(c) || more.contains(c);
    let braces = word.contains('{') && (word.contains(',') || word.contains(".."));
    let count = |c: char| word.matches(c).count();
    let is_closed = count('{') == count('}') && count('[') == count(']');
    // `==` would be an operator, and the parser skips a program `-`.
    let begins = !["", "-"].contains(&word) && !word.starts_with('=');
    let is_plain = begins && word.chars().all(plain) && !braces && is_closed;
    if is_plain && !RESERVED.has(word) {
        return word.to_owned();
    }
    // Double quotes keep an inline script with single quotes readable in place.
    let free = |c: char| !['"', '$', '`', '\\', '!'].contains(&c);
    if word.contains('\'') && word.chars().all(free) {
        return format!("\"{word}\"");
    }
    format!("'{}'", word.replace('\'', ESCAPED))
}
