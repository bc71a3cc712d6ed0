//! Embedding rows, of tokens and of positions: gathered and scaled forward, added up backward.

use rayon::prelude::*;

use super::ROWS;

/// Most rows of a table whose gradient one thread adds up at a time.
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

/// Adds the rows `positions` of `table` `[positions, width]` to those of x `[n, width]`. [`backward`] gives their gradient.
pub fn add_positions(x: &mut [f32], positions: &[u32], (table, width): (&[f32], usize)) {
    let rows = x.par_chunks_mut(width).zip(positions);
    rows.for_each(|(x, &position)| {
        let position = &table[position as usize * width..][..width];
        for (x, position) in x.iter_mut().zip(position) {
            *x += position;
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
    let of_thread = dtable.len() / width / rayon::current_num_threads();
    let of_part = of_thread.clamp(1, VOCABULARY_ROWS);
    dtable
        .par_chunks_mut(of_part * width)
        .enumerate()
        .for_each(|(part, dtable)| {
            if !add {
                dtable.fill(0.0);
            }
            let first = part * of_part;
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
    fn positions_are_added_to_their_rows_and_their_gradient_is_summed_over_them() {
        let (width, positions) = (2, [0, 1, 2, 0, 1, 0]);
        let table: Vec<f32> = (0..8).map(|i| i as f32).collect();
        let mut x = vec![0.5; positions.len() * width];
        add_positions(&mut x, &positions, (&table, width));
        let [first, second, third] = [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]];
        assert_eq!(x, [first, second, third, first, second, first].concat());
        let dx: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let mut gradient = vec![7.0; 8];
        backward((&mut gradient, false), &positions, (&dx, width), 1.0, None);
        // No sequence reaches the last position.
        assert_eq!(gradient, [16.0, 19.0, 10.0, 12.0, 4.0, 5.0, 0.0, 0.0]);
        backward((&mut gradient, true), &positions, (&dx, width), 1.0, None);
        assert_eq!(gradient[..2], [32.0, 38.0]);
    }
}
