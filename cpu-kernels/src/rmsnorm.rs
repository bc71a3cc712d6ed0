//! RMSNorm (Zhang and Sennrich, 2019): y = x / √(mean x² + ε) · w, row by row.

use rayon::prelude::*;

use super::{LANES, ROWS, dot, sum_lanes, vectorised};

/// Floats of scratch that [`backward`] needs for `n` rows of `width`.
pub fn scratch_len(n: usize, width: usize) -> usize {
    n.div_ceil(ROWS) * width
}

/// y = norm(x), both `[n, width]`; `inverse[n]` keeps 1 / √(mean x² + ε).
pub fn forward(y: &mut [f32], inverse: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    let len = ROWS * w.len();
    y.par_chunks_mut(len)
        .zip(inverse.par_chunks_mut(ROWS))
        .zip(x.par_chunks(len))
        .for_each(|((y, inverse), x)| {
            vectorised(
                #[inline(always)]
                || rows(y, inverse, x, w, eps),
            )
        });
}

/// sum = a + b, then y = norm(sum), all `[n, width]`, in one pass over memory.
pub fn add_forward(
    y: &mut [f32],
    inverse: &mut [f32],
    sum: &mut [f32],
    (a, b): (&[f32], &[f32]),
    w: &[f32],
    eps: f32,
) {
    let len = ROWS * w.len();
    y.par_chunks_mut(len)
        .zip(inverse.par_chunks_mut(ROWS))
        .zip(sum.par_chunks_mut(len))
        .zip(a.par_chunks(len))
        .zip(b.par_chunks(len))
        .for_each(|((((y, inverse), sum), a), b)| {
            vectorised(
                #[inline(always)]
                || {
                    for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
                        *sum = a + b;
                    }
                    rows(y, inverse, sum, w, eps);
                },
            )
        });
}

#[inline(always)]
fn rows(y: &mut [f32], inverse: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    let rows = y.chunks_exact_mut(w.len()).zip(x.chunks_exact(w.len()));
    for ((y, x), inverse) in rows.zip(inverse) {
        *inverse = inverse_rms(x, eps);
        scale(y, x, w, *inverse);
    }
}

/// Takes dy `[n, width]` and replaces it by y = norm(x), which the weight gradient of the next layer needs;
/// `dx += ∂/∂x`; `dw = ∂/∂w`, or += when `add`.
///
/// `scratch` has [`scratch_len`] floats.
pub fn backward(
    dy_to_y: &mut [f32],
    dx: &mut [f32],
    (dw, add): (&mut [f32], bool),
    x: &[f32],
    inverse: &[f32],
    w: &[f32],
    scratch: &mut [f32],
) {
    let width = w.len();
    let parts = &mut scratch[..scratch_len(inverse.len(), width)];
    dy_to_y
        .par_chunks_mut(ROWS * width)
        .zip(dx.par_chunks_mut(ROWS * width))
        .zip(x.par_chunks(ROWS * width))
        .zip(inverse.par_chunks(ROWS))
        .zip(parts.par_chunks_mut(width))
        .for_each(|((((dy, dx), x), inverse), dw)| {
            vectorised(
                #[inline(always)]
                || {
                    dw.fill(0.0);
                    let rows = dy.chunks_exact_mut(width).zip(dx.chunks_exact_mut(width));
                    for (((dy, dx), x), &inverse) in rows.zip(x.chunks_exact(width)).zip(inverse) {
                        backward_row(dy, dx, dw, x, inverse, w);
                    }
                },
            )
        });
    add_up((dw, add), parts);
}

/// dw = the sum of the parts, or += when `add`. Each part is as long as dw.
pub(super) fn add_up((dw, add): (&mut [f32], bool), parts: &[f32]) {
    if !add {
        dw.fill(0.0);
    }
    for part in parts.chunks_exact(dw.len()) {
        for (dw, part) in dw.iter_mut().zip(part) {
            *dw += part;
        }
    }
}

#[inline(always)]
fn backward_row(
    dy: &mut [f32],
    dx: &mut [f32],
    dw: &mut [f32],
    x: &[f32],
    inverse: f32,
    w: &[f32],
) {
    let along = along(dy, x, inverse, w);
    for ((((dy, dx), dw), x), w) in dy.iter_mut().zip(dx).zip(dw).zip(x).zip(w) {
        let normed = x * inverse;
        *dw = dy.mul_add(normed, *dw);
        *dx += (*dy * w).mul_add(inverse, -(x * along));
        *dy = normed * w;
    }
}

/// What the gradient of x loses along x: inverse³ · mean(w · dy · x).
#[inline(always)]
pub(super) fn along(dy: &[f32], x: &[f32], inverse: f32, w: &[f32]) -> f32 {
    // Σ w · dy · x, by lane.
    let mut sums = [0.0; LANES];
    let ((dys, dy_rest), (xs, x_rest)) = (dy.as_chunks::<LANES>(), x.as_chunks::<LANES>());
    let (ws, w_rest) = w.as_chunks::<LANES>();
    for ((dy, x), w) in dys.iter().zip(xs).zip(ws) {
        for lane in 0..LANES {
            sums[lane] = (dy[lane] * w[lane]).mul_add(x[lane], sums[lane]);
        }
    }
    for (lane, ((dy, x), w)) in dy_rest.iter().zip(x_rest).zip(w_rest).enumerate() {
        sums[lane] = (dy * w).mul_add(*x, sums[lane]);
    }
    sum_lanes(sums) * inverse * inverse * inverse / x.len() as f32
}

#[inline(always)]
pub(super) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
pub(super) fn scale(y: &mut [f32], x: &[f32], w: &[f32], inverse: f32) {
    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
        *y = x * inverse * w;
    }
}
