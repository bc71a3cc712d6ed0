//! What training on NVIDIA GPUs will stand on. There is no CUDA engine yet: the built-in trainer
//! computes on CPUs.
//!
//! `libraries` finds CUDA's libraries at run time and says what is wrong with them. `kernels` are
//! compiled and compared with the CPU engine in tests, and were never run on a GPU.

#[cfg(test)]
mod kernels;
pub mod libraries;
