//! Which check finds a mistake in a kernel.

use std::fmt;

use emulated_gpu::launch::MemoryFault;
use emulated_gpu::ptx::{Fault, RunError};

/// A check of the emulator, or of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Check {
    Race,
    Barrier,
    Uninitialised,
    OutOfBounds,
    Misaligned,
    PendingCopy,
    /// Registers or shared memory of a `wgmma` without an order with it.
    AsyncProduct,
    AbsentLanes,
    Limits,
    /// A trap, or a branch or an operand that cannot be executed.
    Illegal,
    Value,
    /// Bits that differ between orders of warps.
    Order,
    /// Operations that ptxas may fuse where each must be rounded.
    Fusible,
    /// Bank conflicts, sectors or bytes.
    Cost,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Check::Race => "race in shared memory",
            Check::Barrier => "barrier not reached",
            Check::Uninitialised => "uninitialised read",
            Check::OutOfBounds => "out of bounds",
            Check::Misaligned => "misaligned access",
            Check::PendingCopy => "copy not waited for",
            Check::AsyncProduct => "wgmma without an order",
            Check::AbsentLanes => "absent lanes in a mask",
            Check::Limits => "limits of a launch",
            Check::Illegal => "illegal instruction",
            Check::Value => "wrong value",
            Check::Order => "order of warps changes bits",
            Check::Fusible => "operations that may fuse",
            Check::Cost => "cost",
        })
    }
}

/// A mistake that a check found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{by}: {message}")]
pub struct Caught {
    pub by: Check,
    pub message: String,
}

impl From<RunError> for Caught {
    fn from(error: RunError) -> Self {
        let message = error.to_string();
        let by = match error {
            RunError::Launch(_) => Check::Limits,
            RunError::Execution(error) => match error.fault {
                Fault::Race { .. } => Check::Race,
                Fault::DivergentBarrier { .. }
                | Fault::BarrierCount { .. }
                | Fault::BarrierElsewhere { .. }
                | Fault::BarrierInvalid { .. }
                | Fault::BarrierAfterExit { .. }
                | Fault::Deadlock { .. } => Check::Barrier,
                Fault::UninitialisedRegister { .. }
                | Fault::UninitialisedMemory { .. }
                | Fault::Global(MemoryFault::Uninitialised { .. }) => Check::Uninitialised,
                Fault::OutOfWindow { .. } | Fault::Global(_) | Fault::CopySize { .. } => {
                    Check::OutOfBounds
                }
                Fault::Misaligned { .. } => Check::Misaligned,
                Fault::PendingCopy { .. } => Check::PendingCopy,
                Fault::OperandUnderWay { .. }
                | Fault::NoProxyFence { .. }
                | Fault::RegisterUnderWay { .. }
                | Fault::NoRegisterFence { .. } => Check::AsyncProduct,
                Fault::InactiveLanes { .. }
                | Fault::NotInMask { .. }
                | Fault::NoWarpgroup { .. }
                | Fault::WarpgroupDiffers { .. }
                | Fault::WarpgroupExited { .. } => Check::AbsentLanes,
                Fault::Budget { .. } => Check::Limits,
                Fault::Descriptor { .. }
                | Fault::NotUniform
                | Fault::BranchIndex { .. }
                | Fault::Trap => Check::Illegal,
            },
        };
        Self { by, message }
    }
}

/// Returns that a check has failed unless the condition holds.
macro_rules! ensure {
    ($check:expr, $condition:expr, $($message:tt)+) => {
        let holds: bool = $condition;
        if !holds {
            return Err($crate::support::caught::Caught {
                by: $check,
                message: format!($($message)+),
            });
        }
    };
}

pub(crate) use ensure;
