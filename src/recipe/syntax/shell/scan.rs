//! Splits a text into commands and words as a POSIX shell does, with their places.
//!
//! The scanner handles quotes, escapes, comments, continued lines, redirections and here-documents. Of
//! loops and conditions it knows the beginning and the end, of `case` also the patterns. It expands
//! nothing.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.2 to 2.10; arrays as in bash 5.2.

mod compound;
mod word;

use std::path::Path;

use crate::recipe::syntax::shell::inner::{self, Inside, Unescaped};
use crate::recipe::syntax::shell::word::{Word, is_long_option};
use crate::recipe::syntax::source::FileId;

pub(crate) use compound::ARITHMETIC;

/// The name of the virtual file that holds a command given after `--`.
pub const COMMAND: &str = "command";

/// The syntax of a text with commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A line ends its command.
    Script,
    /// Arguments alone: a line end is a space.
    Arguments,
    /// Words that the user's shell has already split, quoted again where needed.
    Typed,
    /// The arguments file of `HfArgumentParser`, split only at white space (transformers 5.23.0
    /// `hf_argparser.py`, `parse_args_into_dataclasses`).
    ArgumentsFile,
}

impl Form {
    /// The form of a file, or of the virtual one that holds a command.
    pub fn of(path: &Path, text: &str) -> Form {
        if path == Path::new(COMMAND) {
            return Form::Typed;
        }
        if path.extension().is_some_and(|e| e == "args") {
            return Form::ArgumentsFile;
        }
        let first = text.split_whitespace().next();
        match first.is_some_and(is_long_option) {
            true => Form::Arguments,
            false => Form::Script,
        }
    }
}

/// One command of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// Has at least one word.
    pub words: Vec<Word>,
    /// The script's shell runs the command exactly once, whatever the exit status of others.
    pub certain: bool,
    /// The shell that runs the command.
    pub shell: Shell,
}

/// The shell that runs a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shell {
    /// The shell that reads the text.
    Own,
    /// A shell that the text starts with this command as inline script (`bash -c`).
    Inner,
    /// The command starts a shell with an inline script whose quoting is not supported.
    Unread,
}

/// The commands of a text. Each has at least one word.
pub(crate) fn commands(text: &str, file: FileId, form: Form) -> Vec<Line> {
    let scanner = Scanner {
        text,
        file,
        form,
        at: 0,
        line: 1,
        column: (0, 1),
        words: Vec::new(),
        lines: Vec::new(),
        open: Vec::new(),
        after: Then::Next,
        documents: Vec::new(),
        passed: Vec::new(),
        kept: Vec::new(),
        in_pattern: false,
        whole: form == Form::Script,
    };
    match form {
        Form::ArgumentsFile => scanner.white_space(),
        _ => scanner.shell(),
    }
}

/// The separator after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// The next command always follows.
    Next,
    /// The next command depends on the exit status (`&&`, `||`).
    If,
    /// Both commands run at the same time, each in a subshell.
    Beside,
}

struct Scanner<'t> {
    text: &'t str,
    file: FileId,
    form: Form,
    at: usize,
    line: u32,
    /// A byte offset on this line and its column.
    column: (usize, u32),
    /// The words of the command so far.
    words: Vec<Word>,
    lines: Vec<Line>,
    /// The end words of open compound commands and groups.
    open: Vec<&'static str>,
    after: Then,
    /// End words of the here-documents that begin on the next line, and whether tabs may precede them.
    documents: Vec<(String, bool)>,
    /// Byte offsets of backslashes that the outer shell removes.
    passed: Vec<usize>,
    /// Byte offsets of each `$` that is escaped for the outer shell.
    kept: Vec<usize>,
    /// A pattern of `case` comes next.
    in_pattern: bool,
    /// The text ends where its file ends.
    whole: bool,
}

/// Redirection operators; longer ones come before their prefixes.
const REDIRECTIONS: [&str; 12] = [
    "&>>", "<<<", "<<-", "&>", "<<", ">>", ">&", ">|", "<&", "<>", ">", "<",
];

impl Scanner<'_> {
    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn advance(&mut self, c: char) {
        self.at += c.len_utf8();
        if c == '\n' {
            self.line += 1;
            self.column = (self.at, 1);
        }
        self.at += usize::from(self.passed.binary_search(&self.at).is_ok());
    }

    fn advance_by(&mut self, bytes: usize) {
        let end = self.at + bytes;
        while let Some(c) = self.peek().filter(|_| self.at < end) {
            self.advance(c);
        }
    }

    fn white_space(mut self) -> Vec<Line> {
        while let Some(c) = self.peek() {
            if c.is_whitespace() {
                self.advance(c);
                continue;
            }
            let mut span = self.here();
            let rest = self.rest();
            let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
            let text = rest[..end].to_owned();
            self.advance_by(end);
            span.end = self.at;
            self.words.push(Word {
                closed: true,
                literal: text.len(),
                text,
                span,
                unresolved: Vec::new(),
                items: None,
            });
        }
        self.end(Then::Next);
        self.lines
    }

    fn shell(mut self) -> Vec<Line> {
        while let Some(c) = self.peek() {
            let next = self.rest()[c.len_utf8()..].chars().next();
            if self.in_pattern {
                self.pattern(c);
                continue;
            }
            match c {
                '\n' if self.form == Form::Script => {
                    self.advance(c);
                    self.end(Then::Next);
                    self.skip_documents();
                }
                '<' | '>' if next != Some('(') => self.redirection(),
                '&' if next == Some('>') => self.redirection(),
                ';' if self.ends_case_item() => {}
                ';' | '&' | '|' => {
                    let then = match (c, next) {
                        (';', _) => Then::Next,
                        (c, next) if next == Some(c) => Then::If,
                        _ => Then::Beside,
                    };
                    self.advance(c);
                    if next == Some(c) || (c, next) == ('|', Some('&')) {
                        self.advance_by(1);
                    }
                    self.end(then);
                }
                '(' if self.arithmetic() => {}
                '(' => {
                    self.advance(c);
                    self.end(Then::Next);
                    self.open.push("(");
                }
                ')' => {
                    self.advance(c);
                    self.end(Then::Next);
                    self.close("(");
                }
                '#' => self.skip_line(),
                c if self.is_blank(c) => self.advance(c),
                '\\' if self.continues() => self.skip_continuation(),
                _ => self.word_or_descriptor(),
            }
        }
        if self.in_pattern {
            self.words.clear();
        }
        self.end(Then::Next);
        self.lines
    }

    /// Reads a word of the command, unless it is the number before a redirection (`2>`).
    fn word_or_descriptor(&mut self) {
        let mut word = self.word(false);
        let digits = word.is_literal() && word.text.chars().all(|c| c.is_ascii_digit());
        let redirects = self.rest().starts_with(['<', '>']);
        if digits && redirects {
            return;
        }
        if self.form == Form::Typed && word.unresolved.is_empty() {
            word.doubt();
        }
        self.words.push(word);
        if self.begins_patterns() {
            self.end(Then::Next);
            self.in_pattern = true;
        }
    }

    /// Adds a command, or the commands of the inline script that it starts.
    fn push(&mut self, words: Vec<Word>, certain: bool) {
        let mut line = Line {
            words,
            certain,
            shell: Shell::Own,
        };
        let found = inner::script(&line.words).filter(|_| !inner::is_harmless(&line.words));
        if let Some((at, word)) = found {
            if let Some(inside) = inner::inside(self.text, &word) {
                let before = line.words[..at].iter();
                let before = before.filter(|word| word.assignment().is_some());
                let before: Vec<Word> = before.cloned().collect();
                let inner = self.inner(&word, inside, &before);
                self.lines.extend(inner);
                return;
            }
            line.shell = Shell::Unread;
        }
        self.lines.push(line);
    }

    /// The commands of an inline script. `before`: assignments for its environment.
    fn inner(&self, word: &Word, inside: Inside, before: &[Word]) -> Vec<Line> {
        let quote = u32::from(inside.start > word.span.start);
        let column = word.span.column.saturating_add(quote);
        let plain = |text, at, line, column, passed, kept| {
            let mut scanner = Scanner {
                text,
                file: self.file,
                form: Form::Script,
                at,
                line,
                column: (at, column),
                words: Vec::new(),
                lines: Vec::new(),
                open: Vec::new(),
                after: Then::Next,
                documents: Vec::new(),
                passed,
                kept,
                in_pattern: false,
                whole: false,
            };
            scanner.at += usize::from(scanner.passed.first() == Some(&scanner.at));
            scanner.shell()
        };
        let line = word.span.line;
        let mut lines = match inside.escaped {
            true => {
                let inner = Unescaped::of(self.text, inside.start, inside.end, line, column);
                let mut lines = plain(&inner.text, 0, 1, 1, Vec::new(), inner.kept.clone());
                let words = lines.iter_mut().flat_map(|line| &mut line.words);
                words.for_each(|word| inner.put_back(word));
                lines
            }
            false => {
                let kept = inside.passed.iter().map(|at| at + 1).collect();
                let text = &self.text[..inside.end];
                plain(text, inside.start, line, column, inside.passed, kept)
            }
        };
        for line in &mut lines {
            line.certain = false;
            if line.shell == Shell::Own {
                line.shell = Shell::Inner;
            }
            let unresolved = line.words.iter_mut().flat_map(|word| &mut word.unresolved);
            for part in unresolved.filter(|_| inside.own_variables) {
                part.name = None;
            }
            line.words.splice(..0, before.iter().cloned());
        }
        lines
    }

    fn skip_line(&mut self) {
        while let Some(c) = self.peek().filter(|c| *c != '\n') {
            self.advance(c);
        }
    }

    /// Skips here-documents with their end words.
    fn skip_documents(&mut self) {
        for (end, tabs) in std::mem::take(&mut self.documents) {
            while self.at < self.text.len() {
                let line = self.rest().split('\n').next().unwrap_or_default();
                let line = line.strip_suffix('\r').unwrap_or(line);
                let text = if tabs {
                    line.trim_start_matches('\t')
                } else {
                    line
                };
                let ended = text == end;
                self.skip_line();
                self.advance_by(1);
                if ended {
                    break;
                }
            }
        }
    }

    /// Whether a character separates words. A shell splits at no other blank, such as U+00A0. A file of
    /// arguments may have CRLF line ends.
    fn is_blank(&self, c: char) -> bool {
        matches!(c, ' ' | '\t' | '\n') || (c == '\r' && self.form == Form::Arguments)
    }

    /// Whether a backslash here joins this line with the next, or ends a script. There bash removes it.
    fn continues(&self) -> bool {
        let rest = &self.rest()[1..];
        (rest.is_empty() && self.whole)
            || rest.starts_with('\n')
            || (rest.starts_with("\r\n") && self.form == Form::Arguments)
    }

    fn skip_continuation(&mut self) {
        while let Some(c) = self.peek() {
            self.advance(c);
            if c == '\n' {
                return;
            }
        }
    }

    /// Skips a redirection (`> file`, `2>&1`, `<<END`): it is no argument.
    fn redirection(&mut self) {
        let found = REDIRECTIONS.iter().find(|op| self.rest().starts_with(**op));
        let Some(operator) = found else { return };
        self.advance_by(operator.len());
        while let Some(c) = self.peek() {
            match c {
                '\\' if self.continues() => self.skip_continuation(),
                ' ' | '\t' => self.advance(c),
                _ => break,
            }
        }
        let target = self.word(false);
        if !target.closed {
            // Keeps the word, so that the caller finds the unclosed quote.
            self.words.push(target);
        } else if operator.starts_with("<<") && *operator != "<<<" && self.form == Form::Script {
            self.documents.push((target.text, *operator == "<<-"));
        }
    }
}

#[cfg(test)]
mod tests;
