//! Parses one row of a source: a text, a prompt with its completion, or a conversation.

use std::fmt;

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::kind::Kind;

/// The content of a row.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Record {
    /// Plain text; all of it carries loss.
    Text(String),
    /// A prompt without loss and a completion with loss.
    Completion { prompt: String, completion: String },
    /// Messages for a chat template.
    Chat {
        /// Unchanged objects with `role` and `content`.
        messages: Vec<Value>,
        /// Index of the first message whose answers carry loss; earlier answers are context.
        first_answer: usize,
    },
}

/// The problem of a row and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub problem: String,
    pub help: String,
}

impl Fault {
    pub(super) fn new(problem: impl Into<String>, help: impl Into<String>) -> Fault {
        Fault {
            problem: problem.into(),
            help: help.into(),
        }
    }
}

/// The columns with the content, each a text or messages: those that the recipe lists, or known ones of this kind of sample
/// among `available` if it lists none, the first of [`Kind::columns`].
pub(super) fn choose_columns(
    listed: &[String],
    available: &[&str],
    kind: Kind,
) -> Result<Vec<String>, Fault> {
    let named = |name: &str| match listed {
        [] => available.contains(&name),
        _ => listed.iter().any(|column| column == name),
    };
    let all = kind.columns();
    let known = all
        .iter()
        .find(|columns| columns.iter().all(|column| named(column)));
    let fits = |listed: &[String]| all.iter().any(|columns| columns.len() == listed.len());
    let columns: Vec<String> = match (known, listed) {
        (Some(known), _) => known.iter().map(|name| name.to_string()).collect(),
        (None, listed) if fits(listed) => listed.to_vec(),
        (None, []) => {
            let wanted = match kind {
                Kind::Text => "neither messages, nor prompt and completion, nor text",
                Kind::Pair => "no chosen and rejected",
                Kind::Labelled => "no prompt, completion and label",
            };
            return Err(Fault::new(
                format!("it has {wanted}, but {}", list(available)),
                "name the column to read in the source's columns",
            ));
        }
        (None, many) => {
            return Err(Fault::new(
                format!("it is unclear which of the {} columns to read", many.len()),
                match kind {
                    Kind::Text => {
                        "list one column (text or messages) or two (prompt and completion)"
                    }
                    Kind::Pair => "list prompt, chosen and rejected, or the last two",
                    Kind::Labelled => "list prompt, completion and label",
                },
            ));
        }
    };
    let missing = |name: &&String| !available.contains(&name.as_str());
    if let Some(missing) = columns.iter().find(missing) {
        return Err(Fault::new(
            format!("it has no column {missing}, but {}", list(available)),
            "name the column to read in the source's columns",
        ));
    }
    Ok(columns)
}

impl Record {
    /// Parses a row; `listed` are the columns that the recipe names.
    pub fn from_row(mut row: Map<String, Value>, listed: &[String]) -> Result<Record, Fault> {
        let available: Vec<&str> = row.keys().map(String::as_str).collect();
        let columns = choose_columns(listed, &available, Kind::Text)?;
        let mut take = |name: &str| row.get_mut(name).map(Value::take).unwrap_or_default();
        let [first, second] = columns.as_slice() else {
            let name = columns.concat();
            return match take(&name) {
                Value::String(text) if name != "messages" => Ok(Record::Text(text)),
                Value::Array(messages) if name != "text" => Record::chat(messages, 0),
                other => {
                    let wanted = match name.as_str() {
                        "messages" => "a list of messages",
                        "text" => "a text",
                        _ => "a text or a list of messages",
                    };
                    Err(wrong_type(&name, &other, wanted))
                }
            };
        };
        match (take(first), take(second)) {
            (Value::String(prompt), Value::String(completion)) => {
                Ok(Record::Completion { prompt, completion })
            }
            (Value::Array(mut messages), Value::Array(answer)) => {
                let first_answer = messages.len();
                messages.extend(answer);
                Record::chat(messages, first_answer)
            }
            (Value::String(_), other) => Err(wrong_type(second, &other, "a text")),
            (Value::Array(_), other) => Err(wrong_type(second, &other, "a list of messages")),
            (other, _) => Err(wrong_type(first, &other, "a text or a list of messages")),
        }
    }

    fn chat(messages: Vec<Value>, first_answer: usize) -> Result<Record, Fault> {
        check_messages(&messages)?;
        Ok(Record::Chat {
            messages,
            first_answer,
        })
    }
}

/// A text, or messages.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Turns {
    Text(String),
    Chat(Vec<Value>),
}

/// The value of a column.
pub(super) fn turns(name: &str, value: Value) -> Result<Turns, Fault> {
    match value {
        Value::String(text) => Ok(Turns::Text(text)),
        Value::Array(messages) => Ok(Turns::Chat(messages)),
        other => Err(wrong_type(name, &other, "a text or a list of messages")),
    }
}

fn wrong_type(name: &str, found: &Value, wanted: &str) -> Fault {
    let found = match found {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Fault::new(
        format!("{name} is {found} and must be {wanted}"),
        "repair the row, or name another column in the source's columns",
    )
}

/// The most columns that a message names, and characters of a name.
const NAMED: usize = 20;
const NAME: usize = 100;

fn list(names: &[&str]) -> String {
    let first = &names[..names.len().min(NAMED)];
    let first = first
        .iter()
        .map(|name| name.chars().take(NAME).collect::<String>());
    let first = first.collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "no columns at all".to_string(),
        1..=NAMED => first,
        more => format!("{first} and {} more", more - NAMED),
    }
}

/// Checks that messages have a role and a text, that a system message is first, and that users and assistants
/// alternate.
pub(super) fn check_messages(messages: &[Value]) -> Result<(), Fault> {
    let mut previous = None;
    for (i, message) in messages.iter().enumerate() {
        let number = i + 1;
        let role = check_message(message, number)?;
        let allowed = match role {
            "system" | "developer" => i == 0,
            "user" => previous != Some("user"),
            "assistant" => matches!(previous, Some("user" | "tool")),
            "tool" => matches!(previous, Some("assistant" | "tool")),
            other => {
                return Err(Fault::new(
                    format!("message {number} has the role {other}"),
                    "roles are system, developer, user, assistant and tool",
                ));
            }
        };
        if !allowed {
            let place = match previous {
                Some(previous) => format!("follows one of role {previous}"),
                None => "comes first".to_string(),
            };
            return Err(Fault::new(
                format!("message {number} of role {role} {place}"),
                "a system message comes first, then user and assistant take turns",
            ));
        }
        previous = Some(role);
    }
    Ok(())
}

fn check_message(message: &Value, number: usize) -> Result<&str, Fault> {
    let Some(role) = message["role"].as_str() else {
        let help = if message.get("from").is_some() {
            "rename from to role and value to content, human to user and gpt to assistant"
        } else {
            "a message is an object with the texts role and content"
        };
        return Err(Fault::new(format!("message {number} has no role"), help));
    };
    // An answer that consists of tool calls may have no content.
    let calls = message.get("tool_calls").is_some_and(Value::is_array);
    match &message["content"] {
        Value::String(_) => Ok(role),
        Value::Null if calls => Ok(role),
        Value::Null => Err(Fault::new(
            format!("message {number} of role {role} has no content"),
            "a message is an object with the texts role and content",
        )),
        _ => Err(Fault::new(
            format!("the content of message {number} of role {role} is no text"),
            "only text can be trained on: give content as one text",
        )),
    }
}

/// Parses the object on a line.
pub(super) fn parse_json(line: &str) -> Result<Map<String, Value>, Fault> {
    match serde_json::from_str(line).map(|Unique(value)| value) {
        Ok(Value::Object(row)) => Ok(row),
        Ok(_) => Err(Fault::new(
            "the line holds no JSON object",
            "write one object a line, for example {\"text\": \"…\"}",
        )),
        Err(_) if line.trim_start().starts_with('[') => Err(Fault::new(
            "a JSON array begins here",
            "write one object a line instead, for example with jq -c '.[]'",
        )),
        Err(error) if error.is_data() => {
            Err(Fault::new(without_position(&error), "remove the wrong one"))
        }
        Err(error) => Err(Fault::new(
            format!(
                "malformed JSON at column {}: {}",
                error.column(),
                without_position(&error)
            ),
            "repair or remove the line",
        )),
    }
}

/// The parser's message without its line and column, which are relative to this line.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.find(" at line ") {
        Some(end) => text[..end].to_string(),
        None => text,
    }
}

/// A value whose objects have unique keys: of two equal keys only the author knows the intended one.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Unique, D::Error> {
        deserializer.deserialize_any(Once).map(Unique)
    }
}

/// Builds a [`Unique`] value.
struct Once;

impl<'de> Visitor<'de> for Once {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut row = Map::new();
        while let Some((key, Unique(value))) = entries.next_entry::<String, Unique>()? {
            if row.contains_key(&key) {
                return Err(A::Error::custom(format!("the key `{key}` occurs twice")));
            }
            row.insert(key, value);
        }
        Ok(Value::Object(row))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(value)) = items.next_element()? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }
}

#[cfg(test)]
mod tests {
    //! Valid and invalid rows.

    use serde_json::json;

    use super::*;

    fn read(row: Value, columns: &[&str]) -> Result<Record, Fault> {
        let Value::Object(row) = row else { panic!() };
        let columns: Vec<String> = columns.iter().map(|name| name.to_string()).collect();
        Record::from_row(row, &columns)
    }

    #[test]
    fn columns_are_selected_by_name_then_by_position() {
        let row =
            || json!({"messages": [], "prompt": "p", "completion": "c", "text": "t", "other": "o"});
        let chat = Record::Chat {
            messages: Vec::new(),
            first_answer: 0,
        };
        let pair = |prompt: &str, completion: &str| Record::Completion {
            prompt: prompt.to_string(),
            completion: completion.to_string(),
        };
        assert_eq!(read(row(), &[]).unwrap(), chat);
        assert_eq!(read(row(), &["text", "messages"]).unwrap(), chat);
        assert_eq!(
            read(row(), &["completion", "x", "prompt"]).unwrap(),
            pair("p", "c")
        );
        assert_eq!(
            read(row(), &["other", "text"]).unwrap(),
            Record::Text("t".to_string())
        );
        assert_eq!(
            read(row(), &["other"]).unwrap(),
            Record::Text("o".to_string())
        );
        assert_eq!(read(row(), &["other", "prompt"]).unwrap(), pair("o", "p"));
    }

    #[test]
    fn invalid_rows_are_refused_with_the_reason() {
        let message = |role: &str| json!({"role": role, "content": "x"});
        let chat = |messages: &[Value]| json!({ "messages": messages });
        let rows = [
            (json!({"id": 1, "body": "x"}), &[][..]),
            (json!({}), &[]),
            (json!({"text": "x"}), &["body"]),
            (json!({"a": "x", "b": "x", "c": "x"}), &["a", "b", "c"]),
            (json!({"text": null}), &[]),
            (json!({"text": 3}), &[]),
            (json!({"messages": "x"}), &[]),
            (json!({"text": []}), &[]),
            (json!({"x": {}}), &["x"]),
            (json!({"prompt": "x", "completion": ["x"]}), &[]),
            (json!({"prompt": [], "completion": "x"}), &[]),
            (json!({"prompt": true, "completion": "x"}), &[]),
            (chat(&[json!("hello")]), &[]),
            (chat(&[json!({"from": "human", "value": "x"})]), &[]),
            (chat(&[json!({"role": "user"})]), &[]),
            (chat(&[json!({"role": "user", "content": ["x"]})]), &[]),
            (chat(&[message("human")]), &[]),
            (chat(&[message("assistant")]), &[]),
            (chat(&[message("system"), message("assistant")]), &[]),
            (chat(&[message("user"), message("user")]), &[]),
            (
                chat(&[message("user"), message("assistant"), message("assistant")]),
                &[],
            ),
            (chat(&[message("user"), message("system")]), &[]),
            (chat(&[message("user"), message("tool")]), &[]),
        ];
        let refusals: Vec<String> = rows
            .into_iter()
            .map(|(row, columns)| {
                let fault = read(row.clone(), columns).unwrap_err();
                format!("{row}\n    {}; {}", fault.problem, fault.help)
            })
            .collect();
        insta::assert_snapshot!(refusals.join("\n"));
    }

    #[test]
    fn conversations_with_tools_and_developers_are_read() {
        let row = json!({"messages": [
            {"role": "developer", "content": "x"},
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": null, "tool_calls": []},
            {"role": "tool", "content": "x"},
            {"role": "tool", "content": "x"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "x"},
        ]});
        assert!(
            matches!(read(row, &[]).unwrap(), Record::Chat { messages, .. } if messages.len() == 7)
        );
    }
}
