//! Device memory in a few large allocations, whose sizes are known before the first step.

use std::sync::Arc;

use super::driver::{Device, Memory};
use super::error::CudaError;

/// Alignment of every buffer, as that of `cuMemAlloc`.
const ALIGNMENT: u64 = 256;

/// Hands out addresses of one allocation in ascending order.
#[derive(Debug)]
pub struct Bump {
    at: u64,
}

impl Bump {
    /// Address of a buffer of `elements` elements of `size` bytes each.
    pub fn take(&mut self, elements: usize, size: usize) -> u64 {
        let address = self.at;
        // A size beyond 2^64 exceeds every limit of memory.
        let bytes = (elements as u64).saturating_mul(size as u64);
        let bytes = bytes.checked_next_multiple_of(ALIGNMENT);
        self.at = self.at.saturating_add(bytes.unwrap_or(u64::MAX));
        address
    }

    /// Address of a buffer of `elements` f32.
    pub fn f32(&mut self, elements: usize) -> u64 {
        self.take(elements, size_of::<f32>())
    }
}

/// Bytes of an allocation that holds what `place` takes.
pub fn bytes_of<T>(place: impl Fn(&mut Bump) -> T) -> u64 {
    let mut bump = Bump { at: 0 };
    place(&mut bump);
    bump.at
}

/// One allocation and the addresses in it.
pub struct Slab<T> {
    /// The addresses, as `place` returned them.
    pub at: T,
    memory: Memory,
}

impl<T> Slab<T> {
    /// Allocates exactly what `place` takes. `place` must take the same buffers in every call.
    pub fn allocate(
        device: &Arc<Device>,
        what: &str,
        place: impl Fn(&mut Bump) -> T,
    ) -> Result<Slab<T>, CudaError> {
        let memory = device.allocate(bytes_of(&place), what)?;
        let mut bump = Bump {
            at: memory.address(),
        };
        Ok(Slab {
            at: place(&mut bump),
            memory,
        })
    }

    /// Bytes of the allocation.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}
