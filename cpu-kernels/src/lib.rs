//! The arithmetic of Evenkeel's CPU engine, one file per operation, forward and backward. As a package it is optimised also
//! in tests, which train with it.
//!
//! Tensors are row-major slices. Doc comments state their shapes, with n for the tokens of a micro-batch
//! (batch × seq_len). Every kernel splits its work over rayon's current pool and adds in an order that follows from the
//! shapes alone, so that neither another run nor another number of threads changes a bit.

pub mod adamw;
pub mod adapter;
pub mod attention;
pub mod cross_entropy;
pub mod embedding;
mod exp;
pub mod fixed;
pub mod head_norms;
pub mod identity;
pub mod layernorm;
pub mod linear;
mod matrix;
pub mod mlp;
pub mod rmsnorm;
pub mod rope;
pub mod vector;

/// Rows that one thread takes at a time in row-wise kernels.
const ROWS: usize = 32;

/// Elements of the widest vector register; each lane has its own sum.
const LANES: usize = 16;

/// Runs `f` compiled for this processor's widest vectors. Only functions that are inlined into `f`
/// (`#[inline(always)]`) gain from it.
#[inline(always)]
fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Σ over the lanes, pairwise.
#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// a · b, for slices of equal length.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] = a[lane].mul_add(b[lane], sums[lane]);
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[lane] = a.mul_add(*b, sums[lane]);
    }
    sum_lanes(sums)
}
