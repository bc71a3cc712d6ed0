//! The CUDA engine: a Llama on one NVIDIA GPU. Training on several GPUs has run only on the
//! emulated GPUs of `emulated-gpu/`.
//!
//! `libraries` finds NVIDIA's libraries at run time; `driver`, `nvrtc`, `cublaslt` and `nccl` bind their
//! functions. `measured` remembers which of cuBLASLt's algorithms is the fastest.
//! `compiler` compiles the `kernels` and caches them. `engine` is the [`super::Engine`]: `state` and
//! `workspace` place its memory in allocations of an `arena`, `backend` and `adapted` carry out the operations of a walk, and
//! `launches` has each kernel's parameters and geometry. `staging` copies weights to the device. With other ranks, `peers` adds gradients over them
//! with `nccl`, and `sharded` gathers weights from shards.

mod adapted;
mod arena;
mod backend;
pub mod compiler;
pub mod cublaslt;
pub mod driver;
mod engine;
pub mod error;
mod kernels;
mod launches;
pub mod libraries;
pub mod measured;
pub mod nccl;
pub mod nvrtc;
mod options;
mod peers;
mod sharded;
mod staging;
mod state;
mod table;
#[cfg(test)]
mod tests;
mod workspace;

pub use engine::{CudaEngine, supported};
pub use error::CudaError;
pub use options::{CudaOptions, Precision};
pub use workspace::logits_rows;
