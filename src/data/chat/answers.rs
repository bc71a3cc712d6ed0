//! Finds the answers in a rendered conversation.

use std::ops::Range;

use serde_json::Value;

use super::generation::unmark;
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
        let prompt = unmark(&template.raw(&messages[..i], true)?).text;
        if !text.starts_with(&prompt) {
            return Err(unstable);
        }
        let end = if i + 1 == messages.len() {
            text.len()
        } else {
            let through = unmark(&template.raw(&messages[..=i], false)?).text;
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
