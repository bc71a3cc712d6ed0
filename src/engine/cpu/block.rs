//! One block of the model, forward and backward.
//!
//! ```text
//! qkv      = rope(norm(x) · Wqkvᵀ)
//! middle   = x + attention(qkv) · Woᵀ
//! next     = middle + swiglu(norm(middle) · Wgate,upᵀ) · Wdownᵀ
//! ```
//!
//! Normed inputs and SwiGLU's product are cheap, so backward recomputes them instead of storing them.

use super::kernels::{attention, linear, rmsnorm, rope, swiglu, vector};
use super::store::Gradient;
use super::workspace::{Shared, Stash};
use crate::engine::{BlockTensors, Direction, ModelConfig, Unit};

/// A block's tensors within its unit, and the shapes of this micro-batch.
pub struct Block<'a> {
    config: &'a ModelConfig,
    shape: attention::Shape,
    tensors: BlockTensors,
}

impl<'a> Block<'a> {
    /// `unit` is a block of [`crate::engine::layout`].
    pub fn new(config: &'a ModelConfig, unit: &Unit, batch: usize, seq_len: usize) -> Block<'a> {
        Block {
            config,
            shape: attention::Shape {
                batch,
                seq_len,
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
            },
            tensors: unit.block_tensors(),
        }
    }

    fn tokens(&self) -> usize {
        self.shape.batch * self.shape.seq_len
    }

    /// From the block's input x `[n, hidden]` to the stash for backward.
    pub fn fill_stash(&self, w: &[f32], x: &[f32], stash: &mut Stash, shared: &mut Shared) {
        let (n, config, shape) = (self.tokens(), self.config, self.shape);
        let eps = config.rms_norm_eps;
        let queries = config.queries();

        let normed = &mut shared.narrow[..n * config.hidden_size];
        let inverse = &mut stash.inverse_input[..n];
        rmsnorm::forward(normed, inverse, x, &w[self.tensors.norm_input.clone()], eps);
        let qkv = &mut stash.qkv[..n * shape.qkv()];
        linear::forward(qkv, normed, &w[self.tensors.qkv.clone()], n);
        self.rotate(qkv, &shared.rope, Direction::Forward);

        let attended = &mut stash.attended[..n * queries];
        let log_sums = &mut stash.log_sums[..n * shape.heads];
        attention::forward(attended, log_sums, qkv, shape, &shared.attention);
        let projected = &mut shared.narrow[..n * config.hidden_size];
        linear::forward(projected, attended, &w[self.tensors.output.clone()], n);

        let normed = &mut shared.wide[..n * config.hidden_size];
        let middle = &mut stash.middle[..n * config.hidden_size];
        let inverse = &mut stash.inverse_middle[..n];
        let weights = &w[self.tensors.norm_middle.clone()];
        rmsnorm::add_forward(normed, inverse, middle, (x, projected), weights, eps);
        let gate_up = &mut stash.gate_up[..n * 2 * config.intermediate_size];
        linear::forward(gate_up, normed, &w[self.tensors.gate_up.clone()], n);
    }

    /// From the stash to the next block's input, `[n, hidden]`.
    pub fn finish(&self, w: &[f32], stash: &Stash, shared: &mut Shared, next: &mut [f32]) {
        let (n, hidden, inner) = (
            self.tokens(),
            self.config.hidden_size,
            self.config.intermediate_size,
        );
        let h = &mut shared.wide[..n * inner];
        swiglu::forward(h, &stash.gate_up[..n * 2 * inner], inner);
        let down = &mut shared.narrow[..n * hidden];
        linear::forward(down, h, &w[self.tensors.down.clone()], n);
        vector::add(next, &stash.middle[..n * hidden], down);
    }

    /// From the gradient of the block's output in `shared.dx` to that of its input, in place. Overwrites the
    /// stash.
    pub fn backward(
        &self,
        w: &[f32],
        gradient: Gradient<'_>,
        x: &[f32],
        stash: &mut Stash,
        shared: &mut Shared,
    ) {
        let (n, config, shape) = (self.tokens(), self.config, self.shape);
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let queries = config.queries();
        let Gradient { values: dw, add } = gradient;
        let dx = &mut shared.dx[..n * hidden];

        let h = &mut shared.wide[..n * inner];
        let gate_up = &mut stash.gate_up[..n * 2 * inner];
        linear::backward_input(h, dx, &w[self.tensors.down.clone()], n);
        swiglu::backward(h, gate_up, inner);
        linear::backward_weight(&mut dw[self.tensors.down.clone()], dx, h, n, add);

        let normed = &mut shared.narrow[..n * hidden];
        linear::backward_input(normed, gate_up, &w[self.tensors.gate_up.clone()], n);
        rmsnorm::backward(
            normed,
            dx,
            (&mut dw[self.tensors.norm_middle.clone()], add),
            &stash.middle[..n * hidden],
            &stash.inverse_middle[..n],
            &w[self.tensors.norm_middle.clone()],
            &mut shared.norm_scratch,
        );
        linear::backward_weight(
            &mut dw[self.tensors.gate_up.clone()],
            gate_up,
            normed,
            n,
            add,
        );

        let dattended = &mut shared.narrow[..n * queries];
        let attended = &stash.attended[..n * queries];
        linear::backward_input(dattended, dx, &w[self.tensors.output.clone()], n);
        linear::backward_weight(&mut dw[self.tensors.output.clone()], dx, attended, n, add);
        let dqkv = &mut shared.wide[..n * shape.qkv()];
        attention::backward(
            dqkv,
            dattended,
            (
                &stash.qkv[..n * shape.qkv()],
                attended,
                &stash.log_sums[..n * shape.heads],
            ),
            shape,
            &shared.attention,
        );
        self.rotate(dqkv, &shared.rope, Direction::Backward);

        let normed = &mut shared.narrow[..n * hidden];
        linear::backward_input(normed, dqkv, &w[self.tensors.qkv.clone()], n);
        rmsnorm::backward(
            normed,
            dx,
            (&mut dw[self.tensors.norm_input.clone()], add),
            x,
            &stash.inverse_input[..n],
            &w[self.tensors.norm_input.clone()],
            &mut shared.norm_scratch,
        );
        linear::backward_weight(&mut dw[self.tensors.qkv.clone()], dqkv, normed, n, add);
    }

    /// Rotates the queries and keys.
    fn rotate(&self, qkv: &mut [f32], table: &[f32], direction: Direction) {
        let shape = self.shape;
        rope::rotate(
            qkv,
            shape.qkv(),
            shape.heads + shape.kv_heads,
            (table, shape.seq_len, shape.head_dim),
            direction,
        );
    }
}
