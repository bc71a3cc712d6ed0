//! Evenkeel launches and orchestrates LLM training with a constant global batch, also when the number
//! of GPUs changes. `docs/architecture.md` shows how the modules depend on each other;
//! `source-tests/tests/layers.rs` checks it.

pub mod agent;
pub mod api;
pub mod bucket;
pub mod checkpoint;
pub mod cli;
pub mod client;
pub mod comm;
pub mod data;
pub mod engine;
pub mod export;
pub mod external_trainer;
pub mod host;
pub mod hub;
pub mod inventory;
pub mod launch;
pub mod lifecycle;
pub mod norm;
pub mod objective;
pub mod operator;
pub mod plan;
pub mod recipe;
pub mod samples;
pub mod telemetry;
pub mod train;
pub mod util;
