//! The C interface of cuBLASLt, `libcublasLt.so`: matrix products in stream order, computed on the CPU.
//!
//! Inputs are f32, bf16 or f16, sums are f32 in the order of the inner dimension. Epilogues are none and
//! bias. The first algorithm of a heuristic wants a workspace and overwrites it, so that one workspace on
//! two streams is a race.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};

use crate::abi::{HostRange, In, Out, guard};
use crate::driver::{self, Handle};
use crate::launch::{Failure, GlobalMemory, LaunchError, MemoryFault};
use crate::memory::POISON;
use crate::status::Status;
use crate::stream::Access;

/// cuBLAS 13.0
const VERSION: usize = 130_000;
/// Bytes of workspace that the first algorithm wants.
const WORKSPACE: u64 = 32 * 1024;
/// Marks algorithms of this library.
const MAGIC: u64 = 0x656d_756c_6174_6564;
/// Marks handles of this library.
const HANDLE: usize = 0x4c74 << 32;

/// `cublasStatus_t` without success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
enum Code {
    NotInitialized = 1,
    InvalidValue = 7,
    ExecutionFailed = 13,
    InternalError = 14,
    NotSupported = 15,
}

/// A result cannot be written, or an argument cannot be read.
impl From<Status> for Code {
    fn from(_: Status) -> Code {
        Code::InvalidValue
    }
}

/// `cudaDataType_t`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    F32,
    F16,
    Bf16,
}

impl Type {
    fn new(number: i32) -> Result<Type, Code> {
        match number {
            0 => Ok(Type::F32),
            2 => Ok(Type::F16),
            14 => Ok(Type::Bf16),
            _ => Err(Code::NotSupported),
        }
    }

    fn bytes(self) -> u64 {
        if self == Type::F32 { 4 } else { 2 }
    }

    fn read(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Type::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Type::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Type::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            // The slices come from `chunks_exact(self.bytes())`.
            _ => f32::NAN,
        }
    }

    fn write(self, value: f32, into: &mut Vec<u8>) {
        match self {
            Type::F32 => into.extend(value.to_le_bytes()),
            Type::F16 => into.extend(f16::from_f32(value).to_le_bytes()),
            Type::Bf16 => into.extend(bf16::from_f32(value).to_le_bytes()),
        }
    }
}

/// How products are computed (`cublasComputeType_t`).
const COMPUTE_F32: i32 = 68;
const COMPUTE_TF32: i32 = 77;

#[derive(Debug, Clone, Copy)]
struct Operation {
    compute: i32,
    scale: i32,
    /// 0: alpha and beta are on the host; 1: on the device.
    pointer_mode: i32,
    /// Of A, B and C: 0 none, 1 transposed, 2 conjugated (transposed).
    transposes: [i32; 3],
    epilogue: i32,
    bias: u64,
    /// Negative: the type of D.
    bias_type: i32,
    /// Elements from one batch's bias to the next.
    bias_stride: i64,
}

const EPILOGUE_NONE: i32 = 1;
const EPILOGUE_BIAS: i32 = 4;

#[derive(Debug, Clone, Copy)]
struct Layout {
    kind: i32,
    /// 0: columns are contiguous; 1: rows are.
    order: i32,
    rows: u64,
    columns: u64,
    /// Elements from one column (or row) to the next.
    leading: i64,
    batches: i32,
    /// Elements from one batch to the next.
    stride: i64,
}

#[derive(Debug, Clone, Copy)]
enum Object {
    Library,
    Operation(Operation),
    Layout(Layout),
    /// The most bytes of workspace.
    Preference(u64),
}

static OBJECTS: Mutex<Vec<Option<Object>>> = Mutex::new(Vec::new());

fn code(call: impl FnOnce() -> Result<(), Code>) -> c_int {
    guard(Code::InternalError as c_int, || {
        call().map_or_else(|code| code as c_int, |()| 0)
    })
}

fn create(handle: Out<usize>, object: Object) -> Result<(), Code> {
    let mut objects = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    objects.push(Some(object));
    Ok(handle.put(HANDLE | objects.len())?)
}

fn with<R>(
    handle: usize,
    call: impl FnOnce(&mut Option<Object>) -> Result<R, Code>,
) -> Result<R, Code> {
    let mut objects = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    let index = (handle ^ HANDLE).checked_sub(1);
    let object = index.and_then(|index| objects.get_mut(index));
    call(object.ok_or(Code::InvalidValue)?)
}

fn destroy(handle: usize) -> c_int {
    code(|| {
        with(handle, |object| {
            object.take().map(|_| ()).ok_or(Code::InvalidValue)
        })
    })
}

fn operation(handle: usize) -> Result<Operation, Code> {
    with(handle, |object| match object {
        Some(Object::Operation(operation)) => Ok(*operation),
        _ => Err(Code::InvalidValue),
    })
}

fn layout(handle: usize) -> Result<Layout, Code> {
    with(handle, |object| match object {
        Some(Object::Layout(layout)) => Ok(*layout),
        _ => Err(Code::InvalidValue),
    })
}

fn library(handle: usize) -> Result<(), Code> {
    with(handle, |object| match object {
        Some(Object::Library) => Ok(()),
        _ => Err(Code::NotInitialized),
    })
}

/// The value of an attribute, whose size must be exact.
fn value<const N: usize>(from: *const c_void, bytes: usize) -> Result<[u8; N], Code> {
    let range = HostRange::new(from, bytes)?;
    if from.is_null() || bytes != N {
        return Err(Code::InvalidValue);
    }
    <[u8; N]>::try_from(range.read()).map_err(|_| Code::InvalidValue)
}

fn int(from: *const c_void, bytes: usize) -> Result<i32, Code> {
    value(from, bytes).map(i32::from_le_bytes)
}

fn long(from: *const c_void, bytes: usize) -> Result<i64, Code> {
    value(from, bytes).map(i64::from_le_bytes)
}

// Library and descriptors

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: c_int) -> *const c_char {
    match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        14 => c"CUBLAS_STATUS_INTERNAL_ERROR",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"<unknown>",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusName(status: c_int) -> *const c_char {
    cublasLtGetStatusString(status)
}

/// Needs a current context, as the real library does.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtCreate(handle: Out<usize>) -> c_int {
    code(|| {
        driver::with_context(|_, _| Ok(())).map_err(|_| Code::NotInitialized)?;
        create(handle, Object::Library)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtDestroy(handle: usize) -> c_int {
    destroy(handle)
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescCreate(
    handle: Out<usize>,
    compute: c_int,
    scale: c_int,
) -> c_int {
    let operation = Operation {
        compute,
        scale,
        pointer_mode: 0,
        transposes: [0; 3],
        epilogue: EPILOGUE_NONE,
        bias: 0,
        bias_type: -1,
        bias_stride: 0,
    };
    code(|| create(handle, Object::Operation(operation)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescDestroy(handle: usize) -> c_int {
    destroy(handle)
}

/// The numbers are those of `cublasLtMatmulDescAttributes_t`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescSetAttribute(
    handle: usize,
    attribute: c_int,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    code(|| {
        let mut operation = operation(handle)?;
        match attribute {
            0 => operation.compute = int(from, bytes)?,
            1 => operation.scale = int(from, bytes)?,
            2 => operation.pointer_mode = int(from, bytes)?,
            3..=5 => operation.transposes[attribute as usize - 3] = int(from, bytes)?,
            7 => operation.epilogue = int(from, bytes)?,
            8 => operation.bias = long(from, bytes)? as u64,
            10 => operation.bias_stride = long(from, bytes)?,
            // The number of multiprocessors to use changes nothing.
            15 => drop(int(from, bytes)?),
            26 => operation.bias_type = int(from, bytes)?,
            _ => return Err(Code::NotSupported),
        }
        with(handle, |object| {
            *object = Some(Object::Operation(operation));
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutCreate(
    handle: Out<usize>,
    kind: c_int,
    rows: u64,
    columns: u64,
    leading: i64,
) -> c_int {
    let layout = Layout {
        kind,
        order: 0,
        rows,
        columns,
        leading,
        batches: 1,
        stride: 0,
    };
    code(|| create(handle, Object::Layout(layout)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutDestroy(handle: usize) -> c_int {
    destroy(handle)
}

/// The numbers are those of `cublasLtMatrixLayoutAttribute_t`.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutSetAttribute(
    handle: usize,
    attribute: c_int,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    code(|| {
        let mut layout = layout(handle)?;
        match attribute {
            0 => layout.kind = int(from, bytes)?,
            1 => layout.order = int(from, bytes)?,
            2 => layout.rows = long(from, bytes)? as u64,
            3 => layout.columns = long(from, bytes)? as u64,
            4 => layout.leading = long(from, bytes)?,
            5 => layout.batches = int(from, bytes)?,
            6 => layout.stride = long(from, bytes)?,
            _ => return Err(Code::NotSupported),
        }
        with(handle, |object| {
            *object = Some(Object::Layout(layout));
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceCreate(handle: Out<usize>) -> c_int {
    code(|| create(handle, Object::Preference(0)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceDestroy(handle: usize) -> c_int {
    destroy(handle)
}

/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES` (1); the other preferences change nothing.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    handle: usize,
    attribute: c_int,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    code(|| {
        with(handle, |object| {
            let Some(Object::Preference(workspace)) = object else {
                return Err(Code::InvalidValue);
            };
            match attribute {
                1 => *workspace = long(from, bytes)? as u64,
                0 | 3 | 5..=9 | 12 => {}
                _ => return Err(Code::InvalidValue),
            }
            Ok(())
        })
    })
}

// Products

/// `cublasLtMatmulAlgo_t`: [`MAGIC`], then the bytes of workspace.
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Heuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

fn algorithm(workspace: u64) -> Algorithm {
    [MAGIC, workspace, 0, 0, 0, 0, 0, 0]
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    handle: usize,
    operation_handle: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    preference: usize,
    requested: c_int,
    results: Out<Heuristic>,
    count: Out<c_int>,
) -> c_int {
    code(|| {
        library(handle)?;
        let most = with(preference, |object| match object {
            Some(Object::Preference(workspace)) => Ok(*workspace),
            _ => Err(Code::InvalidValue),
        })?;
        let requested = usize::try_from(requested).map_err(|_| Code::InvalidValue)?;
        if requested == 0 {
            return Err(Code::InvalidValue);
        }
        let checked = Product::new(operation(operation_handle)?, [a, b, c, d]);
        if let Err(code) = checked {
            count.put(0)?;
            return Err(code);
        }
        let workspaces = [WORKSPACE, 0].into_iter().filter(|&bytes| bytes <= most);
        let found: Vec<Heuristic> = workspaces
            .take(requested)
            .map(|bytes| Heuristic {
                algorithm: algorithm(bytes),
                workspace: bytes as usize,
                state: 0,
                waves: 1.0,
                reserved: [0; 4],
            })
            .collect();
        count.put(found.len() as c_int)?;
        Ok(results.put_all(found, requested)?)
    })
}

/// D = alpha · op(A) · op(B) + beta · C + bias
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmul(
    handle: usize,
    operation_handle: usize,
    alpha: *const c_void,
    a: u64,
    a_layout: usize,
    b: u64,
    b_layout: usize,
    beta: *const c_void,
    c: u64,
    c_layout: usize,
    d: u64,
    d_layout: usize,
    algo: In<Algorithm>,
    workspace: u64,
    workspace_bytes: usize,
    stream: Handle,
) -> c_int {
    code(|| {
        library(handle)?;
        let operation = operation(operation_handle)?;
        let product = Product::new(operation, [a_layout, b_layout, c_layout, d_layout])?;
        let needed = if algo.is_null() {
            0
        } else {
            match algo.get()? {
                [MAGIC, needed, ..] => needed,
                _ => return Err(Code::InvalidValue),
            }
        };
        if needed > workspace_bytes as u64 || (needed > 0 && workspace == 0) {
            return Err(Code::InvalidValue);
        }
        if alpha.is_null() || beta.is_null() || [a, b, d].contains(&0) {
            return Err(Code::InvalidValue);
        }
        let [alpha, beta] = [alpha, beta].map(|scale| match operation.pointer_mode {
            0 => value(scale, 4).map(|bytes| Scale::Host(f32::from_le_bytes(bytes))),
            1 => Ok(Scale::Device(scale as u64)),
            _ => Err(Code::NotSupported),
        });
        let (alpha, beta) = (alpha?, beta?);
        let submitted = driver::with_context(|machine, context| {
            let stream = driver::stream_of(machine, stream)?;
            if machine.streams.context(stream) != context {
                return Err(Status::InvalidHandle);
            }
            driver::submit(machine, stream, &product.name(), move |access| {
                access.limit_to(context);
                if needed > 0 {
                    access.fill(workspace, &[POISON], needed)?;
                }
                product.run(access, alpha, beta, [a, b, c, d])
            })
        });
        // A broken context and a wrong stream look the same to the caller.
        submitted.map(|_| ()).map_err(|_| Code::ExecutionFailed)
    })
}

/// Alpha or beta, or its address.
#[derive(Debug, Clone, Copy)]
enum Scale {
    Host(f32),
    Device(u64),
}

impl Scale {
    fn get(self, access: &Access<'_>) -> Result<f32, MemoryFault> {
        match self {
            Scale::Host(value) => Ok(value),
            Scale::Device(address) => {
                let mut bytes = [0; 4];
                access.read(address, &mut bytes)?;
                Ok(f32::from_le_bytes(bytes))
            }
        }
    }
}

/// A product whose layouts agree.
#[derive(Debug, Clone, Copy)]
struct Product {
    a: Matrix,
    b: Matrix,
    c: Matrix,
    d: Matrix,
    batches: u64,
    has_tf32: bool,
    bias: Option<Bias>,
}

/// A matrix as the product uses it: transposed if its operation says so.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    kind: Type,
    rows: u64,
    columns: u64,
    /// Whether rows, or else columns, are contiguous lines.
    by_rows: bool,
    /// Elements from one line to the next.
    leading: u64,
    /// Elements from one batch to the next.
    stride: i64,
}

/// A value for each row of D.
#[derive(Debug, Clone, Copy)]
struct Bias {
    address: u64,
    kind: Type,
    stride: i64,
}

impl Matrix {
    fn new(layout: Layout, transpose: i32) -> Result<Matrix, Code> {
        let leading = u64::try_from(layout.leading).map_err(|_| Code::InvalidValue)?;
        let (by_rows, length) = match layout.order {
            0 => (false, layout.rows),
            1 => (true, layout.columns),
            _ => return Err(Code::NotSupported),
        };
        if leading < length || layout.rows == 0 || layout.columns == 0 {
            return Err(Code::InvalidValue);
        }
        let matrix = Matrix {
            kind: Type::new(layout.kind)?,
            rows: layout.rows,
            columns: layout.columns,
            by_rows,
            leading,
            stride: layout.stride,
        };
        match transpose {
            0 => Ok(matrix),
            1 | 2 => Ok(Matrix {
                rows: matrix.columns,
                columns: matrix.rows,
                by_rows: !by_rows,
                ..matrix
            }),
            _ => Err(Code::InvalidValue),
        }
    }

    fn batch(&self, address: u64, batch: u64) -> u64 {
        let elements = self.stride * batch as i64;
        address.wrapping_add_signed(elements * self.kind.bytes() as i64)
    }

    /// How many lines, and elements of each.
    fn lines(&self) -> (u64, u64) {
        if self.by_rows {
            (self.rows, self.columns)
        } else {
            (self.columns, self.rows)
        }
    }

    /// Address of a line, which must be aligned for the type.
    fn line(&self, address: u64, line: u64) -> Result<u64, LaunchError> {
        let bytes = self.kind.bytes();
        let address = address + line * self.leading * bytes;
        if address.is_multiple_of(bytes) {
            Ok(address)
        } else {
            let message = format!("{address:#x} is not aligned to {bytes} bytes");
            Err(LaunchError::new(Failure::Misaligned, message))
        }
    }

    /// Index, by rows, of an element of a line.
    fn index(&self, line: u64, element: u64) -> usize {
        let index = if self.by_rows {
            line * self.columns + element
        } else {
            element * self.columns + line
        };
        index as usize
    }

    /// The values by rows. Elements between the lines are not touched.
    fn read(&self, access: &Access<'_>, address: u64) -> Result<Vec<f32>, LaunchError> {
        let (lines, length) = self.lines();
        let mut values = vec![0.0; (self.rows * self.columns) as usize];
        let mut bytes = vec![0; (length * self.kind.bytes()) as usize];
        for line in 0..lines {
            access.read(self.line(address, line)?, &mut bytes)?;
            let elements = bytes.chunks_exact(self.kind.bytes() as usize);
            for (element, bytes) in (0..length).zip(elements) {
                values[self.index(line, element)] = self.kind.read(bytes);
            }
        }
        Ok(values)
    }

    fn write(
        &self,
        access: &mut Access<'_>,
        address: u64,
        values: &[f32],
    ) -> Result<(), LaunchError> {
        let (lines, length) = self.lines();
        for line in 0..lines {
            let mut bytes = Vec::with_capacity((length * self.kind.bytes()) as usize);
            for element in 0..length {
                self.kind
                    .write(values[self.index(line, element)], &mut bytes);
            }
            access.write(self.line(address, line)?, &bytes)?;
        }
        Ok(())
    }
}

impl Product {
    fn new(operation: Operation, layouts: [usize; 4]) -> Result<Product, Code> {
        let mut resolved = [None; 4];
        for (slot, handle) in resolved.iter_mut().zip(layouts) {
            *slot = Some(layout(handle)?);
        }
        let [Some(a), Some(b), Some(c), Some(d)] = resolved else {
            return Err(Code::InvalidValue);
        };
        let batches = d.batches;
        let same = [a, b, c].iter().all(|layout| layout.batches == batches);
        let [a_op, b_op, c_op] = operation.transposes;
        let product = Product {
            a: Matrix::new(a, a_op)?,
            b: Matrix::new(b, b_op)?,
            c: Matrix::new(c, c_op)?,
            d: Matrix::new(d, 0)?,
            batches: u64::try_from(batches).map_err(|_| Code::InvalidValue)?,
            has_tf32: operation.compute == COMPUTE_TF32,
            bias: match operation.epilogue {
                EPILOGUE_NONE => None,
                EPILOGUE_BIAS => Some(Bias {
                    address: operation.bias,
                    kind: Type::new(if operation.bias_type < 0 {
                        d.kind
                    } else {
                        operation.bias_type
                    })?,
                    stride: operation.bias_stride,
                }),
                _ => return Err(Code::NotSupported),
            },
        };
        let Product { a, b, c, d, .. } = product;
        if !same || batches < 1 || a.columns != b.rows {
            return Err(Code::InvalidValue);
        }
        if [(a.rows, b.columns), (c.rows, c.columns)] != [(d.rows, d.columns); 2] {
            return Err(Code::InvalidValue);
        }
        let is_known = [COMPUTE_F32, COMPUTE_TF32].contains(&operation.compute);
        let is_typed = a.kind == b.kind && c.kind == d.kind;
        let is_output = d.kind == Type::F32 || d.kind == a.kind;
        let is_supported = is_known && is_typed && is_output && operation.scale == 0;
        if !is_supported || c_op != 0 || (product.has_tf32 && a.kind != Type::F32) {
            return Err(Code::NotSupported);
        }
        Ok(product)
    }

    fn name(&self) -> String {
        let (m, n, k) = (self.d.rows, self.d.columns, self.a.columns);
        format!("matrix product {m}×{n}×{k}")
    }

    fn run(
        &self,
        access: &mut Access<'_>,
        alpha: Scale,
        beta: Scale,
        [a, b, c, d]: [u64; 4],
    ) -> Result<(), LaunchError> {
        let (alpha, beta) = (alpha.get(access)?, beta.get(access)?);
        let (rows, columns, inner) = (self.d.rows, self.d.columns, self.a.columns);
        for batch in 0..self.batches {
            let mut a = self.a.read(access, self.a.batch(a, batch))?;
            let mut b = self.b.read(access, self.b.batch(b, batch))?;
            if self.has_tf32 {
                a.iter_mut()
                    .chain(&mut b)
                    .for_each(|value| *value = tf32(*value));
            }
            // A null C is allowed where beta is 0, and C is not read then.
            let c = if beta == 0.0 {
                None
            } else {
                Some(self.c.read(access, self.c.batch(c, batch))?)
            };
            let bias = match self.bias {
                None => None,
                Some(bias) => {
                    let vector = Matrix {
                        kind: bias.kind,
                        rows,
                        columns: 1,
                        by_rows: false,
                        leading: rows,
                        stride: bias.stride,
                    };
                    Some(vector.read(access, vector.batch(bias.address, batch))?)
                }
            };
            let mut out = Vec::with_capacity((rows * columns) as usize);
            let width = columns as usize;
            for row in 0..rows as usize {
                let mut sums = vec![0.0; width];
                let factors = &a[row * inner as usize..][..inner as usize];
                for (&factor, line) in factors.iter().zip(b.chunks_exact(width)) {
                    for (sum, value) in sums.iter_mut().zip(line) {
                        *sum += factor * value;
                    }
                }
                for (column, sum) in sums.into_iter().enumerate() {
                    let added = c.as_ref().map_or(0.0, |c| beta * c[row * width + column]);
                    let bias = bias.as_ref().map_or(0.0, |bias| bias[row]);
                    out.push(alpha * sum + added + bias);
                }
            }
            self.d.write(access, self.d.batch(d, batch), &out)?;
        }
        Ok(())
    }
}

/// Rounds to the ten bits of mantissa that TF32 has, ties to even.
fn tf32(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
    }
    let bits = value.to_bits();
    let even = bits >> 13 & 1;
    f32::from_bits((bits + 0xfff + even) & !0x1fff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_has_ten_bits_of_mantissa() {
        let step = 2f32.powi(-10);
        assert_eq!(tf32(1.0 + step), 1.0 + step);
        assert_eq!(tf32(1.0 + step / 2.0), 1.0);
        assert_eq!(tf32(1.0 + step * 1.5), 1.0 + step * 2.0);
        assert!(tf32(f32::NAN).is_nan());
    }
}
