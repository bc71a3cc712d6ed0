//! The functions of `libcuda.so.1`, with the names to which `cuda.h` of CUDA 12 and 13 maps them.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use super::super::error::CudaError;
use super::super::table::{functions, text};

/// A pointer to an object of the driver or of a library on top of it.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(pub *mut c_void);

// SAFETY: the program never dereferences a handle, and CUDA's libraries allow their objects on every thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    pub const NULL: Handle = Handle(std::ptr::null_mut());
}

/// `CUresult`
pub type Code = c_int;

pub const OUT_OF_MEMORY: Code = 2;
pub const DEVICE_UNAVAILABLE: Code = 46;
pub const NO_DEVICE: Code = 100;
pub const NOT_READY: Code = 600;

functions! {
    pub Functions:
    cuInit(c_uint) -> Code;
    cuGetErrorName(Code, *mut *const c_char) -> Code;
    cuGetErrorString(Code, *mut *const c_char) -> Code;
    cuDeviceGetCount(*mut c_int) -> Code;
    cuDeviceGet(*mut c_int, c_int) -> Code;
    cuDeviceGetName(*mut c_char, c_int, c_int) -> Code;
    cuDeviceGetUuid_v2(*mut [u8; 16], c_int) -> Code;
    cuDeviceTotalMem_v2(*mut usize, c_int) -> Code;
    cuDeviceGetAttribute(*mut c_int, c_int, c_int) -> Code;
    cuDevicePrimaryCtxRetain(*mut Handle, c_int) -> Code;
    cuDevicePrimaryCtxRelease_v2(c_int) -> Code;
    cuCtxSetCurrent(Handle) -> Code;
    cuMemGetInfo_v2(*mut usize, *mut usize) -> Code;
    cuMemAlloc_v2(*mut u64, usize) -> Code;
    cuMemFree_v2(u64) -> Code;
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Code;
    cuMemFreeHost(*mut c_void) -> Code;
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle) -> Code;
    cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle) -> Code;
    cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle) -> Code;
    cuMemsetD8Async(u64, u8, usize, Handle) -> Code;
    cuStreamCreate(*mut Handle, c_uint) -> Code;
    cuStreamDestroy_v2(Handle) -> Code;
    cuStreamSynchronize(Handle) -> Code;
    cuStreamQuery(Handle) -> Code;
    cuStreamWaitEvent(Handle, Handle, c_uint) -> Code;
    cuStreamBeginCapture_v2(Handle, c_int) -> Code;
    cuStreamEndCapture(Handle, *mut Handle) -> Code;
    cuEventCreate(*mut Handle, c_uint) -> Code;
    cuEventDestroy_v2(Handle) -> Code;
    cuEventRecord(Handle, Handle) -> Code;
    cuGraphInstantiateWithFlags(*mut Handle, Handle, c_ulonglong) -> Code;
    cuGraphLaunch(Handle, Handle) -> Code;
    cuGraphDestroy(Handle) -> Code;
    cuGraphExecDestroy(Handle) -> Code;
    cuModuleLoadDataEx(*mut Handle, *const c_void, c_uint, *const c_int, *mut *mut c_void) -> Code;
    cuModuleUnload(Handle) -> Code;
    cuModuleGetFunction(*mut Handle, Handle, *const c_char) -> Code;
    cuFuncSetAttribute(Handle, c_int, c_int) -> Code;
    cuLaunchKernel(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
        *const *const c_void, *const *const c_void
    ) -> Code;
}

impl Functions {
    /// The error of a call.
    pub fn check(&self, function: &'static str, code: Code) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            OUT_OF_MEMORY => Err(CudaError::out_of_memory(function)),
            code => Err(self.failed(function, code)),
        }
    }

    /// The error of a call that failed with this code.
    pub fn failed(&self, function: &'static str, code: Code) -> CudaError {
        let of = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut found = std::ptr::null();
            // SAFETY: the function stores a pointer to a constant text, or null for an unknown code.
            unsafe {
                match function(code, &mut found) {
                    0 => text(found),
                    _ => None,
                }
            }
        };
        CudaError::Call {
            function,
            code: of(self.cuGetErrorName).unwrap_or_else(|| format!("error {code}")),
            words: of(self.cuGetErrorString).unwrap_or_else(|| "unknown error".to_owned()),
        }
    }
}
