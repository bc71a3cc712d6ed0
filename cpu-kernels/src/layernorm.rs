//! LayerNorm (Ba et al., 2016): y = (x − mean x) / √(variance of x + ε) · w + b, row by row.

use rayon::prelude::*;

use super::rmsnorm::{add_up, scratch_len};
use super::{LANES, ROWS, dot, sum_lanes, vectorised};

/// y = norm(x), both `[n, width]`; `statistics` `[n, 2]` keeps 1 / √(variance + ε) and the mean. `w` and `b` are `[width]`.
pub fn forward(
    y: &mut [f32],
    statistics: &mut [f32],
    x: &[f32],
    (w, b): (&[f32], &[f32]),
    eps: f32,
) {
    let width = w.len();
    y.par_chunks_mut(ROWS * width)
        .zip(statistics.par_chunks_mut(2 * ROWS))
        .zip(x.par_chunks(ROWS * width))
        .for_each(|((y, statistics), x)| {
            vectorised(
                #[inline(always)]
                || {
                    let rows = y.chunks_exact_mut(width).zip(x.chunks_exact(width));
                    for ((y, x), kept) in rows.zip(statistics.chunks_exact_mut(2)) {
                        let mean = sum(x) / width as f32;
                        for (y, x) in y.iter_mut().zip(x) {
                            *y = x - mean;
                        }
                        let inverse = 1.0 / (dot(y, y) / width as f32 + eps).sqrt();
                        for ((y, w), b) in y.iter_mut().zip(w).zip(b) {
                            *y = (*y * inverse).mul_add(*w, *b);
                        }
                        kept.copy_from_slice(&[inverse, mean]);
                    }
                },
            )
        });
}

/// Takes dy `[n, width]` and replaces it by y = norm(x), which the weight gradient of the next layer needs;
/// `dx += ∂/∂x`; `dwb` `[2, width]` = the gradients of `w` and `b`, or += when `add`.
///
/// `scratch` has [`scratch_len`] floats for rows of 2 × width.
pub fn backward(
    dy_to_y: &mut [f32],
    dx: &mut [f32],
    (dwb, add): (&mut [f32], bool),
    x: &[f32],
    statistics: &[f32],
    (w, b): (&[f32], &[f32]),
    scratch: &mut [f32],
) {
    let width = w.len();
    let parts = &mut scratch[..scratch_len(statistics.len() / 2, 2 * width)];
    dy_to_y
        .par_chunks_mut(ROWS * width)
        .zip(dx.par_chunks_mut(ROWS * width))
        .zip(x.par_chunks(ROWS * width))
        .zip(statistics.par_chunks(2 * ROWS))
        .zip(parts.par_chunks_mut(2 * width))
        .for_each(|((((dy, dx), x), statistics), dwb)| {
            vectorised(
                #[inline(always)]
                || {
                    dwb.fill(0.0);
                    let (dw, db) = dwb.split_at_mut(width);
                    let rows = dy.chunks_exact_mut(width).zip(dx.chunks_exact_mut(width));
                    let rows = rows.zip(x.chunks_exact(width));
                    for (((dy, dx), x), kept) in rows.zip(statistics.chunks_exact(2)) {
                        backward_row(dy, dx, (dw, db), x, (kept[0], kept[1]), (w, b));
                    }
                },
            )
        });
    add_up((dwb, add), parts);
}

#[inline(always)]
fn backward_row(
    dy: &mut [f32],
    dx: &mut [f32],
    (dw, db): (&mut [f32], &mut [f32]),
    x: &[f32],
    (inverse, mean): (f32, f32),
    (w, b): (&[f32], &[f32]),
) {
    // The means of w · dy, and of w · dy · normed.
    let (mut shift, mut along) = ([0.0; LANES], [0.0; LANES]);
    for ((dy, x), w) in (dy.chunks(LANES).zip(x.chunks(LANES))).zip(w.chunks(LANES)) {
        for (lane, ((dy, x), w)) in dy.iter().zip(x).zip(w).enumerate() {
            let product = dy * w;
            shift[lane] += product;
            along[lane] = product.mul_add((x - mean) * inverse, along[lane]);
        }
    }
    let [shift, along] = [shift, along].map(|sums| sum_lanes(sums) / x.len() as f32);
    let rows = dy.iter_mut().zip(dx).zip(dw).zip(db).zip(x).zip(w).zip(b);
    for ((((((dy, dx), dw), db), x), w), b) in rows {
        let normed = (x - mean) * inverse;
        *dw = dy.mul_add(normed, *dw);
        *db += *dy;
        *dx += inverse * (dy.mul_add(*w, -shift) - normed * along);
        *dy = normed.mul_add(*w, *b);
    }
}

/// Σ x.
#[inline(always)]
fn sum(x: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (rows, rest) = x.as_chunks::<LANES>();
    for row in rows {
        for lane in 0..LANES {
            sums[lane] += row[lane];
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x;
    }
    sum_lanes(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPS: f64 = 1e-5;

    /// One row by the formula, in f64.
    fn normed(x: &[f64], w: &[f32], b: &[f32]) -> Vec<f64> {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        let row = x.iter().zip(w).zip(b);
        row.map(|((x, w), b)| (x - mean) / (variance + EPS).sqrt() * f64::from(*w) + f64::from(*b))
            .collect()
    }

    #[test]
    fn norm_and_gradient_are_the_definition() {
        // Several chunks of rows, and a width that is no multiple of the lanes.
        let (n, width) = (70, 37);
        let at = |i: usize, salt: usize| ((i * 37 + salt * 11) % 101) as f32 / 40.0 - 1.0;
        let row = |n: usize, salt| (0..n).map(|i| at(i, salt)).collect::<Vec<f32>>();
        // The mean is far from zero.
        let x: Vec<f32> = row(n * width, 1).iter().map(|x| x + 5.0).collect();
        let (w, b, dy) = (row(width, 2), row(width, 3), row(n * width, 4));
        let (mut y, mut statistics) = (vec![0.0; n * width], vec![0.0; 2 * n]);
        forward(&mut y, &mut statistics, &x, (&w, &b), EPS as f32);

        let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let rows: Vec<&[f64]> = wide.chunks(width).collect();
        let expected: Vec<f64> = rows.iter().flat_map(|x| normed(x, &w, &b)).collect();
        let near = |got: &[f32], expected: &[f64]| {
            for (got, expected) in got.iter().zip(expected) {
                let error = (f64::from(*got) - expected).abs();
                assert!(error < 2e-4 * expected.abs().max(1.0), "{got} {expected}");
            }
        };
        near(&y, &expected);

        let (mut dx, mut dwb) = (vec![1.0; n * width], vec![3.0; 2 * width]);
        let mut scratch = vec![0.0; scratch_len(n, 2 * width)];
        let mut dy_to_y = dy.clone();
        let weights = (&w[..], &b[..]);
        backward(
            &mut dy_to_y,
            &mut dx,
            (&mut dwb, true),
            &x,
            &statistics,
            weights,
            &mut scratch,
        );
        near(&dy_to_y, &expected);
        let loss = |x: &[f64], dy: &[f32]| -> f64 {
            let y = normed(x, &w, &b);
            y.iter().zip(dy).map(|(y, dy)| y * f64::from(*dy)).sum()
        };
        let of_x = rows.iter().zip(dy.chunks(width)).flat_map(|(x, dy)| {
            (0..width).map(move |i| {
                let moved = |step: f64| {
                    let mut x = x.to_vec();
                    x[i] += step;
                    loss(&x, dy)
                };
                1.0 + (moved(1e-5) - moved(-1e-5)) / 2e-5
            })
        });
        near(&dx, &of_x.collect::<Vec<f64>>());
        let ones = (vec![1.0; width], vec![0.0; width]);
        let plain: Vec<f64> = rows
            .iter()
            .flat_map(|x| normed(x, &ones.0, &ones.1))
            .collect();
        let sum = |i: usize, of: &dyn Fn(usize) -> f64| -> f64 {
            let rows = (0..n).map(|row| row * width + i);
            3.0 + rows.map(|at| f64::from(dy[at]) * of(at)).sum::<f64>()
        };
        let of_w = (0..width).map(|i| sum(i, &|at| plain[at]));
        let of_b = (0..width).map(|i| sum(i, &|_| 1.0));
        near(&dwb, &of_w.chain(of_b).collect::<Vec<f64>>());
    }
}
