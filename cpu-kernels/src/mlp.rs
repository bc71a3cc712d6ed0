//! The activation of an MLP: of a gated linear unit (Shazeer, 2020), h = a(gate) · up with SiLU (SwiGLU) or GELU (GEGLU) as a,
//! or of an MLP without gates, h = a(up).
//!
//! `inputs` is `[n, 2 × inner]`, the gates of a row, then its ups; or `[n, inner]`, the ups. `a` gives the activation and its
//! derivative: [`silu`], [`gelu`] or [`gelu_tanh`].

use rayon::prelude::*;

use super::exp::exp;
use super::{ROWS, vectorised};

/// x · σ(x), and its derivative.
#[inline(always)]
pub fn silu(x: f32) -> (f32, f32) {
    scaled_sigmoid(x, x, 1.0)
}

/// GELU's approximation by tanh (Hendrycks and Gimpel, 2016), x · ½ (1 + tanh(√(2/π) (x + 0.044715 x³))), and its
/// derivative.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> (f32, f32) {
    /// 2 √(2/π)
    const FACTOR: f32 = 1.595_769_2;
    const CUBE: f32 = 0.044_715;
    let square = x * x;
    scaled_sigmoid(
        x,
        FACTOR * x * square.mul_add(CUBE, 1.0),
        FACTOR * square.mul_add(3.0 * CUBE, 1.0),
    )
}

/// x · σ(s) and its derivative, with s' = `slope`.
#[inline(always)]
fn scaled_sigmoid(x: f32, s: f32, slope: f32) -> (f32, f32) {
    let sigmoid = 1.0 / (1.0 + exp(-s));
    let activated = x * sigmoid;
    (activated, sigmoid + activated * (1.0 - sigmoid) * slope)
}

/// GELU (Hendrycks and Gimpel, 2016), x · Φ(x) with the normal distribution Φ, and its derivative Φ(x) + x · φ(x).
#[inline(always)]
pub fn gelu(x: f32) -> (f32, f32) {
    /// √½ and 1 / √(2π).
    const ROOT: f32 = std::f32::consts::FRAC_1_SQRT_2;
    const DENSITY: f32 = 0.398_942_3;
    let tail = 0.5 * erfc(x.abs() * ROOT);
    let below = if x < 0.0 { tail } else { 1.0 - tail };
    (x * below, x.mul_add(DENSITY * exp(-0.5 * x * x), below))
}

/// The complementary error function of z ≥ 0, within 1.2e-7 of its value and the rounding of z² (the Chebyshev fit of
/// Numerical Recipes, third edition, section 6.2.2).
#[inline(always)]
fn erfc(z: f32) -> f32 {
    let t = 1.0 / (0.5f32).mul_add(z, 1.0);
    let mut p = 0.170_872_77f32;
    for c in [
        -0.822_152_2,
        1.488_515_9,
        -1.135_204,
        0.278_868_08,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ] {
        p = p.mul_add(t, c);
    }
    t * exp(z.mul_add(-z, p))
}

/// h `[n, inner]`.
pub fn forward(
    h: &mut [f32],
    inputs: &[f32],
    (inner, gated): (usize, bool),
    a: impl Fn(f32) -> (f32, f32) + Copy + Send + Sync,
) {
    let width = inner * if gated { 2 } else { 1 };
    h.par_chunks_mut(ROWS * inner)
        .zip(inputs.par_chunks(ROWS * width))
        .for_each(|(h, inputs)| {
            vectorised(
                #[inline(always)]
                || {
                    let rows = h.chunks_exact_mut(inner);
                    for (h, inputs) in rows.zip(inputs.chunks_exact(width)) {
                        let (first, up) = inputs.split_at(inner);
                        if !gated {
                            for (h, up) in h.iter_mut().zip(first) {
                                *h = a(*up).0;
                            }
                        }
                        for ((h, gate), up) in h.iter_mut().zip(first).zip(up) {
                            *h = a(*gate).0 * up;
                        }
                    }
                },
            )
        });
}

/// Takes dh `[n, inner]` and replaces it by h, which the weight gradient needs; replaces `inputs` by their gradient.
pub fn backward(
    dh_to_h: &mut [f32],
    inputs: &mut [f32],
    (inner, gated): (usize, bool),
    a: impl Fn(f32) -> (f32, f32) + Copy + Send + Sync,
) {
    let width = inner * if gated { 2 } else { 1 };
    dh_to_h
        .par_chunks_mut(ROWS * inner)
        .zip(inputs.par_chunks_mut(ROWS * width))
        .for_each(|(dh, inputs)| {
            vectorised(
                #[inline(always)]
                || {
                    let rows = dh.chunks_exact_mut(inner);
                    for (dh, inputs) in rows.zip(inputs.chunks_exact_mut(width)) {
                        let (first, up) = inputs.split_at_mut(inner);
                        match gated {
                            true => backward_gated(dh, first, up, a),
                            false => backward_plain(dh, first, a),
                        }
                    }
                },
            )
        });
}

/// A separate function, because the compiler knows that arguments do not overlap.
#[inline(always)]
fn backward_gated(
    dh: &mut [f32],
    gate: &mut [f32],
    up: &mut [f32],
    a: impl Fn(f32) -> (f32, f32) + Copy,
) {
    for ((dh, gate), up) in dh.iter_mut().zip(gate).zip(up) {
        let (activated, slope) = a(*gate);
        let (d, u) = (*dh, *up);
        *dh = activated * u;
        *up = d * activated;
        *gate = d * u * slope;
    }
}

#[inline(always)]
fn backward_plain(dh: &mut [f32], up: &mut [f32], a: impl Fn(f32) -> (f32, f32) + Copy) {
    for (dh, up) in dh.iter_mut().zip(up) {
        let (activated, slope) = a(*up);
        *up = *dh * slope;
        *dh = activated;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: f32, expected: f64) {
        let difference = (f64::from(got) - expected).abs();
        let allowed = 1e-5 * expected.abs().max(1.0);
        assert!(difference < allowed, "{got} {expected}");
    }

    /// Checks a(x) and its derivative, for gates and ups of many sizes.
    fn check(a: impl Fn(f32) -> (f32, f32) + Copy + Send + Sync, exact: impl Fn(f64) -> f64) {
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
        let slope = |x: f64| (exact(x + 1e-4) - exact(x - 1e-4)) / 2e-4;
        for gated in [true, false] {
            let inputs = if gated { &gate_up } else { &rows };
            let mut h = vec![0.0; rows.len()];
            forward(&mut h, inputs, (inner, gated), a);
            let (mut dh, mut gradient) = (vec![2.0; rows.len()], inputs.clone());
            backward(&mut dh, &mut gradient, (inner, gated), a);
            assert_eq!(dh, h);
            for (i, &x) in rows.iter().enumerate() {
                let (x, up) = (f64::from(x), 0.5 - f64::from(x));
                if gated {
                    let at = i / inner * 2 * inner + i % inner;
                    near(h[i], exact(x) * up);
                    near(gradient[at], 2.0 * up * slope(x));
                    near(gradient[at + inner], 2.0 * exact(x));
                } else {
                    near(h[i], exact(x));
                    near(gradient[i], 2.0 * slope(x));
                }
            }
        }
    }

    #[test]
    fn every_activation_and_its_gradient_are_the_definitions() {
        check(silu, |x| x / (1.0 + (-x).exp()));
        check(gelu_tanh, |x| {
            let inside = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inside.tanh())
        });
        check(gelu, |x| x * normal(x));
    }

    /// The normal distribution, by Simpson's rule.
    fn normal(x: f64) -> f64 {
        let density = |t: f64| (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt();
        let steps = 2000;
        let h = x.abs() / f64::from(steps);
        let sum: f64 = (0..=steps)
            .map(|i| {
                let weight = match i {
                    0 => 1.0,
                    i if i == steps => 1.0,
                    i if i % 2 == 1 => 4.0,
                    _ => 2.0,
                };
                weight * density(f64::from(i) * h)
            })
            .sum();
        0.5 + x.signum() * sum * h / 3.0
    }

    /// Far tails would be noise if they came from 1 − Φ.
    #[test]
    fn the_tail_of_gelu_is_relatively_exact() {
        // Φ(−4) and Φ(−5).
        for (x, below) in [(-4.0f32, 3.167_124_2e-5), (-5.0, 2.866_515_7e-7)] {
            let error = f64::from(gelu(x).0) / (f64::from(x) * below) - 1.0;
            assert!(error.abs() < 5e-6, "{x}: {error}");
        }
        assert_eq!(gelu(0.0).0, 0.0);
        assert!(gelu(f32::NAN).0.is_nan() && gelu(f32::NAN).1.is_nan());
    }
}
