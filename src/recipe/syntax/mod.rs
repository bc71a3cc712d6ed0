//! Text to trees with source positions: YAML, JSON, scalars and shell commands.

pub mod diagnostic;
pub mod json;
pub mod node;
pub mod scalar;
pub mod shell;
pub mod source;
pub mod toml;
pub(crate) mod words;
pub mod yaml;
