//! Words without a shell's grammar: those that the user's shell has already split, and the arguments file of
//! `HfArgumentParser`.

use std::ops::Range;

use super::inner;
use super::pieces::{Piece, pieces};
use super::resolve::RawWord;
use super::text::Text;
use super::word::{Unresolved, Word};
use super::{Line, Script, Shell, commands};
use crate::recipe::syntax::source::Span;

fn word(text: &Text, range: Range<usize>, content: String, literal: usize) -> Word {
    Word::new(content, text.span(range.start, range.end), literal)
}

fn script(words: Vec<Word>) -> Script {
    let shell = Shell::Own;
    let line = (!words.is_empty()).then_some(Line { words, shell });
    Script {
        lines: line.into_iter().collect(),
        ..Script::default()
    }
}

/// The words of a text, split only at white space.
pub(super) fn white_space(text: &Text) -> Script {
    let mut words = Vec::new();
    let mut at = 0;
    for part in text.text.split_inclusive(char::is_whitespace) {
        let content = part.trim_end().to_owned();
        if !content.is_empty() {
            let length = content.len();
            words.push(word(text, at..at + length, content, length));
        }
        at += part.len();
    }
    script(words)
}

/// The words that [`super::join`] has quoted, and the commands of an inline script among them.
pub(super) fn words(text: &Text) -> Result<Script, Span> {
    let mut words = Vec::new();
    let mut raws = Vec::new();
    let mut at = 0;
    while let Some(c) = text.text[at..].chars().next() {
        if c.is_ascii_whitespace() {
            at += 1;
            continue;
        }
        let range = at..word_end(&text.text, at);
        at = range.end;
        let Some(found) = pieces(&text.text, range.clone(), &[]) else {
            return Err(text.span(range.start, range.end));
        };
        let characters = found.iter().filter_map(|piece| match piece {
            Piece::Char(c, ..) => Some(*c),
            Piece::Expansion { .. } => None,
        });
        let content: String = characters.collect();
        let plain = content == text.text[range.clone()];
        let literal = if plain { content.len() } else { 0 };
        let mut word = word(text, range.clone(), content, literal);
        doubt(&mut word);
        words.push(word);
        raws.push(RawWord {
            range,
            expansions: Vec::new(),
        });
    }
    let found = inner::script(&words).filter(|_| !inner::is_harmless(&words));
    let mut script = script(words);
    if let (Some(found), Some(line)) = (found, script.lines.first_mut()) {
        let inner = inner::text_of(text, &raws[found.at], found.skip);
        match inner.and_then(|inner| commands::inline(&inner)) {
            Some(lines) => script.lines = lines,
            None => line.shell = Shell::Unread,
        }
    }
    Ok(script)
}

/// The end of the quoted word at a byte offset.
fn word_end(text: &str, start: usize) -> usize {
    let mut quote = None;
    let mut characters = text[start..].char_indices();
    while let Some((at, c)) = characters.next() {
        match (quote, c) {
            (None, c) if c.is_ascii_whitespace() => return start + at,
            (None, '\'' | '"') => quote = Some(c),
            (None, '\\') => {
                characters.next();
            }
            (Some(open), c) if c == open => quote = None,
            _ => {}
        }
    }
    text.len()
}

/// Treats text that looks like a variable as unresolved, although it is quoted: the user most likely expected
/// the shell to expand it.
fn doubt(word: &mut Word) {
    let mut at = 0;
    while let Some(found) = word.text[at..].find(['$', '`']) {
        let start = at + found;
        let rest = &word.text[start..];
        let Some(bytes) = expansion(rest) else {
            at = start + 1;
            continue;
        };
        let end = start + bytes;
        let all = rest.starts_with("$@") || rest.starts_with("$*");
        word.literal = word.literal.min(start);
        word.unresolved.push(Unresolved {
            start,
            end,
            all,
            quoted: false,
        });
        at = end;
    }
}

/// The bytes of what looks like an expansion at the start of a text.
fn expansion(text: &str) -> Option<usize> {
    let to = |close: char| text.rfind(close).filter(|at| *at > 1);
    let Some(rest) = text.strip_prefix('$') else {
        return Some(text[1..].find('`').map_or(text.len(), |at| at + 2));
    };
    match rest.chars().next()? {
        '{' => Some(rest.find('}').map_or(text.len(), |at| at + 2)),
        '(' => Some(to(')').map_or(text.len(), |at| at + 1)),
        '[' => Some(to(']').map_or(text.len(), |at| at + 1)),
        c if c.is_ascii_alphabetic() || c == '_' => {
            let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            Some(1 + rest.find(|c| !is_of_name(c)).unwrap_or(rest.len()))
        }
        c if c.is_ascii_digit() || "@*#?$!-".contains(c) => Some(2),
        _ => None,
    }
}
