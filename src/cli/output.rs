//! Output of commands: results on standard output, as text or as data (`-o text|json|yaml`), and
//! notes on standard error.
//!
//! A lost result must not go unnoticed: a full standard output is an error with a message. A reader
//! that has closed the pipe (`… | head`) is not.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

use crate::util::wrap;

/// Output format of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Plain text
    Text,
    /// One JSON document
    Json,
    /// The JSON document as YAML
    Yaml,
}

impl Format {
    /// Prints data as JSON or YAML; each command formats its own text.
    pub fn print(self, value: &impl Serialize) -> anyhow::Result<()> {
        match self {
            Format::Text | Format::Json => {
                print_as_is(format_args!("{}\n", serde_json::to_string_pretty(value)?))?;
            }
            Format::Yaml => print_as_is(yaml(value)?)?,
        }
        Ok(())
    }
}

/// A YAML document that YAML 1.1 (PyYAML) and 1.2 parsers read alike: strings that either would
/// convert are quoted.
fn yaml(value: &impl Serialize) -> Result<String, serde_saphyr::ser::Error> {
    serde_saphyr::to_string(value)
}

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub struct Unprinted(#[from] pub io::Error);

impl Unprinted {
    /// Whether the reader of a pipe has closed it, which is not an error.
    pub fn reader_left(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Columns of standard output; `None`: unlimited.
pub fn width() -> Option<usize> {
    wrap::columns(io::stdout())
}

/// Prints text on standard output, in lines that fit the terminal, with styles only on a terminal.
pub fn print(text: impl Display) -> Result<(), Unprinted> {
    match width() {
        Some(width) => print_as_is(wrap::fit(&text.to_string(), width)),
        None => print_as_is(text),
    }
}

/// Prints what another program reads, or a log, on standard output: no line is broken.
pub fn print_as_is(text: impl Display) -> Result<(), Unprinted> {
    let mut out = anstream::stdout().lock();
    write!(out, "{text}")?;
    Ok(out.flush()?)
}

/// Prints a line on standard output.
pub fn line(text: impl Display) -> Result<(), Unprinted> {
    print(format_args!("{text}\n"))
}

/// Prints text on standard error, in lines that fit the terminal. A failure to write is ignored, because it cannot be
/// reported.
pub fn say(text: impl Display) {
    match wrap::columns(io::stderr()) {
        Some(width) => say_as_is(wrap::fit(&text.to_string(), width)),
        None => say_as_is(text),
    }
}

/// Prints the commands to type next on standard error, if there are any, one a line; a backslash ends each line of a longer
/// one.
pub fn say_next(commands: &[String]) {
    if commands.is_empty() {
        return;
    }
    say("next:\n");
    let width = wrap::columns(io::stderr()).unwrap_or(usize::MAX);
    for command in commands {
        say_as_is(format_args!("{}\n", wrap::command(command, 2, width)));
    }
}

/// Prints a log on standard error: no line is broken.
pub fn say_as_is(text: impl Display) {
    let _ = write!(anstream::stderr().lock(), "{text}");
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::yaml;
    use crate::recipe::Sources;
    use crate::recipe::syntax::node::{Node, Value as Tree};
    use crate::recipe::syntax::scalar::{Resolved, Schema};
    use crate::recipe::syntax::yaml as reader;

    /// The value that a YAML parser of this schema reads.
    fn read(node: &Node, schema: Schema) -> Value {
        match &node.value {
            Tree::Sequence(items) => items.iter().map(|item| read(item, schema)).collect(),
            Tree::Mapping(entries) => {
                let entry = |e: &crate::recipe::syntax::node::Entry| {
                    (e.name.clone(), read(&e.value, schema))
                };
                Value::Object(entries.iter().map(entry).collect())
            }
            Tree::Scalar(_) => match node.resolve(schema).unwrap() {
                Resolved::Null => Value::Null,
                Resolved::Bool(value) => value.into(),
                Resolved::Int(value) => i64::try_from(value).unwrap().into(),
                Resolved::Float(value) => value.into(),
                Resolved::Str(text) => text.into(),
                Resolved::Missing => unreachable!(),
            },
        }
    }

    #[test]
    fn every_yaml_parser_reads_the_written_value() {
        let value = json!({
            "formula": "8 × 16 × 1 = 128",
            "eval_every": null,
            "feasible_gpu_counts": [1, 2, 4],
            "adjusted": [{"key": "a: b", "from": "1"}, {"key": "no", "nested": {"x": ["y"]}}],
            "traps": ["NO", "1e-5", "1.0e-5", "~", "12:30", "0x10", "", " a", "# b", "- c", "{d}",
                      "two\nlines", "\"quoted\" 'twice'", "&e", "*f", "!g", "%h", "010", "1_000"],
            "empty": [], "none": {}, "whole": 1.5,
        });
        let text = yaml(&value).unwrap();
        let mut sources = Sources::default();
        let file = sources.add("x", text.as_str());
        let mut found = Vec::new();
        let tree = reader::parse(&text, file, &mut found).unwrap();
        assert_eq!(found, []);
        for schema in [Schema::PyYaml, Schema::Core] {
            assert_eq!(read(&tree, schema), value, "{schema:?}\n{text}");
        }
    }
}
