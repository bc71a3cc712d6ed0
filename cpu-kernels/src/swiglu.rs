//! SwiGLU (Shazeer, 2020): h = silu(gate) · up. `gate_up` is `[n, 2 × inner]`: the gates of a row, then its
//! ups.

use rayon::prelude::*;

use super::exp::exp;
use super::{ROWS, vectorised};

/// h `[n, inner]`.
pub fn forward(h: &mut [f32], gate_up: &[f32], inner: usize) {
    h.par_chunks_mut(ROWS * inner)
        .zip(gate_up.par_chunks(ROWS * 2 * inner))
        .for_each(|(h, gate_up)| {
            vectorised(
                #[inline(always)]
                || {
                    let rows = h.chunks_exact_mut(inner);
                    for (h, gate_up) in rows.zip(gate_up.chunks_exact(2 * inner)) {
                        let (gate, up) = gate_up.split_at(inner);
                        for ((h, gate), up) in h.iter_mut().zip(gate).zip(up) {
                            *h = gate * sigmoid(*gate) * up;
                        }
                    }
                },
            )
        });
}

/// Takes dh `[n, inner]` and replaces it by h, which the weight gradient needs; replaces `gate_up` by its
/// gradient.
pub fn backward(dh_to_h: &mut [f32], gate_up: &mut [f32], inner: usize) {
    dh_to_h
        .par_chunks_mut(ROWS * inner)
        .zip(gate_up.par_chunks_mut(ROWS * 2 * inner))
        .for_each(|(dh, gate_up)| {
            vectorised(
                #[inline(always)]
                || {
                    let rows = dh.chunks_exact_mut(inner);
                    for (dh, gate_up) in rows.zip(gate_up.chunks_exact_mut(2 * inner)) {
                        let (gate, up) = gate_up.split_at_mut(inner);
                        backward_row(dh, gate, up);
                    }
                },
            )
        });
}

/// A separate function, because the compiler knows that arguments do not overlap.
#[inline(always)]
fn backward_row(dh: &mut [f32], gate: &mut [f32], up: &mut [f32]) {
    for ((dh, gate), up) in dh.iter_mut().zip(gate).zip(up) {
        let sigmoid = sigmoid(*gate);
        let silu = *gate * sigmoid;
        let (d, u) = (*dh, *up);
        *dh = silu * u;
        *up = d * silu;
        *gate = d * u * (sigmoid + silu * (1.0 - sigmoid));
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
