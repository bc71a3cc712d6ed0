//! `-o text|json|yaml`, for commands whose result is data.

use serde::Serialize;

/// How to print a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON document.
    Json,
}

impl Format {
    /// Prints data in a machine's format.
    pub fn print(self, value: &impl Serialize) -> anyhow::Result<()> {
        anstream::println!("{}", serde_json::to_string_pretty(value)?);
        Ok(())
    }
}
