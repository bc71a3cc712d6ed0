//! The interface between the driver and the PTX interpreter: one launch of a kernel.

use std::collections::BTreeMap;
use std::fmt;

/// Global memory as a kernel sees it. Addresses are device pointers.
///
/// An implementation checks that a range lies in one allocation and is initialised before it is read.
pub trait GlobalMemory {
    /// Reads `into.len()` bytes.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryFault>;
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

/// A parameter of a kernel in its `.param` space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Bytes from the start of the parameters.
    pub offset: u32,
    /// Bytes of the value.
    pub bytes: u32,
}

/// What the driver must know of a kernel to check and pack a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    pub name: String,
    pub parameters: Vec<Parameter>,
    /// Bytes of static shared memory of each block.
    pub static_shared: u32,
    /// Bytes of local memory of each thread.
    pub local: u32,
    /// Registers of each thread.
    pub registers: u32,
    /// The largest block that the kernel allows (`.maxntid`), 1024 by default.
    pub max_threads: u32,
}

impl Kernel {
    /// Bytes of all parameters.
    pub fn parameter_bytes(&self) -> usize {
        let end = |parameter: &Parameter| (parameter.offset + parameter.bytes) as usize;
        self.parameters.iter().map(end).max().unwrap_or(0)
    }
}

/// A variable of a module in global memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    pub name: String,
    /// The initial value; its length is the variable's.
    pub initial: Vec<u8>,
}

/// A loaded module: what the driver needs from whatever executes its kernels.
pub trait Program: Send + Sync {
    /// Parses the text of a module.
    fn load(text: &str) -> Result<Box<dyn Program>, LoadError>
    where
        Self: Sized;
    fn kernels(&self) -> &[Kernel];
    /// The module's variables in global memory.
    fn globals(&self) -> &[Global];
    /// Gives a variable, by its index, its address. The driver places every variable once, before the first
    /// launch.
    fn place(&mut self, global: usize, address: u64);
    /// Runs every block of a launch and returns what it counted.
    fn run(
        &self,
        kernel: &str,
        launch: &Launch<'_>,
        memory: &mut dyn GlobalMemory,
    ) -> Result<Counts, LaunchError>;
}

/// What launches count, for example instructions or bank conflicts. The report has their sums by kernel.
pub type Counts = BTreeMap<&'static str, u64>;

/// Why a module cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    #[error("invalid PTX: {0}")]
    Invalid(String),
    #[error("the emulator does not model {0}")]
    Unsupported(String),
}

/// Why a launch failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct LaunchError {
    pub failure: Failure,
    /// What failed and where, for people.
    pub message: String,
}

/// What the driver reports of a failed launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// An access outside of an allocation, or to freed memory.
    Address,
    Misaligned,
    Instruction,
    /// An assertion of the kernel.
    Assert,
    /// Shared memory or registers exceed the device's.
    Resources,
    /// A trap, and every error that a real GPU does not report, for example a read of uninitialised memory.
    Launch,
}

impl LaunchError {
    pub fn new(failure: Failure, message: impl fmt::Display) -> LaunchError {
        LaunchError {
            failure,
            message: message.to_string(),
        }
    }
}

impl From<MemoryFault> for Failure {
    fn from(fault: MemoryFault) -> Failure {
        match fault {
            MemoryFault::OutOfBounds { .. } | MemoryFault::Freed { .. } => Failure::Address,
            MemoryFault::Uninitialised { .. } => Failure::Launch,
        }
    }
}

impl From<MemoryFault> for LaunchError {
    fn from(fault: MemoryFault) -> LaunchError {
        LaunchError::new(fault.into(), fault)
    }
}
