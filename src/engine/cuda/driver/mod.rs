//! The CUDA driver: devices, memory, modules, streams, events and graphs.
//!
//! Each object keeps the objects alive that it needs, and frees itself when it is dropped. A failure to free
//! is ignored: it only repeats the error of an earlier call. The primary context of a device is made current
//! by each call that needs it, so objects may move between threads.

mod functions;
mod memory;
mod module;
mod stream;

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex};

pub use self::functions::Handle;
use self::functions::{Code, DEVICE_UNAVAILABLE, Functions, NO_DEVICE, OUT_OF_MEMORY};
pub use self::memory::{Memory, Pinned};
pub use self::module::{Argument, Function, Grid, Module};
pub use self::stream::{Event, Graph, Stream};
use super::error::CudaError;
use super::libraries::{CUDA, Version};
use crate::util::lock::lock;

/// The oldest supported compute capability: bf16 matrix units and asynchronous copies.
pub const CAPABILITY: (u32, u32) = (8, 0);

// `CUdevice_attribute`
const MULTIPROCESSOR_COUNT: c_int = 16;
const COMPUTE_MODE: c_int = 20;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

// `CUcomputemode`
const PROHIBITED: c_int = 2;
const EXCLUSIVE_PROCESS: c_int = 3;

pub struct Driver {
    functions: Functions,
    /// The newest CUDA that the driver supports.
    pub version: Version,
}

impl Driver {
    /// Loads and initialises the driver, once in a process.
    ///
    /// # Errors
    /// The library cannot be used, or no GPU is visible.
    pub fn load() -> Result<Arc<Driver>, CudaError> {
        static LOADED: Mutex<Option<Arc<Driver>>> = Mutex::new(None);
        let mut loaded = lock(&LOADED);
        if let Some(driver) = &*loaded {
            return Ok(driver.clone());
        }
        let (functions, version) = Functions::open(&CUDA, None)?;
        // SAFETY: the flags must be 0.
        match unsafe { (functions.cuInit)(0) } {
            NO_DEVICE => return Err(no_device()),
            code => functions.check("cuInit", code)?,
        }
        let driver = Arc::new(Driver { functions, version });
        *loaded = Some(driver.clone());
        Ok(driver)
    }

    pub fn device_count(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: the function writes its result.
        let code = unsafe { (self.functions.cuDeviceGetCount)(&mut count) };
        self.functions.check("cuDeviceGetCount", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The major version, which limits the versions of the other libraries.
    pub(super) fn major(&self) -> usize {
        self.version.0
    }
}

/// The reason why the driver sees no GPU.
fn no_device() -> CudaError {
    if let Some(list) = std::env::var_os("CUDA_VISIBLE_DEVICES") {
        return CudaError::Unusable(format!(
            "CUDA_VISIBLE_DEVICES={} names no GPU of this machine; unset it, or name GPUs that \
             `evenkeel gpus` lists",
            list.display()
        ));
    }
    let partitioned = partitioned();
    if !partitioned.is_empty() {
        return CudaError::Unusable(format!(
            "the driver shows no GPU: MIG is on without a compute instance on {}; create instances with \
             nvidia-smi mig, or turn MIG off with nvidia-smi -mig 0",
            partitioned.join(", ")
        ));
    }
    CudaError::Unusable(
        "the driver finds no GPU; start the container with its GPUs (docker run --gpus all), or look for \
         errors of the GPU in the kernel's log (dmesg)"
            .to_owned(),
    )
}

/// GPUs in MIG mode without a MIG device, as NVML knows them.
fn partitioned() -> Vec<String> {
    let Ok(nvml) = nvml_wrapper::Nvml::init() else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for index in 0..nvml.device_count().unwrap_or(0) {
        let Ok(device) = nvml.device_by_index(index) else {
            continue;
        };
        let is_partitioned = device.mig_mode().is_ok_and(|mode| mode.current == 1);
        let slots = device.mig_device_count().unwrap_or(0);
        let has_instance = (0..slots).any(|slot| device.mig_device_by_index(slot).is_ok());
        if is_partitioned && !has_instance {
            let name = device.name().unwrap_or_else(|_| "GPU".to_owned());
            found.push(format!("GPU {index} ({name})"));
        }
    }
    found
}

/// A GPU with its primary context.
pub struct Device {
    pub driver: Arc<Driver>,
    number: c_int,
    context: Handle,
    pub name: String,
    /// The UUID as NVML writes it, for example `GPU-5ca8…`.
    pub uuid: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Bytes of the device.
    pub total_memory: u64,
    pub multiprocessors: u32,
}

impl Device {
    /// Opens a visible device by its index.
    ///
    /// # Errors
    /// The device does not exist, is too old, or another process has it for itself.
    pub fn open(driver: &Arc<Driver>, ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let functions = &driver.functions;
        let count = driver.device_count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(number) = number else {
            return Err(CudaError::Unusable(format!(
                "GPU {ordinal} does not exist: the driver shows {count}, numbered from 0; check \
                 CUDA_VISIBLE_DEVICES and `evenkeel gpus`"
            )));
        };
        let mut device = 0;
        let mut name = [0; 256];
        let mut uuid = [0; 16];
        let mut total = 0;
        // SAFETY: the functions write their results; the name has room for the length that is passed.
        unsafe {
            functions.check("cuDeviceGet", (functions.cuDeviceGet)(&mut device, number))?;
            let text = name.as_mut_ptr().cast::<c_char>();
            let code = (functions.cuDeviceGetName)(text, name.len() as c_int, device);
            functions.check("cuDeviceGetName", code)?;
            let code = (functions.cuDeviceGetUuid_v2)(&mut uuid, device);
            functions.check("cuDeviceGetUuid", code)?;
            let code = (functions.cuDeviceTotalMem_v2)(&mut total, device);
            functions.check("cuDeviceTotalMem", code)?;
        }
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the function writes its result.
            let code = unsafe { (functions.cuDeviceGetAttribute)(&mut value, attribute, device) };
            functions
                .check("cuDeviceGetAttribute", code)
                .map(|()| value)
        };
        let number = |value: c_int| u32::try_from(value).unwrap_or(0);
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let capability = (
            number(attribute(CAPABILITY_MAJOR)?),
            number(attribute(CAPABILITY_MINOR)?),
        );
        if capability < CAPABILITY {
            return Err(CudaError::Unusable(format!(
                "GPU {ordinal} ({name}) has compute capability {}.{}, {}.{} is needed (A100 or newer); \
                 choose other GPUs with CUDA_VISIBLE_DEVICES",
                capability.0, capability.1, CAPABILITY.0, CAPABILITY.1
            )));
        }
        let mode = attribute(COMPUTE_MODE)?;
        if mode == PROHIBITED {
            return Err(CudaError::Unusable(format!(
                "GPU {ordinal} ({name}) is in compute mode \"prohibited\"; change it with nvidia-smi -c DEFAULT"
            )));
        }
        let mut context = Handle::NULL;
        // SAFETY: the function writes its result. The device releases the context when it is dropped.
        let code = unsafe { (functions.cuDevicePrimaryCtxRetain)(&mut context, device) };
        match code {
            DEVICE_UNAVAILABLE if mode == EXCLUSIVE_PROCESS => {
                return Err(CudaError::Unusable(format!(
                    "GPU {ordinal} ({name}) is in exclusive-process mode and another process uses it; end that \
                     process (nvidia-smi lists it), or change the mode with nvidia-smi -c DEFAULT"
                )));
            }
            DEVICE_UNAVAILABLE => {
                return Err(CudaError::Unusable(format!(
                    "GPU {ordinal} ({name}) is busy or unavailable; nvidia-smi lists its processes"
                )));
            }
            OUT_OF_MEMORY => {
                return Err(CudaError::out_of_memory(format!(
                    "the context of GPU {ordinal} ({name})"
                )));
            }
            code => functions.check("cuDevicePrimaryCtxRetain", code)?,
        }
        Ok(Arc::new(Device {
            driver: driver.clone(),
            number: device,
            context,
            uuid: uuid_text(uuid),
            capability,
            total_memory: total as u64,
            multiprocessors: number(attribute(MULTIPROCESSOR_COUNT)?),
            name,
        }))
    }

    /// Bytes that no process uses.
    pub fn free_memory(&self) -> Result<u64, CudaError> {
        let functions = self.current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the function writes its results.
        let code = unsafe { (functions.cuMemGetInfo_v2)(&mut free, &mut total) };
        functions.check("cuMemGetInfo", code)?;
        Ok(free as u64)
    }

    /// The driver's functions, with the context made current on this thread.
    fn current(&self) -> Result<&Functions, CudaError> {
        let functions = &self.driver.functions;
        // SAFETY: the device holds the context until it is dropped.
        let code = unsafe { (functions.cuCtxSetCurrent)(self.context) };
        functions.check("cuCtxSetCurrent", code)?;
        Ok(functions)
    }

    /// Makes the context current on this thread, for libraries on top of the driver.
    pub(super) fn make_current(&self) -> Result<(), CudaError> {
        self.current().map(|_| ())
    }
}

/// An object of the driver with its device, destroyed when dropped.
struct Object {
    device: Arc<Device>,
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> Code,
}

impl Object {
    /// The object that `create` writes.
    fn new(
        device: &Arc<Device>,
        function: &'static str,
        create: impl FnOnce(&Functions, &mut Handle) -> Code,
        destroy: unsafe extern "C" fn(Handle) -> Code,
    ) -> Result<Object, CudaError> {
        let functions = device.current()?;
        let mut handle = Handle::NULL;
        functions.check(function, create(functions, &mut handle))?;
        Ok(Object {
            device: device.clone(),
            handle,
            destroy,
        })
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if self.device.current().is_ok() {
            // SAFETY: the object is destroyed once, by the function for its kind.
            unsafe { (self.destroy)(self.handle) };
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: everything that belongs to the context holds the device, so it is gone.
        unsafe { (self.driver.functions.cuDevicePrimaryCtxRelease_v2)(self.number) };
    }
}

/// A UUID in groups of 8, 4, 4, 4 and 12 digits.
fn uuid_text(uuid: [u8; 16]) -> String {
    let mut text = "GPU-".to_owned();
    for (index, byte) in uuid.into_iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}
