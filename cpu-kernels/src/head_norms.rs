//! RMSNorms of each head's queries and keys (Qwen 3), with one weight for all query heads and one for all key heads.
//!
//! `qkv` is `[n, (heads + 2 × kv_heads) × head_dim]` as in [`super::attention`]; `unnormed` `[n, (heads + kv_heads) ×
//! head_dim]` has its queries and keys before the norms; w is `[2, head_dim]`: of the queries, then of the keys.

use std::ops::Range;

use rayon::prelude::*;

use super::attention::Shape;
use super::rmsnorm::{add_up, along, inverse_rms, scale};
use super::{ROWS, vectorised};

/// Copies queries and keys to `unnormed`, and norms them in `qkv`.
pub fn forward(qkv: &mut [f32], unnormed: &mut [f32], w: &[f32], shape: Shape, eps: f32) {
    let (width, normed) = (shape.qkv(), shape.queries_and_keys());
    qkv.par_chunks_mut(ROWS * width)
        .zip(unnormed.par_chunks_mut(ROWS * normed))
        .for_each(|(qkv, unnormed)| {
            vectorised(
                #[inline(always)]
                || {
                    let rows = qkv
                        .chunks_exact_mut(width)
                        .zip(unnormed.chunks_exact_mut(normed));
                    for (qkv, unnormed) in rows {
                        unnormed.copy_from_slice(&qkv[..normed]);
                        let heads = qkv.chunks_exact_mut(shape.head_dim);
                        let heads = heads.zip(unnormed.chunks_exact(shape.head_dim));
                        for (head, (y, x)) in heads.enumerate() {
                            scale(y, x, &w[weights_of(head, shape)], inverse_rms(x, eps));
                        }
                    }
                },
            )
        });
}

/// `dqkv` holds the gradient of the normed queries and keys, and then that of the unnormed ones; dw `[2, head_dim]` as in
/// [`super::rmsnorm::backward`]. `scratch` has [`super::rmsnorm::scratch_len`] floats for n rows of 2 × head_dim.
pub fn backward(
    dqkv: &mut [f32],
    dw: (&mut [f32], bool),
    unnormed: &[f32],
    w: &[f32],
    (shape, eps): (Shape, f32),
    scratch: &mut [f32],
) {
    let (width, normed, head_dim) = (shape.qkv(), shape.queries_and_keys(), shape.head_dim);
    let chunks = dqkv.len().div_ceil(ROWS * width);
    let parts = &mut scratch[..chunks * 2 * head_dim];
    dqkv.par_chunks_mut(ROWS * width)
        .zip(unnormed.par_chunks(ROWS * normed))
        .zip(parts.par_chunks_mut(2 * head_dim))
        .for_each(|((dqkv, unnormed), dw)| {
            vectorised(
                #[inline(always)]
                || {
                    dw.fill(0.0);
                    let rows = dqkv
                        .chunks_exact_mut(width)
                        .zip(unnormed.chunks_exact(normed));
                    for (dqkv, unnormed) in rows {
                        let heads = dqkv.chunks_exact_mut(head_dim);
                        let heads = heads.zip(unnormed.chunks_exact(head_dim));
                        for (head, (dy, x)) in heads.enumerate() {
                            let range = weights_of(head, shape);
                            backward_head(dy, &mut dw[range.clone()], x, eps, &w[range]);
                        }
                    }
                },
            )
        });
    add_up(dw, parts);
}

/// The range of a head's weights: of the queries or of the keys.
#[inline(always)]
fn weights_of(head: usize, shape: Shape) -> Range<usize> {
    let from = if head < shape.heads {
        0
    } else {
        shape.head_dim
    };
    from..from + shape.head_dim
}

/// Replaces dy by dx; dw += dy · x · inverse.
#[inline(always)]
fn backward_head(dy: &mut [f32], dw: &mut [f32], x: &[f32], eps: f32, w: &[f32]) {
    let inverse = inverse_rms(x, eps);
    let along = along(dy, x, inverse, w);
    for (((dy, dw), x), w) in dy.iter_mut().zip(dw).zip(x).zip(w) {
        *dw = dy.mul_add(x * inverse, *dw);
        *dy = (*dy * w).mul_add(inverse, -(x * along));
    }
}
