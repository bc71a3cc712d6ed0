//! Embedding rows: gathered and scaled forward, added up backward.

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
