//! Finds the answers in a rendered conversation.
//!
//! `{% generation %}…{% endgeneration %}` marks the model's text in a template (transformers' `AssistantTracker`). The
//! engine has no such tag, so it is rewritten to a `with` block, which is a scope too, and includes of two templates that
//! consist of a mark. The marks are Unicode noncharacters, which no text should contain.

use std::ops::Range;

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

/// The marks around the model's text, and the names of the templates that consist of them.
pub(super) const BEGIN: &str = "\u{fdd0}";
pub(super) const END: &str = "\u{fdd1}";

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
        let controls = ['-', '+'];
        let left = &inside[..usize::from(inside.starts_with(controls))];
        let right = inside.len() - usize::from(inside.len() > 1 && inside.ends_with(controls));
        let (name, right) = (inside[left.len()..right].trim(), &inside[right..]);
        // Two tags in place of one, without text between them, leave the white space around as it is.
        let replacement = match name {
            "generation" => format!("{{%{left} with %}}{{% include \"{BEGIN}\" {right}%}}"),
            "endgeneration" => format!("{{%{left} include \"{END}\" %}}{{% endwith {right}%}}"),
            _ => tag[..length + 2].to_owned(),
        };
        found |= name == "generation";
        text.push_str(&replacement);
        rest = &tag[length + 2..];
    }
    text.push_str(rest);
    (text, found)
}

/// The text without marks, and its marked ranges.
pub(super) fn unmark(marked: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(marked.len());
    let mut spans = Vec::new();
    let mut begin = None;
    for piece in marked.split_inclusive(['\u{fdd0}', '\u{fdd1}']) {
        if let Some(before) = piece.strip_suffix(BEGIN) {
            text.push_str(before);
            begin = Some(text.len());
        } else if let Some(inside) = piece.strip_suffix(END) {
            text.push_str(inside);
            spans.extend(begin.take().map(|begin| begin..text.len()));
        } else {
            text.push_str(piece);
        }
    }
    (text, spans)
}
