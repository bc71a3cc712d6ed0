//! A text of commands with the place of each of its bytes in the file. An inline script (`bash -c "…"`) is
//! another text than its file, since the outer shell removes quotes and backslashes.

use std::ops::Range;

use crate::recipe::syntax::source::{FileId, Span};

/// A character in its file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub span: Span,
    /// The outer shell does not expand it: it is single-quoted or escaped there.
    pub inner: bool,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Text {
    pub text: String,
    /// The place of each byte, and of the end.
    places: Vec<Place>,
}

impl Text {
    pub fn of_file(text: &str, file: FileId) -> Text {
        let mut new = Text::default();
        let mut span = Span::of(text, 0..0, file);
        for c in text.chars() {
            span.end = span.start + c.len_utf8();
            new.push(c, Place { span, inner: false });
            span.start = span.end;
            (span.line, span.column) = match c {
                '\n' => (span.line.saturating_add(1), 1),
                _ => (span.line, span.column.saturating_add(1)),
            };
        }
        new.finish(Place { span, inner: false });
        new
    }

    pub fn push(&mut self, c: char, place: Place) {
        self.text.push(c);
        self.places.resize(self.text.len(), place);
    }

    /// Sets the place of the end. Every text needs one.
    pub fn finish(&mut self, mut at: Place) {
        at.span.end = at.span.start;
        self.places.push(at);
    }

    /// The text with blanks in place of some parts.
    pub fn blanked(&self, parts: &[Range<usize>]) -> Text {
        let mut new = self.clone();
        for part in parts {
            let blank = |c: char| {
                if c == '\n' {
                    "\n".to_owned()
                } else {
                    " ".repeat(c.len_utf8())
                }
            };
            let blanks: String = self.text[part.clone()].chars().map(blank).collect();
            new.text.replace_range(part.clone(), &blanks);
        }
        new
    }

    /// The place of the character at a byte offset.
    pub fn place(&self, at: usize) -> Place {
        self.places[at.min(self.text.len())]
    }

    pub fn span(&self, start: usize, end: usize) -> Span {
        let mut span = self.place(start).span;
        span.end = if end > start {
            self.place(end - 1).span.end
        } else {
            span.start
        };
        span
    }
}
