//! JSON lines: one object a line; blank lines are ignored.

use std::fmt;
use std::path::Path;

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::super::error::DataError;
use super::super::record::Fault;
use super::lines::Lines;
use super::{Content, Document, Documents};

pub(super) fn open(path: &Path) -> Result<Documents, DataError> {
    let mut lines = Lines::open(path)?;
    Ok(Box::new(std::iter::from_fn(move || {
        loop {
            let line = match lines.next()? {
                Ok(line) => line,
                Err(error) => return Some(Err(error)),
            };
            if line.text.trim().is_empty() {
                continue;
            }
            return Some(Ok(Document {
                place: lines.place(line.number),
                content: Content::Json(line.text),
                continues: false,
                bytes: line.bytes,
            }));
        }
    })))
}

/// Parses the object on a line.
pub(in crate::data) fn parse(line: &str) -> Result<Map<String, Value>, Fault> {
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
