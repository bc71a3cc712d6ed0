//! The walk over a model's units, written once for every backend: forward, and backward in reverse order.
//!
//! ```text
//! qkv      = rope(norm(x) · Wqkvᵀ), with norms of queries and keys before the rotation in some families
//! middle   = x + attention(qkv) · Woᵀ
//! next     = middle + activation(norm(middle) · Wgate,upᵀ) · Wdownᵀ
//! ```
//!
//! Each product may have a bias. With a parallel residual the second norm is that of x, too. A block is a list of operations
//! on named buffers; a [`Backend`] carries them out. Normed inputs and activations of the MLP are cheap, so backward
//! recomputes them instead of storing them.

use std::ops::Range;

use super::{Adapted, Adapter, Direction, Layout, ModelConfig, Role};

use Slot::{
    Attended, DOutput, GateUp, InputStatistics, Middle, MiddleStatistics, Narrow, Qkv, Residual,
    Wide,
};

/// A buffer of activations. n is the number of tokens; the argument is a block's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// The residual stream before a block, and after the last, `[n, hidden]`.
    Residual(usize),
    /// What forward keeps of the norm of the block's input, `[n, statistics]`: 1 / rms, or 1 / σ and the mean.
    InputStatistics(usize),
    /// Rotated queries and keys, and values, `[n, qkv]`.
    Qkv(usize),
    /// Queries and keys before their norms, `[n, (heads + key-value heads) × head_dim]`.
    Unnormed(usize),
    /// Logarithms of attention's softmax sums, `[batch, heads, seq_len]`.
    LogSums(usize),
    /// Attention's output before its projection, `[n, heads × head_dim]`.
    Attended(usize),
    /// The residual stream after attention, `[n, hidden]`.
    Middle(usize),
    /// The same of the norm before the MLP.
    MiddleStatistics(usize),
    /// Gates and ups, `[n, inner]`, or only ups; backward replaces them by their gradient.
    GateUp(usize),
    /// Scratch, `[n, max(hidden, heads × head_dim)]`.
    Narrow,
    /// Scratch, `[n, max(hidden, intermediate, qkv)]`.
    Wide,
    /// Gradient of the residual stream, `[n, hidden]`.
    DResidual,
    /// `DResidual` as the matrix products read it: as it was when a norm of the walk last published it.
    DOutput,
}

/// A linear layer: its weights `[outputs, inputs]` are a range of a unit.
#[derive(Debug, Clone)]
pub struct Linear {
    pub unit: usize,
    pub weights: Range<usize>,
    pub inputs: usize,
    /// `[outputs]`.
    pub bias: Option<Vector>,
    /// Beside the weights, which are then frozen.
    pub adapters: Vec<Adapter>,
}

/// Adjacent vectors of a unit.
#[derive(Debug, Clone)]
pub struct Vector {
    /// The first one's number among the unit's vectors.
    pub index: usize,
    /// Within the unit.
    pub range: Range<usize>,
}

impl Linear {
    pub fn outputs(&self) -> usize {
        self.weights.len() / self.inputs
    }
}

/// A norm of the residual stream.
#[derive(Debug, Clone)]
pub struct Norm {
    pub unit: usize,
    /// `[hidden]`; of a LayerNorm `[2, hidden]`, weights and bias.
    pub weights: Vector,
    pub statistics: Slot,
    /// Whether its backward pass publishes `DResidual`: the last one that adds to it in a block.
    pub publishes: bool,
}

/// The norms of each head's queries and keys.
#[derive(Debug, Clone)]
pub struct HeadNorms {
    pub unit: usize,
    pub layer: usize,
    /// `[2, head_dim]`: of the queries, then of the keys.
    pub weights: Vector,
}

/// The final norm and the head.
#[derive(Debug, Clone)]
pub struct Head {
    /// The unit of the norm.
    pub unit: usize,
    /// As [`Norm::weights`].
    pub norm: Vector,
    /// To the logits. Tied embeddings are in the first unit.
    pub logits: Linear,
}

/// The operations of a walk. Each leaves all buffers that it does not name unchanged.
pub trait Backend {
    type Error;

    /// Makes the unit's weights readable until their release.
    fn acquire(&mut self, unit: usize) -> Result<(), Self::Error>;

    /// The walk has read the unit's weights for now; `next` is its direction after this.
    fn release(&mut self, unit: usize, next: Direction) -> Result<(), Self::Error>;

    /// The unit's gradient is about to be written. Not called for the head, nor for embeddings tied to it.
    fn open(&mut self, unit: usize) -> Result<(), Self::Error>;

    /// The unit's gradient of this micro-batch is complete.
    fn complete(&mut self, unit: usize) -> Result<(), Self::Error>;

    /// Whether backward recomputes what forward stored (activation checkpointing).
    fn recomputes(&self) -> bool;

    /// From the tokens to the first `Residual`.
    fn embed(&mut self) -> Result<(), Self::Error>;

    /// From `DResidual` to the gradient of the embeddings, of tokens and of positions, unless they are frozen.
    fn embed_backward(&mut self) -> Result<(), Self::Error>;

    /// From the last `Residual` to the loss; with `gradient` also to `DResidual`, published, and the gradient of the weights,
    /// unless they are frozen.
    fn head(&mut self, head: &Head, gradient: bool) -> Result<(), Self::Error>;

    /// From the last row of the last `Residual` to its logits.
    fn logits(&mut self, head: &Head) -> Result<(), Self::Error>;

    /// `normed` = norm(`x`).
    fn norm(&mut self, norm: &Norm, x: Slot, normed: Slot) -> Result<(), Self::Error>;

    /// `Narrow` holds the gradient of the norm's output, and then the output. Adds the gradient of `x` to `DResidual`, and
    /// that of the weights unless they are frozen.
    fn norm_backward(&mut self, norm: &Norm, x: Slot) -> Result<(), Self::Error>;

    /// `y` `[n, outputs]` = `x` `[n, inputs]` · wᵀ + bias + adapters.
    fn linear(&mut self, linear: &Linear, x: Slot, y: Slot) -> Result<(), Self::Error>;

    /// `sum` = `residual` + `x` · wᵀ + bias + adapters. It may overwrite `Narrow`.
    fn linear_add(
        &mut self,
        linear: &Linear,
        x: Slot,
        residual: Slot,
        sum: Slot,
    ) -> Result<(), Self::Error>;

    /// As [`Backend::linear_add`], then `normed` = norm(`sum`).
    fn linear_add_norm(
        &mut self,
        linear: &Linear,
        x: Slot,
        (residual, sum): (Slot, Slot),
        norm: &Norm,
        normed: Slot,
    ) -> Result<(), Self::Error> {
        self.linear_add(linear, x, residual, sum)?;
        self.norm(norm, sum, normed)
    }

    /// `dx` `[n, inputs]` = `dy` `[n, outputs]` · w, and of the adapters.
    fn backward_input(&mut self, linear: &Linear, dy: Slot, dx: Slot) -> Result<(), Self::Error>;

    /// The gradient of the weights: dyᵀ · x, and of the biases: the sum of the rows of dy; or that of the adapters.
    fn backward_weight(&mut self, linear: &Linear, dy: Slot, x: Slot) -> Result<(), Self::Error>;

    /// Copies the block's queries and keys to `Unnormed`, and norms them in place.
    fn head_norms(&mut self, norms: &HeadNorms) -> Result<(), Self::Error>;

    /// `Wide` holds the gradient of the normed queries and keys, and then that of the unnormed ones.
    fn head_norms_backward(&mut self, norms: &HeadNorms) -> Result<(), Self::Error>;

    /// Rotates queries and keys in place.
    fn rope(&mut self, qkv: Slot, direction: Direction) -> Result<(), Self::Error>;

    /// From the block's `Qkv` to `Attended`; keeps `LogSums`.
    fn attention(&mut self, layer: usize) -> Result<(), Self::Error>;

    /// From the gradient of `Attended` in `Narrow` to that of `Qkv` in `Wide`.
    fn attention_backward(&mut self, layer: usize) -> Result<(), Self::Error>;

    /// `Wide` = the activation of the block's `GateUp`, gated or not.
    fn activate(&mut self, layer: usize) -> Result<(), Self::Error>;

    /// `Wide` holds the gradient of the activation's output, and then the output; `GateUp` becomes its gradient.
    fn activate_backward(&mut self, layer: usize) -> Result<(), Self::Error>;
}

/// A model as its units and their order.
#[derive(Debug, Clone, Copy)]
pub struct Walk<'a> {
    pub config: &'a ModelConfig,
    pub layout: &'a Layout,
    /// If only adapters are trained, which are another layout's one unit.
    pub adapted: Option<&'a Adapted>,
}

impl Walk<'_> {
    /// Loss and gradient of a micro-batch.
    pub fn train<B: Backend>(self, backend: &mut B) -> Result<(), B::Error> {
        let (head, tied) = (self.head(), self.config.tie_word_embeddings);
        self.forward(backend)?;
        backend.head(&head, true)?;
        self.release_head(backend, Direction::Backward)?;
        let is_frozen = self.adapted.is_some();
        if !is_frozen {
            backend.complete(head.unit)?;
        }
        for layer in (0..self.config.num_hidden_layers).rev() {
            let (block, unit) = (self.block(layer), layer + 1);
            backend.acquire(unit)?;
            if backend.recomputes() {
                block.fill_stash(backend)?;
            }
            if !is_frozen {
                backend.open(unit)?;
            }
            block.backward(backend)?;
            backend.release(unit, Direction::Backward)?;
            if !is_frozen {
                backend.complete(unit)?;
            }
        }
        if !is_frozen && !tied {
            backend.open(0)?;
        }
        backend.embed_backward()?;
        backend.complete(0)
    }

    /// Loss of a micro-batch.
    pub fn evaluate<B: Backend>(self, backend: &mut B) -> Result<(), B::Error> {
        let head = self.head();
        self.forward(backend)?;
        backend.head(&head, false)?;
        self.release_head(backend, Direction::Forward)
    }

    /// The logits of the token after those of a sequence of one row.
    pub fn predict<B: Backend>(self, backend: &mut B) -> Result<(), B::Error> {
        self.forward(backend)?;
        backend.logits(&self.head())?;
        self.release_head(backend, Direction::Forward)
    }

    /// From the tokens to the last block's output, and to the head's weights.
    fn forward<B: Backend>(self, backend: &mut B) -> Result<(), B::Error> {
        backend.acquire(0)?;
        backend.embed()?;
        // The head needs tied embeddings, too.
        if !self.config.tie_word_embeddings {
            backend.release(0, Direction::Forward)?;
        }
        for layer in 0..self.config.num_hidden_layers {
            let (block, unit) = (self.block(layer), layer + 1);
            backend.acquire(unit)?;
            block.fill_stash(backend)?;
            block.finish(backend)?;
            backend.release(unit, Direction::Forward)?;
        }
        backend.acquire(self.layout.units.len() - 1)
    }

    /// In backward the head is not computed again.
    fn release_head<B: Backend>(self, backend: &mut B, next: Direction) -> Result<(), B::Error> {
        backend.release(self.layout.units.len() - 1, next)?;
        if self.config.tie_word_embeddings {
            backend.release(0, next)?;
        }
        Ok(())
    }

    fn head(self) -> Head {
        let unit = self.layout.units.len() - 1;
        let (of_logits, role) = if self.config.tie_word_embeddings {
            (0, Role::Embedding)
        } else {
            (unit, Role::Head)
        };
        Head {
            unit,
            norm: self.weights_of_norm(unit, Role::FinalNorm),
            logits: self.linear(of_logits, role, role),
        }
    }

    fn block(self, layer: usize) -> Block {
        let unit = layer + 1;
        let config = self.config;
        let norm = |role, statistics, publishes| Norm {
            unit,
            weights: self.weights_of_norm(unit, role),
            statistics,
            publishes,
        };
        let biased = |linear: Linear, is_biased: bool, first, last| Linear {
            bias: is_biased.then(|| self.vector(unit, first, last)),
            ..linear
        };
        let is_fused = self.layout.units[unit].has(Role::Qkv);
        let [first, last, first_bias, last_bias] = match is_fused {
            true => [Role::Qkv, Role::Qkv, Role::QkvBias, Role::QkvBias],
            false => [Role::Query, Role::Value, Role::QueryBias, Role::ValueBias],
        };
        let (qkv, output) = (
            self.linear(unit, first, last),
            self.linear(unit, Role::Output, Role::Output),
        );
        let (gate, gate_bias) = match config.gated {
            true => (Role::Gate, Role::GateBias),
            false => (Role::Up, Role::UpBias),
        };
        let (gate_up, down) = (
            self.linear(unit, gate, Role::Up),
            self.linear(unit, Role::Down, Role::Down),
        );
        Block {
            layer,
            norm_input: norm(Role::InputNorm, InputStatistics(layer), true),
            qkv: biased(qkv, config.qkv_biases, first_bias, last_bias),
            head_norms: config.query_key_norms.then(|| HeadNorms {
                unit,
                layer,
                weights: self.vector(unit, Role::QueryNorm, Role::KeyNorm),
            }),
            rotates: config.rotates(layer),
            output: biased(
                output,
                config.output_bias,
                Role::OutputBias,
                Role::OutputBias,
            ),
            norm_middle: norm(
                Role::MiddleNorm,
                MiddleStatistics(layer),
                !config.parallel_residual,
            ),
            is_parallel: config.parallel_residual,
            gate_up: biased(gate_up, config.mlp_biases, gate_bias, Role::UpBias),
            down: biased(down, config.mlp_biases, Role::DownBias, Role::DownBias),
        }
    }

    /// The weights of a norm of the residual stream, with the bias that follows in a LayerNorm.
    fn weights_of_norm(self, unit: usize, role: Role) -> Vector {
        let weights = self.vector(unit, role, role);
        let start = weights.range.start;
        Vector {
            range: start..start + self.config.norm.vectors() * self.config.hidden_size,
            ..weights
        }
    }

    /// The adjacent vectors of a unit from one role to another.
    fn vector(self, unit: usize, first: Role, last: Role) -> Vector {
        let unit = &self.layout.units[unit];
        let (first, last) = (unit.of(first), unit.of(last));
        let before = unit
            .vectors()
            .take_while(|vector| vector.offset < first.offset);
        Vector {
            index: before.count(),
            range: first.offset..last.range().end,
        }
    }

    /// The layer whose weights are the adjacent parameters of a unit from one role to another.
    fn linear(self, unit: usize, first: Role, last: Role) -> Linear {
        let parameters = &self.layout.units[unit];
        let (first, last) = (parameters.of(first), parameters.of(last));
        let weights = first.offset..last.range().end;
        let adapters = (self.adapted).map(|adapted| adapted.of((unit, parameters), &weights));
        Linear {
            unit,
            weights,
            inputs: first.inputs(),
            bias: None,
            adapters: adapters.unwrap_or_default(),
        }
    }
}

struct Block {
    layer: usize,
    norm_input: Norm,
    /// Queries, keys and values.
    qkv: Linear,
    head_norms: Option<HeadNorms>,
    /// Whether queries and keys are rotated.
    rotates: bool,
    output: Linear,
    norm_middle: Norm,
    /// Whether attention and MLP have the same input.
    is_parallel: bool,
    gate_up: Linear,
    down: Linear,
}

impl Block {
    /// From the block's input to what backward needs.
    fn fill_stash<B: Backend>(&self, backend: &mut B) -> Result<(), B::Error> {
        let (layer, x) = (self.layer, Residual(self.layer));
        backend.norm(&self.norm_input, x, Narrow)?;
        backend.linear(&self.qkv, Narrow, Qkv(layer))?;
        if let Some(norms) = &self.head_norms {
            backend.head_norms(norms)?;
        }
        if self.rotates {
            backend.rope(Qkv(layer), Direction::Forward)?;
        }
        backend.attention(layer)?;
        let (output, attended, norm) = (&self.output, Attended(layer), &self.norm_middle);
        if self.is_parallel {
            backend.linear_add(output, attended, x, Middle(layer))?;
            backend.norm(norm, x, Wide)?;
        } else {
            backend.linear_add_norm(output, attended, (x, Middle(layer)), norm, Wide)?;
        }
        backend.linear(&self.gate_up, Wide, GateUp(layer))
    }

    /// The input of the norm before the MLP.
    fn mlp_input(&self) -> Slot {
        match self.is_parallel {
            true => Residual(self.layer),
            false => Middle(self.layer),
        }
    }

    /// From there to the next block's input.
    fn finish<B: Backend>(&self, backend: &mut B) -> Result<(), B::Error> {
        let layer = self.layer;
        backend.activate(layer)?;
        backend.linear_add(&self.down, Wide, Middle(layer), Residual(layer + 1))
    }

    /// From the gradient of the block's output to that of its input, in place. Overwrites what forward stored.
    fn backward<B: Backend>(&self, backend: &mut B) -> Result<(), B::Error> {
        let layer = self.layer;
        backend.backward_input(&self.down, DOutput, Wide)?;
        backend.activate_backward(layer)?;
        backend.backward_weight(&self.down, DOutput, Wide)?;

        backend.backward_input(&self.gate_up, GateUp(layer), Narrow)?;
        backend.norm_backward(&self.norm_middle, self.mlp_input())?;
        backend.backward_weight(&self.gate_up, GateUp(layer), Narrow)?;

        backend.backward_input(&self.output, DOutput, Narrow)?;
        backend.backward_weight(&self.output, DOutput, Attended(layer))?;
        backend.attention_backward(layer)?;
        if self.rotates {
            backend.rope(Wide, Direction::Backward)?;
        }
        if let Some(norms) = &self.head_norms {
            backend.head_norms_backward(norms)?;
        }

        backend.backward_input(&self.qkv, Wide, Narrow)?;
        backend.norm_backward(&self.norm_input, Residual(layer))?;
        backend.backward_weight(&self.qkv, Wide, Narrow)
    }
}
