//! Text to trees with source positions: YAML, Hjson, scalars and shell commands.

pub mod diagnostic;
pub mod hjson;
pub mod node;
pub mod scalar;
pub mod shell;
pub mod source;
pub(crate) mod words;
pub mod yaml;
