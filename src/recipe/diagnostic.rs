//! What a reader or a rule has to say about a recipe.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::source::{Sources, Span};

/// Orders findings by file and place; what has no place comes last.
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
    /// Nothing may be started.
    Error,
    /// Something differs from what the recipe's author probably expects.
    Warning,
    /// Worth knowing, changes nothing.
    Note,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        })
    }
}

/// One finding: which rule, how serious, what is wrong with the numbers in it, and what to change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnostic {
    /// The rule's id in kebab case, the argument of `evenkeel explain`.
    pub rule: String,
    /// How serious it is.
    pub severity: Severity,
    /// One line with the numbers in it, lower case, without a full stop.
    pub message: String,
    /// What to change, one line.
    pub help: String,
    /// Where the value stood; `None` when nobody wrote it (a default, or something missing).
    pub span: Option<Span>,
}

/// A diagnostic with its place resolved, as `plan -o json` and `check -o json` print it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// The rule's id.
    pub rule: String,
    /// How serious it is.
    pub severity: Severity,
    /// One line with the numbers in it.
    pub message: String,
    /// What to change.
    pub help: String,
    /// The file as the user named it, or `command line`.
    pub file: Option<String>,
    /// Line, counted from 1.
    pub line: Option<u32>,
    /// Column, counted from 1.
    pub column: Option<u32>,
}

/// The first error as `told` tells it, and how many more there are; `None` where there is none.
pub fn first_error(
    diagnostics: &[Diagnostic],
    told: impl FnOnce(&Diagnostic) -> String,
) -> Option<String> {
    let mut errors = diagnostics
        .iter()
        .filter(|diagnostic| diagnostic.severity == Severity::Error);
    let text = told(errors.next()?);
    Some(match errors.count() {
        0 => text,
        more => format!("{text}, and {more} more"),
    })
}

impl Diagnostic {
    /// An error; `span` is where the value stood, if anybody wrote it.
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
        }
    }

    /// A warning.
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

    /// A note.
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

    /// Resolves the span against the sources it was made from.
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
