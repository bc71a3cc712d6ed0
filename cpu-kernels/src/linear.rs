//! Linear layers: weights `[out, in]`, as in PyTorch, and biases `[out]`.

use rayon::prelude::*;

use super::matrix::{Matrix, MatrixMut, multiply_in_parallel};
use super::{ROWS, vectorised};

/// y `[n, out]` = x `[n, in]` · wᵀ.
pub fn forward(y: &mut [f32], x: &[f32], w: &[f32], n: usize) {
    let (inputs, outputs) = (x.len() / n, y.len() / n);
    multiply_in_parallel(
        MatrixMut::new(y, n, outputs),
        Matrix::new(x, n, inputs),
        Matrix::new(w, outputs, inputs).t(),
        false,
    );
}

/// dx `[n, in]` = dy `[n, out]` · w.
pub fn backward_input(dx: &mut [f32], dy: &[f32], w: &[f32], n: usize) {
    let (inputs, outputs) = (dx.len() / n, dy.len() / n);
    multiply_in_parallel(
        MatrixMut::new(dx, n, inputs),
        Matrix::new(dy, n, outputs),
        Matrix::new(w, outputs, inputs),
        false,
    );
}

/// dw `[out, in]` = dyᵀ · x, or += when `add`.
pub fn backward_weight(dw: &mut [f32], dy: &[f32], x: &[f32], n: usize, add: bool) {
    let (inputs, outputs) = (x.len() / n, dy.len() / n);
    multiply_in_parallel(
        MatrixMut::new(dw, outputs, inputs),
        Matrix::new(dy, n, outputs).t(),
        Matrix::new(x, n, inputs),
        add,
    );
}

/// y `[n, out]` += bias, row by row.
pub fn add_bias(y: &mut [f32], bias: &[f32]) {
    y.par_chunks_mut(ROWS * bias.len()).for_each(|rows| {
        vectorised(
            #[inline(always)]
            || {
                for row in rows.chunks_exact_mut(bias.len()) {
                    for (y, bias) in row.iter_mut().zip(bias) {
                        *y += bias;
                    }
                }
            },
        )
    });
}

/// Columns that one thread adds up at a time.
const COLUMNS: usize = 64;

/// db `[out]` = the sum of the rows of dy `[n, out]`, or += when `add`.
pub fn backward_bias(db: &mut [f32], dy: &[f32], add: bool) {
    let width = db.len();
    db.par_chunks_mut(COLUMNS)
        .enumerate()
        .for_each(|(chunk, db)| {
            vectorised(
                #[inline(always)]
                || {
                    if !add {
                        db.fill(0.0);
                    }
                    for row in dy.chunks_exact(width) {
                        for (db, dy) in db.iter_mut().zip(&row[chunk * COLUMNS..]) {
                            *db += dy;
                        }
                    }
                },
            )
        });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_is_added_to_each_row_and_its_gradient_is_the_sum_of_the_rows() {
        let (n, width) = (70, 150);
        let at = |row: usize, column: usize| ((row * 37 + column * 11) % 64) as f32;
        let bias: Vec<f32> = (0..width).map(|column| column as f32).collect();
        let cells = || (0..n).flat_map(|row| (0..width).map(move |column| (row, column)));
        let dy: Vec<f32> = cells().map(|(row, column)| at(row, column)).collect();
        let mut y = dy.clone();
        add_bias(&mut y, &bias);
        assert!(
            cells()
                .zip(&y)
                .all(|((row, column), y)| *y == at(row, column) + bias[column])
        );
        let sum = |column| (0..n).map(|row| at(row, column)).sum::<f32>();
        let mut db = vec![5.0; width];
        backward_bias(&mut db, &dy, false);
        assert!((0..width).all(|column| db[column] == sum(column)));
        backward_bias(&mut db, &dy, true);
        assert!((0..width).all(|column| db[column] == 2.0 * sum(column)));
    }
}
