//! The arithmetic of the CPU engine, one file per operation, forward and backward.
//!
//! Matrices are row-major slices; shapes stand in the doc comments. Every kernel splits its work
//! over rayon's current pool in pieces that do not depend on the number of threads, and adds up in
//! a fixed order, so that a run gives the same bits with any number of threads.

pub mod adamw;
pub mod vector;

/// Runs `f` compiled for the widest vectors that this processor has. What `f` calls must be inlined
/// into it (`#[inline(always)]`) to gain from that.
#[inline(always)]
pub fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}
