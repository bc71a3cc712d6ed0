//! Geometry of the attention kernels, as their sources state it.

use crate::engine::cuda::driver::Grid;
use crate::engine::cuda::options::Precision;
use crate::engine::cuda::workspace::Shape;

/// Threads of a block.
const THREADS: u32 = 128;

/// Kernels that use dynamic shared memory.
pub const TILED: [&str; 3] = [
    "attention_forward",
    "attention_backward_queries",
    "attention_backward_keys",
];

/// What a grid depends on besides the micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    pub precision: Precision,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Geometry {
    /// Blocks, threads and shared memory of an attention kernel.
    pub fn grid(self, kernel: &str, shape: Shape) -> Grid {
        let tiles = shape.seq_len.div_ceil(self.rows(kernel));
        let heads = match kernel {
            "attention_backward_keys" => self.kv_heads,
            _ => self.heads,
        };
        let [x, y, z] = [heads, shape.batch, tiles].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        Grid {
            blocks: (x, y, z),
            threads: THREADS,
            shared: self.shared_bytes(kernel),
        }
    }

    /// Rows of a block's tile.
    fn rows(self, kernel: &str) -> usize {
        match (self.precision, kernel) {
            (Precision::F32, _) | (_, "attention_delta") => 32,
            (Precision::Bf16, "attention_backward_keys") => self.keys(),
            (Precision::Bf16, _) => 128,
        }
    }

    /// `DIM` of attention_bf16.cu: the head size, padded for `mma`.
    fn padded(self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// `KEYS` of attention_bf16.cu.
    fn keys(self) -> usize {
        if self.padded() <= 64 { 128 } else { 64 }
    }

    /// Bytes of dynamic shared memory.
    pub fn shared_bytes(self, kernel: &str) -> u32 {
        let bytes = match (self.precision, kernel) {
            (_, "attention_delta") => 0,
            (Precision::F32, kernel) => {
                let stride = 4 * (self.head_dim.div_ceil(4) | 1);
                let rows = if kernel == "attention_forward" {
                    384
                } else {
                    512
                };
                rows * stride + 4608
            }
            (Precision::Bf16, "attention_forward") => 384 * (self.padded() + 8),
            (Precision::Bf16, "attention_backward_queries") => 640 * (self.padded() + 8),
            (Precision::Bf16, _) => (4 * self.keys() + 256) * (self.padded() + 8) + 512,
        };
        bytes as u32
    }
}
