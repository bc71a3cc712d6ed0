//! Rotary position embedding (Su et al., 2021) in the layout of Hugging Face's Llama: element i of a head
//! rotates together with element i + head_dim / 2.

use rayon::prelude::*;

use super::{ROWS, vectorised};

/// Fills `table` `[seq_len, head_dim]` with the cosines, then the sines, of every position's angles: position × frequency
/// of each of the head_dim / 2 pairs. The angles are rounded to f32, as in transformers.
pub fn fill_table(table: &mut [f32], frequencies: &[f32]) {
    let half = frequencies.len();
    for (position, row) in table.chunks_exact_mut(2 * half).enumerate() {
        let (cos, sin) = row.split_at_mut(half);
        for (i, frequency) in frequencies.iter().enumerate() {
            let angle = f64::from(position as f32 * frequency);
            cos[i] = angle.cos() as f32;
            sin[i] = angle.sin() as f32;
        }
    }
}

/// Rotates the first `heads` heads of every row of `x` `[n, row]` in place; row r is at position r mod
/// seq_len.
pub fn rotate(x: &mut [f32], row: usize, heads: usize, table: (&[f32], usize, usize)) {
    turn_rows(x, row, heads, table, turn);
}

/// The inverse of [`rotate`], which is its transpose.
pub fn rotate_back(x: &mut [f32], row: usize, heads: usize, table: (&[f32], usize, usize)) {
    turn_rows(
        x,
        row,
        heads,
        table,
        #[inline(always)]
        |a, b, cos, sin| turn(b, a, cos, sin),
    );
}

#[inline(always)]
fn turn_rows(
    x: &mut [f32],
    row: usize,
    heads: usize,
    (table, seq_len, head_dim): (&[f32], usize, usize),
    turn: impl Fn(&mut [f32], &mut [f32], &[f32], &[f32]) + Sync,
) {
    let half = head_dim / 2;
    x.par_chunks_mut(ROWS * row)
        .enumerate()
        .for_each(|(chunk, rows)| {
            vectorised(
                #[inline(always)]
                || {
                    for (r, x) in rows.chunks_exact_mut(row).enumerate() {
                        let position = (chunk * ROWS + r) % seq_len;
                        let (cos, sin) = table[position * head_dim..][..head_dim].split_at(half);
                        for head in x[..heads * head_dim].chunks_exact_mut(head_dim) {
                            let (a, b) = head.split_at_mut(half);
                            turn(a, b, cos, sin);
                        }
                    }
                },
            )
        });
}

/// Rotates (a, b) by the angle; with a and b swapped, by its negative.
#[inline(always)]
fn turn(a: &mut [f32], b: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_inverts_forward_and_position_zero_does_not_change() {
        let (seq_len, head_dim, heads, row) = (40, 6, 3, 3 * 6 + 5);
        let mut table = vec![0.0; seq_len * head_dim];
        fill_table(&mut table, &[1.0, 0.046, 0.002]);
        let original: Vec<f32> = (0..2 * seq_len * row).map(|i| (i as f32).sin()).collect();
        let mut x = original.clone();
        let shape = (&table[..], seq_len, head_dim);
        rotate(&mut x, row, heads, shape);
        assert_eq!(x[..row], original[..row]);
        assert_eq!(x[seq_len * row..][..row], original[seq_len * row..][..row]);
        // Elements after the rotated heads do not change.
        assert_eq!(x[row + 18..2 * row], original[row + 18..2 * row]);
        // Position 1, first pair, frequency 1.
        let (a, b) = (original[row], original[row + 3]);
        assert!((x[row] - (a * 1f32.cos() - b * 1f32.sin())).abs() < 1e-6);
        assert!((x[row + 3] - (b * 1f32.cos() + a * 1f32.sin())).abs() < 1e-6);
        rotate_back(&mut x, row, heads, shape);
        for (x, original) in x.iter().zip(&original) {
            assert!((x - original).abs() < 1e-6);
        }
    }
}
