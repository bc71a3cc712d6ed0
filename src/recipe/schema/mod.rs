//! What every dialect is translated into, and what a reader of a dialect works with.

pub mod axes;
pub mod deepspeed;
pub mod dialect;
pub mod environment;
pub mod files;
pub mod launch;
pub mod origin;
pub mod overrides;
pub mod placeholder;
pub mod program;
pub mod progress_pattern;
pub mod reader;
pub mod reading;
pub mod request;
pub mod run_name;
pub mod spec;
pub mod tree;
pub mod untrained;
