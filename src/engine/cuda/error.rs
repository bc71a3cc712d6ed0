//! Errors of CUDA's libraries.

use super::libraries::Problem;
use crate::util::format;

/// Why a call to CUDA failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CudaError {
    /// Device memory, pinned memory, a module or a library handle could not be allocated.
    #[error("out of memory: cannot allocate {}{what}; use a smaller per_device_batch_size, or end other \
             programs on the GPU", amount(*.bytes))]
    OutOfMemory {
        /// The purpose of the memory, or the function that failed.
        what: String,
        /// Bytes that were asked for; 0 where the library does not say.
        bytes: u64,
    },
    /// A call of the driver, cuBLASLt or NVRTC failed.
    #[error("{function} failed with {code}: {words}")]
    Call {
        function: &'static str,
        /// Name of the error code, for example `CUDA_ERROR_ILLEGAL_ADDRESS`.
        code: String,
        /// The library's description of the code.
        words: String,
    },
    /// A library cannot be used.
    #[error("{library}: {problem}")]
    Library {
        /// The common name of the library.
        library: &'static str,
        /// The reason, and the remedy.
        problem: Problem,
    },
    /// NVRTC refused a source.
    #[error("{file} does not compile:\n{log}")]
    Compile { file: &'static str, log: String },
    /// A call of NCCL failed, or an operation that NCCL runs.
    #[error("{who}: {function} failed with {failure}; {remedy}")]
    Nccl {
        /// The rank, for example `rank 0 of 4`.
        who: String,
        function: &'static str,
        /// Name of the `ncclResult_t`, for example `ncclRemoteError`, NCCL's description of it and its last message.
        failure: String,
        remedy: &'static str,
    },
    /// A wait for other ranks reached its limit. The communicator is aborted.
    #[error(
        "{who}: {what} within {seconds} s: another rank is lost, or does something else; restart \
             all ranks, and find the rank with NCCL_DEBUG=INFO"
    )]
    NcclTimeout {
        /// The rank, for example `rank 0 of 4`.
        who: String,
        /// What did not happen, for example `the other ranks did not join`.
        what: &'static str,
        seconds: f64,
    },
    /// The communicator was aborted before the call or during it.
    #[error("{who}: the communicator is aborted; form a new one")]
    NcclAborted {
        /// The rank, for example `rank 0 of 4`.
        who: String,
    },
    /// The device cannot be used: exclusive mode, MIG without instances, a capability below 8.0 and the like.
    #[error("{0}")]
    Unusable(String),
}

/// Codes of a GPU that no longer works, whatever runs on it.
const OF_A_LOST_DEVICE: [&str; 7] = [
    "CUDA_ERROR_UNKNOWN",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_NO_DEVICE",
];

impl CudaError {
    /// An allocation of unknown size failed.
    pub(super) fn out_of_memory(what: impl Into<String>) -> CudaError {
        let what = what.into();
        CudaError::OutOfMemory { what, bytes: 0 }
    }

    /// Whether a new process would fail again: a library or a device is unfit.
    pub fn is_deterministic(&self) -> bool {
        matches!(
            self,
            CudaError::Library { .. } | CudaError::Compile { .. } | CudaError::Unusable(_)
        )
    }

    /// Whether the GPU is lost: it fell off the bus, or its memory has an error that cannot be corrected.
    pub fn is_of_a_lost_device(&self) -> bool {
        matches!(self, CudaError::Call { code, .. } if OF_A_LOST_DEVICE.contains(&code.as_str()))
    }

    /// Whether a collective failed, perhaps because of another rank.
    pub fn is_of_nccl(&self) -> bool {
        matches!(
            self,
            CudaError::Nccl { .. } | CudaError::NcclAborted { .. } | CudaError::NcclTimeout { .. }
        )
    }
}

/// Bytes as the begin of a phrase, if they are known.
fn amount(bytes: u64) -> String {
    if bytes == 0 {
        String::new()
    } else {
        format!("{} for ", format::bytes(bytes))
    }
}
