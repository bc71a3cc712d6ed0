//! Activations and scratch of one micro-batch, in one allocation that is reserved before the first step.

use super::arena::Bump;
use super::cublaslt::Blas;
use super::options::CudaOptions;
use super::options::Precision;
use crate::engine::{Capacity, MicroBatch, ModelConfig};

/// Elements of logits that exist at a time; 256 MiB in bf16.
const LOGITS: usize = 1 << 27;
/// Blocks whose partial sums give the gradient of vectors: four per multiprocessor of an H200.
const VECTOR_BLOCKS: usize = 528;
/// Most adapters of layers that are computed together: queries, keys and values.
const TOGETHER: usize = 3;
/// Most partial sums of a squared norm.
pub const PARTIALS: usize = 1024;

/// Size of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    pub batch: usize,
    /// Number of tokens in a row.
    pub seq_len: usize,
    /// Sequences in packed rows, with some empty ones, so that few numbers occur; `None` where each row is one.
    pub sequences: Option<usize>,
    /// Whether inputs of adapters are dropped.
    pub drops: bool,
}

impl Shape {
    pub fn of(micro_batch: MicroBatch<'_>) -> Shape {
        let n = micro_batch.tokens.len();
        let sequences = micro_batch.starts.len();
        Shape {
            batch: micro_batch.batch,
            seq_len: micro_batch.seq_len,
            sequences: (sequences > 0).then(|| sequences.next_power_of_two().min(n)),
            drops: !micro_batch.dropout.is_empty(),
        }
    }

    /// Sequences, with empty ones.
    pub fn sequences(self) -> usize {
        self.sequences.unwrap_or(self.batch)
    }

    pub fn tokens(self) -> usize {
        self.batch * self.seq_len
    }
}

/// Addresses of activations and scratch. n is the number of tokens; *real* is the precision's element.
#[derive(Debug)]
pub struct Workspace {
    /// What the host sends for a micro-batch.
    pub inputs: Inputs,
    /// The residual stream before every block and after the last, f32 `[n, hidden]` each; two that take turns where nothing
    /// is trained.
    pub residual: Vec<u64>,
    /// Activations for the backward pass of every block; a single stash under activation checkpointing, and where nothing is
    /// trained.
    pub stashes: Vec<Stash>,
    /// Cosines and sines, f32 `[seq_len, rotary_dim]`.
    pub rope: u64,
    /// Real `[n, max(hidden, heads × head_dim)]`.
    pub narrow: u64,
    /// Real `[n, max(hidden, intermediate, qkv)]`.
    pub wide: u64,
    /// Gradient of the residual stream, f32 `[n, hidden]`.
    pub dx: u64,
    /// The same as an operand of matrix products, real `[n, hidden]`; `dx` itself in f32, unless norms add to that before the
    /// products have read it (a parallel residual).
    pub dx_operand: u64,
    /// Partial sums of the gradient of vectors, f32 `[vector_blocks, the widest vectors]`.
    pub vector_partials: u64,
    /// What forward keeps of the final norm, f32 `[n, statistics]`.
    pub head_statistics: u64,
    /// Attention's Σ dO · O, f32 `[batch, heads, seq_len]`.
    pub delta: u64,
    /// Real `[logits_rows, vocabulary]`.
    pub logits: u64,
    /// Rows whose logits exist at a time.
    pub logits_rows: usize,
    /// Cross-entropies, f64 `[n]`.
    pub losses: u64,
    /// Factors of their gradients, f32 `[n]`, where a loss weighs them.
    pub weights: u64,
    /// Between the matrices of an adapter, real `[n, rank]`; empty without adapters.
    pub low: u64,
    /// Its gradient for each adapter of the layers that are computed together, real `[3, n, rank]`: the backward pass of a
    /// layer's input leaves it to that of its weights, which follows.
    pub dlow: u64,
    /// An adapter's input after dropout, or the gradient of that, real `[n, the widest input]`; empty without dropout.
    pub dropped: u64,
    /// Partial sums of squared norms, f64: of the micro-batch's gradient, of the step's, and of the step's over
    /// all ranks.
    pub square_partials: [u64; 3],
    pub scalars: u64,
    /// ‖the step's gradient over all ranks‖², f64.
    pub reduced_norm: u64,
    pub blas: u64,
}

/// What the host sends for a micro-batch, adjacent in this order: u32 each, except `factors`; of a key the lower half
/// first.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    /// Token ids, `[n]`.
    pub tokens: u64,
    /// Targets, `[n]`.
    pub targets: u64,
    pub by_token: Grouped,
    /// 1 / target tokens of the micro-batch, and of the step so far, f32 `[2]`; 0 without targets.
    pub factors: u64,
    /// Key and magnitude of the noise of each row, `[n, 3]`, if memory is reserved for it.
    pub noise: Option<u64>,
    /// Key of the dropout of each row, `[n, 2]`, for adapters with dropout.
    pub dropout: Option<u64>,
    /// If memory is reserved for it.
    pub packed: Option<Packed>,
    /// Bytes of all of them.
    pub bytes: usize,
}

/// The rows of a micro-batch, grouped by the row of a table that each uses.
#[derive(Debug, Clone, Copy)]
pub struct Grouped {
    /// Rows, group by group, `[n]`.
    pub order: u64,
    /// Where each group begins in `order`, and the end of the last, `[n + 1]`.
    pub starts: u64,
    /// The row of the table of each group, `[n]`.
    pub distinct: u64,
    /// Number of groups, `[1]`.
    pub count: u64,
}

/// The sequences of packed rows.
#[derive(Debug, Clone, Copy)]
pub struct Packed {
    /// The first token of each sequence, and its number of tokens, `[n, 2]`.
    pub spans: u64,
    /// The position of each token in its sequence, `[n]`.
    pub positions: u64,
    /// For models with position embeddings.
    pub by_position: Option<Grouped>,
}

/// Activations of one block.
#[derive(Debug)]
pub struct Stash {
    /// What forward keeps of the norm of the block's input, f32 `[n, statistics]`.
    pub input_statistics: u64,
    /// Rotated queries and keys, and values, real `[n, qkv]`.
    pub qkv: u64,
    /// Queries and keys before their norms, real `[n, queries and keys]`; empty without these norms.
    pub unnormed: u64,
    /// Logarithms of attention's softmax sums, f32 `[batch, heads, seq_len]`.
    pub log_sums: u64,
    /// Attention's output before its projection, real `[n, heads × head_dim]`.
    pub attended: u64,
    /// The residual stream after attention, f32 `[n, hidden]`.
    pub middle: u64,
    /// The same of the norm before the MLP.
    pub middle_statistics: u64,
    /// Gates and ups, real `[n, inner]`, or only ups; backward replaces them by their gradient, and then uses the memory
    /// for the sums of attention.
    pub gate_up: u64,
}

/// The results of a micro-batch, f64 each, adjacent on the device.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Scalars {
    /// Sum of the cross-entropies.
    pub loss: f64,
    /// ‖gradient of the micro-batch‖².
    pub own: f64,
    /// ‖gradient of the step so far‖².
    pub whole: f64,
}

impl Scalars {
    /// Bytes on the device.
    pub const BYTES: usize = 24;

    /// The values from their bytes on the device.
    pub fn from_bytes(bytes: &[u8]) -> Scalars {
        let [loss, own, whole] = bytemuck::pod_read_unaligned(&bytes[..Scalars::BYTES]);
        Scalars { loss, own, whole }
    }
}

impl Workspace {
    pub fn place(
        bump: &mut Bump,
        config: &ModelConfig,
        capacity: Capacity,
        options: &CudaOptions,
    ) -> Workspace {
        let precision = options.precision;
        let (n, hidden) = (capacity.tokens, config.hidden_size);
        let real = precision.size();
        let layers = config.num_hidden_layers;
        let stashes = match options.activation_checkpointing || options.forward_only {
            true => 1,
            false => layers,
        };
        let residuals = if options.forward_only { 2 } else { layers + 1 };
        let queries = config.queries();
        let logits_rows = options
            .logits_rows
            .unwrap_or_else(|| logits_rows(config.vocab_size))
            .clamp(1, n);
        let dx = bump.f32(n * hidden);
        let rank = options.adapters.as_ref().map_or(0, |it| it.rank);
        Workspace {
            inputs: Inputs::place(bump, config, n, options),
            residual: (0..residuals).map(|_| bump.f32(n * hidden)).collect(),
            stashes: (0..stashes)
                .map(|_| Stash::place(bump, config, n, real))
                .collect(),
            rope: bump.f32(capacity.seq_len * config.rotary_dim()),
            narrow: bump.take(n * hidden.max(queries), real),
            wide: bump.take(
                n * hidden.max(config.intermediate_size).max(config.qkv()),
                real,
            ),
            dx,
            dx_operand: match precision {
                Precision::F32 if !config.parallel_residual => dx,
                Precision::F32 | Precision::Bf16 => bump.take(n * hidden, real),
            },
            vector_partials: bump.f32(vector_blocks(n) * config.widest_vectors()),
            head_statistics: bump.f32(n * config.norm.statistics()),
            delta: bump.f32(n * config.num_attention_heads),
            logits: bump.take(logits_rows * config.vocab_size, real),
            logits_rows,
            losses: bump.take(n, size_of::<f64>()),
            weights: bump.f32(n),
            low: bump.take(n * rank, real),
            dlow: bump.take(
                if options.forward_only {
                    0
                } else {
                    TOGETHER * n * rank
                },
                real,
            ),
            dropped: match drops(options) {
                true => bump.take(n * hidden.max(queries).max(config.intermediate_size), real),
                false => bump.take(0, real),
            },
            square_partials: [(); 3].map(|()| bump.take(PARTIALS, size_of::<f64>())),
            scalars: bump.take(Scalars::BYTES, 1),
            reduced_norm: bump.take(1, size_of::<f64>()),
            blas: bump.take(Blas::WORKSPACE as usize, 1),
        }
    }
}

impl Inputs {
    fn place(bump: &mut Bump, config: &ModelConfig, n: usize, options: &CudaOptions) -> Inputs {
        let noise = if options.noisy { 3 * n } else { 0 };
        let keys = if drops(options) { 2 * n } else { 0 };
        let by_position = options.packed && config.position_embeddings;
        let packed = if options.packed { 3 * n } else { 0 };
        let groups = (1 + usize::from(by_position)) * Grouped::elements(n);
        // One buffer, so that one copy fills it.
        let bytes = (2 * n + packed + groups + 2 + noise + keys) * size_of::<u32>();
        let mut at = bump.take(bytes, 1);
        let mut take = |elements: usize| {
            let address = at;
            at += (elements * size_of::<u32>()) as u64;
            address
        };
        let (tokens, targets) = (take(n), take(n));
        // Spans are read in pairs, and these are aligned here.
        let packed = options.packed.then(|| (take(2 * n), take(n)));
        Inputs {
            tokens,
            targets,
            by_token: Grouped::place(&mut take, n),
            factors: take(2),
            noise: options.noisy.then(|| take(noise)),
            dropout: drops(options).then(|| take(keys)),
            packed: packed.map(|(spans, positions)| Packed {
                spans,
                positions,
                by_position: by_position.then(|| Grouped::place(&mut take, n)),
            }),
            bytes,
        }
    }

    /// The sequences of a micro-batch of this shape, if its rows are packed.
    pub fn packed(&self, shape: Shape) -> Option<&Packed> {
        self.packed.as_ref().filter(|_| shape.sequences.is_some())
    }

    /// Writes a micro-batch to `bytes`, the host's copy of the inputs. `counts` are its target tokens, or samples, and the
    /// step's so far. The embedding of the token `unmoved` has no gradient: it is not among the distinct ones.
    pub fn fill(
        &self,
        bytes: &mut [u8],
        micro_batch: MicroBatch<'_>,
        counts: [u64; 2],
        unmoved: Option<u32>,
    ) {
        let inverse = |targets: u64| {
            if targets > 0 {
                1.0 / targets as f32
            } else {
                0.0
            }
        };
        let mut put = |address: u64, values: &[u32]| {
            let values = bytemuck::cast_slice::<u32, u8>(values);
            let at = (address - self.tokens) as usize;
            bytes[at..at + values.len()].copy_from_slice(values);
        };
        put(self.tokens, micro_batch.tokens);
        put(self.targets, micro_batch.targets);
        self.by_token.fill(&mut put, micro_batch.tokens, unmoved);
        put(self.factors, &counts.map(|n| inverse(n).to_bits()));
        if let Some(address) = self.noise {
            let mut noise: Vec<u32> = (micro_batch.noise.iter())
                .flat_map(|it| {
                    let [low, high] = halves(it.key);
                    [low, high, it.magnitude.to_bits()]
                })
                .collect();
            noise.resize(3 * micro_batch.batch, 0);
            put(address, &noise);
        }
        if let Some(address) = self.dropout {
            let keys = micro_batch.dropout.iter().flat_map(|&key| halves(key));
            put(address, &keys.collect::<Vec<u32>>());
        }
        let shape = Shape::of(micro_batch);
        if let Some(packed) = self.packed(shape) {
            let sequences = micro_batch.sequences().into_iter();
            let spans = sequences.flat_map(|it| [it.start as u32, it.len() as u32]);
            let mut spans: Vec<u32> = spans.collect();
            spans.resize(2 * shape.sequences(), 0);
            put(packed.spans, &spans);
            let positions = micro_batch.positions(0);
            put(packed.positions, &positions);
            if let Some(by_position) = &packed.by_position {
                by_position.fill(&mut put, &positions, None);
            }
        }
    }
}

impl Grouped {
    fn elements(n: usize) -> usize {
        3 * n + 2
    }

    fn place(take: &mut impl FnMut(usize) -> u64, n: usize) -> Grouped {
        Grouped {
            order: take(n),
            starts: take(n + 1),
            distinct: take(n),
            count: take(1),
        }
    }

    /// Groups the rows by their row of the table, but those that use `unmoved`.
    fn fill(&self, put: &mut impl FnMut(u64, &[u32]), of_rows: &[u32], unmoved: Option<u32>) {
        let mut order: Vec<u32> = (0..of_rows.len() as u32)
            .filter(|&row| Some(of_rows[row as usize]) != unmoved)
            .collect();
        // Stable, so that sums have the order of the rows.
        order.sort_by_key(|&row| of_rows[row as usize]);
        let (mut starts, mut distinct) = (Vec::new(), Vec::new());
        for (at, &row) in order.iter().enumerate() {
            let of_row = of_rows[row as usize];
            if distinct.last() != Some(&of_row) {
                starts.push(at as u32);
                distinct.push(of_row);
            }
        }
        starts.push(order.len() as u32);
        put(self.order, &order);
        put(self.starts, &starts);
        put(self.count, &[distinct.len() as u32]);
        put(self.distinct, &distinct);
    }
}

impl Stash {
    fn place(bump: &mut Bump, config: &ModelConfig, n: usize, real: usize) -> Stash {
        let queries = config.queries();
        Stash {
            input_statistics: bump.f32(n * config.norm.statistics()),
            qkv: bump.take(n * config.qkv(), real),
            unnormed: bump.take(n * config.unnormed(), real),
            log_sums: bump.f32(n * config.num_attention_heads),
            attended: bump.take(n * queries, real),
            middle: bump.f32(n * config.hidden_size),
            middle_statistics: bump.f32(n * config.norm.statistics()),
            gate_up: bump.take(n * config.inner(), real),
        }
    }
}

/// Whether inputs of adapters may be dropped.
fn drops(options: &CudaOptions) -> bool {
    options.adapters.as_ref().is_some_and(|it| it.dropout > 0.0)
}

/// The lower and the upper half of a key.
fn halves(key: u64) -> [u32; 2] {
    [key as u32, (key >> 32) as u32]
}

/// Rows whose logits exist at a time: whole tiles of a matrix product.
pub fn logits_rows(vocabulary: usize) -> usize {
    let most = (LOGITS / vocabulary).max(1);
    if most > 128 { most / 128 * 128 } else { most }
}

/// Rows of which each block sums up the gradient of vectors.
pub fn vector_rows(n: usize) -> usize {
    n.div_ceil(VECTOR_BLOCKS).max(1)
}

/// Number of blocks that sum up the gradient of vectors over `n` rows.
pub fn vector_blocks(n: usize) -> usize {
    n.div_ceil(vector_rows(n))
}
