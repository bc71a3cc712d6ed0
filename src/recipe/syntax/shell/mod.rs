//! Shell commands as text: the simple commands of a script, and their words with the variables that the script
//! assigns. tree-sitter-bash parses. Nothing here knows a trainer.

mod changes;
mod commands;
mod hide;
pub(crate) mod inner;
mod pieces;
mod resolve;
#[cfg(test)]
mod tests;
mod text;
mod tree;
pub(crate) mod word;

use std::collections::BTreeMap;
use std::path::Path;

use crate::recipe::syntax::source::{FileId, Position, Span};
use text::Text;
use word::{Unresolved, Word, written};

pub(crate) use changes::is_shell_hook;
pub(crate) use resolve::ARGUMENTS;
pub(crate) use word::join;

/// The name of the virtual file that holds a command given after `--`.
pub const COMMAND: &str = "command";

/// The syntax of a file with commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A line ends its command.
    Script,
    /// The arguments file of `HfArgumentParser`, split only at white space (transformers 5.23.0
    /// `hf_argparser.py`, `parse_args_into_dataclasses`).
    ArgumentsFile,
}

impl Form {
    pub fn of(path: &Path) -> Form {
        if path.extension().is_some_and(|e| e == "args") {
            return Form::ArgumentsFile;
        }
        Form::Script
    }
}

/// One command of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// Has at least one word.
    pub words: Vec<Word>,
    /// The shell that runs the command.
    pub shell: Shell,
    /// It runs exactly once, whatever other commands return.
    pub certain: bool,
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

/// The commands of a text. An error is the place that bash does not accept. `environment`: its variables, as far as they
/// are known.
pub(crate) fn read(
    text: &str,
    file: FileId,
    form: Form,
    environment: &BTreeMap<String, String>,
) -> Result<Vec<Line>, Span> {
    if form == Form::ArgumentsFile {
        return Ok(white_space(text, file));
    }
    let mut source = Text::of_file(text, file);
    source.text.truncate(without_last_backslash(text).len());
    commands::script(&source, environment)
}

/// A command whose words the user's shell has split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Typed {
    /// Its words as [`join`] writes them.
    pub text: String,
    /// The virtual file that messages show with this text.
    pub file: FileId,
    pub words: Vec<Word>,
    /// The command, or the commands of the inline script that it runs.
    pub lines: Vec<Line>,
}

impl Typed {
    /// The places of the words are in `file`.
    pub fn of(command: &[String], file: FileId) -> Typed {
        let written = written(command);
        let mut at = Position::START;
        let mut starts = Vec::new();
        let mut words = Vec::new();
        for (word, written) in command.iter().zip(&written) {
            let literal = if word == written { word.len() } else { 0 };
            words.push(Word::new(word, at.span(file, written), literal));
            starts.push(at);
            at = at.after(written).after(" ");
        }
        let inner = |at: usize| inner::text_of_typed(&command[at], &written[at], starts[at], file);
        let mut lines = commands::typed(words.clone(), inner);
        let own = lines.iter_mut().filter(|line| line.shell != Shell::Inner);
        own.flat_map(|line| &mut line.words).for_each(doubt);
        words.iter_mut().for_each(doubt);
        Typed {
            text: written.join(" "),
            file,
            words,
            lines,
        }
    }

    /// Whether another shell reads a part of it.
    pub fn is_inline_script(&self) -> bool {
        self.lines.iter().any(|line| line.shell != Shell::Own)
    }
}

/// One command with the words of a text, split only at white space.
fn white_space(text: &str, file: FileId) -> Vec<Line> {
    let source = Text::of_file(text, file);
    let mut words = Vec::new();
    let mut at = 0;
    for part in text.split_inclusive(char::is_whitespace) {
        let content = part.trim_end();
        if !content.is_empty() {
            let span = source.span(at, at + content.len());
            words.push(Word::new(content, span, content.len()));
        }
        at += part.len();
    }
    let line = (!words.is_empty()).then_some(Line {
        words,
        shell: Shell::Own,
        certain: true,
    });
    line.into_iter().collect()
}

/// Treats a typed word as unresolved from the first quoted variable on: the user most likely expected the shell
/// to expand it.
fn doubt(word: &mut Word) {
    let begins =
        |(at, mark): &(usize, &str)| *mark == "`" || pieces::begins_expansion(&word.text[at + 1..]);
    let Some((start, _)) = word.text.match_indices(['$', '`']).find(begins) else {
        return;
    };
    let rest = &word.text[start..];
    let part = Unresolved {
        start,
        end: word.text.len(),
        all: rest.starts_with("$@") || rest.starts_with("$*"),
        quoted: false,
    };
    word.literal = word.literal.min(start);
    word.unresolved = vec![part];
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
