//! Weights in 4 bits: NF4 in blocks of 64, each with an f32 scale (QLoRA, arXiv 2305.14314), with the bytes of bitsandbytes.

use rayon::prelude::*;

/// Weights of a scale.
pub const BLOCK: usize = 64;
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

/// Scales of a group, which have one factor in 8 bits.
pub const GROUP: usize = 256;

/// Factors of the groups of this many scales.
pub fn groups(scales: usize) -> usize {
    scales.div_ceil(GROUP)
}

/// The numbers of codes in 8 bits (`create_dynamic_map` of bitsandbytes): for each of seven powers of 10, the means of
/// twice as many equal parts of 0.1 to 1 as for the power below, of both signs, and 0 and 1.
pub fn numbers() -> [f32; 256] {
    const DECADES: i32 = 7;
    let (least, mut numbers) = (0.1f32, [0.0; 256]);
    let mut at = 0;
    for decade in 0..DECADES {
        let parts = 1u32 << decade;
        let step = f64::from((1.0 - least) / parts as f32);
        // As `torch.linspace`, from both ends.
        let boundary = |i: u32| match i < parts.div_ceil(2) {
            true => (f64::from(least) + step * f64::from(i)) as f32,
            false => (1.0 - step * f64::from(parts - i)) as f32,
        };
        let power = 10f64.powi(decade + 1 - DECADES) as f32;
        for part in 0..parts {
            let mean = power * ((boundary(part) + boundary(part + 1)) / 2.0);
            (numbers[at], numbers[at + 1]) = (mean, -mean);
            at += 2;
        }
    }
    numbers[at + 1] = 1.0;
    numbers.sort_by(f32::total_cmp);
    numbers
}

/// The codes of `scales` in 8 bits, and the factors of their groups (double quantisation, QLoRA section 3). Returns the mean
/// of the scales, which the codes are around.
///
/// bitsandbytes adds up in f32, in an order that depends on threads and the processor; here the mean is rounded once.
pub fn quantise_scales(scales: &[f32], codes: &mut [u8], factors: &mut [f32]) -> f32 {
    let sum: f64 = scales.iter().map(|&scale| f64::from(scale)).sum();
    let offset = (sum / scales.len().max(1) as f64) as f32;
    let numbers = numbers();
    let middles: Vec<f32> = numbers
        .windows(2)
        .map(|pair| 0.5 * (pair[0] + pair[1]))
        .collect();
    let groups = scales
        .par_chunks(GROUP)
        .zip(codes.par_chunks_mut(GROUP))
        .zip(factors);
    groups.for_each(|((scales, codes), factor)| {
        let centred = scales.iter().map(|scale| scale - offset);
        *factor = centred
            .clone()
            .fold(0.0f32, |most, scale| most.max(scale.abs()));
        let inverse = 1.0 / *factor;
        for (code, scale) in codes.iter_mut().zip(centred) {
            *code = match *factor == 0.0 {
                true => 0,
                false => code_of_scale(scale * inverse, &middles),
            };
        }
    });
    offset
}

/// The code next to the centre of the one of 65 536 parts of −1 to 1 that has the number, as bitsandbytes looks it up.
fn code_of_scale(number: f32, middles: &[f32]) -> u8 {
    const LAST: f32 = 65535.0;
    let half = (number.clamp(-1.0, 1.0) + 1.0) * 0.5;
    // One rounding, which this product of f32 leaves to the sum.
    let part = (f64::from(half) * f64::from(LAST) + 0.5) as f32;
    let centre = -1.0 + 2.0 * part.floor() / LAST;
    middles.partition_point(|&middle| middle < centre) as u8
}

/// The scales of codes, factors and their mean; `numbers` are [`numbers`].
pub fn dequantise_scales(
    out: &mut [f32],
    codes: &[u8],
    factors: &[f32],
    offset: f32,
    numbers: &[f32; 256],
) {
    let groups = out.chunks_mut(GROUP).zip(codes.chunks(GROUP)).zip(factors);
    for ((out, codes), factor) in groups {
        for (out, code) in out.iter_mut().zip(codes) {
            *out = numbers[usize::from(*code)] * factor + offset;
        }
    }
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
    const OFFSET: f32 = 0.997_682_3;
    const FACTORS: [f32; 3] = [1.002_317_7, 0.990_599, 1.002_317_7];
    const FIRST: [u8; 24] = [
        0, 10, 21, 31, 41, 51, 62, 161, 195, 205, 215, 226, 236, 246, 2, 12, 22, 33, 43, 53, 63,
        170, 197, 207,
    ];
    /// Hashes of all codes, and of what they are dequantised to.
    const CODES: u64 = 0xeb31_d628_0178_8620;
    const DEQUANTISED: u64 = 0xa7d6_b307_60d5_eb16;

    /// What bitsandbytes 0.50.2 makes of the scales `(i * 37 % 512 + 1) / 256` of 600 blocks, whose sum is exact
    /// (`quantize_4bit` with `compress_statistics`, in f32 on the CPU).
    #[test]
    fn scales_in_8_bits_are_those_of_bitsandbytes() {
        let scales: Vec<f32> = (0..600)
            .map(|i| (i * 37 % 512 + 1) as f32 / 256.0)
            .collect();
        let (mut codes, mut factors) = (vec![0; scales.len()], vec![0.0; groups(scales.len())]);
        let offset = quantise_scales(&scales, &mut codes, &mut factors);
        assert_eq!(offset, OFFSET);
        assert_eq!(factors, FACTORS);
        assert_eq!(codes[..24], FIRST);
        assert_eq!(xxhash_rust::xxh3::xxh3_64(&codes), CODES);
        let (mut out, numbers) = (vec![0.0; scales.len()], numbers());
        dequantise_scales(&mut out, &codes, &factors, offset, &numbers);
        for ((scale, out), code) in scales.iter().zip(&out).zip(&codes) {
            // The widest gap between two numbers is 0.0141, half of which is the most.
            assert!((scale - out).abs() < 0.0075, "{code}: {scale} {out}");
        }
        let bytes: Vec<u8> = out.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        assert_eq!(xxhash_rust::xxh3::xxh3_64(&bytes), DEQUANTISED);
        // Scales that are all the same.
        let offset = quantise_scales(&[0.5; 3], &mut codes[..3], &mut factors[..1]);
        assert_eq!((offset, factors[0], &codes[..3]), (0.5, 0.0, &[0; 3][..]));
    }

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
