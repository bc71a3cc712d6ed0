//! Dropout of the inputs of adapters, drawn by row, adapter and element, so that neither the world nor the micro-batch
//! changes it.

use rayon::prelude::*;

use crate::util::random::nth;

/// What is dropped of the inputs of one adapter in a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct Dropout<'a> {
    /// The share of elements that become 0; the others grow to keep the mean.
    pub share: f32,
    /// What draws each row.
    pub keys: &'a [u64],
    pub adapter: usize,
    pub seq_len: usize,
}

impl Dropout<'_> {
    /// out `[n, width]` = x with dropout.
    pub fn apply(self, out: &mut [f32], x: &[f32], width: usize) {
        self.rows(out, x, width, |out, x, factor| *out = x * factor);
    }

    /// dx `[n, width]` += the gradient d of the output of [`Dropout::apply`].
    pub fn add_gradient(self, dx: &mut [f32], d: &[f32], width: usize) {
        self.rows(dx, d, width, |dx, d, factor| *dx += d * factor);
    }

    fn rows(
        self,
        out: &mut [f32],
        values: &[f32],
        width: usize,
        each: impl Fn(&mut f32, f32, f32) + Sync,
    ) {
        let (dropped, factor) = odds(self.share);
        let rows = out.par_chunks_mut(width).zip(values.par_chunks(width));
        rows.enumerate().for_each(|(row, (out, values))| {
            let key = nth(self.keys[row / self.seq_len], self.adapter as u64 + 1);
            let first = (row % self.seq_len * width) as u64;
            for (element, (out, &value)) in (first..).zip(out.iter_mut().zip(values)) {
                let is_dropped = nth(key, element + 1) >> 40 < u64::from(dropped);
                each(out, value, if is_dropped { 0.0 } else { factor });
            }
        });
    }
}

/// The number of 24 bits below which the upper bits of a random one drop an element, and the factor of the others.
pub fn odds(share: f32) -> (u32, f32) {
    let dropped = f64::from(share) * f64::from(1 << 24);
    (dropped as u32, 1.0 / (1.0 - share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_dropped_the_mean_stays_and_adapters_and_rows_differ() {
        let (width, seq_len) = (32, 200);
        let x = vec![1.0; 2 * seq_len * width];
        let of = |adapter, keys: &[u64]| {
            let mut out = vec![0.0; keys.len() * seq_len * width];
            let x = &x[..out.len()];
            let dropout = Dropout {
                share: 0.25,
                keys,
                adapter,
                seq_len,
            };
            dropout.apply(&mut out, x, width);
            let mut gradient = vec![1.0; out.len()];
            dropout.add_gradient(&mut gradient, x, width);
            assert!(gradient.iter().zip(&out).all(|(g, out)| *g == 1.0 + out));
            out
        };
        let both = of(0, &[3, 4]);
        let dropped = both.iter().filter(|&&value| value == 0.0).count() as f64;
        // The standard deviation is 0.004.
        assert!((dropped / both.len() as f64 - 0.25).abs() < 0.02);
        assert!(both.iter().all(|&value| value == 0.0 || value == 4.0 / 3.0));
        let (first, second) = both.split_at(seq_len * width);
        assert_eq!(of(0, &[4]), second);
        assert_ne!(first, second);
        assert_ne!(of(1, &[3]), first);
    }
}
