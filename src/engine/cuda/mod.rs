//! Preparations for training on NVIDIA GPUs. There is no CUDA engine yet: the built-in trainer computes on
//! CPUs.
//!
//! `libraries` finds CUDA's libraries at run time and reports their problems. `driver`, `nvrtc` and
//! `cublaslt` bind their functions; `compiler` compiles kernels and caches them on disk. Tests compile the
//! `kernels` and compare them with the CPU engine; they have never run on a GPU.

pub mod compiler;
pub mod cublaslt;
pub mod driver;
pub mod error;
#[cfg(test)]
mod kernels;
pub mod libraries;
pub mod nvrtc;
mod table;
