//! Evenkeel launches and orchestrates LLM training whose global batch stays what the recipe
//! meant, whatever happens to the GPUs. `docs/architecture.md` shows how the rooms fit together;
//! `tests/layers.rs` keeps the imports going one way.

pub mod agent;
pub mod batch;
pub mod cli;
pub mod client;
pub mod comm;
pub mod durable;
pub mod engine;
pub mod inventory;
pub mod job;
pub mod launch;
pub mod norm;
pub mod operator;
pub mod recipe;
pub mod samples;
pub mod telemetry;
pub mod train;
pub mod words;
