//! `{% generation %}…{% endgeneration %}`: marks the model's text in a template (transformers'
//! `AssistantTracker`).
//!
//! The engine has no such tag, so it is rewritten to a call block of the same shape, whose function puts
//! marks around its body. The marks are Unicode noncharacters, which no text should contain.

use std::ops::Range;

use minijinja::value::{Kwargs, Rest};
use minijinja::{Error, State, Value};

/// Name of the function that the call block calls.
pub(super) const FUNCTION: &str = "__generation";

const BEGIN: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

/// The template without generation tags, and whether it had any.
pub(super) fn rewrite(source: &str) -> (String, bool) {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        text.push_str(before);
        let Some(length) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[2..length];
        let name = inside.trim_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => Some(format!("call {FUNCTION}()")),
            "endgeneration" => Some("endcall".to_string()),
            _ => None,
        };
        match replacement {
            Some(replacement) => {
                found = true;
                text.push_str("{%");
                text.push_str(&inside.replacen(name, &format!(" {replacement} "), 1));
                text.push_str("%}");
            }
            None => text.push_str(&tag[..length + 2]),
        }
        rest = &tag[length + 2..];
    }
    text.push_str(rest);
    (text, found)
}

/// Marks the body of a generation block.
pub(super) fn mark(
    state: &mut State<'_, '_>,
    _: Rest<Value>,
    arguments: Kwargs,
) -> Result<String, Error> {
    let body: Value = arguments.get("caller")?;
    let body = body.call(state, &[])?;
    Ok(format!("{BEGIN}{body}{END}"))
}

/// A text and its marked ranges.
pub(super) struct Marked {
    pub text: String,
    pub spans: Vec<Range<usize>>,
}

/// Removes the marks and returns the ranges.
pub(super) fn unmark(marked: &str) -> Marked {
    let mut text = String::with_capacity(marked.len());
    let mut spans = Vec::new();
    let mut begin = None;
    for character in marked.chars() {
        match character {
            BEGIN => begin = Some(text.len()),
            END => spans.extend(begin.take().map(|begin| begin..text.len())),
            _ => text.push(character),
        }
    }
    Marked { text, spans }
}
