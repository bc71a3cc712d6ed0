//! A text of commands with the place of each of its bytes in the file. An inline script (`bash -c "…"`) is
//! another text than its file, since the outer shell removes quotes and backslashes.

use crate::recipe::syntax::source::{FileId, Span};

/// A character in its file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    start: usize,
    end: usize,
    line: u32,
    column: u32,
    /// The outer shell does not expand it: it is single-quoted or escaped there.
    pub inner: bool,
}

impl Place {
    /// The place from here to the end of a later one.
    pub fn through(self, last: Place) -> Place {
        Place {
            end: last.end,
            ..self
        }
    }
}

#[derive(Debug)]
pub(super) struct Text {
    pub text: String,
    pub file: FileId,
    /// The place of each byte, and of the end.
    places: Vec<Place>,
}

impl Text {
    pub fn of_file(text: &str, file: FileId) -> Text {
        let mut new = Text::empty(file, text.len());
        let mut at = Place {
            start: 0,
            end: 0,
            line: 1,
            column: 1,
            inner: false,
        };
        for c in text.chars() {
            at.end = at.start + c.len_utf8();
            new.push(c, at);
            at.start = at.end;
            (at.line, at.column) = match c {
                '\n' => (at.line.saturating_add(1), 1),
                _ => (at.line, at.column.saturating_add(1)),
            };
        }
        new.finish(at);
        new
    }

    pub fn empty(file: FileId, bytes: usize) -> Text {
        Text {
            text: String::with_capacity(bytes),
            file,
            places: Vec::with_capacity(bytes + 1),
        }
    }

    pub fn push(&mut self, c: char, place: Place) {
        self.text.push(c);
        self.places.resize(self.text.len(), place);
    }

    /// Sets the place of the end. Every text needs one.
    pub fn finish(&mut self, at: Place) {
        self.places.push(Place {
            end: at.start,
            ..at
        });
    }

    /// The place of the character at a byte offset.
    pub fn place(&self, at: usize) -> Place {
        self.places[at.min(self.text.len())]
    }

    pub fn span(&self, start: usize, end: usize) -> Span {
        let first = self.place(start);
        let end = match end > start {
            true => self.place(end - 1).end,
            false => first.start,
        };
        Span {
            file: self.file,
            start: first.start,
            end,
            line: first.line,
            column: first.column,
        }
    }

    /// The text without its first bytes.
    pub fn after(mut self, bytes: usize) -> Text {
        self.text.drain(..bytes);
        self.places.drain(..bytes);
        self
    }
}
