//! Options of the engine.

use std::path::PathBuf;

use super::precision::Precision;
use crate::engine::{Measure, Strategy};

/// Options of a [`super::CudaEngine`].
#[derive(Debug, Clone, Default)]
pub struct CudaOptions {
    /// Arithmetic of activations and matrix products.
    pub precision: Precision,
    /// Bytes of device memory that the engine may use; `None`: the device's memory.
    pub memory_limit: Option<u64>,
    /// Store only the inputs of blocks and recompute their activations in backward.
    pub activation_checkpointing: bool,
    /// Distribution of the state over the ranks.
    pub strategy: Strategy,
    /// The measurements that any step may request; their memory is reserved.
    pub measure: Measure,
    /// Launch every kernel by itself instead of as a CUDA graph. Walks with collectives never are graphs.
    pub no_graphs: bool,
    /// Rows whose logits exist at a time; `None`: as many as have 2^27 logits.
    pub logits_rows: Option<usize>,
    /// Directory of compiled kernels; `None`: the user's cache directory.
    pub kernel_cache: Option<PathBuf>,
}
