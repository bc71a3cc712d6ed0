//! A double-quoted inline script as the inner shell reads it: without the backslashes that the outer shell
//! removes, and with the place of every remaining byte in the text.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.2.3.

use crate::recipe::syntax::shell::word::Word;

/// An inline script without the escapes of its double quotes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unescaped {
    /// The text that the inner shell reads.
    pub text: String,
    /// Byte offsets in it of each `$` that is escaped for the outer shell.
    pub kept: Vec<usize>,
    /// The place of each of its bytes, and of its end.
    value_sources: Vec<CharPosition>,
}

/// A character in the whole text, with the backslash before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CharPosition {
    start: usize,
    end: usize,
    line: u32,
    column: u32,
}

/// Whether a backslash before this character is removed between double quotes. A line continuation is left
/// to the inner shell.
pub(super) fn is_escaped(c: Option<char>) -> bool {
    matches!(c, Some('"' | '\\' | '$' | '`'))
}

impl Unescaped {
    /// The script from `start` to `end` of a text. `line` and `column` are those of `start`.
    pub fn of(text: &str, start: usize, end: usize, line: u32, column: u32) -> Unescaped {
        let content = text.get(start..end).unwrap_or_default();
        let mut new = Unescaped {
            text: String::with_capacity(content.len()),
            kept: Vec::new(),
            value_sources: Vec::with_capacity(content.len() + 1),
        };
        let mut at = CharPosition {
            start,
            end: start,
            line,
            column,
        };
        let mut characters = content.chars().peekable();
        while let Some(mut c) = characters.next() {
            at.start = at.end;
            at.end += c.len_utf8();
            let mut wide = 1;
            if c == '\\' && is_escaped(characters.peek().copied()) {
                c = characters.next().unwrap_or(c);
                at.end += c.len_utf8();
                wide = 2;
                if c == '$' {
                    new.kept.push(new.text.len());
                }
            }
            new.text.push(c);
            new.value_sources.resize(new.text.len(), at);
            match c {
                '\n' => (at.line, at.column) = (at.line.saturating_add(1), 1),
                _ => at.column = at.column.saturating_add(wide),
            }
        }
        at.start = at.end;
        new.value_sources.push(at);
        new
    }

    /// Moves a word of the script to its place in the whole text.
    pub fn put_back(&self, word: &mut Word) {
        let (start, end) = (word.span.start, word.span.end);
        let Some(first) = self.value_sources.get(start) else {
            return;
        };
        let last = self.value_sources.get(start.max(end.saturating_sub(1)));
        word.span.start = first.start;
        word.span.end = match (end > start, last) {
            (true, Some(last)) => last.end,
            _ => first.start,
        };
        (word.span.line, word.span.column) = (first.line, first.column);
        // Literal up to the first removed backslash.
        let after = self.value_sources[start..].iter().zip(first.start..);
        let whole = after
            .take_while(|(place, expected)| place.start == *expected && place.end == *expected + 1);
        word.literal = whole.take(word.literal).count();
        for item in word.items.iter_mut().flatten() {
            self.put_back(item);
        }
    }
}
