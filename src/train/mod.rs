//! See docs/architecture.md.

pub mod checkpoint;
pub mod files;
pub mod tensor_file;
