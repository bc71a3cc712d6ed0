//! Strided views of matrices, and their product by the `gemm` crate.
//!
//! All `unsafe` code of the kernels is here. Constructing a view checks it against its slice; a product
//! checks the shapes of its views.

use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;

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

// SAFETY: the view represents a shared slice, which is `Send` and `Sync`.
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

    /// The block of `rows` × `columns` elements that starts at (row, column).
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

    /// The number of columns.
    pub fn columns(self) -> usize {
        self.columns
    }

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

/// A writable view of `rows` × `columns` elements; the elements of a row are adjacent.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    row_stride: usize,
    data: PhantomData<&'a mut [f32]>,
}

// SAFETY: the view represents a mutable slice; views made from one view are disjoint.
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

    /// Cuts the matrix into blocks of `rows` × `columns`, smaller at the ends, in row-major order of blocks.
    pub fn grid(self, rows: usize, columns: usize) -> Vec<MatrixMut<'a>> {
        let all = self.rows;
        let bands = (0..all).step_by(rows);
        self.bands(bands.map(|row| row..all.min(row + rows)), columns)
    }

    /// The same with blocks of these rows, which are ascending.
    pub fn bands(
        self,
        bands: impl IntoIterator<Item = Range<usize>>,
        columns: usize,
    ) -> Vec<MatrixMut<'a>> {
        let mut blocks = Vec::new();
        let mut end = 0;
        for band in bands {
            assert!(end <= band.start && band.start <= band.end && band.end <= self.rows);
            end = band.end;
            for column in (0..self.columns).step_by(columns) {
                blocks.push(MatrixMut {
                    // SAFETY: (row, column) lies within this view, or at its end when the block is empty. The blocks do
                    // not overlap, and this view is consumed.
                    start: unsafe { self.start.add(band.start * self.row_stride + column) },
                    rows: band.len(),
                    columns: columns.min(self.columns - column),
                    ..self
                });
            }
        }
        blocks
    }

    pub fn fill(&mut self, value: f32) {
        for row in 0..self.rows {
            // SAFETY: the row lies within this view, which is borrowed meanwhile, and its elements are adjacent.
            let row = unsafe {
                std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.columns)
            };
            row.fill(value);
        }
    }

    /// These columns.
    pub fn columns(self, columns: Range<usize>) -> MatrixMut<'a> {
        assert!(columns.start <= columns.end && columns.end <= self.columns);
        MatrixMut {
            // SAFETY: the columns lie within this view, or at its end when there are none, and this view is consumed.
            start: unsafe { self.start.add(columns.start) },
            columns: columns.len(),
            ..self
        }
    }

    /// The rows `from..to`; this view stays borrowed meanwhile.
    pub fn rows(&mut self, from: usize, to: usize) -> MatrixMut<'_> {
        assert!(from <= to && to <= self.rows);
        MatrixMut {
            // SAFETY: the rows lie within this view, which is borrowed meanwhile.
            start: unsafe { self.start.add(from * self.row_stride) },
            rows: to - from,
            columns: self.columns,
            row_stride: self.row_stride,
            data: PhantomData,
        }
    }
}

/// `out = factor · a · b`, or `out += factor · a · b`, on the calling thread.
pub fn multiply(out: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, factor: f32, add: bool) {
    assert_fit(&out, a, b);
    let shared = a.columns;
    // The kernel prefers a result with adjacent rows: outᵀ = bᵀ · aᵀ.
    let (rows, columns, strides, a, b) = match out.row_stride {
        0 | 1 => (out.rows, out.columns, (1, out.row_stride), a, b),
        stride => (out.columns, out.rows, (stride, 1), b.t(), a.t()),
    };
    let of = |matrix: Matrix<'_>| (matrix.column_stride as isize, matrix.row_stride as isize);
    let ((a_columns, a_rows), (b_columns, b_rows)) = (of(a), of(b));
    let product = gemm_f32::gemm::f32::get_gemm_fn();
    // SAFETY: the views cover their elements, the shapes fit, and `out`, a mutable borrow, does not overlap
    // `a` or `b`.
    unsafe {
        product(
            rows,
            columns,
            shared,
            out.start,
            strides.0 as isize,
            strides.1 as isize,
            add,
            a.start,
            a_columns,
            a_rows,
            b.start,
            b_columns,
            b_rows,
            1.0,
            factor,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

/// `out = a · b`, or `out += a · b`, on rayon's current pool. The bits do not depend on the number of threads.
///
/// `gemm` packs `b` on one thread before its own threads start; separately computed tiles do not wait for
/// that.
pub fn multiply_in_parallel(out: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    assert_fit(&out, a, b);
    let are_rows_adjacent = a.column_stride == 1 && b.row_stride == 1;
    let tile = tile(
        (out.rows, out.columns),
        (a.columns, are_rows_adjacent),
        a.column_stride != 1,
        rayon::current_num_threads(),
    );
    let across = out.columns.div_ceil(tile.1);
    out.grid(tile.0, tile.1)
        .into_par_iter()
        .enumerate()
        .for_each(|(i, out)| {
            let (row, column) = (i / across * tile.0, i % across * tile.1);
            let a = a.block(row, 0, out.rows, a.columns);
            let b = b.block(0, column, b.rows, out.columns);
            multiply(out, a, b, 1.0, add);
        });
}

fn assert_fit(out: &MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>) {
    assert_eq!(
        (out.rows, a.columns, b.columns),
        (a.rows, b.rows, out.columns),
        "product of matrices that do not fit"
    );
}

/// The order in which `gemm` adds up an element of a product. Within one order the bits of an element follow from its row of
/// a and its column of b alone, so that tiles of the order of the whole product have its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Lanes of a vector, each apart.
    Lanes,
    /// The product of a matrix and a vector.
    Vector,
    /// The depth in blocks of 512.
    ShortBlocks,
    /// The depth in blocks whose size follows from it and the caches, or one block.
    Blocks,
}

impl Order {
    /// That of `gemm_basic_generic` (gemm-common 0.19, `gemm.rs`) for a product of this shape and depth, whose operands'
    /// rows along the depth are adjacent or not.
    fn of((rows, columns): (usize, usize), (depth, are_rows_adjacent): (usize, bool)) -> Order {
        if are_rows_adjacent && rows * columns <= 16 * 16 {
            Order::Lanes
        } else if rows <= 1 || columns <= 1 {
            Order::Vector
        } else if rows <= 64 && columns <= 64 && depth > 512 {
            Order::ShortBlocks
        } else {
            Order::Blocks
        }
    }
}

/// Rows and columns of the tiles of a product, at most one tile per thread. The chosen size minimises the
/// time of the largest tile, among those that add up in the order of the whole product.
fn tile(
    (rows, columns): (usize, usize),
    along: (usize, bool),
    a_is_packed: bool,
    threads: usize,
) -> (usize, usize) {
    let order = Order::of((rows, columns), along);
    let keeps_order = |tile: (usize, usize)| {
        let sizes = |len: usize, part: usize| {
            let last = len % part;
            [part.min(len), if last == 0 { part.min(len) } else { last }]
        };
        let [all_rows, all_columns] = [sizes(rows, tile.0), sizes(columns, tile.1)];
        let tiles = all_rows.map(|rows| all_columns.map(|columns| (rows, columns)));
        let mut tiles = tiles.into_iter().flatten();
        tiles.all(|tile| Order::of(tile, along) == order)
    };
    // Rows that `gemm`'s AVX-512 kernel computes at a time.
    const ROWS: usize = 6;
    const COLUMNS: usize = 64;
    // Multiplications that take about as long as packing one element.
    const PACKING: usize = 50;
    (1..=threads)
        .map(|across| {
            let part = |len: usize, parts: usize, step: usize| {
                len.div_ceil(step).div_ceil(parts).max(1) * step
            };
            let columns = part(columns, across, COLUMNS);
            let rows = part(rows, threads / across, ROWS);
            let packing = columns + if a_is_packed { rows } else { 0 };
            (rows * columns + PACKING * packing, (rows, columns))
        })
        .filter(|(_, tile)| keeps_order(*tile))
        .min()
        .map_or((rows, columns), |(_, tile)| tile)
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
    fn products_of_blocks_and_transposes_are_correct() {
        let (left, right) = (values(20 * 30), values(25 * 40));
        let a = Matrix::new(&left, 20, 30).block(3, 5, 11, 17);
        let b = Matrix::new(&right, 25, 40).block(2, 1, 13, 17).t();
        let mut out = vec![1.0; 22 * 26];
        let mut blocks = MatrixMut::new(&mut out, 22, 26).grid(11, 13);
        let last = blocks.pop().unwrap();
        multiply(last, a, b, 0.5, true);
        let first = blocks.swap_remove(0);
        multiply(first, a, b, 1.0, false);
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
    fn tiles_make_the_whole_product() {
        let (left, right) = (values(50 * 40), values(50 * 300));
        let a = Matrix::new(&left, 50, 40).t();
        let b = Matrix::new(&right, 50, 300);
        let product = expected(
            40,
            300,
            50,
            |i, k| left[k * 40 + i],
            |k, j| right[k * 300 + j],
        );
        for threads in [1, 2, 3, 7, 16] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let mut out = vec![1.0; 40 * 300];
            pool.build().unwrap().install(|| {
                multiply_in_parallel(MatrixMut::new(&mut out, 40, 300), a, b, false);
            });
            assert_close(&out, &product);
        }
    }

    /// Each product, of matrices in all orders of their elements, by 1 to 17 threads.
    #[test]
    fn the_bits_of_a_product_do_not_depend_on_the_number_of_threads() {
        let shapes = [
            (1, 300, 700),
            (300, 1, 700),
            (4, 64, 40),
            (4, 65, 40),
            (7, 130, 1100),
            (60, 64, 1100),
            (65, 64, 1100),
            (96, 131, 513),
            (128, 257, 768),
            (256, 96, 1030),
            (1030, 70, 96),
        ];
        for (rows, columns, depth) in shapes {
            let (left, right) = (values(rows * depth), values(depth * columns));
            for order in 0..4 {
                let a = match order & 1 {
                    0 => Matrix::new(&left, rows, depth),
                    _ => Matrix::new(&left, depth, rows).t(),
                };
                let b = match order & 2 {
                    0 => Matrix::new(&right, depth, columns),
                    _ => Matrix::new(&right, columns, depth).t(),
                };
                let of = |threads, add| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    let mut out = vec![0.25; rows * columns];
                    pool.build().unwrap().install(|| {
                        multiply_in_parallel(MatrixMut::new(&mut out, rows, columns), a, b, add);
                    });
                    out.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
                };
                for add in [false, true] {
                    let alone = of(1, add);
                    for threads in [2, 3, 4, 7, 8, 16, 17] {
                        let what = format!("{rows} × {columns} × {depth}, {order}, {threads}");
                        assert!(of(threads, add) == alone, "{what}");
                    }
                }
            }
        }
    }

    /// The planted change: a tile of another order than that of its product has other bits.
    #[test]
    fn orders_of_sums_differ_in_their_bits() {
        let (left, right) = (values(65 * 1100), values(1100 * 64));
        let a = Matrix::new(&left, 65, 1100);
        let b = Matrix::new(&right, 1100, 64);
        let mut out = vec![0.0; 65 * 64];
        multiply(MatrixMut::new(&mut out, 65, 64), a, b, 1.0, false);
        let mut tile = vec![0.0; 60 * 64];
        let rows = a.block(0, 0, 60, 1100);
        multiply(MatrixMut::new(&mut tile, 60, 64), rows, b, 1.0, false);
        assert_close(&out[..60 * 64], &tile);
        assert_ne!(out[..60 * 64], tile);
    }

    #[test]
    fn tiles_are_at_most_one_a_thread_and_even() {
        for (rows, columns) in [(1024, 768), (1376, 256), (5, 3), (1, 4096), (4096, 1)] {
            for packed in [false, true] {
                for threads in 1..=17 {
                    let tile = tile((rows, columns), (256, false), packed, threads);
                    let tiles = rows.div_ceil(tile.0) * columns.div_ceil(tile.1);
                    assert!(
                        tiles <= threads,
                        "{rows} × {columns} by {threads}: {tile:?}"
                    );
                }
            }
        }
        let along = (256, false);
        assert_eq!(tile((1024, 768), along, false, 2), (1026, 384));
        assert_eq!(tile((1376, 256), along, true, 2), (690, 256));
        assert_eq!(tile((4096, 4096), along, false, 16), (4098, 256));
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn shapes_that_do_not_fit_panic() {
        let x = values(6);
        let mut out = vec![0.0; 4];
        let (a, b) = (Matrix::new(&x, 2, 3), Matrix::new(&x, 2, 3));
        multiply(MatrixMut::new(&mut out, 2, 2), a, b, 1.0, false);
    }
}
