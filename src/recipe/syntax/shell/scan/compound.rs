//! Compound commands: the beginning and end of loops and conditions, the patterns of `case`, which are no
//! commands, and arithmetic, which is one.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.9.4; `((…))` as in bash 5.2.

use super::{Form, Scanner, Then};
use crate::recipe::syntax::shell::expansion;
use crate::recipe::syntax::shell::word::Word;

/// The opening and closing words of compound commands.
const COMPOUND: [(&str, &str); 7] = [
    ("if", "fi"),
    ("for", "done"),
    ("select", "done"),
    ("while", "done"),
    ("until", "done"),
    ("case", "esac"),
    ("{", "}"),
];

/// Reserved words that precede a command.
const BEFORE: [&str; 10] = [
    "if", "then", "else", "elif", "while", "until", "do", "{", "!", "time",
];

/// The command name of `((…))`; its only argument is the expression.
pub(crate) const ARITHMETIC: &str = "((";

/// Maximum bytes of an arithmetic command. The limit keeps the scan linear where `((` is never closed.
const LONGEST: usize = 1024;

impl Scanner<'_> {
    pub(super) fn end(&mut self, then: Then) {
        let words = std::mem::take(&mut self.words);
        let after = std::mem::replace(&mut self.after, then);
        let mut rest = words.as_slice();
        while let Some((first, more)) = rest.split_first() {
            let name = first.text.as_str();
            let compound = COMPOUND.iter().find(|(begin, _)| *begin == name);
            if !first.is_literal() || self.form != Form::Script {
                break;
            }
            if let Some((_, end)) = compound {
                self.open.push(end);
            } else if COMPOUND.iter().any(|(_, end)| *end == name) {
                self.close(name);
                rest = more;
                continue;
            }
            if !BEFORE.contains(&name) {
                break;
            }
            rest = more;
        }
        // `function train {`
        let braced = rest.len() > 1 && rest.last().is_some_and(|w| w.text == "{" && w.is_literal());
        if braced && self.form == Form::Script {
            self.open.push("}");
        }
        if !rest.is_empty() {
            let certain = self.open.is_empty() && after == Then::Next && then != Then::Beside;
            let words = rest.to_vec();
            self.push(words, certain);
        }
    }

    pub(super) fn close(&mut self, end: &str) {
        if self.open.last() == Some(&end) {
            self.open.pop();
        }
    }

    /// Whether `case WORD in` has been read.
    pub(super) fn begins_patterns(&self) -> bool {
        let [before @ .., case, _, last] = self.words.as_slice() else {
            return false;
        };
        let is = |word: &Word, text: &str| word.is_literal() && word.text == text;
        let begins = self.form == Form::Script && is(last, "in") && is(case, "case");
        let nothing = |word: &Word| BEFORE.contains(&word.text.as_str());
        begins && before.iter().all(nothing)
    }

    /// Skips `;;`, `;&` or `;;&`, which end an item of `case`. A pattern follows.
    pub(super) fn ends_case_item(&mut self) -> bool {
        let ends = [";;&", ";;", ";&"];
        let found = ends.iter().find(|end| self.rest().starts_with(**end));
        let Some((end, case)) = found.zip(self.open.iter().rposition(|end| *end == "esac")) else {
            return false;
        };
        self.advance_by(end.len());
        self.end(Then::Next);
        self.open.truncate(case + 1);
        self.in_pattern = true;
        true
    }

    /// Skips one character or word of a pattern, which ends at `)`.
    pub(super) fn pattern(&mut self, c: char) {
        match c {
            ')' => {
                self.advance(c);
                self.words.clear();
                self.in_pattern = false;
            }
            '#' => self.skip_line(),
            '\\' if self.continues() => self.skip_continuation(),
            c if self.is_blank(c) || ";&|<>(".contains(c) => self.advance(c),
            _ => {
                let word = self.word(true);
                let ends = self.words.is_empty() && word.is_literal() && word.text == "esac";
                self.words.push(word);
                if ends {
                    self.in_pattern = false;
                }
            }
        }
    }

    /// Reads `((expression))`, as a command or after `for`.
    pub(super) fn arithmetic(&mut self) -> bool {
        let begins = |word: &Word| {
            let name = word.text.as_str();
            word.is_literal() && (name == "for" || BEFORE.contains(&name))
        };
        let rest = self.rest();
        let rest = &rest[..rest.floor_char_boundary(LONGEST)];
        if self.form != Form::Script || !rest.starts_with("((") || !self.words.iter().all(begins) {
            return false;
        }
        // Nested subshells, `( (…) )`, do not end with `))`.
        let outer = expansion::bracketed(rest, ')');
        let inner = expansion::bracketed(&rest[1..], ')');
        let Some((outer, _)) = outer
            .zip(inner)
            .filter(|(outer, inner)| outer == &(inner + 2))
        else {
            return false;
        };
        let expression = rest[2..outer - 2].to_owned();
        for text in [ARITHMETIC.to_owned(), expression] {
            let span = self.here();
            self.words.push(Word {
                closed: true,
                literal: 0,
                text,
                span,
                unresolved: Vec::new(),
                items: None,
            });
        }
        self.advance_by(outer);
        true
    }
}
