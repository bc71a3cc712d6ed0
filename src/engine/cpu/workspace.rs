//! Activations and scratch of one micro-batch, all reserved before the first step.

use cpu_kernels::{attention, rmsnorm, rope};

use super::arena::{Arena, Buffer};
use crate::engine::{Adapters, Capacity, EngineError, ModelConfig};

/// Elements of logits that exist at a time: 8 MiB, which fit the last-level cache.
const LOGITS: usize = 1 << 21;
/// Least rows of logits, so that the head's weights are not read too often.
const HEAD_ROWS: usize = 128;

/// All memory of a walk over the model besides the store.
pub struct Workspace {
    /// The sizes that the workspace supports.
    pub capacity: Capacity,
    /// The input of every block and the output of the last, `[n, hidden]` each; two that take turns where only forward
    /// passes follow.
    pub inputs: Vec<Buffer>,
    /// Activations for the backward pass of every block; a single stash under activation checkpointing, and in forward
    /// passes.
    pub stashes: Vec<Stash>,
    /// Scratch that all blocks share.
    pub shared: Shared,
}

/// Activations of one block.
pub struct Stash {
    /// What forward keeps of the norm of the block's input, `[n, statistics]`.
    pub input_statistics: Buffer,
    /// Rotated queries and keys, and values, `[n, qkv]`.
    pub qkv: Buffer,
    /// Queries and keys before their norms, `[n, queries and keys]`; empty without these norms.
    pub unnormed: Buffer,
    /// Logarithms of attention's softmax sums, `[batch, heads, seq_len]`.
    pub log_sums: Buffer,
    /// Attention's output before its projection, `[n, heads × head_dim]`.
    pub attended: Buffer,
    /// The residual stream after attention, `[n, hidden]`.
    pub middle: Buffer,
    /// The same of the norm before the MLP.
    pub middle_statistics: Buffer,
    /// Gates and ups, `[n, inner]`, or only ups; backward replaces them by their gradient.
    pub gate_up: Buffer,
}

/// Scratch that blocks and the head share.
pub struct Shared {
    /// `[n, max(hidden, heads × head_dim)]`.
    pub narrow: Buffer,
    /// `[n, max(hidden, intermediate, qkv)]`.
    pub wide: Buffer,
    /// Gradient of the residual stream, `[n, hidden]`.
    pub dx: Buffer,
    /// A copy for matrix products, where norms add to `dx` before these have read it (a parallel residual).
    pub d_output: Option<Buffer>,
    /// Partial sums of the gradients of vectors, and the statistics of the head's rows.
    pub norm_scratch: Buffer,
    /// Scratch for attention's scores; the memory that it has is that of `scores`.
    pub attention: attention::Scratch,
    #[expect(dead_code, reason = "it counts the memory")]
    scores: Vec<Buffer>,
    /// Cosines and sines, `[seq_len, rotary_dim]`.
    pub rope: Buffer,
    /// `[head_rows, vocabulary]`.
    pub logits: Buffer,
    /// `[head_rows, hidden]`.
    pub head: Buffer,
    /// What adapters leave between their matrices and its gradient, `[2, n, rank]`; empty without adapters.
    pub low: Buffer,
    /// Inputs of adapters with dropout, `[n, max(hidden, intermediate, heads × head_dim)]`; empty without dropout.
    pub dropped: Buffer,
    /// Rows that the head takes at a time.
    pub head_rows: usize,
}

impl Workspace {
    /// Reserves the memory; call it on the pool that computes.
    pub fn new(
        arena: &Arena,
        config: &ModelConfig,
        capacity: Capacity,
        (activation_checkpointing, forward_only): (bool, bool),
        adapters: Option<&Adapters>,
    ) -> Result<Workspace, EngineError> {
        let layers = config.num_hidden_layers;
        let inputs = if forward_only { 2 } else { layers + 1 };
        let stashes = match activation_checkpointing || forward_only {
            true => 1,
            false => layers,
        };
        let n = capacity.tokens;
        let what = format!("activations of {n} tokens");
        Ok(Workspace {
            capacity,
            inputs: (0..inputs)
                .map(|_| arena.buffer(n * config.hidden_size, &what))
                .collect::<Result<_, _>>()?,
            stashes: (0..stashes)
                .map(|_| Stash::new(arena, config, n, &what))
                .collect::<Result<_, _>>()?,
            shared: Shared::new(arena, config, capacity, adapters, &what)?,
        })
    }
}

impl Stash {
    fn new(
        arena: &Arena,
        config: &ModelConfig,
        n: usize,
        what: &str,
    ) -> Result<Stash, EngineError> {
        let buffer = |width: usize| arena.buffer(n * width, what);
        let queries = config.queries();
        Ok(Stash {
            input_statistics: buffer(config.norm.statistics())?,
            qkv: buffer(config.qkv())?,
            unnormed: buffer(config.unnormed())?,
            log_sums: buffer(config.num_attention_heads)?,
            attended: buffer(queries)?,
            middle: buffer(config.hidden_size)?,
            middle_statistics: buffer(config.norm.statistics())?,
            gate_up: buffer(config.inner())?,
        })
    }
}

impl Shared {
    fn new(
        arena: &Arena,
        config: &ModelConfig,
        capacity: Capacity,
        adapters: Option<&Adapters>,
        what: &str,
    ) -> Result<Shared, EngineError> {
        let n = capacity.tokens;
        let hidden = config.hidden_size;
        let queries = config.queries();
        // The norms of queries and of keys have scratch for the weights of both.
        let of_norms = config.norm.vectors() * hidden;
        let normed = match config.query_key_norms {
            true => of_norms.max(2 * config.head_dim),
            false => of_norms,
        };
        let head_rows = (LOGITS / config.vocab_size).max(HEAD_ROWS).min(n);
        let mut table = arena.buffer(capacity.seq_len * config.rotary_dim(), "the RoPE table")?;
        rope::fill_table(&mut table, &config.frequencies());
        let wide = hidden.max(config.intermediate_size).max(config.qkv());
        let len = attention::Scratch::block_len(capacity.seq_len);
        let mut scores: Vec<Buffer> = (0..2 * rayon::current_num_threads())
            .map(|_| arena.buffer(len, "attention scores"))
            .collect::<Result<_, _>>()?;
        let lent = scores.as_chunks_mut().0.iter_mut();
        let lent = lent
            .map(|[first, second]| [first.lend(), second.lend()])
            .collect();
        Ok(Shared {
            narrow: arena.buffer(n * hidden.max(queries), what)?,
            wide: arena.buffer(n * wide, what)?,
            dx: arena.buffer(n * hidden, what)?,
            d_output: (config.parallel_residual)
                .then(|| arena.buffer(n * hidden, what))
                .transpose()?,
            norm_scratch: arena.buffer(
                rmsnorm::scratch_len(n, normed) + config.norm.statistics() * head_rows,
                what,
            )?,
            attention: attention::Scratch::new(lent),
            scores,
            rope: table,
            logits: arena.buffer(head_rows * config.vocab_size, "logits")?,
            head: arena.buffer(head_rows * hidden, what)?,
            low: arena.buffer(2 * n * adapters.map_or(0, |it| it.rank), what)?,
            dropped: match adapters.filter(|it| it.dropout > 0.0) {
                Some(_) => {
                    arena.buffer(n * hidden.max(config.intermediate_size).max(queries), what)?
                }
                None => arena.buffer(0, what)?,
            },
            head_rows,
        })
    }
}
