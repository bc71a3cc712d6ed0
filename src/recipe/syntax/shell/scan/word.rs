//! One word of a command, with its quotes, escapes and expansions.

use super::{Form, Scanner};
use crate::recipe::syntax::shell::expansion;
use crate::recipe::syntax::shell::word::{Unresolved, Word};
use crate::recipe::syntax::source::Span;

impl Scanner<'_> {
    /// The current place as an empty span.
    pub(super) fn here(&mut self) -> Span {
        let (at, column) = self.column;
        let passed = self.text[at..self.at].chars().count();
        let column = column.saturating_add(u32::try_from(passed).unwrap_or(u32::MAX));
        self.column = (self.at, column);
        Span {
            file: self.file,
            start: self.at,
            end: self.at,
            line: self.line,
            column,
        }
    }

    /// Reads a word. `item`: an array item, which holds no further array.
    pub(super) fn word(&mut self, item: bool) -> Word {
        let mut span = self.here();
        let mut word = Word {
            text: String::new(),
            span,
            closed: true,
            unresolved: Vec::new(),
            items: None,
            literal: usize::MAX,
        };
        // Excludes a line continuation at the end: text inserted after its backslash would be escaped.
        let mut end = self.at;
        while let Some(c) = self.peek() {
            let next = self.rest()[c.len_utf8()..].chars().next();
            if matches!(c, '\\' | '\'' | '"' | '$' | '`' | '<' | '>') {
                word.literal = word.literal.min(word.text.len());
            }
            match c {
                c if self.is_blank(c) => break,
                '<' | '>' if next == Some('(') => self.process(&mut word),
                '(' if !item && self.begins_array(&word) => {
                    let items = self.array();
                    word.closed &= items.is_some();
                    word.items = items;
                    end = self.at;
                    break;
                }
                ';' | '&' | '|' | '<' | '>' | '(' | ')' => break,
                '\\' if self.continues() => {
                    self.skip_continuation();
                    continue;
                }
                '\\' => {
                    self.advance(c);
                    match self.peek() {
                        Some(escaped) => {
                            self.advance(escaped);
                            word.text.push(escaped);
                        }
                        None => word.closed = false,
                    }
                }
                // `$'…'` and `$"…"` are quotes as well.
                '$' if matches!(next, Some('\'' | '"')) => self.advance(c),
                '\'' | '"' => self.quoted(c, &mut word),
                '$' | '`' => self.expansion(&mut word, false),
                c => {
                    self.advance(c);
                    word.text.push(c);
                }
            }
            end = self.at;
        }
        span.end = end;
        word.span = span;
        word.literal = word.literal.min(word.text.len());
        word
    }

    /// Reads quoted text. An unclosed quote reaches to the end of the text.
    fn quoted(&mut self, quote: char, word: &mut Word) {
        self.advance(quote);
        while let Some(c) = self.peek() {
            if c == quote {
                self.advance(c);
                return;
            }
            if quote == '"' && matches!(c, '$' | '`') {
                self.expansion(word, true);
                continue;
            }
            self.advance(c);
            let escapes = c == '\\' && quote == '"';
            match self.peek().filter(|_| escapes) {
                Some('\n') => self.advance('\n'),
                Some(escaped @ ('"' | '\\' | '$' | '`')) => {
                    self.advance(escaped);
                    word.text.push(escaped);
                }
                _ => word.text.push(c),
            }
        }
        word.closed = false;
    }

    /// Reads a variable, a substitution or a literal `$`.
    fn expansion(&mut self, word: &mut Word, quoted: bool) {
        let rest = &self.text[self.at..];
        let Some(found) = expansion::at(rest) else {
            word.text.push('$');
            self.advance('$');
            return;
        };
        let start = word.text.len();
        // A `$` that is escaped for the outer shell is a variable of the inner shell.
        let inner = self.kept.binary_search(&self.at).is_ok();
        word.text.push_str(&rest[..found.bytes]);
        word.unresolved.push(Unresolved {
            start,
            end: word.text.len(),
            name: found.name.filter(|_| !inner).map(str::to_owned),
            all: found.all,
            quoted,
        });
        word.closed &= found.closed;
        self.advance_by(found.bytes);
    }

    /// Reads a process substitution, `<(command)`, which expands to a file name.
    fn process(&mut self, word: &mut Word) {
        let rest = &self.text[self.at..];
        let end = expansion::bracketed(&rest[1..], ')');
        let bytes = end.map_or(rest.len(), |end| end + 1);
        let start = word.text.len();
        word.text.push_str(&rest[..bytes]);
        word.unresolved.push(Unresolved {
            start,
            end: word.text.len(),
            name: None,
            all: false,
            quoted: true,
        });
        word.closed &= end.is_some();
        self.advance_by(bytes);
    }

    fn begins_array(&self, word: &Word) -> bool {
        self.form == Form::Script && word.text.ends_with('=') && word.assignment().is_some()
    }

    /// Reads an array, `(a b c)`, possibly over several lines. `None`: it is not closed.
    fn array(&mut self) -> Option<Vec<Word>> {
        self.advance('(');
        let mut items = Vec::new();
        while let Some(c) = self.peek() {
            match c {
                ')' => {
                    self.advance(c);
                    return Some(items);
                }
                '#' => self.skip_line(),
                '\\' if self.continues() => self.skip_continuation(),
                c if self.is_blank(c) || ";&|<>(".contains(c) => self.advance(c),
                _ => items.push(self.word(true)),
            }
        }
        None
    }
}
