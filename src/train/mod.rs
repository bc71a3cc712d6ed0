//! See docs/architecture.md.

pub mod checkpoint;
pub mod data;
pub mod files;
pub mod schedule;
pub mod tensor_file;
pub mod weights;
