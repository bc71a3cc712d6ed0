//! Characters that look as if they stood between words and do not: to a shell a carriage return is a
//! letter, and so is every blank beyond space and tab.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.3, and bash 5.2 (`shell_blank`).

use super::scan::Form;
use super::script::Candidate;
use super::words::Word;
use crate::recipe::diagnostic::Diagnostic;
use crate::recipe::source::{FileId, Span};

/// Refuses a script whose lines end in a carriage return.
pub(super) fn refuse_line_ends(
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
            Some(place(text, at, file)),
            "the lines of this script end in a carriage return, which the shell takes for a letter: a `\\` before it continues nothing, and the command ends there",
            "save it with LF line ends (`dos2unix`, `sed -i 's/\\r$//'`)",
        ));
    true
}

/// Refuses a training with a word that looks like several.
pub(super) fn refuse(form: Form, training: &Candidate<'_>, diagnostics: &mut Vec<Diagnostic>) {
    // Between quotes they are meant.
    let joined = |word: &&Word| word.text[..word.literal].chars().any(char::is_whitespace);
    if form == Form::Script
        && let Some(word) = training.words.iter().find(joined)
    {
        let blank = word.text.chars().find(|c| c.is_whitespace());
        let blank = u32::from(blank.unwrap_or(' '));
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(word.span),
            format!(
                "U+{blank:04X} looks like a space here and is none to the shell: this is one word"
            ),
            "write a space in its place, or quotes around it where it is meant",
        ));
    }
}

fn place(text: &str, at: usize, file: FileId) -> Span {
    let before = &text[..at];
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let line = before.rsplit('\n').next().unwrap_or_default();
    Span {
        file,
        start: at,
        end: at + 1,
        line: number(before.matches('\n').count() + 1),
        column: number(line.chars().count() + 1),
    }
}

#[cfg(test)]
mod tests {
    use crate::recipe::command::tests::{argument, refused};

    const CALL: &str = "torchrun --nproc_per_node 2 train.py --per_device_train_batch_size 4";

    #[test]
    fn a_script_with_carriage_returns_is_refused() {
        for script in [
            format!("#!/bin/bash\r\n{CALL}\r\n"),
            CALL.replace(" train", " \\\r\n  train"),
            format!("#!/bin/bash\n{CALL} \\\r\n  --seed 1\n"),
        ] {
            let said = refused(&script).unwrap_or_default();
            assert!(said.contains("carriage return"), "{script:?}: {said}");
        }
    }

    #[test]
    fn a_blank_that_is_none_to_the_shell_is_refused() {
        for blank in ['\u{a0}', '\u{2003}', '\u{3000}', '\u{b}', '\r'] {
            for script in [
                CALL.replace("size 4", &format!("size{blank}4")),
                CALL.replace("node 2", &format!("node{blank}2")),
                CALL.replace("size 4", &format!("size 4{blank}--seed 1")),
            ] {
                let said = refused(&script).unwrap_or_default();
                let number = format!("U+{:04X}", u32::from(blank));
                assert!(
                    said.contains(&number) || said.contains("no option"),
                    "{script:?}: {said}"
                );
            }
        }
        let meant = format!("{CALL} --run_name 'a\u{a0}b'");
        assert_eq!(argument(&meant, "run_name").as_deref(), Some("a\u{a0}b"));
    }
}
