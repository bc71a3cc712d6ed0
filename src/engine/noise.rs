//! Noise on the embeddings in training (NEFTune, arXiv 2310.05914).

use rayon::prelude::*;

use crate::util::random::nth;

/// Uniform noise on the embeddings of one sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Noise {
    /// Selects the random numbers.
    pub key: u64,
    /// The largest absolute value; NEFTune's is α / √(tokens · width).
    pub magnitude: f32,
}

impl Noise {
    /// The noise of an element of the sequence, `[seq_len, width]` row-major: the upper 24 bits of the key's random number,
    /// scaled to −1 ≤ u < 1, times the magnitude.
    fn at(self, element: u64) -> f32 {
        ((nth(self.key, element + 1) >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0) * self.magnitude
    }
}

/// Adds the noise of each sequence to its rows of x `[n, width]`.
pub fn add(x: &mut [f32], width: usize, seq_len: usize, noise: &[Noise]) {
    x.par_chunks_mut(width).enumerate().for_each(|(row, x)| {
        let (noise, first) = (noise[row / seq_len], row % seq_len * width);
        for (element, x) in (first as u64..).zip(x) {
            *x += noise.at(element);
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
        add(&mut x, width, seq_len, &[noise, other]);
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
        add(&mut alone, width, seq_len, &[noise]);
        assert_eq!(alone, noisy);
    }
}
