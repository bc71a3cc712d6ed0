//! Errors of a file that is not a tree.

use super::budget::{MAX_DEPTH, MAX_NODES, MAX_TEXT};
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::source::Span;

/// An error of `yaml-syntax`; boxed, because the results that carry it are many and small.
pub(super) type Problem = Box<Diagnostic>;

pub(super) fn problem(span: Span, message: impl Into<String>, help: &str) -> Problem {
    Box::new(Diagnostic::error("yaml-syntax", Some(span), message, help))
}

pub(super) fn too_deep(span: Span) -> Problem {
    problem(
        span,
        format!("values are nested more than {MAX_DEPTH} deep"),
        "check the brackets, the indentation and the aliases",
    )
}

pub(super) fn over_budget(span: Span) -> Problem {
    problem(
        span,
        format!("the values have more than {MAX_NODES} nodes or {MAX_TEXT} bytes"),
        "nested aliases multiply: write the values out",
    )
}
