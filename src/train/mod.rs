//! See docs/architecture.md.

pub mod data;
pub mod files;
pub mod schedule;
