//! Embedding rows, of tokens and of positions: gathered and scaled forward, added up backward.

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
