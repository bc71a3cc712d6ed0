//! Rotary position embedding (Su et al., 2021) in the layout of Hugging Face's Llama: element i of a head
//! rotates together with element i + rotary_dim / 2. Only the first rotary_dim elements of a head rotate.

use rayon::prelude::*;

use super::{ROWS, vectorised};

/// Fills `table` `[seq_len, rotary_dim]` with the cosines, then the sines, of every position's angles: position × frequency
/// of each of the rotary_dim / 2 pairs. The angles are rounded to f32, as in transformers.
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

/// The angles of the positions, and what they rotate.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// From [`fill_table`].
    pub table: &'a [f32],
    /// Of each row.
    pub positions: &'a [u32],
    /// The first heads of each row.
    pub heads: usize,
    pub head_dim: usize,
    pub rotary_dim: usize,
}

/// Rotates the heads of every row of `x` `[n, row]` in place.
pub fn rotate(x: &mut [f32], row: usize, rotation: Rotation) {
    turn_rows(x, row, rotation, turn);
}

/// The inverse of [`rotate`], which is its transpose.
pub fn rotate_back(x: &mut [f32], row: usize, rotation: Rotation) {
    turn_rows(
        x,
        row,
        rotation,
        #[inline(always)]
        |a, b, cos, sin| turn(b, a, cos, sin),
    );
}

#[inline(always)]
fn turn_rows(
    x: &mut [f32],
    row: usize,
    Rotation {
        table,
        positions,
        heads,
        head_dim,
        rotary_dim,
    }: Rotation,
    turn: impl Fn(&mut [f32], &mut [f32], &[f32], &[f32]) + Sync,
) {
    let half = rotary_dim / 2;
    x.par_chunks_mut(ROWS * row)
        .zip(positions.par_chunks(ROWS))
        .for_each(|(rows, positions)| {
            vectorised(
                #[inline(always)]
                || {
                    for (x, &position) in rows.chunks_exact_mut(row).zip(positions) {
                        let (cos, sin) =
                            table[position as usize * rotary_dim..][..rotary_dim].split_at(half);
                        for head in x[..heads * head_dim].chunks_exact_mut(head_dim) {
                            let (a, b) = head[..rotary_dim].split_at_mut(half);
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
        // Heads that rotate whole, and in part.
        for head_dim in [6, 9] {
            let (seq_len, heads, rotary_dim) = (40, 3, 6);
            let row = heads * head_dim + 5;
            let mut table = vec![0.0; seq_len * rotary_dim];
            fill_table(&mut table, &[1.0, 0.046, 0.002]);
            let original: Vec<f32> = (0..2 * seq_len * row).map(|i| (i as f32).sin()).collect();
            let mut x = original.clone();
            let positions: Vec<u32> = (0..2).flat_map(|_| 0..seq_len as u32).collect();
            let rotation = Rotation {
                table: &table,
                positions: &positions,
                heads,
                head_dim,
                rotary_dim,
            };
            rotate(&mut x, row, rotation);
            assert_eq!(x[..row], original[..row]);
            assert_eq!(x[seq_len * row..][..row], original[seq_len * row..][..row]);
            // Elements that do not rotate, and those after the rotated heads, do not change.
            assert_eq!(
                x[row + 6..][..head_dim - 6],
                original[row + 6..][..head_dim - 6]
            );
            let end = row + heads * head_dim;
            assert_eq!(x[end..2 * row], original[end..2 * row]);
            // Position 1, first pair, frequency 1, of the first and the second head.
            for at in [row, row + head_dim] {
                let (a, b) = (original[at], original[at + 3]);
                assert!((x[at] - (a * 1f32.cos() - b * 1f32.sin())).abs() < 1e-6);
                assert!((x[at + 3] - (b * 1f32.cos() + a * 1f32.sin())).abs() < 1e-6);
            }
            rotate_back(&mut x, row, rotation);
            for (x, original) in x.iter().zip(&original) {
                assert!((x - original).abs() < 1e-6);
            }
        }
    }
}
