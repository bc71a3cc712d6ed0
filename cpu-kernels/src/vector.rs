//! Sums over long vectors; norms are summed in f64.

use rayon::prelude::*;

use super::vectorised;

/// Elements that one thread takes at a time: 256 KiB, within the second-level cache.
pub const CHUNK: usize = 1 << 16;

/// Independent partial sums, so that additions overlap and vectorise.
const LANES: usize = 32;

/// sum = a + b.
pub fn add(sum: &mut [f32], a: &[f32], b: &[f32]) {
    sum.par_chunks_mut(CHUNK)
        .zip(a.par_chunks(CHUNK))
        .zip(b.par_chunks(CHUNK))
        .for_each(|((sum, a), b)| add_on_this_thread(sum, a, b));
}

/// As [`add`], on this thread.
pub fn add_on_this_thread(sum: &mut [f32], a: &[f32], b: &[f32]) {
    vectorised(
        #[inline(always)]
        || {
            for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
                *sum = a + b;
            }
        },
    );
}

/// As [`accumulate`], on this thread.
pub fn accumulate_on_this_thread(sum: &mut [f32], x: &[f32]) {
    each_on_this_thread(
        sum,
        x,
        #[inline(always)]
        |sum, x| *sum += x,
    );
}

/// sum += x, elementwise.
pub fn accumulate(sum: &mut [f32], x: &[f32]) {
    each(
        sum,
        x,
        #[inline(always)]
        |sum, x| *sum += x,
    );
}

/// sum += factor · x², elementwise.
pub fn add_squares(sum: &mut [f32], x: &[f32], factor: f32) {
    each(
        sum,
        x,
        #[inline(always)]
        |sum, x| *sum += factor * (x * x),
    );
}

/// Calls `change` with every element of `values` and that of `x`.
fn each(values: &mut [f32], x: &[f32], change: impl Fn(&mut f32, f32) + Sync) {
    values
        .par_chunks_mut(CHUNK)
        .zip(x.par_chunks(CHUNK))
        .for_each(|(values, x)| each_on_this_thread(values, x, &change));
}

#[inline(always)]
fn each_on_this_thread(values: &mut [f32], x: &[f32], change: impl Fn(&mut f32, f32)) {
    vectorised(
        #[inline(always)]
        || {
            for (value, &x) in values.iter_mut().zip(x) {
                change(value, x);
            }
        },
    );
}

/// ‖x‖², summed in f64.
pub fn squared_norm(x: &[f32]) -> f64 {
    let parts: Vec<f64> = x
        .par_chunks(CHUNK)
        .map(|x| {
            vectorised(
                #[inline(always)]
                || {
                    let mut sums = [0.0f64; LANES];
                    let (rows, rest) = x.as_chunks::<LANES>();
                    for row in rows {
                        for lane in 0..LANES {
                            sums[lane] += square(row[lane]);
                        }
                    }
                    total(sums, rest)
                },
            )
        })
        .collect();
    parts.iter().sum()
}

/// `sum += x`; returns ‖x‖² and the new ‖sum‖², each bitwise equal to [`squared_norm`].
pub fn add_measuring(sum: &mut [f32], x: &[f32]) -> (f64, f64) {
    let parts: Vec<(f64, f64)> = sum
        .par_chunks_mut(CHUNK)
        .zip(x.par_chunks(CHUNK))
        .map(|(sum, x)| {
            vectorised(
                #[inline(always)]
                || {
                    let (mut of_x, mut of_sum) = ([0.0f64; LANES], [0.0f64; LANES]);
                    let (rows, rest) = x.as_chunks::<LANES>();
                    let (into, rest_into) = sum.as_chunks_mut::<LANES>();
                    for (into, row) in into.iter_mut().zip(rows) {
                        for lane in 0..LANES {
                            into[lane] += row[lane];
                            of_x[lane] += square(row[lane]);
                            of_sum[lane] += square(into[lane]);
                        }
                    }
                    for (into, x) in rest_into.iter_mut().zip(rest) {
                        *into += x;
                    }
                    (total(of_x, rest), total(of_sum, rest_into))
                },
            )
        })
        .collect();
    let of = |part: fn(&(f64, f64)) -> f64| parts.iter().map(part).sum();
    (of(|part| part.0), of(|part| part.1))
}

/// Σ over the lanes, plus the squares of the remaining elements.
#[inline(always)]
fn total(lanes: [f64; LANES], rest: &[f32]) -> f64 {
    lanes.iter().sum::<f64>() + rest.iter().map(|&x| square(x)).sum::<f64>()
}

#[inline(always)]
fn square(x: f32) -> f64 {
    f64::from(x) * f64::from(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * 0.37).sin()).collect()
    }

    #[test]
    fn squared_norm_is_the_sum_of_squares_at_any_length() {
        for len in [0, 1, 31, 32, 33, 1000, CHUNK + 17, 3 * CHUNK] {
            let x = values(len);
            let expected: f64 = x.iter().map(|&x| square(x)).sum();
            assert!(
                (squared_norm(&x) - expected).abs() <= 1e-12 * expected,
                "{len}"
            );
        }
    }

    #[test]
    fn adding_measures_what_is_added_and_the_sum() {
        for len in [1, 33, CHUNK + 17] {
            let x = values(len);
            let mut sum: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let expected: Vec<f32> = sum.iter().zip(&x).map(|(a, b)| a + b).collect();
            let norms = add_measuring(&mut sum, &x);
            assert_eq!(sum, expected);
            assert_eq!(norms, (squared_norm(&x), squared_norm(&sum)));
        }
    }

    #[test]
    fn squares_are_added_elementwise() {
        for len in [1, 33, CHUNK + 17] {
            let x = values(len);
            let mut sum = vec![1.0; len];
            add_squares(&mut sum, &x, 0.5);
            let expected: Vec<f32> = x.iter().map(|x| 1.0 + 0.5 * (x * x)).collect();
            assert_eq!(sum, expected);
        }
    }

    #[test]
    fn nan_and_infinity_propagate() {
        assert!(squared_norm(&[1.0, f32::NAN]).is_nan());
        assert_eq!(squared_norm(&[1.0, f32::NEG_INFINITY]), f64::INFINITY);
        // Far beyond f32's range, within f64's.
        assert!(squared_norm(&[1e30; 100]).is_finite());
    }
}
