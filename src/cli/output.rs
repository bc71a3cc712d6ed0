//! What commands print: results on standard output, as text or as data (`-o text|json|yaml`), and
//! remarks on standard error.
//!
//! A result that nobody takes must not be lost in silence: when standard output is full the command
//! fails with a message. When its reader has left (`… | head`) there is nobody to tell.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

use super::yaml;

/// How to print a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people
    Text,
    /// One JSON document
    Json,
    /// The same as YAML
    Yaml,
}

impl Format {
    /// Prints data in a machine's format; text is made by each command for itself.
    pub fn print(self, value: &impl Serialize) -> anyhow::Result<()> {
        match self {
            Format::Text | Format::Json => line(serde_json::to_string_pretty(value)?)?,
            Format::Yaml => print(yaml::document(&serde_json::to_value(value)?))?,
        }
        Ok(())
    }
}

/// Standard output does not take what is written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub struct Unprinted(#[from] pub io::Error);

impl Unprinted {
    /// Whether the reader of a pipe has left, which is its own business.
    pub fn reader_left(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints text on standard output, without its styles where they do not belong.
pub fn print(text: impl Display) -> Result<(), Unprinted> {
    let mut out = anstream::stdout().lock();
    write!(out, "{text}")?;
    Ok(out.flush()?)
}

/// Prints a line on standard output.
pub fn line(text: impl Display) -> Result<(), Unprinted> {
    print(format_args!("{text}\n"))
}

/// Says something on standard error. If that cannot be written to either, there is no one left to
/// tell.
pub fn say(text: impl Display) {
    let _ = write!(anstream::stderr().lock(), "{text}");
}
