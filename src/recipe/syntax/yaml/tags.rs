//! Explicit tags: only the core ones, and none that makes a loader run code.

use super::problem::{Problem, problem};
use crate::recipe::syntax::scalar::Tag;
use crate::recipe::syntax::source::Span;

pub(super) fn scalar_tag(tag: &granit_parser::Tag, span: Span) -> Result<Tag, Problem> {
    if tag.original() == "!" {
        return Ok(Tag::Str);
    }
    match tag.core_suffix() {
        Some("str") => Ok(Tag::Str),
        Some("int") => Ok(Tag::Int),
        Some("float") => Ok(Tag::Float),
        Some("bool") => Ok(Tag::Bool),
        Some("null") => Ok(Tag::Null),
        _ => Err(unknown_tag(tag, span)),
    }
}

pub(super) fn collection_tag(
    tag: Option<&granit_parser::Tag>,
    expected: &str,
    span: Span,
) -> Result<(), Problem> {
    match tag {
        Some(tag) if tag.core_suffix() != Some(expected) => Err(unknown_tag(tag, span)),
        _ => Ok(()),
    }
}

fn unknown_tag(tag: &granit_parser::Tag, span: Span) -> Problem {
    problem(
        span,
        format!("the tag `{}` is not supported", tag.original()),
        "remove the tag: upstream's safe loader refuses it too",
    )
}
