//! Options of the engine.

use std::path::PathBuf;
use std::sync::Arc;

use crate::comm::activity::Activity;
use crate::engine::{Adapters, Measure, Strategy, TokenLoss};

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
    /// Hold only weights, and the activations of one block: nothing is trained.
    pub forward_only: bool,
    pub token_loss: TokenLoss,
    /// Train only these; the model is frozen.
    pub adapters: Option<Adapters>,
    /// Reserve memory for [`Noise`](crate::engine::Noise) on the embeddings.
    pub noisy: bool,
    /// Reserve memory for the sequences of packed rows ([`MicroBatch::starts`](crate::engine::MicroBatch::starts)).
    pub packed: bool,
    /// Launch every kernel by itself instead of as a CUDA graph. Walks with collectives never are graphs.
    pub no_graphs: bool,
    /// Rows whose logits exist at a time; `None`: as many as have 2^27 logits, in
    /// multiples of 128.
    pub logits_rows: Option<usize>,
    /// Where the engine records that it waits for other ranks.
    pub activity: Arc<Activity>,
    /// Directory of compiled kernels; `None`: the user's cache directory.
    pub kernel_cache: Option<PathBuf>,
    /// Files of the fastest algorithms of matrix products, see [`super::measured`]; `None`: nothing is measured.
    pub products: Option<Vec<PathBuf>>,
}

/// A type of elements. As the engine's arithmetic: master weights, gradients, the residual stream and all sums are
/// f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// Activations and operands of matrix products in bf16.
    #[default]
    Bf16,
    /// Everything in f32, without TF32; for comparisons with the CPU engine.
    F32,
}

impl Precision {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Precision::Bf16 => 2,
            Precision::F32 => 4,
        }
    }

    /// The options that compile a kernel for this precision.
    pub fn options(self) -> Vec<String> {
        match self {
            Precision::Bf16 => vec!["-DREAL_BF16=1".to_owned()],
            Precision::F32 => Vec::new(),
        }
    }
}
