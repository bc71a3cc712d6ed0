//! The attention kernels: which of them a GPU runs, and their geometry as the sources state it.

use super::{ATTENTION_BF16, ATTENTION_F32, ATTENTION_WGMMA, Kernels};
use crate::engine::ModelConfig;
use crate::engine::cuda::driver::Grid;
use crate::engine::cuda::options::Precision;
use crate::engine::cuda::workspace::Shape;

/// Largest head size of any kernel.
pub const MOST_HEAD_DIM: usize = 256;
/// Largest head size of attention_bf16.cu.
const MMA_HEAD_DIM: usize = 128;

/// One source of attention kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Without tensor cores: f32, and bf16 of heads above [`MMA_HEAD_DIM`] or with a window.
    F32,
    /// bf16 on tensor cores of any supported GPU (`mma.sync`).
    Mma,
    /// bf16 on Hopper (`wgmma`), for the head sizes of most models.
    Wgmma,
}

impl Variant {
    /// The fastest one for a model on a GPU of this compute capability.
    pub fn of(config: &ModelConfig, precision: Precision, capability: (u32, u32)) -> Variant {
        let sizes = [64, 128].contains(&config.head_dim);
        match precision {
            Precision::F32 => Variant::F32,
            Precision::Bf16 if config.head_dim > MMA_HEAD_DIM => Variant::F32,
            Precision::Bf16 if capability == (9, 0) && sizes && Sums::fit(config) => Variant::Wgmma,
            Precision::Bf16 => Variant::Mma,
        }
    }

    pub fn kernels(self) -> &'static Kernels {
        match self {
            Variant::F32 => &ATTENTION_F32,
            Variant::Mma => &ATTENTION_BF16,
            Variant::Wgmma => &ATTENTION_WGMMA,
        }
    }
}

/// What a grid depends on besides the micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    pub variant: Variant,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Geometry {
    /// Blocks, threads and shared memory of an attention kernel.
    pub fn grid(self, kernel: &str, shape: Shape) -> Grid {
        let tiles = shape.seq_len.div_ceil(self.rows(kernel));
        let (heads, rows) = (self.heads, shape.sequences());
        let blocks = match kernel {
            "attention_backward" => [heads * rows * tiles, 1, 1],
            "attention_backward_keys" => [self.kv_heads, rows, tiles],
            _ => [heads, rows, tiles],
        };
        let [x, y, z] = blocks.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        Grid {
            blocks: (x, y, z),
            threads: if kernel == "attention_backward" {
                384
            } else {
                128
            },
            shared: self.shared_bytes(kernel),
        }
    }

    /// Rows of a block's tile.
    fn rows(self, kernel: &str) -> usize {
        match (self.variant, kernel) {
            (Variant::F32, _) | (_, "attention_delta") => 32,
            (Variant::Mma, "attention_backward_keys") => self.keys(),
            (Variant::Wgmma, "attention_forward") => 64,
            (Variant::Mma | Variant::Wgmma, _) => 128,
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
        let bytes = match (self.variant, kernel) {
            (_, "attention_delta") => 0,
            (Variant::F32, kernel) => {
                let stride = 4 * (self.head_dim.div_ceil(4) | 1);
                let rows = if kernel == "attention_forward" {
                    384
                } else {
                    512
                };
                rows * stride + 4608
            }
            (Variant::Mma, "attention_forward") => 384 * (self.padded() + 8),
            (Variant::Mma, "attention_backward_queries") => 640 * (self.padded() + 8),
            (Variant::Mma, _) => (4 * self.keys() + 256) * (self.padded() + 8) + 512,
            (Variant::Wgmma, "attention_forward") if self.head_dim == 64 => 73_728,
            (Variant::Wgmma, "attention_forward") => 81_920,
            (Variant::Wgmma, _) if self.head_dim == 64 => 165_904,
            (Variant::Wgmma, _) => 164_880,
        };
        bytes as u32
    }

    /// Where the blocks of `attention_backward` of [`Variant::Wgmma`] add up, from `at` on.
    pub fn sums(self, at: u64, shape: Shape) -> Sums {
        let [queries, keys] = [self.heads, self.kv_heads].map(|heads| heads * self.head_dim);
        let shared = self.kv_heads < self.heads;
        let key_sums = at + bytes(shape.tokens() * queries);
        let turns = key_sums + bytes(if shared { 2 * shape.tokens() * keys } else { 0 });
        let query_rows = if self.head_dim == 64 { 128 } else { 64 };
        let tiles = shape.tokens() / query_rows + shape.sequences();
        let counters = tiles * (self.heads + 2 * self.kv_heads);
        Sums {
            queries: at,
            keys: key_sums,
            turns,
            turn_bytes: 4 * (1 + counters),
        }
    }
}

/// Device memory of the blocks' sums, and the counters of whose turn it is.
#[derive(Debug, Clone, Copy)]
pub struct Sums {
    pub queries: u64,
    pub keys: u64,
    pub turns: u64,
    pub turn_bytes: usize,
}

impl Sums {
    /// Whether they fit the gates and ups of a block, which its backward pass no longer needs by then, whatever the
    /// micro-batch.
    fn fit(config: &ModelConfig) -> bool {
        let geometry = Geometry {
            variant: Variant::Wgmma,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        };
        // Sequences of one token need most for each of their tokens.
        let n = 128;
        let rows = Shape {
            batch: n,
            seq_len: 1,
            sequences: None,
            drops: false,
        };
        let sums = geometry.sums(0, rows);
        let gates = n * Precision::Bf16.size() * config.inner();
        sums.turns + sums.turn_bytes as u64 <= gates as u64
    }
}

/// Bytes of f32 elements.
fn bytes(elements: usize) -> u64 {
    (elements * size_of::<f32>()) as u64
}
