//! Embedding rows, of tokens and of positions: gathered and scaled forward, added up backward. Noise on them.

use rayon::prelude::*;

use super::ROWS;

/// Vocabulary rows whose gradient one thread adds up at a time.
const VOCABULARY_ROWS: usize = 512;

/// x `[n, width]` = `scale` · rows `tokens` of `table` `[vocabulary, width]`.
pub fn forward(x: &mut [f32], tokens: &[u32], (table, width): (&[f32], usize), scale: f32) {
    x.par_chunks_mut(ROWS * width)
        .zip(tokens.par_chunks(ROWS))
        .for_each(|(x, tokens)| {
            for (x, &token) in x.chunks_exact_mut(width).zip(tokens) {
                let row = &table[token as usize * width..][..width];
                for (x, row) in x.iter_mut().zip(row) {
                    *x = row * scale;
                }
            }
        });
}

/// Uniform noise on the embeddings of one sequence (NEFTune, arXiv 2310.05914).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Noise {
    /// Selects the random numbers.
    pub key: u64,
    /// The largest absolute value; NEFTune's is α / √(tokens · width).
    pub magnitude: f32,
}

impl Noise {
    /// The noise of an element of the sequence, `[seq_len, width]` row-major: SplitMix64's output at this place after the
    /// key, of which the upper 24 bits are scaled to −1 ≤ u < 1, times the magnitude.
    #[inline(always)]
    pub fn at(self, element: u64) -> f32 {
        let mut bits = self
            .key
            .wrapping_add((element + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        ((bits >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0) * self.magnitude
    }
}

/// Adds the noise of each sequence to its rows of x `[n, width]`.
pub fn add_noise(x: &mut [f32], width: usize, seq_len: usize, noise: &[Noise]) {
    x.par_chunks_mut(width).enumerate().for_each(|(row, x)| {
        let (noise, first) = (noise[row / seq_len], row % seq_len * width);
        for (element, x) in (first as u64..).zip(x) {
            *x += noise.at(element);
        }
    });
}

/// Adds the rows of `table` `[positions, width]` to those of x `[n, width]`; row r is at position r mod seq_len.
pub fn add_positions(x: &mut [f32], (table, width): (&[f32], usize), seq_len: usize) {
    x.par_chunks_mut(width).enumerate().for_each(|(row, x)| {
        let position = &table[row % seq_len * width..][..width];
        for (x, position) in x.iter_mut().zip(position) {
            *x += position;
        }
    });
}

/// dtable `[positions, width]` = Σ of the rows of dx `[n, width]` at each position, or += when `add`.
pub fn positions_backward(
    (dtable, add): (&mut [f32], bool),
    (dx, width): (&[f32], usize),
    seq_len: usize,
) {
    let rows = dx.len() / width;
    let of_positions = dtable.par_chunks_mut(width).enumerate();
    of_positions.for_each(|(position, sum)| {
        if !add {
            sum.fill(0.0);
        }
        let occurrences = if position < seq_len { rows } else { 0 };
        for row in (position..occurrences).step_by(seq_len) {
            for (sum, dx) in sum.iter_mut().zip(&dx[row * width..]) {
                *sum += dx;
            }
        }
    });
}

/// dtable `[vocabulary, width]` = `scale` · Σ of the rows of dx `[n, width]` by token, or += when `add`. The token `unmoved`
/// has no gradient.
///
/// Every thread scans all tokens for those in its part of the vocabulary, so that rows are added in the order
/// of the tokens.
pub fn backward(
    (dtable, add): (&mut [f32], bool),
    tokens: &[u32],
    (dx, width): (&[f32], usize),
    scale: f32,
    unmoved: Option<u32>,
) {
    dtable
        .par_chunks_mut(VOCABULARY_ROWS * width)
        .enumerate()
        .for_each(|(part, dtable)| {
            if !add {
                dtable.fill(0.0);
            }
            let first = part * VOCABULARY_ROWS;
            let rows = dtable.len() / width;
            for (&token, dx) in tokens.iter().zip(dx.chunks_exact(width)) {
                let row = (token as usize).wrapping_sub(first);
                if row < rows && unmoved != Some(token) {
                    for (sum, dx) in dtable[row * width..][..width].iter_mut().zip(dx) {
                        *sum += dx * scale;
                    }
                }
            }
        });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first two outputs of SplitMix64 for the seed 1234567, as its author's program prints them.
    #[test]
    fn noise_is_uniform_and_the_same_in_every_row_of_a_batch() {
        let noise = Noise {
            key: 1_234_567,
            magnitude: 2.0,
        };
        for (element, bits) in [6_457_827_717_110_365_317_u64, 3_203_168_211_198_807_973]
            .into_iter()
            .enumerate()
        {
            let expected = 2.0 * ((bits >> 40) as f64 / 8_388_608.0 - 1.0);
            assert_eq!(f64::from(noise.at(element as u64)), expected);
        }
        let (width, seq_len) = (64, 100);
        let other = Noise {
            key: 3,
            magnitude: 0.0,
        };
        let mut x = vec![1.0; 2 * seq_len * width];
        add_noise(&mut x, width, seq_len, &[noise, other]);
        let (noisy, plain) = x.split_at(seq_len * width);
        assert!(plain.iter().all(|x| *x == 1.0));
        let mean = |of: fn(f64) -> f64| {
            let sum: f64 = noisy.iter().map(|x| of(f64::from(*x) - 1.0)).sum();
            sum / noisy.len() as f64
        };
        // 6,400 draws: three standard deviations.
        assert!(mean(|x| x).abs() < 0.044, "{}", mean(|x| x));
        assert!((mean(|x| x * x) - 4.0 / 3.0).abs() < 0.045);
        assert!(noisy.iter().all(|x| (x - 1.0).abs() <= 2.0));
        let mut alone = vec![1.0; seq_len * width];
        add_noise(&mut alone, width, seq_len, &[noise]);
        assert_eq!(alone, noisy);
    }

    #[test]
    fn positions_are_added_to_every_sequence_and_their_gradient_is_summed_over_them() {
        let (width, seq_len) = (2, 3);
        let table: Vec<f32> = (0..8).map(|i| i as f32).collect();
        let mut x = vec![0.5; 2 * seq_len * width];
        add_positions(&mut x, (&table, width), seq_len);
        let one = [0.5, 1.5, 2.5, 3.5, 4.5, 5.5];
        assert_eq!(x, [one, one].concat());
        let dx: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let mut gradient = vec![7.0; 8];
        positions_backward((&mut gradient, false), (&dx, width), seq_len);
        // No sequence reaches the last position.
        assert_eq!(gradient, [6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 0.0, 0.0]);
        positions_backward((&mut gradient, true), (&dx, width), seq_len);
        assert_eq!(gradient[..2], [12.0, 16.0]);
    }
}
