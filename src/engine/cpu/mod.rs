//! The CPU engine: f32 on every core, vectors as wide as the processor has them.

pub mod arena;
pub mod kernels;
pub mod store;
