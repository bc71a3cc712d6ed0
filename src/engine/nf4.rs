//! Weights in 4 bits: NF4 in blocks of 64, each with an f32 scale (QLoRA, arXiv 2305.14314), with the bytes of bitsandbytes.

use rayon::prelude::*;

/// Weights of a scale.
const BLOCK: usize = 64;
/// Blocks that one thread takes at a time.
const CHUNK: usize = 256;

/// The quantiles of a normal distribution between −1 and 1 (appendix E).
pub const CODE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Bytes of the codes of this many weights, and their scales.
pub fn sizes(weights: usize) -> [usize; 2] {
    [weights.div_ceil(2), weights.div_ceil(BLOCK)]
}

/// The codes, two in a byte with the first in its upper half, and the scales, of `weights`; see [`sizes`].
pub fn quantise(weights: &[f32], codes: &mut [u8], scales: &mut [f32]) {
    let blocks = weights
        .par_chunks(BLOCK * CHUNK)
        .zip(codes.par_chunks_mut(BLOCK / 2 * CHUNK))
        .zip(scales.par_chunks_mut(CHUNK));
    blocks.for_each(|((weights, codes), scales)| {
        let blocks = weights.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2));
        for ((weights, codes), scale) in blocks.zip(scales) {
            *scale = weights.iter().fold(0.0f32, |most, w| most.max(w.abs()));
            let least = scale.max(1e-38);
            if weights.len() < BLOCK {
                *scale = least;
            }
            // bitsandbytes multiplies whole blocks by the inverse, and divides the rest.
            let inverse = 1.0 / least;
            let scaled = |w: f32| match weights.len() {
                BLOCK => w * inverse,
                _ => w / least,
            };
            for (pair, byte) in weights.chunks(2).zip(codes) {
                let second = pair.get(1).map_or(0.0, |&w| scaled(w));
                *byte = code(scaled(pair[0])) << 4 | code(second);
            }
        }
    });
}

/// The code next to a number; in the middle between two the lower one.
fn code(x: f32) -> u8 {
    let middles = CODE.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    middles.filter(|&middle| middle < x).count() as u8
}

/// The weights of codes and scales.
pub fn dequantise(out: &mut [f32], codes: &[u8], scales: &[f32]) {
    let blocks = out
        .par_chunks_mut(BLOCK * CHUNK)
        .zip(codes.par_chunks(BLOCK / 2 * CHUNK))
        .zip(scales.par_chunks(CHUNK));
    blocks.for_each(|((out, codes), scales)| {
        let blocks = out.chunks_mut(BLOCK).zip(codes.chunks(BLOCK / 2));
        for ((out, codes), scale) in blocks.zip(scales) {
            for (pair, &byte) in out.chunks_mut(2).zip(codes) {
                pair[0] = CODE[usize::from(byte >> 4)] * scale;
                if let Some(second) = pair.get_mut(1) {
                    *second = CODE[usize::from(byte & 15)] * scale;
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What bitsandbytes 0.50.2 makes of `sin(i) * (1 + i / 40)` for 70 values, in f32 (`quantize_4bit`, `nf4`, on the CPU).
    #[test]
    fn bytes_and_scales_are_those_of_bitsandbytes() {
        let weights: Vec<f32> = (0..70)
            .map(|i| {
                let i = i as f32;
                (f64::from(i).sin() as f32) * (1.0 + i / 40.0)
            })
            .collect();
        let [bytes, blocks] = sizes(weights.len());
        let (mut codes, mut scales) = (vec![0; bytes], vec![0.0; blocks]);
        quantise(&weights, &mut codes, &mut scales);
        assert_eq!(codes, EXPECTED);
        assert_eq!(scales, SCALES);
        let mut out = vec![0.0; weights.len()];
        dequantise(&mut out, &codes, &scales);
        for (i, (weight, out)) in weights.iter().zip(&out).enumerate() {
            // The widest gap is 0.304 between the first two codes.
            assert!((weight - out).abs() <= 0.153 * scales[i / BLOCK], "{i}");
        }
        // Codes are kept.
        let (mut again, mut same) = (vec![0; bytes], vec![0.0; blocks]);
        quantise(&out, &mut again, &mut same);
        assert_eq!((again, same), (codes, scales));
    }

    const EXPECTED: [u8; 35] = [
        123, 200, 51, 107, 202, 66, 74, 219, 82, 56, 221, 114, 38, 222, 146, 20, 206, 196, 18, 174,
        214, 17, 126, 232, 16, 77, 251, 32, 44, 254, 64, 25, 255, 112, 6,
    ];
    const SCALES: [f32; 2] = [2.439_447_6, 2.424_404_9];

    #[test]
    fn zeros_and_middles_have_the_lower_code() {
        let mut weights = vec![0.0; 64];
        let (mut codes, mut scales) = (vec![0; 32], vec![1.0]);
        quantise(&weights, &mut codes, &mut scales);
        assert_eq!((codes[0], scales[0]), (0x77, 0.0));
        weights[0] = 1.0;
        weights[1] = (CODE[14] + CODE[15]) / 2.0;
        weights[2] = f32::from_bits(weights[1].to_bits() + 1);
        quantise(&weights, &mut codes, &mut scales);
        assert_eq!(codes[..2], [0xfe, 0xf7]);
    }
}
