//! White space that does not separate words: a shell treats a carriage return as an ordinary character, and
//! so every blank except space and tab.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.3, and bash 5.2 (`shell_blank`).

use super::script::Candidate;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::shell::Form;
use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::source::{FileId, Span};

/// Refuses a script with CRLF line ends.
pub(crate) fn refuse_line_ends(
    text: &str,
    form: Form,
    file: FileId,
    diagnostics: &mut Vec<Diagnostic>,
) -> bool {
    let Some(at) = text.find("\r\n").filter(|_| form == Form::Script) else {
        return false;
    };
    diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(Span::of(text, at..at + 1, file)),
            "the lines of this script end in CRLF: the shell treats the carriage return as part of a word, and a `\\` before it does not continue the line",
            "save it with LF line ends (`dos2unix`, `sed -i 's/\\r$//'`)",
        ));
    true
}

/// Refuses a training command with a word that holds white space outside quotes.
pub(crate) fn refuse(form: Form, training: &Candidate<'_>, diagnostics: &mut Vec<Diagnostic>) {
    // White space within quotes is intended.
    let joined = |word: &&Word| word.text[..word.literal].chars().any(char::is_whitespace);
    if form == Form::Script
        && let Some(word) = training.words.iter().find(joined)
    {
        diagnostics.extend(blank(&word.text, word.span));
    }
}

/// The error for white space in a text that does not separate words. `None`: there is none.
pub(crate) fn blank(text: &str, at: Span) -> Option<Diagnostic> {
    let separates = |c: char| matches!(c, ' ' | '\t' | '\n');
    let blank = text.chars().find(|c| c.is_whitespace() && !separates(*c))?;
    let blank = u32::from(blank);
    Some(Diagnostic::error(
        "yaml-syntax",
        Some(at),
        format!("U+{blank:04X} looks like a space, but the shell does not split words at it"),
        "replace it with a space, or quote it if it is intended",
    ))
}

#[cfg(test)]
mod tests {
    use crate::recipe::dialects::command::tests::{argument, refused};

    const CALL: &str = "torchrun --nproc_per_node 2 train.py --per_device_train_batch_size 4";

    #[test]
    fn a_script_with_carriage_returns_is_refused() {
        for script in [
            format!("#!/bin/bash\r\n{CALL}\r\n"),
            CALL.replace(" train", " \\\r\n  train"),
            format!("#!/bin/bash\n{CALL} \\\r\n  --seed 1\n"),
        ] {
            let message = refused(&script).unwrap_or_default();
            assert!(message.contains("carriage return"), "{script:?}: {message}");
        }
    }

    #[test]
    fn white_space_that_does_not_separate_words_is_refused() {
        for blank in ['\u{a0}', '\u{2003}', '\u{3000}', '\u{b}', '\r'] {
            for script in [
                CALL.replace("size 4", &format!("size{blank}4")),
                CALL.replace("node 2", &format!("node{blank}2")),
                CALL.replace("size 4", &format!("size 4{blank}--seed 1")),
            ] {
                let message = refused(&script).unwrap_or_default();
                let number = format!("U+{:04X}", u32::from(blank));
                assert!(
                    message.contains(&number) || message.contains("no option"),
                    "{script:?}: {message}"
                );
            }
        }
        let meant = format!("{CALL} --run_name 'a\u{a0}b'");
        assert_eq!(argument(&meant, "run_name").as_deref(), Some("a\u{a0}b"));
    }
}
