//! Low-rank adapters of linear layers (LoRA, arXiv 2106.09685): low `[n, rank]` = scale · x · Aᵀ, and y += low · Bᵀ. A is
//! `[rank, in]`, B `[out, rank]`. y and dy are columns of wider rows, those of layers that are computed together.

use std::ops::Range;

use rayon::prelude::*;

use super::matrix::{Matrix, MatrixMut, multiply_in_parallel};

/// The matrices of an adapter.
#[derive(Debug, Clone, Copy)]
pub struct Adapter<'a> {
    pub a: &'a [f32],
    pub b: &'a [f32],
    pub rank: usize,
    pub scale: f32,
}

impl Adapter<'_> {
    fn inputs(&self) -> usize {
        self.a.len() / self.rank
    }

    fn outputs(&self) -> usize {
        self.b.len() / self.rank
    }
}

/// low `[n, rank]` = scale · x `[n, in]` · Aᵀ.
pub fn down(low: &mut [f32], x: &[f32], adapter: Adapter<'_>) {
    let (inputs, rank) = (adapter.inputs(), adapter.rank);
    let n = low.len() / rank;
    let a = Matrix::new(adapter.a, rank, inputs);
    let product = MatrixMut::new(low, n, rank);
    multiply_in_parallel(product, Matrix::new(x, n, inputs), a.t(), false);
    scale(low, adapter.scale);
}

/// Adds low `[n, rank]` · Bᵀ to these columns of y `[n, width]`.
pub fn up(
    (y, width): (&mut [f32], usize),
    columns: Range<usize>,
    low: &[f32],
    adapter: Adapter<'_>,
) {
    let (outputs, rank) = (adapter.outputs(), adapter.rank);
    let n = low.len() / rank;
    let b = Matrix::new(adapter.b, outputs, rank);
    let y = MatrixMut::new(y, n, width).columns(columns);
    multiply_in_parallel(y, Matrix::new(low, n, rank), b.t(), true);
}

/// dlow `[n, rank]` = scale · these columns of dy `[n, width]` · B: the gradient of x · Aᵀ.
pub fn backward_up(
    dlow: &mut [f32],
    (dy, width): (&[f32], usize),
    columns: Range<usize>,
    adapter: Adapter<'_>,
) {
    let (outputs, rank) = (adapter.outputs(), adapter.rank);
    let n = dlow.len() / rank;
    let dy = Matrix::new(dy, n, width).block(0, columns.start, n, columns.len());
    let product = MatrixMut::new(dlow, n, rank);
    multiply_in_parallel(product, dy, Matrix::new(adapter.b, outputs, rank), false);
    scale(dlow, adapter.scale);
}

/// dx `[n, in]` = dlow `[n, rank]` · A, or += when `add`.
pub fn backward_input((dx, add): (&mut [f32], bool), dlow: &[f32], adapter: Adapter<'_>) {
    let (inputs, rank) = (adapter.inputs(), adapter.rank);
    let n = dlow.len() / rank;
    let dx = MatrixMut::new(dx, n, inputs);
    let a = Matrix::new(adapter.a, rank, inputs);
    multiply_in_parallel(dx, Matrix::new(dlow, n, rank), a, add);
}

/// da `[rank, in]` = dlowᵀ · x and db `[out, rank]` = these columns of dyᵀ · low, or += when `add`.
pub fn backward_weights(
    (da, db, add): (&mut [f32], &mut [f32], bool),
    (dlow, low): (&[f32], &[f32]),
    x: &[f32],
    (dy, width): (&[f32], usize),
    columns: Range<usize>,
    rank: usize,
) {
    let (inputs, n) = (da.len() / rank, low.len() / rank);
    let dlow = Matrix::new(dlow, n, rank);
    let da = MatrixMut::new(da, rank, inputs);
    multiply_in_parallel(da, dlow.t(), Matrix::new(x, n, inputs), add);
    let dy = Matrix::new(dy, n, width).block(0, columns.start, n, columns.len());
    let db = MatrixMut::new(db, columns.len(), rank);
    multiply_in_parallel(db, dy.t(), Matrix::new(low, n, rank), add);
}

fn scale(values: &mut [f32], factor: f32) {
    values
        .par_chunks_mut(1 << 14)
        .for_each(|values| values.iter_mut().for_each(|value| *value *= factor));
}
