//! The exponential, in a form that compilers vectorise, and the reductions of a softmax.

use super::{LANES, sum_lanes};

/// exp(x) within 2 units in the last place for −87 ≤ x ≤ 88, constant beyond; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Rounds to the nearest integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, so that n·ln 2 is exact enough (Cody and Waite).
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Comparisons with NaN are false, so NaN passes through.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    // Coefficients of Cephes' expf.
    let mut p = 1.987_569_1e-4f32;
    for c in [
        1.398_2e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = p.mul_add(r, c);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    p * scale
}

/// The largest element; −∞ for an empty slice. NaN may be lost here, because exp(x − max) is NaN anyway.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (rows, rest) = x.as_chunks::<LANES>();
    for row in rows {
        for lane in 0..LANES {
            largest[lane] = if row[lane] > largest[lane] {
                row[lane]
            } else {
                largest[lane]
            };
        }
    }
    let mut most = f32::NEG_INFINITY;
    for &x in largest.iter().chain(rest) {
        most = if x > most { x } else { most };
    }
    most
}

/// x = exp(x − shift) in place; returns the sum.
#[inline(always)]
pub fn exp_and_sum(x: &mut [f32], shift: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (rows, rest) = x.as_chunks_mut::<LANES>();
    for row in rows {
        for lane in 0..LANES {
            row[lane] = exp(row[lane] - shift);
            sums[lane] += row[lane];
        }
    }
    for (lane, x) in rest.iter_mut().enumerate() {
        *x = exp(*x - shift);
        sums[lane] += *x;
    }
    sum_lanes(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * exact;
            worst = worst.max((f64::from(exp(x)) - exact).abs() / unit);
        }
        assert!(worst < 2.0, "{worst}");
    }

    #[test]
    fn exp_is_constant_beyond_its_range() {
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 2e-38);
        assert!(exp(f32::INFINITY) > 1e38);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_count_every_element() {
        for len in [1, 15, 16, 17, 100] {
            let x: Vec<f32> = (0..len).map(|i| ((i * 7) % len) as f32 * 0.1).collect();
            assert_eq!(max(&x), (len - 1) as f32 * 0.1);
            let mut y = x.clone();
            let sum = exp_and_sum(&mut y, 1.0);
            let expected: f64 = x.iter().map(|&x| f64::from(x - 1.0).exp()).sum();
            assert!((f64::from(sum) - expected).abs() < 1e-5 * expected);
        }
        assert_eq!(max(&[]), f32::NEG_INFINITY);
    }
}
