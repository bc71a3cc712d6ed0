//! Gated linear units (Shazeer, 2020): h = a(gate) · up with a(x) = x · σ(s(x)), of SiLU (SwiGLU) or GELU (GEGLU).
//! `gate_up` is `[n, 2 × inner]`: the gates of a row, then its ups.

use rayon::prelude::*;

use super::exp::exp;
use super::{ROWS, vectorised};

/// s and its derivative of SiLU.
#[inline(always)]
pub fn silu(x: f32) -> (f32, f32) {
    (x, 1.0)
}

/// s and its derivative of GELU's approximation by tanh (Hendrycks and Gimpel, 2016):
/// ½ (1 + tanh(√(2/π) (x + 0.044715 x³))) = σ(s(x)).
#[inline(always)]
pub fn gelu_tanh(x: f32) -> (f32, f32) {
    /// 2 √(2/π)
    const FACTOR: f32 = 1.595_769_2;
    const CUBE: f32 = 0.044_715;
    let square = x * x;
    (
        FACTOR * x * square.mul_add(CUBE, 1.0),
        FACTOR * square.mul_add(3.0 * CUBE, 1.0),
    )
}

/// h `[n, inner]`; `s` is [`silu`] or [`gelu_tanh`].
pub fn forward(
    h: &mut [f32],
    gate_up: &[f32],
    inner: usize,
    s: impl Fn(f32) -> (f32, f32) + Copy + Send + Sync,
) {
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
                            *h = gate * sigmoid(s(*gate).0) * up;
                        }
                    }
                },
            )
        });
}

/// Takes dh `[n, inner]` and replaces it by h, which the weight gradient needs; replaces `gate_up` by its
/// gradient.
pub fn backward(
    dh_to_h: &mut [f32],
    gate_up: &mut [f32],
    inner: usize,
    s: impl Fn(f32) -> (f32, f32) + Copy + Send + Sync,
) {
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
                        backward_row(dh, gate, up, s);
                    }
                },
            )
        });
}

/// A separate function, because the compiler knows that arguments do not overlap.
#[inline(always)]
fn backward_row(
    dh: &mut [f32],
    gate: &mut [f32],
    up: &mut [f32],
    s: impl Fn(f32) -> (f32, f32) + Copy,
) {
    for ((dh, gate), up) in dh.iter_mut().zip(gate).zip(up) {
        let (s, slope) = s(*gate);
        let sigmoid = sigmoid(s);
        let activated = *gate * sigmoid;
        let (d, u) = (*dh, *up);
        *dh = activated * u;
        *up = d * activated;
        *gate = d * u * (sigmoid + activated * (1.0 - sigmoid) * slope);
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a(x) and its derivative, for gates and ups of many sizes.
    fn check(s: impl Fn(f32) -> (f32, f32) + Copy + Send + Sync, a: impl Fn(f64) -> f64) {
        let inner = 37;
        let gates = (0..3 * inner).map(|i| i as f32 * 0.2 - 11.0);
        let rows: Vec<f32> = gates.collect();
        let gate_up: Vec<f32> = rows
            .chunks(inner)
            .flat_map(|row| {
                let ups = row.iter().map(|gate| 0.5 - gate);
                row.iter().copied().chain(ups).collect::<Vec<f32>>()
            })
            .collect();
        let mut h = vec![0.0; rows.len()];
        forward(&mut h, &gate_up, inner, s);
        let (mut dh, mut gradient) = (vec![2.0; rows.len()], gate_up.clone());
        backward(&mut dh, &mut gradient, inner, s);
        assert_eq!(dh, h);
        let near = |got: f32, expected: f64| {
            let difference = (f64::from(got) - expected).abs();
            assert!(
                difference < 1e-5 * expected.abs().max(1.0),
                "{got} {expected}"
            );
        };
        for (i, &gate) in rows.iter().enumerate() {
            let (gate, up) = (f64::from(gate), 0.5 - f64::from(gate));
            let at = i / inner * 2 * inner + i % inner;
            near(h[i], a(gate) * up);
            let slope = (a(gate + 1e-4) - a(gate - 1e-4)) / 2e-4;
            near(gradient[at], 2.0 * up * slope);
            near(gradient[at + inner], 2.0 * a(gate));
        }
    }

    #[test]
    fn both_activations_and_their_gradients_are_the_definitions() {
        check(silu, |x| x / (1.0 + (-x).exp()));
        check(gelu_tanh, |x| {
            let inside = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inside.tanh())
        });
    }
}
