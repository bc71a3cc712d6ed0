//! Memory of the device, and pinned memory of the host.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::functions::OUT_OF_MEMORY;
use super::{CudaError, Device};

impl Device {
    /// Allocates memory of the device, aligned to 256 bytes or more; its content is undefined.
    ///
    /// No stream of this thread may be captured meanwhile, also when the memory is dropped.
    pub fn allocate(self: &Arc<Self>, bytes: u64, what: &str) -> Result<Memory, CudaError> {
        let functions = self.current()?;
        let no_memory = || CudaError::OutOfMemory {
            what: what.to_owned(),
            bytes,
        };
        // The driver refuses empty allocations.
        let size = usize::try_from(bytes.max(1)).map_err(|_| no_memory())?;
        let mut address = 0;
        // SAFETY: the function writes its result; the memory is freed when it is dropped.
        match unsafe { (functions.cuMemAlloc_v2)(&mut address, size) } {
            OUT_OF_MEMORY => return Err(no_memory()),
            code => functions.check("cuMemAlloc", code)?,
        }
        Ok(Memory {
            device: self.clone(),
            address,
            bytes,
        })
    }

    /// Allocates memory of the host that streams copy asynchronously; it is zero.
    pub fn pinned(self: &Arc<Self>, bytes: usize, what: &str) -> Result<Pinned, CudaError> {
        let functions = self.current()?;
        let size = bytes.max(1);
        let mut address: *mut c_void = std::ptr::null_mut();
        // SAFETY: the function writes its result; the memory is freed when it is dropped.
        match unsafe { (functions.cuMemHostAlloc)(&mut address, size, 0) } {
            OUT_OF_MEMORY => {
                return Err(CudaError::OutOfMemory {
                    what: format!("{what} (pinned memory of the host)"),
                    bytes: bytes as u64,
                });
            }
            code => functions.check("cuMemHostAlloc", code)?,
        }
        let Some(address) = NonNull::new(address.cast::<u8>()) else {
            return Err(functions.failed("cuMemHostAlloc", OUT_OF_MEMORY));
        };
        // SAFETY: the memory has this size. It must be initialised before it is a slice.
        unsafe { address.write_bytes(0, size) };
        Ok(Pinned {
            device: self.clone(),
            address,
            bytes,
        })
    }
}

/// Memory of the device, freed when dropped. The driver waits for the device before it frees memory.
pub struct Memory {
    device: Arc<Device>,
    address: u64,
    bytes: u64,
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(functions) = self.device.current() {
            // SAFETY: the address is that of the allocation, which is freed once.
            unsafe { (functions.cuMemFree_v2)(self.address) };
        }
    }
}

/// Pinned memory of the host, freed when dropped. Copies run later than their calls: the caller synchronises
/// the stream before it reads what was downloaded, changes what is uploaded, or drops the memory.
pub struct Pinned {
    device: Arc<Device>,
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this object alone; copies of streams are the caller's to order.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has this size, is initialised and lives as long as this object.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the reference is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(functions) = self.device.current() {
            // SAFETY: the address is that of the allocation, which is freed once.
            unsafe { (functions.cuMemFreeHost)(self.address.as_ptr().cast()) };
        }
    }
}
