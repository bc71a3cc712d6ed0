//! Inline scripts: a word of a command that holds commands for another shell,
//! `bash -c 'torchrun … train.py …'` or `sbatch --wrap="torchrun …"`.
//!
//! An inline script is read in place if one pair of quotes encloses the whole word, so that places in it are
//! places of the whole text. Escaped characters between double quotes are read without their backslashes.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.2, and `sh` (`-c`; options may follow it); Slurm
//! 25.05 `sbatch(1)`.

mod unescaped;

use crate::recipe::syntax::shell::word::Word;

pub(crate) use unescaped::Unescaped;

const SHELLS: [&str; 5] = ["sh", "bash", "dash", "zsh", "ksh"];

/// Commands that start no other program, whatever their arguments.
const HARMLESS: &[&str] = &[
    "((", ":", "[", "[[", "alias", "case", "cat", "cd", "chmod", "cp", "curl", "declare", "echo",
    "export", "for", "git", "grep", "let", "local", "ls", "mkdir", "mv", "pip", "pip3", "printf",
    "read", "readonly", "rm", "select", "set", "shift", "test", "typeset", "unset", "wget",
];

/// Whether a command starts no other program, whatever its arguments.
pub(crate) fn is_harmless(words: &[Word]) -> bool {
    let first = words.iter().find(|word| word.assignment().is_none());
    first.is_none_or(|word| HARMLESS.contains(&word.text.as_str()))
}

/// Whether an option of a shell takes a value (`-o`, `-eo`, `+O`).
fn is_valued(option: &str) -> bool {
    match option.starts_with("--") {
        true => ["--rcfile", "--init-file"].contains(&option),
        false => option.ends_with(['o', 'O']),
    }
}

/// Whether a program is a shell.
pub(crate) fn is_shell(name: &str) -> bool {
    SHELLS.contains(&name)
}

/// Whether a word is `-c`, alone or combined with other letters (`-lc`).
pub(crate) fn is_script_option(word: &str) -> bool {
    let letters = word.strip_prefix('-');
    letters.is_some_and(|letters| {
        letters.contains('c') && letters.bytes().all(|c| c.is_ascii_alphabetic())
    })
}

/// The place of an inline script in the text, without its quotes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Inside {
    pub start: usize,
    pub end: usize,
    /// Byte offsets of the backslashes in `\$`, which the outer shell removes.
    pub passed: Vec<usize>,
    /// The script has other escapes, so the inner shell reads a different text.
    pub escaped: bool,
    /// The script is single-quoted: its variables belong to the inner shell.
    pub own_variables: bool,
}

/// The inline script of a command, and the position of the word that starts the shell.
pub(crate) fn script(words: &[Word]) -> Option<(usize, Word)> {
    after_option(words).or_else(|| wrapped(words))
}

/// The value of `sbatch --wrap`, which `sh` runs.
fn wrapped(words: &[Word]) -> Option<(usize, Word)> {
    let is_sbatch = |word: &Word| word.text.rsplit('/').next() == Some("sbatch");
    let at = words.iter().position(is_sbatch)?;
    let mut options = words[at + 1..].iter();
    while let Some(word) = options.next() {
        if word.text == "--wrap" {
            return Some((at, options.next()?.clone()));
        }
        if word.text.starts_with("--wrap=") {
            return Some((at, word.after("--wrap=".len())));
        }
    }
    None
}

/// The word after a shell's `-c`.
fn after_option(words: &[Word]) -> Option<(usize, Word)> {
    let is_shell_word = |word: &Word| {
        let name = word.text.rsplit('/').next().unwrap_or_default();
        word.unresolved.is_empty() && is_shell(name)
    };
    let shell = words.iter().position(is_shell_word)?;
    let mut has_script = false;
    let mut at = shell + 1;
    while let Some(word) = words.get(at) {
        let option = word.text.len() > 1 && word.text.starts_with(['-', '+']);
        if !option {
            return has_script.then(|| (shell, word.clone()));
        }
        has_script |= is_script_option(&word.text);
        at += 1 + usize::from(is_valued(&word.text));
    }
    None
}

/// The place of an inline script. `None`: its quoting is not supported.
pub(crate) fn inside(text: &str, word: &Word) -> Option<Inside> {
    let (start, end) = (word.span.start, word.span.end);
    let written = text.get(start..end)?;
    let mut inside = Inside {
        start,
        end,
        passed: Vec::new(),
        escaped: false,
        own_variables: false,
    };
    if word.is_literal() {
        return Some(inside);
    }
    let quote = written.chars().next().filter(|c| ['\'', '"'].contains(c))?;
    let content = written.strip_prefix(quote)?.strip_suffix(quote)?;
    (inside.start, inside.end) = (start + 1, end - 1);
    inside.own_variables = quote == '\'';
    if inside.own_variables {
        return (!content.contains('\'')).then_some(inside);
    }
    let mut characters = content.char_indices();
    while let Some((at, c)) = characters.next() {
        match (c, content[at + c.len_utf8()..].chars().next()) {
            ('"', _) | ('\\', None) => return None,
            ('\\', next) if unescaped::is_escaped(next) => {
                match next {
                    Some('$') => inside.passed.push(inside.start + at),
                    _ => inside.escaped = true,
                }
                characters.next();
            }
            _ => {}
        }
    }
    Some(inside)
}

#[cfg(test)]
mod tests;
