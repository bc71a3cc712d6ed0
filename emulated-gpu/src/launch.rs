//! The interface between the driver and the PTX interpreter: one launch of a kernel.

use std::fmt;

/// Global memory as a kernel sees it. Addresses are device pointers.
///
/// An implementation checks that a range lies in one allocation and is initialised before it is read.
pub trait GlobalMemory {
    /// Reads `into.len()` bytes.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryFault>;
    /// Writes the bytes.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryFault>;
}

/// A wrong access to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryFault {
    #[error("no allocation contains {bytes} bytes at {address:#x}")]
    OutOfBounds { address: u64, bytes: u64 },
    #[error("{bytes} bytes at {address:#x} were freed")]
    Freed { address: u64, bytes: u64 },
    #[error("{bytes} bytes at {address:#x} are read before they are written")]
    Uninitialised { address: u64, bytes: u64 },
}

/// A number of threads or blocks in x, y and z.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dim {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl Dim {
    /// The product.
    pub fn count(self) -> u64 {
        u64::from(self.x) * u64::from(self.y) * u64::from(self.z)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {}, {})", self.x, self.y, self.z)
    }
}

/// Geometry and arguments of a launch.
#[derive(Debug, Clone)]
pub struct Launch<'a> {
    /// Blocks.
    pub grid: Dim,
    /// Threads of each block.
    pub block: Dim,
    /// Bytes of `extern .shared` memory of each block.
    pub dynamic_shared: u32,
    /// The parameters as the kernel's `.param` space lays them out.
    pub parameters: &'a [u8],
    /// Orders warps and blocks.
    pub seed: u64,
}
