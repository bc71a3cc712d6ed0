//! Matrix products through cuBLASLt's C interface.

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null;

use common::*;
use half::bf16;
use libloading::{Library, Symbol};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const F32: c_int = 0;
const BF16: c_int = 14;
const INVALID: c_int = 7;
const NOT_SUPPORTED: c_int = 15;

struct Lt(Library);

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {
        impl Lt {
            $(#[allow(clippy::too_many_arguments, non_snake_case)]
            fn $name(&self, $($argument: $type),*) -> c_int {
                type Function = unsafe extern "C" fn($($type),*) -> c_int;
                // SAFETY: the types are those of cuBLASLt, and tests pass valid pointers.
                unsafe {
                    let name = concat!(stringify!($name), "\0");
                    let function: Symbol<Function> = self.0.get(name.as_bytes()).unwrap();
                    function($($argument),*)
                }
            })*
        }
    };
}

functions! {
    fn cublasLtCreate(handle: *mut Handle);
    fn cublasLtDestroy(handle: Handle);
    fn cublasLtMatmulDescCreate(handle: *mut Handle, compute: c_int, scale: c_int);
    fn cublasLtMatmulDescSetAttribute(handle: Handle, attribute: c_int, value: *const c_void, bytes: usize);
    fn cublasLtMatrixLayoutCreate(handle: *mut Handle, kind: c_int, rows: u64, columns: u64, leading: i64);
    fn cublasLtMatrixLayoutSetAttribute(handle: Handle, attribute: c_int, value: *const c_void, bytes: usize);
    fn cublasLtMatrixLayoutDestroy(handle: Handle);
    fn cublasLtMatmulPreferenceCreate(handle: *mut Handle);
    fn cublasLtMatmulPreferenceSetAttribute(handle: Handle, attribute: c_int, value: *const c_void, bytes: usize);
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: Handle, operation: Handle, a: Handle, b: Handle, c: Handle, d: Handle, preference: Handle,
        requested: c_int, results: *mut Heuristic, count: *mut c_int
    );
    fn cublasLtMatmul(
        handle: Handle, operation: Handle, alpha: *const c_void, a: u64, a_layout: Handle, b: u64,
        b_layout: Handle, beta: *const c_void, c: u64, c_layout: Handle, d: u64, d_layout: Handle,
        algorithm: *const [u64; 8], workspace: u64, workspace_bytes: usize, stream: Handle
    );
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// A matrix on the device.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    kind: c_int,
    /// Rows and columns as stored.
    shape: [usize; 2],
    /// Whether the product uses the transpose.
    transposed: bool,
    /// Whether rows are contiguous.
    by_rows: bool,
    /// Unused elements after each line.
    padding: usize,
    batches: usize,
}

impl Matrix {
    fn leading(&self) -> usize {
        self.shape[usize::from(self.by_rows)] + self.padding
    }

    /// Elements of a batch.
    fn stride(&self) -> usize {
        self.leading() * self.shape[usize::from(!self.by_rows)]
    }

    /// Index of an element as the product sees it.
    fn at(&self, batch: usize, row: usize, column: usize) -> usize {
        let (row, column) = if self.transposed {
            (column, row)
        } else {
            (row, column)
        };
        let (line, element) = if self.by_rows {
            (row, column)
        } else {
            (column, row)
        };
        batch * self.stride() + line * self.leading() + element
    }

    fn elements(&self) -> usize {
        self.batches * self.stride()
    }
}

/// One product, of small integers so that every sum is exact.
#[derive(Debug, Clone)]
struct Problem {
    a: Matrix,
    b: Matrix,
    c: Matrix,
    d: Matrix,
    has_bias: bool,
    beta: f32,
    values: Vec<i8>,
}

fn problems() -> impl Strategy<Value = Problem> {
    let sizes = (1usize..9, 1usize..9, 1usize..20, 1usize..3);
    let styles = proptest::collection::vec((any::<bool>(), any::<bool>(), 0usize..4), 4);
    let values = proptest::collection::vec(-3i8..4, 4000);
    let kinds = prop_oneof![Just([F32, F32]), Just([BF16, F32]), Just([BF16, BF16])];
    let scales = (any::<bool>(), prop_oneof![Just(0.0f32), Just(2.0)]);
    (sizes, styles, values, kinds, scales).prop_map(
        |((m, n, k, batches), styles, values, kinds, (has_bias, beta))| {
            let matrix = |index: usize, kind, rows, columns| {
                let (transposed, by_rows, padding) = styles[index];
                let transposed = transposed && index < 2;
                let shape = if transposed {
                    [columns, rows]
                } else {
                    [rows, columns]
                };
                Matrix {
                    kind,
                    shape,
                    transposed,
                    by_rows,
                    padding,
                    batches,
                }
            };
            Problem {
                a: matrix(0, kinds[0], m, k),
                b: matrix(1, kinds[0], k, n),
                c: matrix(2, kinds[1], m, n),
                d: matrix(3, kinds[1], m, n),
                has_bias,
                beta,
                values,
            }
        },
    )
}

/// The driver and cuBLASLt with their handles.
struct Session {
    cuda: Cuda,
    lt: Lt,
    handle: Handle,
}

impl Session {
    fn start() -> Session {
        let cuda = Cuda::start();
        // SAFETY: opening the emulator runs no code.
        let lt = Lt(unsafe { Library::new(libraries().join("libcublasLt.so.13")) }.unwrap());
        let handle = cuda.out(|handle| lt.cublasLtCreate(handle));
        Session { cuda, lt, handle }
    }

    fn layout(&self, matrix: &Matrix) -> Handle {
        let [rows, columns] = matrix.shape.map(|size| size as u64);
        let leading = matrix.leading() as i64;
        let layout = self.cuda.out(|layout| {
            self.lt
                .cublasLtMatrixLayoutCreate(layout, matrix.kind, rows, columns, leading)
        });
        let set = |attribute, value, bytes| {
            let code = self
                .lt
                .cublasLtMatrixLayoutSetAttribute(layout, attribute, value, bytes);
            assert_eq!(code, 0);
        };
        set(1, pointer(&i32::from(matrix.by_rows)), 4);
        set(5, pointer(&(matrix.batches as i32)), 4);
        set(6, pointer(&(matrix.stride() as i64)), 8);
        layout
    }

    fn operation(&self) -> Handle {
        self.cuda
            .out(|operation| self.lt.cublasLtMatmulDescCreate(operation, 68, F32))
    }

    fn set<T>(&self, operation: Handle, attribute: c_int, value: T) {
        let bytes = size_of::<T>();
        let code =
            self.lt
                .cublasLtMatmulDescSetAttribute(operation, attribute, pointer(&value), bytes);
        assert_eq!(code, 0);
    }

    /// Uploads the elements that the product reads; what lies between stays uninitialised.
    fn upload(&self, matrix: &Matrix, value: impl Fn(usize) -> f32) -> u64 {
        let bytes = if matrix.kind == F32 { 4 } else { 2 };
        let address = self.cuda.alloc(bytes * matrix.elements());
        let lines = matrix.batches * matrix.shape[usize::from(!matrix.by_rows)];
        for line in 0..lines {
            let start = line * matrix.leading();
            let length = matrix.leading() - matrix.padding;
            let values = (start..start + length).map(&value);
            let data: Vec<u8> = if matrix.kind == F32 {
                values.flat_map(f32::to_le_bytes).collect()
            } else {
                values
                    .flat_map(|value| bf16::from_f32(value).to_le_bytes())
                    .collect()
            };
            let to = address + (bytes * start) as u64;
            assert_eq!(
                self.cuda
                    .cuMemcpyHtoD_v2(to, data.as_ptr().cast(), data.len()),
                0
            );
        }
        address
    }

    fn download(&self, matrix: &Matrix, address: u64, index: usize) -> f32 {
        let bytes = if matrix.kind == F32 { 4 } else { 2 };
        let mut data = [0u8; 4];
        let from = address + (bytes * index) as u64;
        assert_eq!(
            self.cuda
                .cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), from, bytes),
            0
        );
        if matrix.kind == F32 {
            f32::from_le_bytes(data)
        } else {
            bf16::from_le_bytes([data[0], data[1]]).to_f32()
        }
    }

    fn check(&self, problem: &Problem) {
        let Problem { a, b, c, d, .. } = problem;
        let value = |matrix: usize| {
            move |index: usize| {
                f32::from(problem.values[(matrix * 977 + index) % problem.values.len()])
            }
        };
        let addresses =
            [(a, 0), (b, 1), (c, 2)].map(|(matrix, index)| self.upload(matrix, value(index)));
        let out = self.upload(d, |_| 0.0);
        let rows = d.shape[0];
        let bias = Matrix {
            kind: d.kind,
            shape: [rows, 1],
            by_rows: false,
            padding: 0,
            batches: 1,
            ..*d
        };
        let bias_address = self.upload(&bias, value(3));
        let operation = self.operation();
        self.set(operation, 3, i32::from(a.transposed));
        self.set(operation, 4, i32::from(b.transposed));
        if problem.has_bias {
            self.set(operation, 7, 4);
            self.set(operation, 8, bias_address);
        }
        let layouts = [a, b, c, d].map(|matrix| self.layout(matrix));
        let code = self.lt.cublasLtMatmul(
            self.handle,
            operation,
            pointer(&0.5f32),
            addresses[0],
            layouts[0],
            addresses[1],
            layouts[1],
            pointer(&problem.beta),
            addresses[2],
            layouts[2],
            out,
            layouts[3],
            null(),
            0,
            0,
            0,
        );
        assert_eq!(code, 0);
        assert_eq!(self.cuda.cuCtxSynchronize(), 0);
        let inner = a.shape[usize::from(!a.transposed)];
        for batch in 0..d.batches {
            for row in 0..rows {
                for column in 0..d.shape[1] {
                    let terms = (0..inner)
                        .map(|k| value(0)(a.at(batch, row, k)) * value(1)(b.at(batch, k, column)));
                    let mut expected = 0.5 * terms.sum::<f32>();
                    expected += problem.beta * value(2)(c.at(batch, row, column));
                    if problem.has_bias {
                        expected += value(3)(row);
                    }
                    if d.kind == BF16 {
                        expected = bf16::from_f32(expected).to_f32();
                    }
                    assert_eq!(self.download(d, out, d.at(batch, row, column)), expected);
                }
            }
        }
    }
}

/// Every combination of orders, transposes, paddings, batches, types, beta and bias.
#[test]
fn products_equal_the_definition() {
    in_child("products_equal_the_definition", &[], || {
        let session = Session::start();
        let mut runner = TestRunner::new(Config {
            failure_persistence: None,
            ..Config::with_cases(200)
        });
        runner
            .run(&problems(), |problem| {
                session.check(&problem);
                Ok(())
            })
            .unwrap();
    });
}

fn square(kind: c_int, size: usize) -> Matrix {
    Matrix {
        kind,
        shape: [size, size],
        transposed: false,
        by_rows: false,
        padding: 0,
        batches: 1,
    }
}

#[test]
fn wrong_products_are_refused() {
    in_child("wrong_products_are_refused", &[], || {
        let session = Session::start();
        let lt = &session.lt;
        let preference = session
            .cuda
            .out(|preference| lt.cublasLtMatmulPreferenceCreate(preference));
        let operation = session.operation();
        let ask = |matrices: [Matrix; 4]| {
            let [a, b, c, d] = matrices.map(|matrix| session.layout(&matrix));
            let (mut found, mut count) = ([Heuristic::default(); 2], 0);
            let code = lt.cublasLtMatmulAlgoGetHeuristic(
                session.handle,
                operation,
                a,
                b,
                c,
                d,
                preference,
                2,
                found.as_mut_ptr(),
                &mut count,
            );
            (code, count)
        };
        let (two, three) = (square(F32, 2), square(F32, 3));
        assert_eq!(ask([two; 4]), (0, 1), "without a workspace");
        assert_eq!(ask([two, three, two, two]), (INVALID, 0));
        assert_eq!(ask([two, two, three, three]), (INVALID, 0));
        assert_eq!(ask([square(BF16, 2), two, two, two]), (NOT_SUPPORTED, 0));
        assert_eq!(
            ask([two, two, square(BF16, 2), square(BF16, 2)]),
            (NOT_SUPPORTED, 0)
        );
        session.set(operation, 7, 32);
        assert_eq!(ask([two; 4]), (NOT_SUPPORTED, 0), "GELU");
        let mut layout = 0;
        assert_eq!(lt.cublasLtMatrixLayoutCreate(&mut layout, F32, 4, 4, 3), 0);
        let code = lt.cublasLtMatmulDescSetAttribute(operation, 7, pointer(&1i64), 8);
        assert_eq!(code, INVALID, "the size of an attribute");
        assert_eq!(lt.cublasLtMatrixLayoutDestroy(layout), 0);
        assert_eq!(lt.cublasLtMatrixLayoutDestroy(layout), INVALID);
        assert_eq!(lt.cublasLtDestroy(session.handle), 0);
        assert_eq!(ask([two; 4]).0, 1, "the handle is destroyed");
    });
}

/// A workspace must be as large as its algorithm says, and two streams cannot share it.
#[test]
fn workspaces_are_checked_and_used() {
    let report = in_child("workspaces_are_checked_and_used", &[], || {
        let session = Session::start();
        let Session { cuda, lt, handle } = &session;
        let preference = cuda.out(|preference| lt.cublasLtMatmulPreferenceCreate(preference));
        let limit = 1u64 << 20;
        let set = lt.cublasLtMatmulPreferenceSetAttribute(preference, 1, pointer(&limit), 8);
        assert_eq!(set, 0);
        let operation = session.operation();
        let matrix = square(F32, 2);
        let layout = session.layout(&matrix);
        let (mut found, mut count) = ([Heuristic::default(); 3], 0);
        let code = lt.cublasLtMatmulAlgoGetHeuristic(
            *handle,
            operation,
            layout,
            layout,
            layout,
            layout,
            preference,
            3,
            found.as_mut_ptr(),
            &mut count,
        );
        assert_eq!((code, count), (0, 2));
        let Heuristic {
            algorithm,
            workspace: bytes,
            ..
        } = found[0];
        assert!(bytes > 0 && found[1].workspace == 0);
        let [a, b] = [1.0, 2.0].map(|value| session.upload(&matrix, |_| value));
        let out = [0, 1].map(|_| cuda.alloc(16));
        let workspace = cuda.alloc(bytes);
        assert_eq!(cuda.cuCtxSynchronize(), 0);
        let product = |d, bytes, stream| {
            lt.cublasLtMatmul(
                *handle,
                operation,
                pointer(&1f32),
                a,
                layout,
                b,
                layout,
                pointer(&0f32),
                0,
                layout,
                d,
                layout,
                &algorithm,
                workspace,
                bytes,
                stream,
            )
        };
        let (one, two) = (cuda.stream(), cuda.stream());
        assert_eq!(product(out[0], bytes - 1, one), INVALID);
        assert_eq!(product(out[0], bytes, one), 0);
        assert_eq!(cuda.cuStreamSynchronize(one), 0);
        assert_eq!(cuda.get(out[0], 4), [4.0; 4]);
        assert_eq!(product(out[0], bytes, one), 0);
        assert_eq!(product(out[1], bytes, two), 0);
        assert_eq!(cuda.cuCtxSynchronize(), LAUNCH_FAILED);
        assert_eq!(product(out[1], bytes, two), 13, "the context is broken");
    });
    if let Some(report) = report {
        let race = of_kind(&report, "race")[0]["first"].as_str().unwrap();
        assert!(race.starts_with("matrix product 2×2×2 (stream"), "{race}");
    }
}

#[test]
fn products_are_captured_and_ordered_by_streams() {
    in_child("products_are_captured_and_ordered_by_streams", &[], || {
        let session = Session::start();
        let Session { cuda, lt, handle } = &session;
        let matrix = square(F32, 1);
        let layout = session.layout(&matrix);
        let operation = session.operation();
        let a = cuda.put(&[3.0]);
        let stream = cuda.stream();
        assert_eq!(cuda.cuStreamBeginCapture_v2(stream, 0), 0);
        // a = 1 · a · a + 2 · a, in place
        let code = lt.cublasLtMatmul(
            *handle,
            operation,
            pointer(&1f32),
            a,
            layout,
            a,
            layout,
            pointer(&2f32),
            a,
            layout,
            a,
            layout,
            null(),
            0,
            0,
            stream,
        );
        assert_eq!(code, 0);
        let graph = cuda.out(|graph| cuda.cuStreamEndCapture(stream, graph));
        let executable =
            cuda.out(|executable| cuda.cuGraphInstantiateWithFlags(executable, graph, 0));
        for _ in 0..2 {
            assert_eq!(cuda.cuGraphLaunch(executable, stream), 0);
        }
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        assert_eq!(cuda.get(a, 1), [255.0]);
    });
}
