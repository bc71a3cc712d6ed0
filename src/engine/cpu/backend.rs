//! The operations of a walk on this machine's processors.

use std::borrow::Cow;

use cpu_kernels::{attention, embedding, glu, head_norms, linear, rmsnorm, rope, vector};

use super::arena::Buffer;
use super::store::{Gradient, Store};
use super::workspace::{Shared, Stash, Workspace};
use crate::engine::walk::{Backend, Head, HeadNorms, Linear, Norm, Slot, Walk};
use crate::engine::{
    Accumulated, Activation, Direction, EngineError, MicroBatch, ModelConfig, Pass,
};

type Done = Result<(), EngineError>;

/// One micro-batch on its way through the model. The store receives its gradient.
pub struct CpuBackend<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) store: &'a mut Store,
    pub(super) micro_batch: MicroBatch<'a>,
    /// A block's output takes the place of an earlier block's input where there are fewer than blocks.
    inputs: &'a mut [Buffer],
    stashes: &'a mut [Stash],
    pub(super) shared: &'a mut Shared,
    shape: attention::Shape,
    /// Sum of the cross-entropies over target tokens.
    pub(super) loss: f64,
    /// Number of target tokens.
    pub(super) targets: u64,
}

/// Runs a micro-batch.
pub fn run(
    walk: Walk<'_>,
    store: &mut Store,
    workspace: &mut Workspace,
    micro_batch: MicroBatch<'_>,
    pass: Pass,
) -> Result<Accumulated, EngineError> {
    store.begin(pass)?;
    let Workspace {
        inputs,
        stashes,
        shared,
        ..
    } = workspace;
    let (inputs, stashes) = match pass {
        // No backward follows: one stash and two inputs stay in the caches.
        Pass::Evaluation => (&mut inputs[..2], &mut stashes[..1]),
        Pass::Training(_) => (&mut inputs[..], &mut stashes[..]),
    };
    let config = walk.config;
    let mut backend = CpuBackend {
        config,
        store,
        micro_batch,
        inputs,
        stashes,
        shared,
        shape: attention::Shape {
            batch: micro_batch.batch,
            seq_len: micro_batch.seq_len,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            window: None,
        },
        loss: 0.0,
        targets: 0,
    };
    match pass {
        Pass::Evaluation => walk.evaluate(&mut backend)?,
        Pass::Training(_) => walk.train(&mut backend)?,
    }
    Ok(Accumulated {
        loss: backend.loss,
        targets: backend.targets,
        squared_norm: backend.store.end(),
    })
}

impl CpuBackend<'_> {
    pub(super) fn tokens(&self) -> usize {
        self.micro_batch.tokens.len()
    }

    pub(super) fn buffer(&mut self, slot: Slot) -> &mut Buffer {
        let (inputs, stashes) = (self.inputs.len(), self.stashes.len());
        match slot {
            Slot::Residual(layer) => &mut self.inputs[layer % inputs],
            Slot::InverseInput(layer) => &mut self.stashes[layer % stashes].inverse_input,
            Slot::Qkv(layer) => &mut self.stashes[layer % stashes].qkv,
            Slot::Unnormed(layer) => &mut self.stashes[layer % stashes].unnormed,
            Slot::LogSums(layer) => &mut self.stashes[layer % stashes].log_sums,
            Slot::Attended(layer) => &mut self.stashes[layer % stashes].attended,
            Slot::Middle(layer) => &mut self.stashes[layer % stashes].middle,
            Slot::InverseMiddle(layer) => &mut self.stashes[layer % stashes].inverse_middle,
            Slot::GateUp(layer) => &mut self.stashes[layer % stashes].gate_up,
            Slot::Narrow => &mut self.shared.narrow,
            Slot::Wide => &mut self.shared.wide,
            Slot::DResidual => &mut self.shared.dx,
        }
    }

    /// Runs `work` on the rows of distinct buffers, which have these widths, with the store and the scratch of kernels.
    fn on<const N: usize>(
        &mut self,
        slots: [(Slot, usize); N],
        work: impl FnOnce([&mut [f32]; N], &mut Store, &mut Shared),
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

    fn hidden(&self) -> usize {
        self.config.hidden_size
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
        self.store.complete(unit)
    }

    fn recomputes(&self) -> bool {
        self.stashes.len() < self.config.num_hidden_layers
    }

    fn embed(&mut self) -> Done {
        let (tokens, hidden) = (self.micro_batch.tokens, self.hidden());
        let scale = self.config.embedding_scale();
        self.on([(Slot::Residual(0), hidden)], |[x], store, _| {
            embedding::forward(x, tokens, (store.parameters(0), hidden), scale)
        })
    }

    fn embed_backward(&mut self) -> Done {
        let (tokens, hidden) = (self.micro_batch.tokens, self.hidden());
        let tied = self.config.tie_word_embeddings;
        let (scale, padding) = (self.config.embedding_scale(), self.config.padding_token());
        self.on([(Slot::DResidual, hidden)], |[dx], store, _| {
            let (_, Gradient { values, add }) = store.gradient(0);
            // Tied embeddings already hold the head's part.
            embedding::backward((values, add || tied), tokens, (dx, hidden), scale, padding);
        })
    }

    fn head(&mut self, head: &Head, gradient: bool) -> Done {
        self.set_loss(head, gradient);
        Ok(())
    }

    fn norm(&mut self, norm: &Norm, x: Slot, normed: Slot) -> Done {
        let (config, hidden) = (self.config, self.hidden());
        let slots = [(normed, hidden), (norm.inverse, 1), (x, hidden)];
        self.on(slots, |[normed, inverse, x], store, _| {
            let w = norm_scale(
                config,
                &store.parameters(norm.unit)[norm.weights.range.clone()],
            );
            rmsnorm::forward(normed, inverse, x, &w, config.rms_norm_eps)
        })
    }

    fn norm_backward(&mut self, norm: &Norm, x: Slot) -> Done {
        let (config, hidden) = (self.config, self.hidden());
        let slots = [
            (Slot::Narrow, hidden),
            (Slot::DResidual, hidden),
            (x, hidden),
            (norm.inverse, 1),
        ];
        self.on(slots, |[normed, dx, x, inverse], store, shared| {
            let (w, Gradient { values, add }) = store.gradient(norm.unit);
            let dw = (&mut values[norm.weights.range.clone()], add);
            let w = norm_scale(config, &w[norm.weights.range.clone()]);
            rmsnorm::backward(normed, dx, dw, x, inverse, &w, &mut shared.norm_scratch)
        })
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
        })
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
        self.linear(linear, x, Slot::Narrow)?;
        let (config, hidden) = (self.config, self.hidden());
        let slots = [
            (normed, hidden),
            (norm.inverse, 1),
            (sum, hidden),
            (residual, hidden),
            (Slot::Narrow, hidden),
        ];
        self.on(
            slots,
            |[normed, inverse, sum, residual, projected], store, _| {
                let w = norm_scale(
                    config,
                    &store.parameters(norm.unit)[norm.weights.range.clone()],
                );
                let eps = config.rms_norm_eps;
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
        })
    }

    fn backward_weight(&mut self, linear: &Linear, dy: Slot, x: Slot) -> Done {
        let n = self.tokens();
        let slots = [(dy, linear.outputs()), (x, linear.inputs)];
        self.on(slots, |[dy, x], store, _| {
            let (_, Gradient { values, add }) = store.gradient(linear.unit);
            linear::backward_weight(&mut values[linear.weights.clone()], dy, x, n, add);
            if let Some(bias) = &linear.bias {
                linear::backward_bias(&mut values[bias.range.clone()], dy, add);
            }
        })
    }

    fn head_norms(&mut self, norms: &HeadNorms) -> Done {
        let (shape, eps) = (self.shape, self.config.rms_norm_eps);
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
        let (shape, eps) = (self.shape, self.config.rms_norm_eps);
        let slots = [
            (Slot::Wide, shape.qkv()),
            (Slot::Unnormed(norms.layer), shape.queries_and_keys()),
        ];
        self.on(slots, |[dqkv, unnormed], store, shared| {
            let (w, Gradient { values, add }) = store.gradient(norms.unit);
            let range = norms.weights.range.clone();
            let dw = (&mut values[range.clone()], add);
            let scratch = &mut shared.norm_scratch;
            head_norms::backward(dqkv, dw, unnormed, &w[range], (shape, eps), scratch)
        })
    }

    fn rope(&mut self, qkv: Slot, direction: Direction) -> Done {
        let shape = self.shape;
        self.on([(qkv, shape.qkv())], |[qkv], _, shared| {
            let table = (&shared.rope[..], shape.seq_len, shape.head_dim);
            let rotated = shape.heads + shape.kv_heads;
            match direction {
                Direction::Forward => rope::rotate(qkv, shape.qkv(), rotated, table),
                Direction::Backward => rope::rotate_back(qkv, shape.qkv(), rotated, table),
            }
        })
    }

    fn attention(&mut self, layer: usize) -> Done {
        let (shape, queries) = (self.attention_of(layer), self.config.queries());
        let slots = [
            (Slot::Attended(layer), queries),
            (Slot::LogSums(layer), shape.heads),
            (Slot::Qkv(layer), shape.qkv()),
        ];
        self.on(slots, |[attended, log_sums, qkv], _, shared| {
            attention::forward(attended, log_sums, qkv, shape, &shared.attention)
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
        self.on(
            slots,
            |[dqkv, dattended, qkv, attended, log_sums], _, shared| {
                let forward = (&*qkv, &*attended, &*log_sums);
                attention::backward(dqkv, dattended, forward, shape, &shared.attention)
            },
        )
    }

    fn glu(&mut self, layer: usize) -> Done {
        let (inner, activation) = (self.config.intermediate_size, self.config.activation);
        let slots = [(Slot::Wide, inner), (Slot::GateUp(layer), 2 * inner)];
        self.on(slots, |[h, gate_up], _, _| match activation {
            Activation::Silu => glu::forward(h, gate_up, inner, glu::silu),
            Activation::GeluTanh => glu::forward(h, gate_up, inner, glu::gelu_tanh),
        })
    }

    fn glu_backward(&mut self, layer: usize) -> Done {
        let (inner, activation) = (self.config.intermediate_size, self.config.activation);
        let slots = [(Slot::Wide, inner), (Slot::GateUp(layer), 2 * inner)];
        self.on(slots, |[h, gate_up], _, _| match activation {
            Activation::Silu => glu::backward(h, gate_up, inner, glu::silu),
            Activation::GeluTanh => glu::backward(h, gate_up, inner, glu::gelu_tanh),
        })
    }
}

/// The factors of a norm: its weights, or one more than each.
pub(super) fn norm_scale<'w>(config: &ModelConfig, weights: &'w [f32]) -> Cow<'w, [f32]> {
    match config.norms_add_one {
        false => Cow::Borrowed(weights),
        true => weights.iter().map(|w| 1.0 + w).collect(),
    }
}
