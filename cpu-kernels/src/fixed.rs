//! Sums of gradients in fixed point: integers of 2⁻³², whose sum is the same in any order of the addends.
//!
//! An addend is rounded once, by at most 2⁻³³. The sum itself is exact: additions wrap around, so that a sum within ±2³¹ is
//! right whatever the partial sums are. [`peak_units`] of the addends bounds it.

use rayon::prelude::*;

use super::vector::CHUNK;
use super::vectorised;

/// Units of a 1.
const SCALE: f64 = (1u64 << 32) as f64;
/// Addends up to this size are converted; a larger one is a gradient that has diverged.
const LARGEST: f32 = (1u32 << 19) as f32;
/// 1.5 · 2⁵²: a sum with it is rounded to an integer, which its lowest bits then hold.
const ROUNDING: f64 = 6_755_399_441_055_744.0;
/// Independent partial sums, so that additions vectorise.
const LANES: usize = 16;

/// What [`add`] finds out about its addend.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Added {
    /// The largest absolute value; NaN or infinite if any element is.
    pub peak: f32,
    /// ‖x‖², in f64, in an order that the length alone decides.
    pub squared_norm: f64,
}

/// sum = x, or += x unless it `overwrites`. The sum is unspecified where the peak of x is above what [`peak_units`] accepts.
pub fn add(sum: &mut [i64], x: &[f32], overwrites: bool) -> Added {
    let parts: Vec<(u32, f64)> = (sum.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)))
        .map(|(sum, x)| {
            vectorised(
                #[inline(always)]
                || match overwrites {
                    true => add_chunk(sum, x, |_, x| x),
                    false => add_chunk(sum, x, i64::wrapping_add),
                },
            )
        })
        .collect();
    Added {
        peak: f32::from_bits(parts.iter().map(|part| part.0).max().unwrap_or(0)),
        squared_norm: parts.iter().map(|part| part.1).sum(),
    }
}

/// The bits of the largest absolute value, which are ordered as the values are and put NaN last, and ‖x‖².
#[inline(always)]
fn add_chunk(sum: &mut [i64], x: &[f32], put: impl Fn(i64, i64) -> i64) -> (u32, f64) {
    let (mut peaks, mut squares) = ([0u32; LANES], [0.0f64; LANES]);
    let (rows, rest) = x.as_chunks::<LANES>();
    let (into, rest_into) = sum.as_chunks_mut::<LANES>();
    for (into, row) in into.iter_mut().zip(rows) {
        for lane in 0..LANES {
            let x = f64::from(row[lane]);
            into[lane] = put(into[lane], units(x));
            squares[lane] += x * x;
            peaks[lane] = peaks[lane].max(row[lane].to_bits() & 0x7fff_ffff);
        }
    }
    for (lane, (into, x)) in rest_into.iter_mut().zip(rest).enumerate() {
        let value = f64::from(*x);
        *into = put(*into, units(value));
        squares[lane] += value * value;
        peaks[lane] = peaks[lane].max(x.to_bits() & 0x7fff_ffff);
    }
    (
        peaks.into_iter().max().unwrap_or(0),
        squares.into_iter().sum(),
    )
}

/// x in units, to the nearest integer, half to even.
#[inline(always)]
fn units(x: f64) -> i64 {
    ((x * SCALE + ROUNDING).to_bits() as i64).wrapping_sub(ROUNDING.to_bits() as i64)
}

/// The largest that an addend with this peak can be, in units. While these add up to less than 2⁶³, no sum of the addends
/// overflows. `u64::MAX`: the peak is not finite or too large.
pub fn peak_units(peak: f32) -> u64 {
    if peak <= LARGEST {
        (f64::from(peak) * SCALE).ceil() as u64
    } else {
        u64::MAX
    }
}

/// sum += x, on this thread.
pub fn accumulate_on_this_thread(sum: &mut [i64], x: &[i64]) {
    vectorised(
        #[inline(always)]
        || {
            for (sum, x) in sum.iter_mut().zip(x) {
                *sum = sum.wrapping_add(*x);
            }
        },
    );
}

/// sum += x, elementwise; both wrap around.
pub fn accumulate(sum: &mut [i64], x: &[i64]) {
    sum.par_chunks_mut(CHUNK)
        .zip(x.par_chunks(CHUNK))
        .for_each(|(sum, x)| accumulate_on_this_thread(sum, x));
}

/// out = sum, to the nearest f32. Returns Σ sum² in units², exactly, or `u128::MAX` if it is larger: this, too, is the same in
/// any order and in any shards.
pub fn round(out: &mut [f32], sum: &[i64]) -> u128 {
    let parts: Vec<u128> = (out.par_chunks_mut(CHUNK).zip(sum.par_chunks(CHUNK)))
        .map(|(out, sum)| {
            let mut squares = 0u128;
            for (out, &sum) in out.iter_mut().zip(sum) {
                *out = sum as f32 * (1.0 / SCALE as f32);
                let size = u128::from(sum.unsigned_abs());
                squares = squares.saturating_add(size * size);
            }
            squares
        })
        .collect();
    parts.into_iter().fold(0, u128::saturating_add)
}

/// A sum of squares from [`round`] in f64; infinite if it was too large.
pub fn squares(units: u128) -> f64 {
    match units {
        u128::MAX => f64::INFINITY,
        units => units as f64 / (SCALE * SCALE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gradients of samples: sizes over twelve orders of magnitude.
    fn samples(count: usize, len: usize) -> Vec<Vec<f32>> {
        let at = |i: usize| {
            let size = 10f32.powi((i * 7 % 13) as i32 - 8);
            (i as f32 * 0.37).sin() * size
        };
        (0..count)
            .map(|sample| (0..len).map(|i| at(sample * len + i)).collect())
            .collect()
    }

    fn sum(samples: &[&Vec<f32>]) -> Vec<i64> {
        let mut sum = vec![7; samples[0].len()];
        for (i, sample) in samples.iter().enumerate() {
            add(&mut sum, sample, i == 0);
        }
        sum
    }

    /// Every order and every split into ranks has the same sum, and f32 has not: the planted change.
    #[test]
    fn sums_do_not_depend_on_the_order_and_f32_sums_do() {
        let samples = samples(9, CHUNK + 21);
        let ascending: Vec<&Vec<f32>> = samples.iter().collect();
        let mut shuffled = ascending.clone();
        shuffled.reverse();
        shuffled.swap(1, 5);
        let expected = sum(&ascending);
        assert!(sum(&shuffled) == expected);
        let (one, other) = ascending.split_at(4);
        let mut of_ranks = sum(other);
        accumulate(&mut of_ranks, &sum(one));
        assert!(of_ranks == expected);
        let in_f32 = |samples: &[&Vec<f32>]| {
            let mut sum = vec![0.0; samples[0].len()];
            for sample in samples {
                super::super::vector::accumulate(&mut sum, sample);
            }
            sum
        };
        assert_ne!(in_f32(&ascending), in_f32(&shuffled));
    }

    #[test]
    fn a_sum_is_that_of_the_rounded_addends_at_any_length_and_number_of_threads() {
        for len in [0, 1, 15, 16, 33, 1000, CHUNK + 17] {
            let samples = samples(3, len);
            let of_threads = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                pool.build().unwrap().install(|| {
                    let mut sum = vec![0; len];
                    let added = samples.iter().map(|x| add(&mut sum, x, false));
                    let added: Vec<Added> = added.collect();
                    let mut rounded = vec![0.0; len];
                    let squares = round(&mut rounded, &sum);
                    (sum, added, rounded, squares)
                })
            };
            let (sum, added, rounded, total) = of_threads(1);
            assert!(of_threads(3) == (sum.clone(), added.clone(), rounded.clone(), total));
            for (i, sum) in sum.iter().enumerate() {
                let unit = |x: &Vec<f32>| (f64::from(x[i]) * SCALE).round_ties_even() as i64;
                assert_eq!(*sum, samples.iter().map(unit).sum::<i64>());
                assert_eq!(rounded[i], (*sum as f64 / SCALE) as f32);
            }
            for (x, added) in samples.iter().zip(&added) {
                let peak = x.iter().fold(0.0f32, |peak, x| peak.max(x.abs()));
                assert_eq!(added.peak, peak);
                let square = super::super::vector::squared_norm(x);
                assert!((added.squared_norm - square).abs() <= 1e-12 * square);
            }
            let square: f64 = sum.iter().map(|&x| (x as f64 / SCALE).powi(2)).sum();
            assert!((squares(total) - square).abs() <= 1e-12 * square);
        }
    }

    #[test]
    fn the_norm_of_a_sum_does_not_depend_on_its_shards() {
        let sum = sum(&samples(4, 1000).iter().collect::<Vec<_>>());
        let mut out = vec![0.0; 1000];
        let whole = round(&mut out, &sum);
        let shards = sum
            .chunks(77)
            .map(|shard| round(&mut out[..shard.len()], shard));
        assert_eq!(shards.sum::<u128>(), whole);
        // Sums of squares in f64 differ.
        let in_f64 = |shard: usize| {
            let squares = |shard: &[i64]| {
                shard
                    .iter()
                    .map(|&x| (x as f64 / SCALE).powi(2))
                    .sum::<f64>()
            };
            sum.chunks(shard).map(squares).sum::<f64>()
        };
        assert_ne!(in_f64(77), in_f64(1000));
    }

    #[test]
    fn what_is_not_finite_or_too_large_is_found_in_any_place() {
        for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -6e5] {
            for at in [0, 15, 40] {
                let mut x = vec![1.0; 41];
                x[at] = wrong;
                let added = add(&mut [0; 41], &x, false);
                assert_eq!(peak_units(added.peak), u64::MAX, "{wrong} at {at}");
            }
        }
        assert_eq!(peak_units(LARGEST), 1 << 51);
        assert_eq!(peak_units(0.0), 0);
        assert_eq!(round(&mut [0.0; 5], &[i64::MIN; 5]), u128::MAX);
        assert_eq!(squares(u128::MAX), f64::INFINITY);
    }

    /// A partial sum beyond the range returns into it.
    #[test]
    fn partial_sums_may_overflow() {
        let mut sum = [i64::MAX - 5];
        accumulate(&mut sum, &[1 << 40]);
        accumulate(&mut sum, &[-(1 << 41)]);
        assert_eq!(sum, [i64::MAX - 5 - (1 << 40)]);
    }
}
