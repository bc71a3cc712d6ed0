//! Diagnostics: the findings of readers and rules in a recipe.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::source::{Sources, Span};

/// Sorts diagnostics by file and place. Those without a place come last.
pub fn in_file_order(diagnostics: &mut [Diagnostic]) {
    diagnostics.sort_by_key(|d| {
        let place = d.span.map(|span| (span.file, span.start));
        (place.is_none(), place)
    });
}

/// How serious a diagnostic is. Only errors stop a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The plan fails, so nothing starts.
    Error,
    /// Something differs from what the recipe's author probably expects.
    Warning,
    /// Information without an effect on the plan.
    Note,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A finding: its rule and severity, the problem with its numbers, and the way out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnostic {
    /// The rule's id in kebab case, the argument of `evenkeel explain`.
    pub rule: String,
    pub severity: Severity,
    /// The problem in one line, with the numbers, in lower case and without a full stop.
    pub message: String,
    /// The way out, one line.
    pub help: String,
    /// The value's place; `None` for a default or a missing value.
    pub span: Option<Span>,
    /// It says that the batch of a program is not known, which ends with a given global batch.
    #[serde(skip)]
    pub hides_batch: bool,
    /// What to type to end it. `None`: no word does, and the help says what to change.
    #[serde(skip)]
    pub next: Option<Box<Next>>,
}

/// What ends a problem on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// More words of the same command: `GPUS=VALUE`, `--recipe-gpus N`.
    Words(Vec<String>),
    /// Another command.
    Command(String),
}

impl Next {
    /// These words of the same command.
    pub(crate) fn words<W: Into<String>>(words: impl IntoIterator<Item = W>) -> Option<Box<Next>> {
        let words = words.into_iter().map(Into::into).collect();
        Some(Box::new(Next::Words(words)))
    }

    pub(crate) fn command(command: String) -> Option<Box<Next>> {
        Some(Box::new(Next::Command(command)))
    }
}

/// A diagnostic with file, line and column, as `plan -o json` and `check -o json` print it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    pub rule: String,
    /// How serious it is; only errors stop a plan.
    pub severity: Severity,
    /// The problem in one line, with the numbers.
    pub message: String,
    /// The way out, one line.
    pub help: String,
    /// The path as the user wrote it, or `command line`.
    pub file: Option<String>,
    /// Line, counted from 1.
    pub line: Option<u32>,
    /// Column, counted from 1.
    pub column: Option<u32>,
}

/// Whether any of them is an error.
pub fn has_error(diagnostics: &[Diagnostic]) -> bool {
    diagnostics.iter().any(Diagnostic::is_error)
}

/// The first error, formatted by `format`, and the number of further errors. `None`: there is no error.
pub fn first_error(
    diagnostics: &[Diagnostic],
    format: impl FnOnce(&Diagnostic) -> String,
) -> Option<String> {
    let mut errors = diagnostics.iter().filter(|d| d.is_error());
    let text = format(errors.next()?);
    Some(match errors.count() {
        0 => text,
        more => format!("{text}, and {more} more"),
    })
}

/// The most diagnostics of one reading.
const MAX: usize = 100;

/// Drops the last and least severe diagnostics beyond a limit, and sorts the others by place. The last one says how
/// many are missing.
pub(crate) fn keep_most_severe(diagnostics: &mut Vec<Diagnostic>) {
    let more = diagnostics.len().saturating_sub(MAX);
    if more == 0 {
        return;
    }
    diagnostics.sort_by_key(|diagnostic| diagnostic.severity);
    diagnostics.truncate(MAX);
    in_file_order(diagnostics);
    if let Some(last) = diagnostics.last_mut() {
        last.help = format!("{}; {more} more problems are not listed", last.help);
    }
}

impl Diagnostic {
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }

    /// The same problem, which ends with a given global batch.
    pub(crate) fn of_batch(self) -> Diagnostic {
        Diagnostic {
            hides_batch: true,
            ..self
        }
    }

    /// The same problem, which these words of the command end.
    pub(crate) fn ended_by<W: Into<String>>(
        self,
        words: impl IntoIterator<Item = W>,
    ) -> Diagnostic {
        Diagnostic {
            next: Next::words(words),
            ..self
        }
    }

    /// The rule, the problem and the way out in one line.
    pub fn one_line(&self) -> String {
        format!("{}: {} ({})", self.rule, self.message, self.help)
    }

    /// An error. `span`: the value's place, `None` for a default or a missing value.
    pub fn error(
        rule: &str,
        span: Option<Span>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) -> Diagnostic {
        Diagnostic {
            rule: rule.to_owned(),
            severity: Severity::Error,
            message: message.into(),
            help: help.into(),
            span,
            hides_batch: false,
            next: None,
        }
    }

    pub fn warning(
        rule: &str,
        span: Option<Span>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) -> Diagnostic {
        Diagnostic {
            severity: Severity::Warning,
            ..Diagnostic::error(rule, span, message, help)
        }
    }

    pub fn note(
        rule: &str,
        span: Option<Span>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) -> Diagnostic {
        Diagnostic {
            severity: Severity::Note,
            ..Diagnostic::error(rule, span, message, help)
        }
    }

    /// Resolves the span. `sources` must be those of the reading that made the diagnostic.
    pub fn locate(&self, sources: &Sources) -> Located {
        Located {
            rule: self.rule.clone(),
            severity: self.severity,
            message: self.message.clone(),
            help: self.help.clone(),
            file: self
                .span
                .and_then(|s| sources.get(s.file))
                .map(|f| f.path.display().to_string()),
            line: self.span.map(|s| s.line),
            column: self.span.map(|s| s.column),
        }
    }
}
