//! Trees of messages with ranked replies: a prompt is the conversation before a message, and its completions are the
//! message's next better sibling and itself.
//!
//! Upstream: ContextualAI/HALOs 4831988 `train/data.py` (`get_oasst`), with pandas 2.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::conversion::{number, other_rows, text};
use super::error::DataError;
use super::read::{self, Content, Document};
use super::record::Fault;
use super::request::check_stopped;
use super::sources::Source;

/// Messages of other languages are left out.
const LANGUAGE: &str = "en";

/// The messages of a source.
#[derive(Debug, Default)]
pub(super) struct Messages {
    by_id: HashMap<String, Message>,
    /// By the id of the parent, in the order of the rows.
    replies: HashMap<String, Vec<String>>,
}

#[derive(Debug, Clone)]
struct Message {
    id: String,
    parent: Option<String>,
    role: &'static str,
    text: String,
    /// 0 is the best.
    rank: Option<f64>,
}

impl Message {
    /// `None`: it is in another language.
    fn of(row: &Map<String, Value>) -> Result<Option<Message>, Fault> {
        if text(row, "lang")? != LANGUAGE {
            return Ok(None);
        }
        let is_given = |name: &str| row.get(name).is_some_and(|value| !value.is_null());
        let parent = is_given("parent_id").then(|| text(row, "parent_id"));
        let rank = is_given("rank").then(|| number(row, "rank"));
        Ok(Some(Message {
            id: text(row, "message_id")?.to_owned(),
            parent: parent.transpose()?.map(str::to_owned),
            role: match text(row, "role")? {
                "prompter" => "user",
                _ => "assistant",
            },
            text: text(row, "text")?.to_owned(),
            rank: rank.transpose()?,
        }))
    }
}

impl Messages {
    /// Reads all messages of a source.
    pub fn read(
        source: &Source,
        choose: read::Choose<'_>,
        reading: read::Reading<'_>,
    ) -> Result<Messages, DataError> {
        let mut messages = Messages::default();
        for file in &source.files {
            for document in read::open(file, choose, reading)? {
                check_stopped(reading.stopped)?;
                let document = document?;
                let row = document.content.row();
                let message = row.and_then(|row| Message::of(&row));
                messages.add(message.map_err(|fault| at(&document, fault))?);
            }
        }
        Ok(messages)
    }

    fn add(&mut self, message: Option<Message>) {
        let Some(message) = message else { return };
        if let Some(parent) = &message.parent {
            let replies = self.replies.entry(parent.clone()).or_default();
            replies.push(message.id.clone());
        }
        self.by_id.insert(message.id.clone(), message);
    }

    /// A message with its conversation in place of its row, or without columns where upstream leaves it out.
    pub fn replace(&self, document: Document) -> Result<Document, DataError> {
        let row = document.content.row();
        let row = row.and_then(|row| self.row(&row));
        let row = row.map_err(|fault| at(&document, fault))?;
        Ok(Document {
            content: Content::Row(row.unwrap_or_default()),
            ..document
        })
    }

    fn row(&self, row: &Map<String, Value>) -> Result<Option<Map<String, Value>>, Fault> {
        let Some(worse) = Message::of(row)? else {
            return Ok(None);
        };
        let (Some(rank), Some(parent)) = (worse.rank.filter(|rank| *rank != 0.0), &worse.parent)
        else {
            return Ok(None);
        };
        let siblings = self.replies.get(parent).into_iter().flatten();
        let mut siblings = siblings.filter_map(|id| self.by_id.get(id));
        let Some(better) = siblings.find(|sibling| sibling.rank == Some(rank - 1.0)) else {
            return Ok(None);
        };
        let Some(prompt) = self.conversation(parent)? else {
            return Ok(None);
        };
        let row = json!({"prompt": prompt, "chosen": better.text, "rejected": worse.text});
        Ok(row.as_object().cloned())
    }

    /// The messages from the root to this one. `None`: one of them is missing.
    fn conversation(&self, last: &str) -> Result<Option<Vec<Value>>, Fault> {
        let mut path = Vec::new();
        let mut next = Some(last);
        while let Some(id) = next {
            let Some(message) = self.by_id.get(id) else {
                return Ok(None);
            };
            if path.len() == self.by_id.len() {
                return Err(other_rows("a message replies to itself"));
            }
            path.push(json!({"role": message.role, "content": message.text}));
            next = message.parent.as_deref();
        }
        path.reverse();
        Ok(Some(path))
    }
}

fn at(document: &Document, fault: Fault) -> DataError {
    DataError::record(&document.place, fault.problem, fault.help)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, parent: Option<&str>, role: &str, rank: Option<u64>, lang: &str) -> Value {
        json!({"message_id": id, "parent_id": parent, "role": role, "text": format!("{id}  text"),
            "rank": rank, "lang": lang})
    }

    /// What each row becomes: the ids of its prompt, of its chosen and of its rejected completion.
    fn shown(rows: &[Value]) -> Vec<String> {
        let mut messages = Messages::default();
        for row in rows {
            messages.add(Message::of(row.as_object().unwrap()).unwrap());
        }
        let found = rows
            .iter()
            .filter_map(|row| messages.row(row.as_object().unwrap()).unwrap());
        let id = |value: &Value| {
            value
                .as_str()
                .unwrap()
                .split(' ')
                .next()
                .unwrap()
                .to_owned()
        };
        let of = |row: Map<String, Value>| {
            let prompt = row["prompt"].as_array().unwrap().iter();
            let prompt: Vec<String> = prompt
                .map(|turn| {
                    format!(
                        "{} {}",
                        turn["role"].as_str().unwrap(),
                        id(&turn["content"])
                    )
                })
                .collect();
            let (chosen, rejected) = (id(&row["chosen"]), id(&row["rejected"]));
            format!("{}: {chosen} > {rejected}", prompt.join(", "))
        };
        found.map(of).collect()
    }

    /// The expected pairs are what `get_oasst` gives for these rows.
    #[test]
    fn each_ranked_reply_is_paired_with_its_next_better_sibling() {
        let rows = [
            row("p", None, "prompter", None, "en"),
            row("b", Some("p"), "assistant", Some(1), "en"),
            row("a", Some("p"), "assistant", Some(0), "en"),
            // The rank between them is missing.
            row("d", Some("p"), "assistant", Some(3), "en"),
            row("q", Some("b"), "prompter", Some(0), "en"),
            row("r", Some("b"), "prompter", Some(1), "en"),
            row("x", Some("q"), "assistant", Some(2), "en"),
            row("y", Some("q"), "assistant", Some(1), "en"),
            // A better sibling in another language does not count.
            row("z", Some("q"), "assistant", Some(0), "de"),
            row("alone", Some("r"), "assistant", Some(1), "en"),
            row("unranked", Some("r"), "assistant", None, "en"),
            // The parent of these is in another language, or missing.
            row("v", Some("z"), "prompter", Some(0), "en"),
            row("w", Some("z"), "prompter", Some(1), "en"),
            row("s", Some("lost"), "prompter", Some(0), "en"),
            row("t", Some("lost"), "prompter", Some(1), "en"),
        ];
        assert_eq!(
            shown(&rows),
            [
                "user p: a > b",
                "user p, assistant b: q > r",
                "user p, assistant b, user q: y > x",
            ]
        );
    }

    #[test]
    fn a_circle_of_messages_is_refused() {
        let rows = [
            row("a", Some("b"), "assistant", Some(0), "en"),
            row("b", Some("a"), "prompter", Some(0), "en"),
            row("c", Some("a"), "prompter", Some(1), "en"),
        ];
        let mut messages = Messages::default();
        for row in &rows {
            messages.add(Message::of(row.as_object().unwrap()).unwrap());
        }
        let fault = messages.row(rows[2].as_object().unwrap()).unwrap_err();
        assert_eq!(fault.problem, "a message replies to itself");
    }
}
