//! The operations of a walk on this machine's processors.

use std::borrow::Cow;
use std::ops::Range;
use std::rc::Rc;

use cpu_kernels::{
    adapter, attention, embedding, head_norms, layernorm, linear, mlp, rmsnorm, rope, vector,
};

use super::arena::Buffer;
use super::held::Held;
use super::store::Gradient;
use super::workspace::{Shared, Stash, Workspace};
use crate::engine::walk::{Backend, Head, HeadNorms, Linear, Norm, Slot, Walk};
use crate::engine::{
    Accumulated, Activation, Adapted, Adapter, Adapters, Direction, Dropout, EngineError,
    MicroBatch, ModelConfig, NormKind, Pass, Sequence, TokenLoss, Weigh, noise,
};

type Done = Result<(), EngineError>;

/// One micro-batch on its way through the model. The store receives its gradient.
pub struct CpuBackend<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) store: &'a mut Held,
    adapted: Option<&'a Adapted>,
    pub(super) micro_batch: MicroBatch<'a>,
    /// A block's output takes the place of an earlier block's input where there are fewer than blocks.
    inputs: &'a mut [Buffer],
    stashes: &'a mut [Stash],
    pub(super) shared: &'a mut Shared,
    /// What the micro-batch continues.
    sequence: Option<&'a mut Sequence<Buffer>>,
    shape: attention::Shape,
    /// The tokens of each sequence.
    sequences: Rc<[Range<usize>]>,
    /// Of each token in its sequence.
    positions: Rc<[u32]>,
    pub(super) token_loss: TokenLoss,
    /// Weighs the losses of the tokens between forward and backward.
    pub(super) weigh: Option<Weigh<'a>>,
    /// Loss of each token, 0 without a target; empty where training needs only their sum.
    pub(super) losses: Vec<f64>,
    /// Sum of the losses of target tokens.
    pub(super) loss: f64,
    /// Number of target tokens.
    pub(super) targets: u64,
}

/// What a pass has besides its micro-batch.
#[derive(Default)]
pub struct With<'a> {
    /// A prediction continues it.
    pub sequence: Option<&'a mut Sequence<Buffer>>,
    pub weigh: Option<Weigh<'a>>,
    pub token_loss: TokenLoss,
}

/// Runs a micro-batch. Also returns the losses of the tokens, where the pass keeps them.
pub fn run(
    walk: Walk<'_>,
    store: &mut Held,
    workspace: &mut Workspace,
    micro_batch: MicroBatch<'_>,
    pass: Pass,
    With {
        sequence,
        weigh,
        token_loss,
    }: With<'_>,
) -> Result<(Accumulated, Vec<f64>), EngineError> {
    store.begin(pass)?;
    let Workspace {
        inputs,
        stashes,
        shared,
        ..
    } = workspace;
    let (inputs, stashes) = match pass {
        // No backward follows: one stash and two inputs stay in the caches.
        Pass::Evaluation | Pass::Prediction => (&mut inputs[..2], &mut stashes[..1]),
        Pass::Training(_) => (&mut inputs[..], &mut stashes[..]),
    };
    let config = walk.config;
    let sequence = sequence.filter(|_| pass == Pass::Prediction);
    let past = sequence.as_ref().map_or(0, |sequence| sequence.past);
    let mut backend = CpuBackend {
        config,
        store,
        adapted: walk.adapted,
        micro_batch,
        inputs,
        stashes,
        shared,
        sequence,
        token_loss,
        weigh,
        losses: Vec::new(),
        shape: attention::Shape {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            window: None,
        },
        sequences: micro_batch.sequences().into(),
        positions: micro_batch.positions(past).into(),
        loss: 0.0,
        targets: 0,
    };
    match pass {
        Pass::Evaluation => walk.evaluate(&mut backend)?,
        Pass::Prediction => walk.predict(&mut backend)?,
        Pass::Training(_) => walk.train(&mut backend)?,
    }
    if let Some(sequence) = &mut backend.sequence {
        sequence.past += micro_batch.tokens.len();
    }
    let accumulated = Accumulated {
        loss: backend.loss,
        targets: backend.targets,
        squared_norm: backend.store.trained.end(),
    };
    Ok((accumulated, backend.losses))
}

impl<'a> CpuBackend<'a> {
    pub(super) fn tokens(&self) -> usize {
        self.micro_batch.tokens.len()
    }

    pub(super) fn buffer(&mut self, slot: Slot) -> &mut Buffer {
        let (inputs, stashes) = (self.inputs.len(), self.stashes.len());
        match slot {
            Slot::Residual(layer) => &mut self.inputs[layer % inputs],
            Slot::InputStatistics(layer) => &mut self.stashes[layer % stashes].input_statistics,
            Slot::Qkv(layer) => &mut self.stashes[layer % stashes].qkv,
            Slot::Unnormed(layer) => &mut self.stashes[layer % stashes].unnormed,
            Slot::LogSums(layer) => &mut self.stashes[layer % stashes].log_sums,
            Slot::Attended(layer) => &mut self.stashes[layer % stashes].attended,
            Slot::Middle(layer) => &mut self.stashes[layer % stashes].middle,
            Slot::MiddleStatistics(layer) => &mut self.stashes[layer % stashes].middle_statistics,
            Slot::GateUp(layer) => &mut self.stashes[layer % stashes].gate_up,
            Slot::Narrow => &mut self.shared.narrow,
            Slot::Wide => &mut self.shared.wide,
            Slot::DResidual => &mut self.shared.dx,
            Slot::DOutput => self.shared.d_output.as_mut().unwrap_or(&mut self.shared.dx),
        }
    }

    /// Runs `work` on the rows of distinct buffers, which have these widths, with the store and the scratch of kernels.
    fn on<const N: usize>(
        &mut self,
        slots: [(Slot, usize); N],
        work: impl FnOnce([&mut [f32]; N], &mut Held, &mut Shared),
    ) -> Done {
        let n = self.tokens();
        let mut lent = slots.map(|(slot, width)| (self.buffer(slot).lend(), n * width));
        let rows = lent.each_mut().map(|(data, len)| &mut data[..*len]);
        work(rows, self.store, self.shared);
        for ((slot, _), (data, _)) in slots.into_iter().zip(lent) {
            self.buffer(slot).restore(data);
        }
        Ok(())
    }

    /// The shape of a layer's attention.
    fn attention_of(&self, layer: usize) -> attention::Shape {
        attention::Shape {
            window: self.config.window(layer),
            ..self.shape
        }
    }

    /// From the block's `Qkv` to `Attended`, and to the sequence's keys and values.
    fn attention_over_cache(&mut self, layer: usize, sequence: &mut Sequence<Buffer>) -> Done {
        let (shape, queries) = (self.attention_of(layer), self.config.queries());
        let (past, n, width) = (sequence.past, self.tokens(), shape.qkv() - queries);
        let rows = &mut sequence.caches[layer][..(past + n) * width];
        let slots = [
            (Slot::Attended(layer), queries),
            (Slot::Qkv(layer), shape.qkv()),
        ];
        self.on(slots, |[attended, qkv], _, shared| {
            attention::fill_cache(&mut rows[past * width..], qkv, shape);
            let cache = attention::Cache { rows, past };
            attention::over_cache(attended, qkv, cache, shape, &shared.attention);
        })
    }

    /// What drops inputs of an adapter, where anything does.
    fn dropout(&self, adapter: &Adapter) -> Option<Dropout<'a>> {
        let share = self.adapted.map_or(0.0, |adapted| adapted.settings.dropout) as f32;
        let keys = self.micro_batch.dropout;
        (share > 0.0 && !keys.is_empty()).then_some(Dropout {
            share,
            keys,
            adapter: adapter.number,
            seq_len: self.micro_batch.seq_len,
        })
    }

    /// Adds the output of the adapters for `x` to `y`.
    fn adapt(&mut self, linear: &Linear, x: Slot, y: Slot) -> Done {
        let Some(adapted) = self.adapted else {
            return Ok(());
        };
        let (n, settings) = (self.tokens(), &adapted.settings);
        for adapter in &linear.adapters {
            let dropout = self.dropout(adapter);
            let slots = [(y, linear.outputs()), (x, linear.inputs)];
            self.on(slots, |[y, x], store, shared| {
                let matrices = matrices(store.trained.parameters(0), adapter, settings);
                let low = &mut shared.low[..n * settings.rank];
                let x = dropped(dropout, x, linear.inputs, &mut shared.dropped);
                adapter::down(low, x, matrices);
                adapter::up(
                    (y, linear.outputs()),
                    adapter.columns.clone(),
                    low,
                    matrices,
                );
            })?;
        }
        Ok(())
    }

    /// Adds the gradient of the adapters' input to `dx`.
    fn adapt_backward_input(&mut self, linear: &Linear, dy: Slot, dx: Slot) -> Done {
        let Some(adapted) = self.adapted else {
            return Ok(());
        };
        let (n, settings) = (self.tokens(), &adapted.settings);
        for adapter in &linear.adapters {
            let dropout = self.dropout(adapter);
            let slots = [(dx, linear.inputs), (dy, linear.outputs())];
            self.on(slots, |[dx, dy], store, shared| {
                let matrices = matrices(store.trained.parameters(0), adapter, settings);
                let low = &mut shared.low[..n * settings.rank];
                let dy = (&*dy, linear.outputs());
                adapter::backward_up(low, dy, adapter.columns.clone(), matrices);
                let Some(dropout) = dropout else {
                    return adapter::backward_input((dx, true), low, matrices);
                };
                let gradient = &mut shared.dropped[..dx.len()];
                adapter::backward_input((gradient, false), low, matrices);
                dropout.add_gradient(dx, gradient, linear.inputs);
            })?;
        }
        Ok(())
    }

    /// The gradient of the adapters.
    fn adapt_backward_weight(&mut self, linear: &Linear, dy: Slot, x: Slot) -> Done {
        let Some(adapted) = self.adapted else {
            return Ok(());
        };
        let (n, settings) = (self.tokens(), &adapted.settings);
        for adapter in &linear.adapters {
            let dropout = self.dropout(adapter);
            let slots = [(dy, linear.outputs()), (x, linear.inputs)];
            self.on(slots, |[dy, x], store, shared| {
                let (parameters, Gradient { values, add }) = store.trained.gradient(0);
                let matrices = matrices(parameters, adapter, settings);
                let (low, dlow) = shared.low.split_at_mut(n * settings.rank);
                let dlow = &mut dlow[..n * settings.rank];
                let x = dropped(dropout, x, linear.inputs, &mut shared.dropped);
                adapter::down(low, x, matrices);
                let dy = (&*dy, linear.outputs());
                adapter::backward_up(dlow, dy, adapter.columns.clone(), matrices);
                // B follows its A.
                let both = &mut values[adapter.a.start..adapter.b.end];
                let (da, db) = both.split_at_mut(adapter.a.len());
                let columns = adapter.columns.clone();
                let lows = (&*dlow, &*low);
                adapter::backward_weights((da, db, add), lows, x, dy, columns, settings.rank);
            })?;
        }
        Ok(())
    }

    fn hidden(&self) -> usize {
        self.config.hidden_size
    }

    /// Makes the gradient of the residual stream that of products, which is a copy where those do not read it directly.
    pub(super) fn publish(&mut self) {
        let n = self.tokens() * self.hidden();
        if let Some(d_output) = &mut self.shared.d_output {
            d_output[..n].copy_from_slice(&self.shared.dx[..n]);
        }
    }
}

impl Backend for CpuBackend<'_> {
    type Error = EngineError;

    fn acquire(&mut self, unit: usize) -> Done {
        self.store.acquire(unit)
    }

    fn release(&mut self, unit: usize, _direction: Direction) -> Done {
        self.store.release(unit);
        Ok(())
    }

    fn open(&mut self, _unit: usize) -> Done {
        Ok(())
    }

    fn complete(&mut self, unit: usize) -> Done {
        self.store.trained.complete(unit)
    }

    fn recomputes(&self) -> bool {
        self.stashes.len() < self.config.num_hidden_layers
    }

    fn embed(&mut self) -> Done {
        let (tokens, hidden) = (self.micro_batch.tokens, self.hidden());
        let scale = self.config.embedding_scale();
        let table = self.config.vocab_size * hidden;
        let has_positions = self.config.position_embeddings;
        let MicroBatch { seq_len, noise, .. } = self.micro_batch;
        let positions = self.positions.clone();
        self.on([(Slot::Residual(0), hidden)], |[x], store, _| {
            let unit = store.parameters(0);
            embedding::forward(x, tokens, (unit, hidden), scale);
            if has_positions {
                embedding::add_positions(x, &positions, (&unit[table..], hidden));
            }
            if !noise.is_empty() {
                noise::add(x, hidden, seq_len, noise);
            }
        })
    }

    fn embed_backward(&mut self) -> Done {
        let (tokens, hidden) = (self.micro_batch.tokens, self.hidden());
        let tied = self.config.tie_word_embeddings;
        let (scale, padding) = (self.config.embedding_scale(), self.config.padding_token());
        let table = self.config.vocab_size * hidden;
        let positions = self
            .config
            .position_embeddings
            .then(|| table..table + self.config.max_position_embeddings * hidden);
        let of_tokens = self.positions.clone();
        self.on([(Slot::DResidual, hidden)], |[dx], store, _| {
            if let (_, Some(Gradient { values, add })) = store.gradient(0, &(0..table)) {
                // Tied embeddings already hold the head's part.
                embedding::backward((values, add || tied), tokens, (dx, hidden), scale, padding);
            }
            if let Some(range) = positions
                && let (_, Some(Gradient { values, add })) = store.gradient(0, &range)
            {
                embedding::backward((values, add), &of_tokens, (dx, hidden), 1.0, None);
            }
        })
    }

    fn head(&mut self, head: &Head, gradient: bool) -> Done {
        self.set_loss(head, gradient);
        Ok(())
    }

    fn logits(&mut self, head: &Head) -> Done {
        self.last_logits(head);
        Ok(())
    }

    fn norm(&mut self, norm: &Norm, x: Slot, normed: Slot) -> Done {
        let (config, hidden) = (self.config, self.hidden());
        let statistics = (norm.statistics, config.norm.statistics());
        let slots = [(normed, hidden), statistics, (x, hidden)];
        self.on(slots, |[normed, statistics, x], store, _| {
            let w = &store.parameters(norm.unit)[norm.weights.range.clone()];
            norm_forward(config, normed, statistics, x, w)
        })
    }

    fn norm_backward(&mut self, norm: &Norm, x: Slot) -> Done {
        let (config, hidden) = (self.config, self.hidden());
        let slots = [
            (Slot::Narrow, hidden),
            (Slot::DResidual, hidden),
            (x, hidden),
            (norm.statistics, config.norm.statistics()),
        ];
        self.on(slots, |[normed, dx, x, statistics], store, shared| {
            let (w, gradient) = store.gradient(norm.unit, &norm.weights.range);
            let mut unused = unused(&gradient, w.len());
            let dw = place(gradient, &mut unused);
            let scratch = &mut shared.norm_scratch;
            norm_backward(config, (normed, dx), dw, (x, statistics), w, scratch)
        })?;
        if norm.publishes {
            self.publish();
        }
        Ok(())
    }

    fn linear(&mut self, linear: &Linear, x: Slot, y: Slot) -> Done {
        let n = self.tokens();
        let slots = [(y, linear.outputs()), (x, linear.inputs)];
        self.on(slots, |[y, x], store, _| {
            let unit = store.parameters(linear.unit);
            linear::forward(y, x, &unit[linear.weights.clone()], n);
            if let Some(bias) = &linear.bias {
                linear::add_bias(y, &unit[bias.range.clone()]);
            }
        })?;
        self.adapt(linear, x, y)
    }

    fn linear_add(&mut self, linear: &Linear, x: Slot, residual: Slot, sum: Slot) -> Done {
        self.linear(linear, x, Slot::Narrow)?;
        let hidden = self.hidden();
        let slots = [(sum, hidden), (residual, hidden), (Slot::Narrow, hidden)];
        self.on(slots, |[sum, residual, projected], _, _| {
            vector::add(sum, residual, projected)
        })
    }

    /// The sum and its norm in one pass over memory.
    fn linear_add_norm(
        &mut self,
        linear: &Linear,
        x: Slot,
        (residual, sum): (Slot, Slot),
        norm: &Norm,
        normed: Slot,
    ) -> Done {
        if self.config.norm == NormKind::Layer {
            self.linear_add(linear, x, residual, sum)?;
            return self.norm(norm, sum, normed);
        }
        self.linear(linear, x, Slot::Narrow)?;
        let (config, hidden) = (self.config, self.hidden());
        let slots = [
            (normed, hidden),
            (norm.statistics, 1),
            (sum, hidden),
            (residual, hidden),
            (Slot::Narrow, hidden),
        ];
        self.on(
            slots,
            |[normed, inverse, sum, residual, projected], store, _| {
                let w = &store.parameters(norm.unit)[norm.weights.range.clone()];
                let (w, eps) = (norm_scale(config, w), config.norm_eps);
                rmsnorm::add_forward(normed, inverse, sum, (residual, projected), &w, eps)
            },
        )
    }

    fn backward_input(&mut self, linear: &Linear, dy: Slot, dx: Slot) -> Done {
        let n = self.tokens();
        let slots = [(dx, linear.inputs), (dy, linear.outputs())];
        self.on(slots, |[dx, dy], store, _| {
            let w = &store.parameters(linear.unit)[linear.weights.clone()];
            linear::backward_input(dx, dy, w, n)
        })?;
        self.adapt_backward_input(linear, dy, dx)
    }

    fn backward_weight(&mut self, linear: &Linear, dy: Slot, x: Slot) -> Done {
        let n = self.tokens();
        let slots = [(dy, linear.outputs()), (x, linear.inputs)];
        self.on(slots, |[dy, x], store, _| {
            let gradient = store.gradient(linear.unit, &linear.weights).1;
            if let Some(Gradient { values, add }) = gradient {
                linear::backward_weight(values, dy, x, n, add);
            }
            if let Some(bias) = &linear.bias
                && let Some(Gradient { values, add }) = store.gradient(linear.unit, &bias.range).1
            {
                linear::backward_bias(values, dy, add);
            }
        })?;
        self.adapt_backward_weight(linear, dy, x)
    }

    fn head_norms(&mut self, norms: &HeadNorms) -> Done {
        let (shape, eps) = (self.shape, self.config.norm_eps);
        let slots = [
            (Slot::Qkv(norms.layer), shape.qkv()),
            (Slot::Unnormed(norms.layer), shape.queries_and_keys()),
        ];
        self.on(slots, |[qkv, unnormed], store, _| {
            let w = &store.parameters(norms.unit)[norms.weights.range.clone()];
            head_norms::forward(qkv, unnormed, w, shape, eps)
        })
    }

    fn head_norms_backward(&mut self, norms: &HeadNorms) -> Done {
        let (shape, eps) = (self.shape, self.config.norm_eps);
        let slots = [
            (Slot::Wide, shape.qkv()),
            (Slot::Unnormed(norms.layer), shape.queries_and_keys()),
        ];
        self.on(slots, |[dqkv, unnormed], store, shared| {
            let (w, gradient) = store.gradient(norms.unit, &norms.weights.range);
            let mut unused = unused(&gradient, w.len());
            let dw = place(gradient, &mut unused);
            let scratch = &mut shared.norm_scratch;
            head_norms::backward(dqkv, dw, unnormed, w, (shape, eps), scratch)
        })
    }

    fn rope(&mut self, qkv: Slot, direction: Direction) -> Done {
        let (shape, rotary_dim) = (self.shape, self.config.rotary_dim());
        let positions = self.positions.clone();
        self.on([(qkv, shape.qkv())], |[qkv], _, shared| {
            let rotation = rope::Rotation {
                table: &shared.rope,
                positions: &positions,
                heads: shape.heads + shape.kv_heads,
                head_dim: shape.head_dim,
                rotary_dim,
            };
            match direction {
                Direction::Forward => rope::rotate(qkv, shape.qkv(), rotation),
                Direction::Backward => rope::rotate_back(qkv, shape.qkv(), rotation),
            }
        })
    }

    fn attention(&mut self, layer: usize) -> Done {
        let (shape, queries) = (self.attention_of(layer), self.config.queries());
        if let Some(sequence) = self.sequence.take() {
            let done = self.attention_over_cache(layer, sequence);
            self.sequence = Some(sequence);
            return done;
        }
        let slots = [
            (Slot::Attended(layer), queries),
            (Slot::LogSums(layer), shape.heads),
            (Slot::Qkv(layer), shape.qkv()),
        ];
        let sequences = self.sequences.clone();
        self.on(slots, |[attended, log_sums, qkv], _, shared| {
            attention::forward(
                attended,
                log_sums,
                qkv,
                (shape, &sequences),
                &shared.attention,
            )
        })
    }

    fn attention_backward(&mut self, layer: usize) -> Done {
        let (shape, queries) = (self.attention_of(layer), self.config.queries());
        let slots = [
            (Slot::Wide, shape.qkv()),
            (Slot::Narrow, queries),
            (Slot::Qkv(layer), shape.qkv()),
            (Slot::Attended(layer), queries),
            (Slot::LogSums(layer), shape.heads),
        ];
        let sequences = self.sequences.clone();
        self.on(
            slots,
            |[dqkv, dattended, qkv, attended, log_sums], _, shared| {
                let forward = (&*qkv, &*attended, &*log_sums);
                let shape = (shape, &sequences[..]);
                attention::backward(dqkv, dattended, forward, shape, &shared.attention)
            },
        )
    }

    fn activate(&mut self, layer: usize) -> Done {
        let config = self.config;
        let shape = (config.intermediate_size, config.gated);
        let slots = [(Slot::Wide, shape.0), (Slot::GateUp(layer), config.inner())];
        self.on(slots, |[h, inputs], _, _| match config.activation {
            Activation::Silu => mlp::forward(h, inputs, shape, mlp::silu),
            Activation::GeluTanh => mlp::forward(h, inputs, shape, mlp::gelu_tanh),
            Activation::Gelu => mlp::forward(h, inputs, shape, mlp::gelu),
        })
    }

    fn activate_backward(&mut self, layer: usize) -> Done {
        let config = self.config;
        let shape = (config.intermediate_size, config.gated);
        let slots = [(Slot::Wide, shape.0), (Slot::GateUp(layer), config.inner())];
        self.on(slots, |[h, inputs], _, _| match config.activation {
            Activation::Silu => mlp::backward(h, inputs, shape, mlp::silu),
            Activation::GeluTanh => mlp::backward(h, inputs, shape, mlp::gelu_tanh),
            Activation::Gelu => mlp::backward(h, inputs, shape, mlp::gelu),
        })
    }
}

/// An adapter's matrices among the parameters of all.
fn matrices<'p>(
    parameters: &'p [f32],
    adapter: &Adapter,
    settings: &Adapters,
) -> adapter::Adapter<'p> {
    adapter::Adapter {
        a: &parameters[adapter.a.clone()],
        b: &parameters[adapter.b.clone()],
        rank: settings.rank,
        scale: settings.scale(),
    }
}

/// x `[n, width]` with dropout, in `scratch`, or x itself.
fn dropped<'x>(
    dropout: Option<Dropout<'_>>,
    x: &'x [f32],
    width: usize,
    scratch: &'x mut [f32],
) -> &'x [f32] {
    let Some(dropout) = dropout else {
        return x;
    };
    let scratch = &mut scratch[..x.len()];
    dropout.apply(scratch, x, width);
    scratch
}

/// A place for the gradient of `len` frozen elements, which nothing reads.
pub(super) fn unused(gradient: &Option<Gradient<'_>>, len: usize) -> Vec<f32> {
    match gradient {
        Some(_) => Vec::new(),
        None => vec![0.0; len],
    }
}

/// The place for a gradient, and whether to add to it.
pub(super) fn place<'g>(
    gradient: Option<Gradient<'g>>,
    unused: &'g mut [f32],
) -> (&'g mut [f32], bool) {
    match gradient {
        Some(Gradient { values, add }) => (values, add),
        None => (unused, false),
    }
}

/// `normed` = norm(`x`); keeps the `statistics` of the rows. `w` are the norm's vectors.
pub(super) fn norm_forward(
    config: &ModelConfig,
    normed: &mut [f32],
    statistics: &mut [f32],
    x: &[f32],
    w: &[f32],
) {
    match config.norm {
        NormKind::Layer => {
            let vectors = w.split_at(config.hidden_size);
            layernorm::forward(normed, statistics, x, vectors, config.norm_eps);
        }
        NormKind::Rms | NormKind::RmsPlusOne => {
            let w = norm_scale(config, w);
            rmsnorm::forward(normed, statistics, x, &w, config.norm_eps);
        }
    }
}

/// Replaces the gradient of the norm's output by the output, and adds that of the input to `dx` and that of the vectors to
/// `dw`.
pub(super) fn norm_backward(
    config: &ModelConfig,
    (normed, dx): (&mut [f32], &mut [f32]),
    dw: (&mut [f32], bool),
    (x, statistics): (&[f32], &[f32]),
    w: &[f32],
    scratch: &mut [f32],
) {
    match config.norm {
        NormKind::Layer => {
            let vectors = w.split_at(config.hidden_size);
            layernorm::backward(normed, dx, dw, x, statistics, vectors, scratch);
        }
        NormKind::Rms | NormKind::RmsPlusOne => {
            let w = norm_scale(config, w);
            rmsnorm::backward(normed, dx, dw, x, statistics, &w, scratch);
        }
    }
}

/// The factors of an RMSNorm: its weights, or one more than each.
fn norm_scale<'w>(config: &ModelConfig, weights: &'w [f32]) -> Cow<'w, [f32]> {
    match config.norm {
        NormKind::RmsPlusOne => weights.iter().map(|w| 1.0 + w).collect(),
        NormKind::Rms | NormKind::Layer => Cow::Borrowed(weights),
    }
}
