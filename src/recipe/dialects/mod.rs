//! One reader per upstream dialect, and the commands with which people start a training.

pub mod accelerate;
pub mod command;
pub mod deepspeed;
pub mod dpo;
pub mod halos;
pub mod handbook;
pub mod hydra;
pub(crate) mod llama_factory;
pub mod native;
pub(crate) mod own_defaults;
pub mod preference;
pub mod programs;
pub(crate) mod projects;
pub mod readers;
pub mod transformers;
mod tree_effects;
