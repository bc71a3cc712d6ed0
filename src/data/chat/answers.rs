//! Finds the answers in a rendered conversation.
//!
//! `{% generation %}…{% endgeneration %}` marks the model's text in a template (transformers' `AssistantTracker`). The
//! engine has no such tag, so it is rewritten to a call block of the same shape, whose function puts
//! marks around its body. The marks are Unicode noncharacters, which no text should contain.

use std::ops::Range;

use minijinja::value::{Kwargs, Rest};
use minijinja::{Error, State};
use serde_json::Value;

use super::{ChatError, ChatTemplate};

/// The text of a message; it is empty for tool calls.
fn content(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn is_answer(message: &Value) -> bool {
    message["role"] == "assistant"
}

/// The text inside the template's own generation blocks.
pub(super) fn marked(
    messages: &[Value],
    first: usize,
    text: &str,
    spans: Vec<Range<usize>>,
) -> Result<Vec<Range<usize>>, ChatError> {
    let answers = messages.iter().filter(|message| is_answer(message)).count();
    let before = messages[..first].iter().filter(|m| is_answer(m)).count();
    if before > 0 && spans.len() != answers {
        // The start of the answer is ambiguous.
        return Err(ChatError::NotPrefixStable { message: first + 1 });
    }
    let holds_text = |span: &Range<usize>| !text[span.clone()].is_empty();
    Ok(spans.into_iter().skip(before).filter(holds_text).collect())
}

/// An answer starts at the end of the messages before it, rendered with the generation prompt. It ends at the
/// end of the rendering of all messages up to it, without the white space after the mark that ends the turn.
pub(super) fn by_prefixes(
    template: &ChatTemplate,
    messages: &[Value],
    first: usize,
    text: &str,
) -> Result<Vec<Range<usize>>, ChatError> {
    let mut spans = Vec::new();
    for (i, message) in messages.iter().enumerate().skip(first) {
        if !is_answer(message) {
            continue;
        }
        let unstable = ChatError::NotPrefixStable { message: i + 1 };
        let prompt = template.render(&messages[..i], true)?;
        if !text.starts_with(&prompt) {
            return Err(unstable);
        }
        let end = if i + 1 == messages.len() {
            text.len()
        } else {
            let through = template.render(&messages[..=i], false)?;
            shared_prefix(&through, text, &template.marks)
        };
        let answer = text.get(prompt.len()..end).ok_or(unstable.clone())?;
        // Templates may trim an answer, but never change it.
        let words = content(message).trim();
        let at = answer.find(words).ok_or(unstable)?;
        let tail = &answer[at + words.len()..];
        let kept = match tail.trim_end() {
            "" => answer.len(),
            mark => at + words.len() + mark.len(),
        };
        if kept > 0 {
            spans.push(prompt.len()..prompt.len() + kept);
        }
    }
    Ok(spans)
}

/// Length in bytes of the common prefix of two texts, moved back to the start of any special token that it
/// would cut. A template may end the last message differently from the others (`<eos>` instead of
/// `<|im_start|>`), so that a common `<` is meaningless.
pub(super) fn shared_prefix(one: &str, other: &str, marks: &[String]) -> usize {
    let mut shared = one
        .char_indices()
        .zip(other.chars())
        .find(|((_, a), b)| a != b)
        .map_or(one.len().min(other.len()), |((at, _), _)| at);
    // Moving back may enter another special token, so this repeats until nothing moves.
    loop {
        let before = shared;
        for text in [one, other] {
            for mark in marks {
                let first = (shared + 1).saturating_sub(mark.len());
                shared = (first..shared)
                    .find(|&at| {
                        at + mark.len() > shared
                            && text.as_bytes()[at..].starts_with(mark.as_bytes())
                    })
                    .unwrap_or(shared);
            }
        }
        if shared == before {
            return shared;
        }
    }
}

/// Name of the function that the call block calls.
pub(super) const FUNCTION: &str = "__generation";
const CALL: &str = " call __generation() ";

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
        let Some(length) = tag[2..].find("%}").map(|length| length + 2) else {
            rest = tag;
            break;
        };
        let inside = &tag[2..length];
        let name = inside.trim_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => Some(CALL),
            "endgeneration" => Some(" endcall "),
            _ => None,
        };
        found |= replacement.is_some();
        let inside = inside.replacen(name, replacement.unwrap_or(name), 1);
        text.push_str(&format!("{{%{inside}%}}"));
        rest = &tag[length + 2..];
    }
    text.push_str(rest);
    (text, found)
}

/// Marks the body of a generation block.
pub(super) fn mark(
    state: &mut State<'_, '_>,
    _: Rest<minijinja::Value>,
    arguments: Kwargs,
) -> Result<String, Error> {
    let body: minijinja::Value = arguments.get("caller")?;
    let body = body.call(state, &[])?;
    Ok(format!("{BEGIN}{body}{END}"))
}

/// The text without marks, and its marked ranges.
pub(super) fn unmark(marked: &str) -> (String, Vec<Range<usize>>) {
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
    (text, spans)
}
