//! Linear layers without bias: weights `[out, in]`, as in PyTorch.

use super::matrix::{Matrix, MatrixMut, multiply_in_parallel};

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
