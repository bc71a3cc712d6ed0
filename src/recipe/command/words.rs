//! A text to the commands in it and their words, as a POSIX shell splits them, with places.
//!
//! Quotes, escapes, comments and continued lines are understood. Variables and substitutions are
//! not expanded: their values are not in the text, so a word keeps its `$NAME`, which no key takes
//! for a number.

use crate::recipe::source::{FileId, Span};

/// One word of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Word {
    /// The text without quotes and escapes.
    pub text: String,
    /// Where it stands, quotes included.
    pub span: Span,
    /// Every quote in it has its second one, and every backslash something behind it.
    pub closed: bool,
    /// So many bytes at its start are written as they are, without quotes and escapes.
    literal: usize,
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
        Word {
            text: self.text[bytes..].to_owned(),
            span,
            closed: self.closed,
            literal: self.literal.saturating_sub(bytes),
        }
    }
}

/// Whether a text is a long option; numbers such as `-1` are values.
pub(super) fn is_long_option(text: &str) -> bool {
    let name = text.strip_prefix("--");
    name.is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// What ends a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lines {
    /// A line ends its command (a script).
    AreCommands,
    /// A line end is a space (`HfArgumentParser` splits its `.args` files so).
    AreSpaces,
}

/// The commands of a text; none of them is empty.
pub(super) fn commands(text: &str, file: FileId, lines: Lines) -> Vec<Vec<Word>> {
    let mut scanner = Scanner {
        text,
        file,
        at: 0,
        line: 1,
        line_start: 0,
    };
    let mut commands = vec![Vec::new()];
    while let Some(c) = scanner.peek() {
        match c {
            '\n' if lines == Lines::AreCommands => {
                scanner.advance(c);
                commands.push(Vec::new());
            }
            ';' | '&' | '|' => {
                scanner.advance(c);
                commands.push(Vec::new());
            }
            '#' => scanner.skip_comment(),
            c if c.is_whitespace() => scanner.advance(c),
            '\\' if scanner.continues() => scanner.skip_continuation(),
            _ => {
                let word = scanner.word();
                if let Some(command) = commands.last_mut() {
                    command.push(word);
                }
            }
        }
    }
    commands.retain(|command| !command.is_empty());
    commands
}

struct Scanner<'t> {
    text: &'t str,
    file: FileId,
    at: usize,
    line: u32,
    line_start: usize,
}

impl Scanner<'_> {
    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn advance(&mut self, c: char) {
        self.at += c.len_utf8();
        if c == '\n' {
            self.line += 1;
            self.line_start = self.at;
        }
    }

    fn skip_comment(&mut self) {
        while let Some(c) = self.peek().filter(|c| *c != '\n') {
            self.advance(c);
        }
    }

    /// Whether a backslash here joins this line with the next.
    fn continues(&self) -> bool {
        let rest = &self.text[self.at + 1..];
        rest.starts_with('\n') || rest.starts_with("\r\n")
    }

    fn skip_continuation(&mut self) {
        while let Some(c) = self.peek() {
            self.advance(c);
            if c == '\n' {
                return;
            }
        }
    }

    fn word(&mut self) -> Word {
        let start = self.at;
        let line = self.line;
        let column = self.text[self.line_start..start].chars().count() + 1;
        let mut text = String::new();
        let mut literal = None;
        let mut closed = true;
        // Without a continued line at its end: what is added there would be escaped.
        let mut end = self.at;
        while let Some(c) = self.peek() {
            if matches!(c, '\\' | '\'' | '"') {
                literal.get_or_insert(text.len());
            }
            match c {
                c if c.is_whitespace() => break,
                ';' | '&' | '|' => break,
                '\\' if self.continues() => {
                    self.skip_continuation();
                    continue;
                }
                '\\' => {
                    self.advance(c);
                    match self.peek() {
                        Some(escaped) => {
                            self.advance(escaped);
                            text.push(escaped);
                        }
                        None => closed = false,
                    }
                }
                '\'' | '"' => closed &= self.quoted(c, &mut text),
                c => {
                    self.advance(c);
                    text.push(c);
                }
            }
            end = self.at;
        }
        Word {
            closed,
            literal: literal.unwrap_or(text.len()),
            text,
            span: Span {
                file: self.file,
                start,
                end,
                line,
                column: u32::try_from(column).unwrap_or(u32::MAX),
            },
        }
    }

    /// What stands between quotes. Without a second one (`false`) that reaches to the end.
    fn quoted(&mut self, quote: char, into: &mut String) -> bool {
        self.advance(quote);
        while let Some(c) = self.peek() {
            self.advance(c);
            if c == quote {
                return true;
            }
            let escapes = c == '\\' && quote == '"';
            match self.peek().filter(|_| escapes) {
                Some('\n') => self.advance('\n'),
                Some(escaped @ ('"' | '\\' | '$' | '`')) => {
                    self.advance(escaped);
                    into.push(escaped);
                }
                _ => into.push(c),
            }
        }
        false
    }
}

/// A command's words as one line that a shell splits into the same words again.
pub(in crate::recipe) fn join(words: &[String]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| quote(word)).collect();
    quoted.join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./=:,+@%^[]{}*?".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(text: &str, lines: Lines) -> Vec<Vec<String>> {
        commands(text, FileId(0), lines)
            .into_iter()
            .map(|words| words.into_iter().map(|word| word.text).collect())
            .collect()
    }

    #[test]
    fn words_are_split_as_a_shell_does() {
        let script = "#!/bin/bash\n# a comment\nN=4 torchrun \\\n  --a 'x y' --b=\"1\\\"2\" --c\\ d; echo done\n";
        assert_eq!(
            texts(script, Lines::AreCommands),
            [
                vec!["N=4", "torchrun", "--a", "x y", "--b=1\"2", "--c d"],
                vec!["echo", "done"],
            ]
        );
        let file = "--a 1\r\n--b 2\n";
        assert_eq!(texts(file, Lines::AreSpaces), [["--a", "1", "--b", "2"]]);
    }

    #[test]
    fn a_word_knows_its_place() {
        let text = "torchrun \\\n  --größe=\"16\" x";
        let words = &commands(text, FileId(0), Lines::AreCommands)[0];
        let key = &words[1];
        assert_eq!((key.span.line, key.span.column), (2, 3));
        let value = key.after("--größe=".len());
        assert_eq!(&text[value.span.start..value.span.end], "\"16\"");
        assert_eq!((value.text.as_str(), value.span.column), ("16", 11));
    }

    #[test]
    fn a_word_ends_before_a_continued_line() {
        let text = "train.py --a 1\\\n  ; echo";
        let words = &commands(text, FileId(0), Lines::AreCommands)[0];
        let last = &words[2];
        assert_eq!(
            (last.text.as_str(), &text[last.span.start..last.span.end]),
            ("1", "1")
        );
        let joined = &commands("a\\\nb c", FileId(0), Lines::AreCommands)[0];
        assert_eq!((joined[0].text.as_str(), joined[0].span.end), ("ab", 4));
    }

    proptest! {
        #[test]
        fn joined_words_are_split_again(words in prop::collection::vec(any::<String>(), 1..6)) {
            let line = join(&words);
            prop_assert_eq!(texts(&line, Lines::AreCommands), [words]);
        }
    }
}
