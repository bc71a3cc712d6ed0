//! Calls of the emulated libraries through their C interfaces, as programs make them.
#![allow(dead_code, non_snake_case, clippy::too_many_arguments)]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::null;

use libloading::{Library, Symbol};
use serde_json::Value;

pub const INVALID_VALUE: c_int = 1;
pub const OUT_OF_MEMORY: c_int = 2;
pub const NOT_READY: c_int = 600;
pub const ILLEGAL_ADDRESS: c_int = 700;
pub const LAUNCH_FAILED: c_int = 719;

/// The test that a child process runs.
const CHILD: &str = "EMULATED_GPU_TEST_CHILD";
/// The directory of the libraries.
const LIBRARIES: &str = "EMULATED_GPU_TEST_LIBRARIES";

/// Runs the body in a separate process, whose emulated GPUs have the settings, and returns its report.
/// In the child the body runs and nothing is returned.
pub fn in_child(name: &str, settings: &[(&str, &str)], body: impl FnOnce()) -> Option<Vec<Value>> {
    if std::env::var(CHILD).as_deref() == Ok(name) {
        body();
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    emulated_gpu::install(directory.path()).unwrap();
    let report = directory.path().join("report");
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, name)
        .env(LIBRARIES, directory.path())
        .env("LD_LIBRARY_PATH", directory.path())
        .env("EMULATED_GPU_REPORT", &report)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{error}");
    assert!(said.contains("1 passed"), "no test is named {name}");
    let lines = std::fs::read_to_string(report).unwrap_or_default();
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    Some(lines.collect())
}

/// The lines of a kind.
pub fn of_kind<'a>(report: &'a [Value], kind: &str) -> Vec<&'a Value> {
    report.iter().filter(|line| line["kind"] == kind).collect()
}

/// The directory of the libraries, in a child.
pub fn libraries() -> std::path::PathBuf {
    std::env::var_os(LIBRARIES).unwrap().into()
}

/// An opaque pointer of the driver.
pub type Handle = usize;

pub struct Cuda(Library);

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {
        impl Cuda {
            $(pub fn $name(&self, $($argument: $type),*) -> c_int {
                type Function = unsafe extern "C" fn($($type),*) -> c_int;
                // SAFETY: the types are those of the driver API, and tests pass valid pointers.
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
    fn cuInit(flags: c_uint);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
    fn cuDevicePrimaryCtxRelease_v2(device: c_int);
    fn cuCtxSetCurrent(context: Handle);
    fn cuCtxGetCurrent(context: *mut Handle);
    fn cuCtxSynchronize();
    fn cuCtxGetDevice(device: *mut c_int);
    fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize);
    fn cuMemFree_v2(pointer: u64);
    fn cuMemAllocAsync(pointer: *mut u64, bytes: usize, stream: Handle);
    fn cuMemFreeAsync(pointer: u64, stream: Handle);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(pointer: *mut c_void);
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle);
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle);
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle);
    fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: Handle);
    fn cuStreamCreate(stream: *mut Handle, flags: c_uint);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuStreamSynchronize(stream: Handle);
    fn cuStreamQuery(stream: Handle);
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    fn cuEventCreate(event: *mut Handle, flags: c_uint);
    fn cuEventDestroy_v2(event: Handle);
    fn cuEventRecord(event: Handle, stream: Handle);
    fn cuEventSynchronize(event: Handle);
    fn cuEventQuery(event: Handle);
    fn cuEventElapsedTime(time: *mut f32, start: Handle, end: Handle);
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void);
    fn cuModuleUnload(module: Handle);
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
    fn cuModuleGetGlobal_v2(pointer: *mut u64, bytes: *mut usize, module: Handle, name: *const c_char);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Handle);
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: Handle, threads: c_int, shared: usize);
    fn cuLaunchKernel(
        function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, stream: Handle, parameters: *const *const c_void, extra: *const *const c_void
    );
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int);
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int);
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64);
    fn cuGraphLaunch(executable: Handle, stream: Handle);
    fn cuGraphDestroy(graph: Handle);
    fn cuGraphExecDestroy(executable: Handle);
    fn cuGetErrorName(code: c_int, name: *mut *const c_char);
    fn cuGetProcAddress_v2(name: *const c_char, function: *mut *const c_void, version: c_int, flags: u64, status: *mut c_int);
}

impl Cuda {
    /// Opens the driver of a child without any call.
    pub fn open() -> Cuda {
        Cuda::open_at(&libraries())
    }

    pub fn open_at(directory: &Path) -> Cuda {
        // SAFETY: opening the emulator runs no code.
        Cuda(unsafe { Library::new(directory.join("libcuda.so.1")) }.unwrap())
    }

    /// Opens the driver, and makes the context of device 0 current.
    pub fn start() -> Cuda {
        let cuda = Cuda::open();
        assert_eq!(cuda.cuInit(0), 0);
        cuda.enter(0);
        cuda
    }

    /// Retains the context of a device and makes it current.
    pub fn enter(&self, device: c_int) -> Handle {
        let context = self.out(|context| self.cuDevicePrimaryCtxRetain(context, device));
        assert_eq!(self.cuCtxSetCurrent(context), 0);
        context
    }

    /// The value that a call writes.
    pub fn out<T: Default>(&self, call: impl FnOnce(&mut T) -> c_int) -> T {
        let mut value = T::default();
        assert_eq!(call(&mut value), 0);
        value
    }

    pub fn alloc(&self, bytes: usize) -> u64 {
        self.out(|pointer| self.cuMemAlloc_v2(pointer, bytes))
    }

    /// Allocates memory with these values.
    pub fn put(&self, values: &[f32]) -> u64 {
        let pointer = self.alloc(4 * values.len());
        assert_eq!(
            self.cuMemcpyHtoD_v2(pointer, values.as_ptr().cast(), 4 * values.len()),
            0
        );
        assert_eq!(self.cuStreamSynchronize(0), 0);
        pointer
    }

    pub fn get(&self, pointer: u64, count: usize) -> Vec<f32> {
        let mut values = vec![0f32; count];
        let to = values.as_mut_ptr().cast();
        assert_eq!(self.cuMemcpyDtoH_v2(to, pointer, 4 * count), 0);
        values
    }

    /// Pinned memory with these values; it lives until the process ends.
    pub fn pinned(&self, values: &[f32]) -> &'static mut [f32] {
        let mut pointer = std::ptr::null_mut();
        assert_eq!(self.cuMemHostAlloc(&mut pointer, 4 * values.len(), 0), 0);
        // SAFETY: the driver returns aligned, initialised memory of this size, and tests do not free it.
        let slice = unsafe { std::slice::from_raw_parts_mut(pointer.cast::<f32>(), values.len()) };
        slice.copy_from_slice(values);
        slice
    }

    /// A stream that is not ordered with the default stream.
    pub fn stream(&self) -> Handle {
        self.out(|stream| self.cuStreamCreate(stream, 1))
    }

    pub fn event(&self) -> Handle {
        self.out(|event| self.cuEventCreate(event, 0))
    }

    pub fn load(&self) -> Handle {
        let text = CString::new(emulated_gpu::scripted::MARK).unwrap();
        self.out(|module| self.cuModuleLoadData(module, text.as_ptr().cast()))
    }

    pub fn function(&self, module: Handle, name: &str) -> Handle {
        let name = CString::new(name).unwrap();
        self.out(|function| self.cuModuleGetFunction(function, module, name.as_ptr()))
    }

    pub fn launch(
        &self,
        function: Handle,
        threads: u32,
        stream: Handle,
        parameters: &[*const c_void],
    ) -> c_int {
        let parameters = parameters.as_ptr();
        self.cuLaunchKernel(
            function,
            1,
            1,
            1,
            threads,
            1,
            1,
            0,
            stream,
            parameters,
            null(),
        )
    }

    /// `out[i] = value`
    pub fn fill(
        &self,
        function: Handle,
        stream: Handle,
        out: u64,
        value: f32,
        count: u32,
    ) -> c_int {
        let parameters = [pointer(&out), pointer(&value), pointer(&count)];
        self.launch(function, count, stream, &parameters)
    }

    /// `out[i] = factor * out[i] + in[i]`
    pub fn step(
        &self,
        function: Handle,
        stream: Handle,
        out: u64,
        add: u64,
        factor: f32,
        count: u32,
    ) -> c_int {
        let parameters = [
            pointer(&out),
            pointer(&add),
            pointer(&factor),
            pointer(&count),
        ];
        self.launch(function, count, stream, &parameters)
    }
}

pub fn pointer<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}
