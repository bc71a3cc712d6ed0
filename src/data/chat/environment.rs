//! The Jinja environment of chat templates, with the settings of transformers
//! (`utils/chat_template_utils.py`): `trim_blocks`, `lstrip_blocks`, loop controls, a `tojson` that does not
//! escape HTML, `raise_exception` and `strftime_now`; booleans and none are spelled as in Python.
//!
//! Templates are untrusted. They can read no file and load no other template. Their instructions and output
//! are limited here; the values that they build, by the memory of preparation (`util::memory`).

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::answers;
use crate::util::format;

/// Instructions per conversation; a message takes a few dozen.
const FUEL: u64 = 1_000_000;

/// Output bytes per conversation.
const OUTPUT: usize = 64 << 20;

/// The widest indent of `tojson`.
const MAX_INDENT: usize = 64;

pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    if let Ok(syntax) = syntax {
        environment.set_syntax(syntax);
    }
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, state, value| match value.kind() {
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        ValueKind::None => Ok(out.write_str("None")?),
        _ => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter("tojson", tojson);
    // In Python no loop runs over none.
    environment.add_test("iterable", |value: Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    for mark in [answers::BEGIN, answers::END] {
        // It is no syntax that could be malformed.
        let _ = environment.add_template(mark, mark);
    }
    environment.add_function("raise_exception", |message: String| {
        Err::<(), _>(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// An error in one line: the text that a template raised, or the engine's message with the line.
pub(super) fn message(error: &Error) -> String {
    let mut text = match (std::error::Error::source(error), error.detail()) {
        (Some(cause), _) if cause.is::<io::Error>() => cause.to_string(),
        (_, Some(detail)) => detail.to_string(),
        (_, None) => error.kind().to_string(),
    };
    if error.kind() == ErrorKind::OutOfFuel {
        text = format!("it did not end within {FUEL} instructions");
    }
    match error.line() {
        Some(line) => format!("{text} (line {line} of the template)"),
        None => text,
    }
}

/// `value|tojson(indent=…, ensure_ascii=…, separators=…, sort_keys=…)`: Python's `json.dumps`, by default with
/// `ensure_ascii=False`.
fn tojson(value: Value, arguments: Kwargs) -> Result<String, Error> {
    let refused = |problem: String| {
        let problem = format!("tojson: {problem}");
        Err(Error::new(ErrorKind::InvalidOperation, problem))
    };
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"))
    };
    let indent: Option<usize> = arguments.get("indent")?;
    if let Some(indent) = indent.filter(|indent| *indent > MAX_INDENT) {
        return refused(format!("an indent of {indent} is more than {MAX_INDENT}"));
    }
    let ascii: Option<bool> = arguments.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let style = match separators.as_deref() {
        None => Python {
            item: ", ",
            key: ": ",
        },
        Some([item, key]) if indent.is_none() => Python { item, key },
        Some([_, _]) => return refused("separators need an indent of none".to_owned()),
        Some(_) => return refused("separators are two texts".to_owned()),
    };
    let sorted: Option<bool> = arguments.get("sort_keys")?;
    arguments.assert_all_used()?;

    let mut tree = serde_json::to_value(&value).map_err(failed)?;
    if sorted == Some(true) {
        tree.sort_all_objects();
    }
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent);
            let style = PrettyFormatter::with_indent(indent.as_bytes());
            tree.serialize(&mut Serializer::with_formatter(&mut bytes, style))
        }
        None => tree.serialize(&mut Serializer::with_formatter(&mut bytes, style)),
    };
    written.map_err(failed)?;
    let text = String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    if ascii != Some(true) {
        return Ok(text);
    }
    let mut escaped = String::new();
    for character in text.chars() {
        if character.is_ascii() {
            escaped.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                escaped.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    Ok(escaped)
}

/// Python's layout of JSON in one line, with the texts between items and after a key.
struct Python<'a> {
    item: &'a str,
    key: &'a str,
}

impl Python<'_> {
    fn separate<W: ?Sized + io::Write>(&self, w: &mut W, first: bool) -> io::Result<()> {
        w.write_all(if first { "" } else { self.item }.as_bytes())
    }
}

impl Formatter for Python<'_> {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.separate(w, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.separate(w, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.key.as_bytes())
    }
}

/// The date is always Friday, 26 July 2024, the default of templates that ask for the date (Llama 3.2's).
/// Data must not depend on the day of its preparation.
fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        text.push_str(match characters.next() {
            Some('d') => "26",
            Some('m') => "07",
            Some('b') => "Jul",
            Some('B') => "July",
            Some('Y') => "2024",
            Some('y') => "24",
            Some('a') => "Fri",
            Some('A') => "Friday",
            Some('j') => "208",
            Some('H' | 'M' | 'S') => "00",
            Some('%') => "%",
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now knows no format {format:?}"),
                ));
            }
        });
    }
    Ok(text)
}

/// A text with a limited length.
#[derive(Default)]
pub(super) struct Bounded(Vec<u8>);

impl Bounded {
    pub fn into_string(self) -> String {
        // Templates write whole strings, so nothing is ever replaced here.
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT {
            return Err(io::Error::other(format!(
                "the text is longer than {}",
                format::bytes(OUTPUT as u64)
            )));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
