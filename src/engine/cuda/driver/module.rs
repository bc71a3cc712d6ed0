//! Modules of kernels, and their arguments.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::sync::Arc;

use super::functions::OUT_OF_MEMORY;
use super::{CudaError, Device, Handle, Object};

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_DYNAMIC_SHARED: c_int = 8;
// `CUjit_option`
const ERROR_LOG_BUFFER: c_int = 5;
const ERROR_LOG_BYTES: c_int = 6;
/// Bytes for the driver's messages about PTX.
const LOG: usize = 4096;

impl Device {
    /// Loads a CUBIN or PTX. Global variables of the module are allocated, too.
    pub fn module(self: &Arc<Self>, image: &[u8], what: &str) -> Result<Module, CudaError> {
        let functions = self.current()?;
        // PTX is a C string.
        let image = [image, b"\0"].concat();
        let mut log = vec![0u8; LOG];
        let options = [ERROR_LOG_BUFFER, ERROR_LOG_BYTES];
        // The size is passed in place of a pointer.
        let mut values = [
            log.as_mut_ptr().cast::<c_void>(),
            std::ptr::without_provenance_mut(LOG),
        ];
        let mut handle = Handle::NULL;
        // SAFETY: the image is complete and ends with a zero; the log has the size that is passed; both arrays
        // have as many elements as is passed.
        let code = unsafe {
            (functions.cuModuleLoadDataEx)(
                &mut handle,
                image.as_ptr().cast(),
                options.len() as c_uint,
                options.as_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code == OUT_OF_MEMORY {
            return Err(CudaError::out_of_memory(format!("the module {what}")));
        }
        functions
            .check("cuModuleLoadDataEx", code)
            .map_err(|error| with_log(error, what, &log))?;
        Ok(Module(Arc::new(Object {
            device: self.clone(),
            handle,
            destroy: functions.cuModuleUnload,
        })))
    }
}

/// Adds the name of the module and the driver's log to an error.
fn with_log(error: CudaError, what: &str, log: &[u8]) -> CudaError {
    let CudaError::Call {
        function,
        code,
        words,
    } = error
    else {
        return error;
    };
    let log = log.split(|&byte| byte == 0).next().unwrap_or_default();
    let log = String::from_utf8_lossy(log);
    let words = match log.trim() {
        "" => format!("{words} ({what})"),
        log => format!("{words} ({what}): {log}"),
    };
    CudaError::Call {
        function,
        code,
        words,
    }
}

/// A loaded module, unloaded when it and its functions are dropped.
pub struct Module(Arc<Object>);

impl Module {
    /// A kernel by its name. Kernels that are not `extern "C"` have mangled names.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let functions = self.0.device.current()?;
        let text = CString::new(name).unwrap_or_default();
        let mut handle = Handle::NULL;
        // SAFETY: the module is live, the text ends with a zero, and the function writes its result.
        let code =
            unsafe { (functions.cuModuleGetFunction)(&mut handle, self.0.handle, text.as_ptr()) };
        functions
            .check("cuModuleGetFunction", code)
            .map_err(|error| with_log(error, name, b""))?;
        Ok(Function {
            module: self.0.clone(),
            handle,
        })
    }
}

/// A kernel. It keeps its module loaded. Streams do not: synchronise before the last function of a module is
/// dropped.
pub struct Function {
    module: Arc<Object>,
    pub(super) handle: Handle,
}

impl Function {
    /// Allows launches with this many bytes of dynamic shared memory; without it, 48 KiB less the kernel's
    /// static shared memory.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let functions = self.module.device.current()?;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function is live as long as its module.
        let code =
            unsafe { (functions.cuFuncSetAttribute)(self.handle, MAX_DYNAMIC_SHARED, bytes) };
        functions.check("cuFuncSetAttribute", code)
    }
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Argument {
    /// A pointer to memory of the device; 0 is null.
    Address(u64),
    /// `size_t`
    Size(u64),
    Int(i32),
    Float(f32),
}

impl Argument {
    /// The address of the value.
    pub(super) fn value(&self) -> *const c_void {
        match self {
            Argument::Address(value) | Argument::Size(value) => std::ptr::from_ref(value).cast(),
            Argument::Int(value) => std::ptr::from_ref(value).cast(),
            Argument::Float(value) => std::ptr::from_ref(value).cast(),
        }
    }
}

/// The geometry of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: (u32, u32, u32),
    /// Threads of a block, all in x.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}
