//! Matrix products by cuBLASLt, row-major.
//!
//! cuBLASLt's matrices are column-major. A row-major matrix is the column-major transpose of itself, so
//! `result = a · b` is computed as `resultᵀ = bᵀ · aᵀ`: the operands change places and nothing is moved.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::driver::{Device, Handle, Stream};
use super::error::CudaError;
use super::libraries::{CUBLAS_LT, Version};
use super::measured::{Algorithm, Measured};
use super::options::Precision;
use super::table::{functions, text};
use crate::util::lock::lock;

/// `cublasStatus_t`
type Code = c_int;

const ALLOC_FAILED: Code = 3;
const INVALID_VALUE: Code = 7;
const NOT_SUPPORTED: Code = 15;

/// `CUBLAS_COMPUTE_32F`: f32 sums; f32 inputs keep all their bits.
const COMPUTE_F32: c_int = 68;
/// `CUDA_R_32F`
const REAL_F32: c_int = 0;
/// `CUDA_R_16BF`
const REAL_BF16: c_int = 14;

// `cublasLtMatmulDescAttributes_t`
const TRANSPOSE_A: c_int = 3;
const TRANSPOSE_B: c_int = 4;

// `cublasLtMatmulPreferenceAttributes_t`
const MAX_WORKSPACE: c_int = 1;
/// The alignment of A; those of B, C and D follow.
const MIN_ALIGNMENT_A: c_int = 5;

/// Alignments above this make no difference.
const ALIGNMENT_MOST: u64 = 256;

/// Algorithms that are asked for. The first that cuBLASLt can run is used, unless they are measured or [`Blas::choose`]
/// says otherwise.
const ALGORITHMS: usize = 8;

/// Rounds of a measurement, in which each algorithm has its turn, and repetitions in a turn.
const ROUNDS: usize = 3;
const REPETITIONS: u32 = 8;
/// An algorithm replaces cuBLASLt's first if it takes at most this part of its time. With 0.99 a step of TinyLlama
/// became 1.2 % slower on an H200: what is a little faster alone may be slower under the limit of power.
const FASTER: f64 = 0.97;

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Heuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: Code,
    waves: f32,
    reserved: [c_int; 4],
}

functions! {
    Functions:
    cublasLtGetStatusName(Code) -> *const c_char;
    cublasLtGetStatusString(Code) -> *const c_char;
    cublasLtCreate(*mut Handle) -> Code;
    cublasLtDestroy(Handle) -> Code;
    cublasLtMatmulDescCreate(*mut Handle, c_int, c_int) -> Code;
    cublasLtMatmulDescDestroy(Handle) -> Code;
    cublasLtMatmulDescSetAttribute(Handle, c_int, *const c_void, usize) -> Code;
    cublasLtMatrixLayoutCreate(*mut Handle, c_int, u64, u64, i64) -> Code;
    cublasLtMatrixLayoutDestroy(Handle) -> Code;
    cublasLtMatmulPreferenceCreate(*mut Handle) -> Code;
    cublasLtMatmulPreferenceDestroy(Handle) -> Code;
    cublasLtMatmulPreferenceSetAttribute(Handle, c_int, *const c_void, usize) -> Code;
    cublasLtMatmulAlgoGetHeuristic(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Heuristic, *mut c_int
    ) -> Code;
    cublasLtMatmul(
        Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle,
        *const Algorithm, u64, usize, Handle
    ) -> Code;
}

/// A row-major matrix in memory.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// Address of the first element.
    pub address: u64,
    pub element: Precision,
    /// Elements from row to row, as they lie in memory.
    pub stride: usize,
    /// The product uses the transpose of what lies in memory.
    pub transposed: bool,
}

/// The transpose of a matrix.
pub fn transposed(operand: Operand) -> Operand {
    Operand {
        transposed: !operand.transposed,
        ..operand
    }
}

/// `result[rows, columns] = factor · a[rows, inner] · b[inner, columns] (+ added)`
#[derive(Debug, Clone, Copy)]
pub struct Product {
    pub rows: usize,
    pub columns: usize,
    pub inner: usize,
    pub a: Operand,
    /// Its element is that of `a`.
    pub b: Operand,
    /// Address of a matrix to add, with the element of the result. It may be the result.
    pub added: Option<u64>,
    pub factor: f32,
    /// Address of the result.
    pub result: u64,
    /// Elements from row to row of the result and of the added matrix.
    pub stride: usize,
    /// The element of the result: f32 or that of `a`.
    pub element: Precision,
}

/// cuBLASLt on a device.
pub struct Blas {
    library: Arc<Library>,
    plans: Mutex<HashMap<Shape, Plan>>,
    /// `None`: algorithms are cuBLASLt's first.
    measured: Option<Mutex<Measured>>,
}

/// The handle of the library, destroyed when dropped.
struct Library {
    functions: Functions,
    version: Version,
    device: Arc<Device>,
    handle: Handle,
}

/// What an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    /// Rows, columns and inner dimension.
    sizes: [usize; 3],
    /// Of `a`, `b` and the result.
    elements: [Precision; 3],
    /// Of `a`, `b` and the result.
    strides: [usize; 3],
    transposed: [bool; 2],
    /// Of `a`, `b`, the added matrix and the result, in bytes.
    alignments: [u32; 4],
    workspace: u64,
}

/// The descriptors and the algorithm of a shape.
struct Plan {
    operation: Descriptor,
    first: Descriptor,
    second: Descriptor,
    result: Descriptor,
    /// Best first, by cuBLASLt's own estimate; never empty.
    algorithms: Vec<Algorithm>,
    chosen: usize,
    /// Whether the choice is final.
    settled: bool,
}

/// A descriptor of cuBLASLt, destroyed when dropped.
struct Descriptor {
    library: Arc<Library>,
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> Code,
}

impl Blas {
    /// Bytes of workspace that the caller should give: what NVIDIA recommends for Hopper.
    pub const WORKSPACE: u64 = 32 << 20;

    /// Loads cuBLASLt, which is never closed again.
    pub fn new(device: &Arc<Device>) -> Result<Blas, CudaError> {
        let (functions, version) = Functions::open(&CUBLAS_LT, Some(device.driver.major()))?;
        device.make_current()?;
        let mut handle = Handle::NULL;
        // SAFETY: the function writes its result; the handle is destroyed when it is dropped.
        let code = unsafe { (functions.cublasLtCreate)(&mut handle) };
        functions.check("cublasLtCreate", code)?;
        Ok(Blas {
            library: Arc::new(Library {
                functions,
                version,
                device: device.clone(),
                handle,
            }),
            plans: Mutex::default(),
            measured: None,
        })
    }

    /// Measures the algorithms of each product when it is first computed, unless they are known. A first use in a
    /// graph's capture is an error.
    pub fn measuring(self, measured: Measured) -> Blas {
        Blas {
            measured: Some(Mutex::new(measured)),
            ..self
        }
    }

    /// Appends a product to a stream. Sums are f32; f32 inputs are never rounded to TF32 unless
    /// `NVIDIA_TF32_OVERRIDE` demands it.
    ///
    /// # Safety
    /// The matrices, and the workspace by its address and bytes, are live until the stream has run the
    /// product. The result overlaps neither `a` nor `b`. No other stream uses the workspace meanwhile.
    pub unsafe fn multiply(
        &self,
        stream: &Stream,
        product: &Product,
        workspace: (u64, u64),
    ) -> Result<(), CudaError> {
        if product.rows == 0 || product.columns == 0 {
            return Ok(());
        }
        let shape = Shape::new(product, workspace);
        self.library.device.make_current()?;
        let library = &self.library;
        let mut plans = lock(&self.plans);
        let plan = plan(&mut plans, library, shape)?;
        let enqueue = |plan: &Plan, algorithm: usize| {
            // SAFETY: the caller's guarantees.
            let done = unsafe { library.multiply(plan, algorithm, stream, product, workspace) };
            done.map_err(|error| shape.named(error))
        };
        // Repetitions may not add to the result once more.
        let repeatable = product.added != Some(product.result);
        if let Some(measured) = &self.measured
            && !plan.settled
            && repeatable
        {
            let mut measured = lock(measured);
            plan.chosen = match library.known(&mut measured, &shape, &plan.algorithms) {
                Some(known) => known,
                None if !measured.takes(shape.flops()) => 0,
                None => {
                    let fastest = plan.fastest(stream, |algorithm| enqueue(plan, algorithm))?;
                    measured.add(&library.described(&shape), plan.algorithms[fastest]);
                    fastest
                }
            };
            plan.settled = true;
        }
        enqueue(plan, plan.chosen)
    }

    /// Uses the algorithm with this index for the product's shape from now on: 0 is cuBLASLt's first, the last is
    /// used for larger indices. Returns the number of algorithms.
    pub fn choose(
        &self,
        product: &Product,
        workspace: (u64, u64),
        index: usize,
    ) -> Result<usize, CudaError> {
        let shape = Shape::new(product, workspace);
        self.library.device.make_current()?;
        let mut plans = lock(&self.plans);
        let plan = plan(&mut plans, &self.library, shape)?;
        plan.chosen = index.min(plan.algorithms.len() - 1);
        plan.settled = true;
        Ok(plan.algorithms.len())
    }
}

/// The plan of a shape, which is made at its first use.
fn plan<'a>(
    plans: &'a mut HashMap<Shape, Plan>,
    library: &Arc<Library>,
    shape: Shape,
) -> Result<&'a mut Plan, CudaError> {
    Ok(match plans.entry(shape) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => entry.insert(Plan::new(library, &shape)?),
    })
}

impl Shape {
    fn new(product: &Product, workspace: (u64, u64)) -> Shape {
        let Product { a, b, result, .. } = *product;
        let added = product.added.unwrap_or(result);
        Shape {
            sizes: [product.rows, product.columns, product.inner],
            elements: [a.element, b.element, product.element],
            strides: [a.stride, b.stride, product.stride],
            transposed: [a.transposed, b.transposed],
            alignments: [a.address, b.address, added, result].map(alignment),
            workspace: workspace.1,
        }
    }

    fn flops(&self) -> f64 {
        2.0 * self.sizes.map(|size| size as f64).iter().product::<f64>()
    }

    /// Adds the shape to an error.
    fn named(&self, error: CudaError) -> CudaError {
        let CudaError::Call {
            function,
            code,
            words,
        } = error
        else {
            return error;
        };
        let [rows, columns, inner] = self.sizes;
        let [a, b, result] = self.elements;
        CudaError::Call {
            function,
            code,
            words: format!(
                "{words} ({rows}×{inner} {a:?} · {inner}×{columns} {b:?} to {result:?})"
            ),
        }
    }
}

/// The largest power of two that divides an address, at most [`ALIGNMENT_MOST`].
fn alignment(address: u64) -> u32 {
    let alignment = address | ALIGNMENT_MOST;
    1 << alignment.trailing_zeros()
}

impl Plan {
    /// The index of the fastest algorithm by the least time of its turns.
    fn fastest(
        &self,
        stream: &Stream,
        enqueue: impl Fn(usize) -> Result<(), CudaError>,
    ) -> Result<usize, CudaError> {
        let mut least = vec![Duration::MAX; self.algorithms.len()];
        for round in 0..=ROUNDS {
            for (algorithm, least) in least.iter_mut().enumerate() {
                stream.synchronize()?;
                let begin = Instant::now();
                let ran = (0..REPETITIONS).try_for_each(|_| enqueue(algorithm));
                stream.synchronize()?;
                match ran {
                    // The first round loads the kernels.
                    Ok(()) if round > 0 => *least = (*least).min(begin.elapsed()),
                    Err(error) if algorithm == 0 => return Err(error),
                    // One that cuBLASLt proposes and cannot run is not the fastest.
                    Ok(()) | Err(_) => {}
                }
            }
        }
        let all = least.iter().enumerate();
        let fastest = all.min_by_key(|&(_, time)| time).map_or(0, |(at, _)| at);
        let faster = least[fastest].as_secs_f64() <= FASTER * least[0].as_secs_f64();
        Ok(if faster { fastest } else { 0 })
    }

    fn new(library: &Arc<Library>, shape: &Shape) -> Result<Plan, CudaError> {
        let functions = &library.functions;
        let [rows, columns, inner] = shape.sizes;
        let [a, b, result] = shape.elements;
        let [a_stride, b_stride, stride] = shape.strides;
        let [a_transposed, b_transposed] = shape.transposed;

        let operation = library.descriptor(
            "cublasLtMatmulDescCreate",
            functions.cublasLtMatmulDescDestroy,
            // SAFETY: the function writes its result.
            |handle| unsafe { (functions.cublasLtMatmulDescCreate)(handle, COMPUTE_F32, REAL_F32) },
        )?;
        // cuBLASLt's A is `b`. What is transposed here is transposed there.
        for (attribute, transposed) in [(TRANSPOSE_A, b_transposed), (TRANSPOSE_B, a_transposed)] {
            operation.set(
                "cublasLtMatmulDescSetAttribute",
                functions.cublasLtMatmulDescSetAttribute,
                attribute,
                &c_int::from(transposed).to_ne_bytes(),
            )?;
        }

        // A row-major matrix of memory is column-major with its sizes exchanged.
        let layout = |element: Precision, rows: usize, columns: usize, stride: usize| {
            let element = match element {
                Precision::F32 => REAL_F32,
                Precision::Bf16 => REAL_BF16,
            };
            library.descriptor(
                "cublasLtMatrixLayoutCreate",
                functions.cublasLtMatrixLayoutDestroy,
                // SAFETY: the function writes its result.
                |handle| unsafe {
                    (functions.cublasLtMatrixLayoutCreate)(
                        handle,
                        element,
                        columns as u64,
                        rows as u64,
                        i64::try_from(stride).unwrap_or(i64::MAX),
                    )
                },
            )
        };
        let stored = |rows, columns, transposed| {
            if transposed {
                (columns, rows)
            } else {
                (rows, columns)
            }
        };
        let (b_rows, b_columns) = stored(inner, columns, b_transposed);
        let (a_rows, a_columns) = stored(rows, inner, a_transposed);
        let first = layout(b, b_rows, b_columns, b_stride)?;
        let second = layout(a, a_rows, a_columns, a_stride)?;
        let result = layout(result, rows, columns, stride)?;

        let preference = library.descriptor(
            "cublasLtMatmulPreferenceCreate",
            functions.cublasLtMatmulPreferenceDestroy,
            // SAFETY: the function writes its result.
            |handle| unsafe { (functions.cublasLtMatmulPreferenceCreate)(handle) },
        )?;
        let prefer = |attribute, value: &[u8]| {
            preference.set(
                "cublasLtMatmulPreferenceSetAttribute",
                functions.cublasLtMatmulPreferenceSetAttribute,
                attribute,
                value,
            )
        };
        prefer(MAX_WORKSPACE, &shape.workspace.to_ne_bytes())?;
        let [a, b, added, of_result] = shape.alignments;
        for (attribute, alignment) in (MIN_ALIGNMENT_A..).zip([b, a, added, of_result]) {
            prefer(attribute, &alignment.to_ne_bytes())?;
        }

        let mut found = [Heuristic::default(); ALGORITHMS];
        let mut count = 0;
        // SAFETY: the descriptors are live, and the array has as many elements as is passed.
        let code = unsafe {
            (functions.cublasLtMatmulAlgoGetHeuristic)(
                library.handle,
                operation.handle,
                first.handle,
                second.handle,
                result.handle,
                result.handle,
                preference.handle,
                ALGORITHMS as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        let function = "cublasLtMatmulAlgoGetHeuristic";
        let named = |error| shape.named(error);
        functions.check(function, code).map_err(named)?;
        let count = usize::try_from(count).unwrap_or(0);
        let usable = found
            .iter()
            .take(count)
            .filter(|found| found.state == 0 && found.workspace as u64 <= shape.workspace);
        let algorithms: Vec<Algorithm> = usable.map(|found| found.algorithm).collect();
        if algorithms.is_empty() {
            return Err(shape.named(functions.failed(function, NOT_SUPPORTED)));
        }
        Ok(Plan {
            algorithms,
            chosen: 0,
            settled: false,
            operation,
            first,
            second,
            result,
        })
    }
}

impl Library {
    /// A product with one of the plan's algorithms.
    ///
    /// # Safety
    /// As [`Blas::multiply`].
    unsafe fn multiply(
        &self,
        plan: &Plan,
        algorithm: usize,
        stream: &Stream,
        product: &Product,
        workspace: (u64, u64),
    ) -> Result<(), CudaError> {
        let alpha = product.factor;
        let beta = if product.added.is_some() { 1.0f32 } else { 0.0 };
        // SAFETY: the descriptors are live, the scales are f32 as the operation says, and the caller
        // guarantees the memory.
        let code = unsafe {
            (self.functions.cublasLtMatmul)(
                self.handle,
                plan.operation.handle,
                std::ptr::from_ref(&alpha).cast(),
                product.b.address,
                plan.first.handle,
                product.a.address,
                plan.second.handle,
                std::ptr::from_ref(&beta).cast(),
                product.added.unwrap_or(product.result),
                plan.result.handle,
                product.result,
                plan.result.handle,
                &plan.algorithms[algorithm],
                workspace.0,
                usize::try_from(workspace.1).unwrap_or(usize::MAX),
                stream.handle(),
            )
        };
        self.functions.check("cublasLtMatmul", code)
    }

    /// The index of the algorithm that was measured before, if cuBLASLt still proposes it.
    fn known(
        &self,
        measured: &mut Measured,
        shape: &Shape,
        algorithms: &[Algorithm],
    ) -> Option<usize> {
        let product = self.described(shape);
        let known = measured.get(&product)?;
        let index = algorithms
            .iter()
            .position(|&algorithm| algorithm == known)?;
        measured.spread(&product, known);
        Some(index)
    }

    /// A product on this GPU with this version of cuBLASLt.
    fn described(&self, shape: &Shape) -> String {
        let Shape {
            sizes: [rows, columns, inner],
            elements: [a, b, result],
            strides,
            transposed,
            alignments,
            workspace,
        } = shape;
        format!(
            "{}, cuBLASLt {}: {rows}×{inner} {a:?} · {inner}×{columns} {b:?} to {result:?}, strides {strides:?}, \
             transposed {transposed:?}, alignments {alignments:?}, workspace {workspace}",
            self.device.name, self.version
        )
    }

    fn descriptor(
        self: &Arc<Self>,
        function: &'static str,
        destroy: unsafe extern "C" fn(Handle) -> Code,
        create: impl FnOnce(*mut Handle) -> Code,
    ) -> Result<Descriptor, CudaError> {
        let mut handle = Handle::NULL;
        self.functions.check(function, create(&mut handle))?;
        Ok(Descriptor {
            library: self.clone(),
            handle,
            destroy,
        })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if self.device.make_current().is_ok() {
            // SAFETY: the handle is destroyed once; descriptors hold the library.
            unsafe { (self.functions.cublasLtDestroy)(self.handle) };
        }
    }
}

impl Descriptor {
    fn set(
        &self,
        function: &'static str,
        set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code,
        attribute: c_int,
        value: &[u8],
    ) -> Result<(), CudaError> {
        // SAFETY: the descriptor is live, and the value has the size that is passed.
        let code = unsafe { set(self.handle, attribute, value.as_ptr().cast(), value.len()) };
        self.library.functions.check(function, code)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is destroyed once, by the function for its kind.
        unsafe { (self.destroy)(self.handle) };
    }
}

impl Functions {
    fn check(&self, function: &'static str, code: Code) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            ALLOC_FAILED => Err(CudaError::out_of_memory(format!("cuBLASLt ({function})"))),
            code => Err(self.failed(function, code)),
        }
    }

    fn failed(&self, function: &'static str, code: Code) -> CudaError {
        // SAFETY: the functions return a constant text or null.
        let [name, words] = [self.cublasLtGetStatusName, self.cublasLtGetStatusString]
            .map(|of| unsafe { text(of(code)) });
        CudaError::Call {
            function,
            code: name.unwrap_or_else(|| format!("error {code}")),
            words: match code {
                INVALID_VALUE => "cuBLASLt refuses an argument".to_owned(),
                NOT_SUPPORTED => "cuBLASLt has no algorithm for it".to_owned(),
                _ => words.unwrap_or_default(),
            },
        }
    }
}
