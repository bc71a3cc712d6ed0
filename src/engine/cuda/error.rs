//! Errors of CUDA's libraries.

use super::libraries::Problem;

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
        /// The C function.
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
    Compile {
        /// The source file.
        file: &'static str,
        /// NVRTC's log.
        log: String,
    },
    /// The device cannot be used: exclusive mode, MIG without instances, a capability below 8.0 and the like.
    #[error("{0}")]
    Unusable(String),
}

/// Bytes as the begin of a phrase, if they are known.
fn amount(bytes: u64) -> String {
    if bytes == 0 {
        String::new()
    } else {
        format!("{bytes} bytes for ")
    }
}
