//! `tojson` of chat templates: Python's `json.dumps` with `ensure_ascii=False`, without the HTML escapes of
//! the engine's own filter.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::Formatter;

/// The widest indent. Beyond 65535 Rust's formatting panics.
const MAX_INDENT: usize = 64;

/// `value|tojson(indent=…, ensure_ascii=…, separators=…, sort_keys=…)`.
pub(super) fn tojson(value: Value, arguments: Kwargs) -> Result<String, Error> {
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"))
    };
    let indent: Option<usize> = arguments.get("indent")?;
    if let Some(indent) = indent.filter(|indent| *indent > MAX_INDENT) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson: an indent of {indent} is more than {MAX_INDENT}"),
        ));
    }
    let separators: Option<(String, String)> = match arguments.get("separators")? {
        Some::<Vec<String>>(pair) => match <[String; 2]>::try_from(pair) {
            Ok([item, key]) => Some((item, key)),
            Err(_) => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "tojson: separators are two texts",
                ));
            }
        },
        None => None,
    };
    let ascii: Option<bool> = arguments.get("ensure_ascii")?;
    let sorted: Option<bool> = arguments.get("sort_keys")?;
    arguments.assert_all_used()?;

    let mut tree = serde_json::to_value(&value).map_err(failed)?;
    if sorted == Some(true) {
        tree.sort_all_objects();
    }
    let (item, key) = separators.unwrap_or_else(|| {
        let item = if indent.is_some() { "," } else { ", " };
        (item.to_string(), ": ".to_string())
    });
    let style = Python {
        item,
        key,
        indent,
        depth: 0,
        filled: false,
        ascii: ascii == Some(true),
    };
    let mut bytes = Vec::new();
    tree.serialize(&mut serde_json::Serializer::with_formatter(
        &mut bytes, style,
    ))
    .map_err(failed)?;
    String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// Python's layout of JSON.
struct Python {
    item: String,
    key: String,
    indent: Option<usize>,
    depth: usize,
    /// Whether the innermost container has an element yet.
    filled: bool,
    ascii: bool,
}

impl Python {
    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(writer, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }

    fn begin<W: ?Sized + io::Write>(&mut self, writer: &mut W, open: &str) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        writer.write_all(open.as_bytes())
    }

    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }

    fn end<W: ?Sized + io::Write>(&mut self, writer: &mut W, close: &str) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(writer)?;
        }
        self.filled = true;
        writer.write_all(close.as_bytes())
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, "[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, "]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, "{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, "}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ascii {
            return writer.write_all(fragment.as_bytes());
        }
        let mut units = [0; 2];
        for character in fragment.chars() {
            if character.is_ascii() {
                write!(writer, "{character}")?;
                continue;
            }
            for unit in character.encode_utf16(&mut units) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
}
