//! Shell commands as text: the simple commands of a script, and their words with the variables that the script
//! assigns. tree-sitter-bash parses. Nothing here knows a trainer.

mod changes;
mod commands;
pub(crate) mod inner;
mod pieces;
mod resolve;
#[cfg(test)]
mod tests;
mod text;
mod tree;
mod typed;
pub(crate) mod word;

use std::collections::HashMap;
use std::path::Path;

use crate::recipe::syntax::source::{FileId, Span};
use text::Text;
use word::{Word, is_long_option};

pub(crate) use inner::{is_script_option, is_shell};
pub(crate) use word::join;

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

/// The commands of a text.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub lines: Vec<Line>,
    /// The variables that the text exports, with the places of their values. Unresolved ones are empty.
    pub exports: HashMap<String, Word>,
}

/// One command of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// Has at least one word.
    pub words: Vec<Word>,
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

/// The commands of a text. An error is the place that bash does not accept.
pub(crate) fn read(text: &str, file: FileId, form: Form) -> Result<Script, Span> {
    let mut source = Text::of_file(text, file);
    match form {
        Form::ArgumentsFile => Ok(typed::white_space(&source)),
        Form::Typed => typed::words(&source),
        Form::Script => {
            let end = without_last_backslash(text).len();
            source.text.truncate(end);
            commands::script(&source)
        }
        Form::Arguments => {
            source.text = one_line(text);
            let script = commands::script(&source)?;
            // A comment that `one_line` has not found would hide the arguments after it.
            let end = source.text.trim_end().len();
            let last = script.lines.last().and_then(|line| line.words.last());
            match last.filter(|word| word.span.end < end) {
                Some(word) => Err(source.span(word.span.end, end)),
                None => Ok(script),
            }
        }
    }
}

/// A script without a backslash at its end. bash removes it.
fn without_last_backslash(text: &str) -> &str {
    let last = text.strip_suffix('\n').unwrap_or(text);
    let backslashes = last.len() - last.trim_end_matches('\\').len();
    match backslashes % 2 {
        1 => &last[..last.len() - 1],
        _ => text,
    }
}

/// Arguments on several lines as one line of the same length, without comments. Line ends may be CRLF.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    let (mut quote, mut after_blank, mut comment) = (None, true, false);
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        comment = match c {
            '\n' => false,
            '#' if quote.is_none() && after_blank => true,
            _ => comment,
        };
        after_blank = c.is_ascii_whitespace();
        let next = characters.peek().copied();
        match (quote, c) {
            _ if comment => line.extend(std::iter::repeat_n(' ', c.len_utf8())),
            (None, '\\') if matches!(next, None | Some('\n' | '\r')) => line.push(' '),
            (None | Some('"'), '\\') => {
                line.push(c);
                line.extend(characters.next());
            }
            (None, '\r' | '\n') => line.push(' '),
            _ => {
                quote = match quote {
                    None if ['\'', '"'].contains(&c) => Some(c),
                    Some(open) if open == c => None,
                    same => same,
                };
                line.push(c);
            }
        }
    }
    line
}

/// The words of each command of a text, split as a shell does. A text that bash does not accept is split at
/// white space.
pub(crate) fn commands(text: &str) -> Vec<Vec<String>> {
    match read(text, FileId(0), Form::Script) {
        Ok(script) => {
            let words = |line: Line| line.words.into_iter().map(|word| word.text).collect();
            script.lines.into_iter().map(words).collect()
        }
        Err(_) => vec![text.split_whitespace().map(str::to_owned).collect()],
    }
}
