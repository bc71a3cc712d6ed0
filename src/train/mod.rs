//! See docs/architecture.md.

pub mod files;
