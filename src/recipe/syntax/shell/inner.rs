//! Inline scripts: a word of a command that holds commands for another shell,
//! `bash -c 'torchrun … train.py …'` or `sbatch --wrap="torchrun …"`.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.2, and `sh` (`-c`; options may follow it); Slurm
//! 25.05 `sbatch(1)`.

use super::pieces::{Piece, Quote};
use super::resolve::RawWord;
use super::text::{Place, Text};
use super::word::{ESCAPED, Word};
use crate::recipe::syntax::source::{FileId, Position};

const SHELLS: [&str; 5] = ["sh", "bash", "dash", "zsh", "ksh"];

/// Commands that start no other program, whatever their arguments.
const HARMLESS: &[&str] = &[
    ":",
    "[",
    "alias",
    "cat",
    "cd",
    "chmod",
    "cp",
    "curl",
    "declare",
    "echo",
    "export",
    "git",
    "grep",
    "kill",
    "killall",
    "let",
    "ln",
    "local",
    "ls",
    "mkdir",
    "mv",
    "nvidia-smi",
    "pip",
    "pip3",
    "pkill",
    "printf",
    "read",
    "readonly",
    "rm",
    "rsync",
    "scancel",
    "scontrol",
    "scp",
    "set",
    "shift",
    "sleep",
    "squeue",
    "tar",
    "test",
    "touch",
    "typeset",
    "unset",
    "unzip",
    "update-alternatives",
    "wget",
];

/// Whether a command starts no other program, whatever its arguments.
pub(crate) fn is_harmless(words: &[Word]) -> bool {
    let mut rest = words
        .iter()
        .filter(|word| word.assignment().is_none() && word.text != "sudo");
    rest.next()
        .is_none_or(|word| HARMLESS.contains(&word.text.as_str()))
}

/// Whether an option of a shell takes a value (`-o`, `-eo`, `+O`).
fn is_valued(option: &str) -> bool {
    if option.starts_with("--") {
        ["--rcfile", "--init-file"].contains(&option)
    } else {
        option.ends_with(['o', 'O'])
    }
}

/// Whether a program is a shell.
fn is_shell(name: &str) -> bool {
    SHELLS.contains(&name)
}

/// Whether a word is `-c`, alone or combined with other letters (`-lc`).
fn is_script_option(word: &str) -> bool {
    let letters = word.strip_prefix('-');
    letters.is_some_and(|letters| {
        letters.contains('c') && letters.bytes().all(|c| c.is_ascii_alphabetic())
    })
}

/// `sbatch --wrap=SCRIPT`, which `sh` runs.
const WRAP: &str = "--wrap=";

/// The position of the word with the inline script of a command.
pub(crate) fn script(words: &[Word]) -> Option<usize> {
    after_option(words).or_else(|| wrapped(words))
}

fn wrapped(words: &[Word]) -> Option<usize> {
    let is_sbatch = |word: &Word| word.file_name() == "sbatch";
    let shell = words.iter().position(is_sbatch)?;
    let options = words.iter().enumerate().skip(shell + 1);
    let mut found = options.filter_map(|(at, word)| match word.text.as_str() {
        "--wrap" if at + 1 < words.len() => Some(at + 1),
        text => text.starts_with(WRAP).then_some(at),
    });
    found.next()
}

/// The word after a shell's `-c`.
fn after_option(words: &[Word]) -> Option<usize> {
    let is_shell_word = |word: &Word| {
        let name = word.file_name();
        word.unresolved.is_empty() && is_shell(name)
    };
    let shell = words.iter().position(is_shell_word)?;
    let mut has_script = false;
    let mut at = shell + 1;
    while let Some(word) = words.get(at) {
        let option = word.text.len() > 1 && word.text.starts_with(['-', '+']);
        if !option {
            return has_script.then_some(at);
        }
        has_script |= is_script_option(&word.text);
        at += 1 + usize::from(is_valued(&word.text));
    }
    None
}

/// How the names of script files end.
const SCRIPTS: [&str; 4] = [".sh", ".bash", ".slurm", ".sbatch"];

/// The file with commands that a command runs: `bash -x train.sh`, `./train.sh`, `sbatch --nodes=2 train.slurm`.
pub(crate) fn script_file(words: &[Word]) -> Option<&Word> {
    let is_script = |word: &Word| SCRIPTS.iter().any(|end| word.text.ends_with(end));
    let mut rest = words.iter().skip_while(|word| word.assignment().is_some());
    let first = rest.next()?;
    let is_program =
        |word: &Word| word.text.ends_with(".py") || word.file_name().starts_with("python");
    if is_script(first) {
        // It may start the program that its arguments name.
        return (!rest.any(is_program)).then_some(first);
    }
    let starts = |word: &Word| word.file_name() == "sbatch" || is_shell(word.file_name());
    let at = words.iter().position(starts)?;
    // A program may forward commands.
    if words[..at].iter().any(is_program) {
        return None;
    }
    let is_option = |word: &&Word| word.text.starts_with('-');
    words[at + 1..]
        .iter()
        .find(|word| !is_option(word))
        .filter(|word| is_script(word))
}

/// The text that `eval` reads: its arguments, joined by blanks. `None`: only the shell knows how it begins, or the
/// command is another one.
pub(super) fn evaluated(words: &[Word]) -> Option<Text> {
    let at = words.iter().position(|word| word.assignment().is_none())?;
    let (name, arguments) = words[at..].split_first()?;
    let first = arguments.first()?;
    if name.text != "eval" || first.text.starts_with(['$', '`', '-']) {
        return None;
    }
    let mut inner = Text::default();
    let mut place = Place {
        span: first.span,
        inner: true,
    };
    for (index, word) in arguments.iter().enumerate() {
        place.span = word.span;
        let blank = (index > 0).then_some(' ');
        blank
            .into_iter()
            .chain(word.text.chars())
            .for_each(|c| inner.push(c, place));
    }
    place.span.start = place.span.end;
    inner.finish(place);
    Some(inner)
}

/// The text that the inner shell reads from a word. The outer shell's variables are not expanded in it. `None`:
/// its quoting is not supported.
pub(super) fn text_of(outer: &Text, raw: &RawWord<'_>) -> Option<Text> {
    let mut inner = Text::default();
    for piece in raw.pieces(outer)? {
        match piece {
            Piece::Char(c, at, quote) => {
                let mut place = outer.place(at);
                place.inner |= quote == Quote::Single;
                if quote == Quote::Escape {
                    place.span.end = outer.place(at + 1).span.end;
                    place.inner |= matches!(c, '$' | '`');
                }
                inner.push(c, place);
            }
            Piece::Expansion {
                at,
                node: Some(_),
                quoted: true,
            } => {
                for (offset, c) in outer.text[at.clone()].char_indices() {
                    inner.push(c, outer.place(at.start + offset));
                }
            }
            Piece::Expansion { .. } => return None,
        }
    }
    inner.finish(outer.place(raw.range.end));
    Some(without_wrap(inner))
}

/// As [`text_of`], for a typed word that begins at `at` of a file, where it is `written`.
pub(super) fn text_of_typed(word: &str, written: &str, mut at: Position, file: FileId) -> Text {
    let mut inner = Text::default();
    let quote = written.chars().next().filter(|_| word != written);
    if quote.is_some() {
        at.offset += 1;
        at.column += 1;
    }
    for c in word.chars() {
        let mut bytes = [0; 4];
        let source = match (quote, c) {
            (Some('\''), '\'') => ESCAPED,
            _ => c.encode_utf8(&mut bytes),
        };
        let span = at.span(file, source);
        inner.push(c, Place { span, inner: true });
        at = at.after(source);
    }
    let span = at.span(file, "");
    inner.finish(Place { span, inner: true });
    without_wrap(inner)
}

/// An inline script with blanks in place of [`WRAP`].
fn without_wrap(mut inner: Text) -> Text {
    if inner.text.starts_with(WRAP) {
        let blank = " ".repeat(WRAP.len());
        inner.text.replace_range(..WRAP.len(), &blank);
    }
    inner
}
