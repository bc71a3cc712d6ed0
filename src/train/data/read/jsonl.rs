//! JSON lines: one object a line; blank lines count for nothing.

use std::path::Path;

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

/// The object on a line.
pub(in crate::train::data) fn parse(line: &str) -> Result<Map<String, Value>, Fault> {
    match serde_json::from_str(line) {
        Ok(Value::Object(row)) => Ok(row),
        Ok(_) => Err(Fault::new(
            "the line holds no JSON object",
            "write one object a line, for example {\"text\": \"…\"}",
        )),
        Err(_) if line.trim_start().starts_with('[') => Err(Fault::new(
            "a JSON array begins here",
            "write one object a line instead, for example with jq -c '.[]'",
        )),
        Err(error) => Err(Fault::new(
            format!(
                "malformed JSON at column {}: {}",
                error.column(),
                words(&error)
            ),
            "repair or remove the line",
        )),
    }
}

/// The parser's message without its own line and column, which count from this line's start.
fn words(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.find(" at line ") {
        Some(end) => text[..end].to_string(),
        None => text,
    }
}
