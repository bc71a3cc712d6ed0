//! Preparations for training on NVIDIA GPUs. There is no CUDA engine yet: the built-in trainer computes on
//! CPUs.
//!
//! `libraries` finds CUDA's libraries at run time and reports their problems. Tests compile the `kernels` and
//! compare them with the CPU engine; they have never run on a GPU.

#[cfg(test)]
mod kernels;
pub mod libraries;
