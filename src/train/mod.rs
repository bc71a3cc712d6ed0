//! See docs/architecture.md.

pub mod files;
pub mod tensor_file;
