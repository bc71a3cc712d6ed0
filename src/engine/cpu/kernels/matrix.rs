//! Strided views of matrices, and their product by the `gemm` crate.
//!
//! All `unsafe` code of the kernels is here: views are checked against the slices that they come
//! from when they are made, and products against the views' shapes.

use std::marker::PhantomData;

/// A view of `rows` × `columns` elements.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    start: *const f32,
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
    data: PhantomData<&'a [f32]>,
}

// SAFETY: it stands for a shared slice, which is both.
unsafe impl Send for Matrix<'_> {}
// SAFETY: as above.
unsafe impl Sync for Matrix<'_> {}

impl<'a> Matrix<'a> {
    /// A row-major matrix that fills the slice.
    pub fn new(data: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        assert_eq!(data.len(), rows * columns, "matrix {rows} × {columns}");
        Matrix {
            start: data.as_ptr(),
            rows,
            columns,
            row_stride: columns,
            column_stride: 1,
            data: PhantomData,
        }
    }

    /// The block of `rows` × `columns` elements whose first is (row, column).
    pub fn block(self, row: usize, column: usize, rows: usize, columns: usize) -> Matrix<'a> {
        assert!(row + rows <= self.rows && column + columns <= self.columns);
        Matrix {
            // SAFETY: (row, column) lies within this view, or at its end when the block is empty.
            start: unsafe {
                self.start
                    .add(row * self.row_stride + column * self.column_stride)
            },
            rows,
            columns,
            ..self
        }
    }

    /// How many columns.
    pub fn columns(self) -> usize {
        self.columns
    }

    /// The transpose.
    pub fn t(self) -> Matrix<'a> {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// One row of a matrix that is not transposed.
    pub fn row(self, row: usize) -> &'a [f32] {
        assert!(row < self.rows && self.column_stride == 1);
        // SAFETY: the row lies within the view, and its elements are adjacent.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.row_stride), self.columns) }
    }
}

/// A view of `rows` × `columns` elements to write to, whose rows are adjacent elements.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    row_stride: usize,
    data: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for a mutable slice; views made from one view are disjoint.
unsafe impl Send for MatrixMut<'_> {}

impl<'a> MatrixMut<'a> {
    /// A row-major matrix that fills the slice.
    pub fn new(data: &'a mut [f32], rows: usize, columns: usize) -> MatrixMut<'a> {
        assert_eq!(data.len(), rows * columns, "matrix {rows} × {columns}");
        MatrixMut {
            start: data.as_mut_ptr(),
            rows,
            columns,
            row_stride: columns,
            data: PhantomData,
        }
    }

    /// Cuts the matrix into blocks of `rows` × `columns`, which divide it; row by row of blocks.
    pub fn grid(self, rows: usize, columns: usize) -> Vec<MatrixMut<'a>> {
        assert!(self.rows.is_multiple_of(rows) && self.columns.is_multiple_of(columns));
        let mut blocks = Vec::new();
        for row in (0..self.rows).step_by(rows) {
            for column in (0..self.columns).step_by(columns) {
                blocks.push(MatrixMut {
                    // SAFETY: (row, column) lies within this view. The blocks do not overlap, and
                    // this view is gone.
                    start: unsafe { self.start.add(row * self.row_stride + column) },
                    rows,
                    columns,
                    ..self
                });
            }
        }
        blocks
    }

    /// The rows `from..to`, for as long as this view is lent.
    pub fn rows(&mut self, from: usize, to: usize) -> MatrixMut<'_> {
        assert!(from <= to && to <= self.rows);
        MatrixMut {
            // SAFETY: within this view, which cannot be used meanwhile.
            start: unsafe { self.start.add(from * self.row_stride) },
            rows: to - from,
            columns: self.columns,
            row_stride: self.row_stride,
            data: PhantomData,
        }
    }
}

/// Who computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread.
    One,
    /// Rayon's current pool.
    All,
}

/// `out = factor · a · b`, or `out += factor · a · b`.
pub fn multiply(
    out: MatrixMut<'_>,
    a: Matrix<'_>,
    b: Matrix<'_>,
    factor: f32,
    add: bool,
    threads: Threads,
) {
    assert_eq!(
        (out.rows, a.columns, b.columns),
        (a.rows, b.rows, out.columns),
        "product of matrices that do not fit"
    );
    let parallelism = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::All => gemm::Parallelism::Rayon(rayon::current_num_threads()),
    };
    // SAFETY: the views cover their elements, the shapes fit, and `out`, being a mutable borrow,
    // does not overlap `a` or `b`.
    unsafe {
        gemm::gemm(
            out.rows,
            out.columns,
            a.columns,
            out.start,
            1,
            out.row_stride as isize,
            add,
            a.start,
            a.column_stride as isize,
            a.row_stride as isize,
            b.start,
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            factor,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * 0.61).sin()).collect()
    }

    /// Σ a[i, k] · b[k, j], given as functions of the indices.
    fn expected(
        rows: usize,
        columns: usize,
        depth: usize,
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
    ) -> Vec<f32> {
        let mut out = Vec::new();
        for i in 0..rows {
            for j in 0..columns {
                let sum: f64 = (0..depth)
                    .map(|k| f64::from(a(i, k)) * f64::from(b(k, j)))
                    .sum();
                out.push(sum as f32);
            }
        }
        out
    }

    fn assert_close(a: &[f32], b: &[f32]) {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }

    #[test]
    fn products_of_blocks_and_transposes_are_right() {
        let (left, right) = (values(20 * 30), values(25 * 40));
        let a = Matrix::new(&left, 20, 30).block(3, 5, 11, 17);
        let b = Matrix::new(&right, 25, 40).block(2, 1, 13, 17).t();
        let mut out = vec![1.0; 22 * 26];
        let mut blocks = MatrixMut::new(&mut out, 22, 26).grid(11, 13);
        let last = blocks.pop().unwrap();
        multiply(last, a, b, 0.5, true, Threads::One);
        let first = blocks.swap_remove(0);
        multiply(first, a, b, 1.0, false, Threads::All);
        let product = expected(
            11,
            13,
            17,
            |i, k| left[(i + 3) * 30 + k + 5],
            |k, j| right[(j + 2) * 40 + k + 1],
        );
        let block = |row: usize, column: usize| -> Vec<f32> {
            (0..11)
                .flat_map(|i| out[(row + i) * 26 + column..][..13].to_vec())
                .collect()
        };
        assert_close(&block(0, 0), &product);
        let added: Vec<f32> = product.iter().map(|p| 1.0 + 0.5 * p).collect();
        assert_close(&block(11, 13), &added);
        assert!(block(0, 13).iter().chain(&block(11, 0)).all(|&x| x == 1.0));
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn shapes_that_do_not_fit_panic() {
        let x = values(6);
        let mut out = vec![0.0; 4];
        let (a, b) = (Matrix::new(&x, 2, 3), Matrix::new(&x, 2, 3));
        multiply(
            MatrixMut::new(&mut out, 2, 2),
            a,
            b,
            1.0,
            false,
            Threads::One,
        );
    }
}
