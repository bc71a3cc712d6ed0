//! The operations of a walk on the device.
//!
//! The residual stream and its gradient are f32, as under PyTorch's autocast; the matrix products add to them
//! directly. The model runs on the compute stream. As soon as a unit's gradient is complete, the side stream adds
//! and measures it, while the compute stream continues with the next unit. With other ranks, their
//! stream then adds the step's gradient over all of them; or, if the model is sharded, it reduces every
//! micro-batch's gradient to shards.

use std::ops::Range;

use super::cublaslt::{Blas, Operand, Product, transposed};
use super::driver::{Event, Pinned, Stream};
use super::error::CudaError;
use super::launches::{Enqueued, Kernels};
use super::options::Precision;
use super::peers::Peers;
use super::sharded::Shards;
use super::state::{Held, Whole};
use super::workspace::{Scalars, Shape, Stash, Workspace};
use crate::engine::adapters::trained;
use crate::engine::walk::{Backend, Head, HeadNorms, Linear, Norm, Slot, Vector, Walk};
use crate::engine::{Direction, Layout, Pass, Role, Sequence, Training, Weigh};

const F32: usize = size_of::<f32>();

/// The two streams, and the events that order them.
pub struct Streams {
    /// Forward, backward, and the optimiser step.
    pub compute: Stream,
    /// Sums and norms of complete gradients.
    pub side: Stream,
    /// By unit: the compute stream has completed the gradient.
    pub complete: Vec<Event>,
    /// By unit: the side stream has added and measured the gradient.
    pub added: Vec<Event>,
}

/// What turns the losses of tokens into the factors of their gradients, between forward and backward.
pub struct Weighing<'a> {
    pub weigh: Weigh<'a>,
    /// For the losses, f64 `[n]`, and then the factors, f32 `[n]`.
    pub host: &'a mut Pinned,
}

/// One micro-batch on its way through the model. The methods only enqueue work, except where losses are weighed.
pub struct CudaBackend<'a> {
    pub walk: Walk<'a>,
    pub pass: Pass,
    pub precision: Precision,
    pub kernels: &'a Kernels,
    pub blas: &'a Blas,
    pub streams: &'a Streams,
    pub held: &'a Held,
    pub work: &'a Workspace,
    /// `None` where this process trains alone.
    pub peers: Option<&'a Peers>,
    /// Gathers the weights of a sharded model; `None` if every rank holds everything.
    pub shards: Option<Shards<'a>>,
    pub shape: Shape,
    /// What the micro-batch of [`Pass::Prediction`] continues.
    pub sequence: Option<&'a Sequence<u64>>,
    pub weighing: Option<Weighing<'a>>,
}

/// The place for a unit's gradient.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gradient {
    address: u64,
    /// Whether to add to the values; otherwise they are unspecified and every one is overwritten.
    add: bool,
}

impl Gradient {
    /// The part of a tensor.
    pub(super) fn part(self, range: &Range<usize>) -> Gradient {
        Gradient {
            address: f32_at(self.address, range.start),
            ..self
        }
    }
}

impl<'a> CudaBackend<'a> {
    pub fn run(&mut self) -> Enqueued {
        self.zero(self.work.scalars, Scalars::BYTES)?;
        let walk = self.walk;
        match self.pass {
            Pass::Evaluation => {
                self.begin_shards()?;
                walk.evaluate(self)
            }
            Pass::Prediction => {
                self.begin_shards()?;
                walk.predict(self)
            }
            Pass::Training(training) => {
                self.zero(self.work.reduced_norm, size_of::<f64>())?;
                if training.first {
                    for (squares, elements) in self.held.trained.squares(self.trained()) {
                        self.zero(squares, elements * F32)?;
                    }
                }
                self.begin_shards()?;
                walk.train(self)?;
                // The compute stream waits for the side stream.
                if adds(training) {
                    self.streams.compute.wait(&self.streams.added[0])?;
                }
                Ok(())
            }
        }
    }

    fn begin_shards(&self) -> Enqueued {
        match &self.shards {
            Some(shards) => shards.begin(),
            None => Ok(()),
        }
    }

    /// What is done with the gradient; only a walk that trains has one.
    fn training(&self) -> Training {
        self.pass.training().unwrap_or_default()
    }

    /// The layout of what is trained.
    fn trained(&self) -> &'a Layout {
        trained(self.walk.adapted, self.walk.layout)
    }

    /// An acquired unit's weights.
    fn whole(&self, unit: usize) -> Whole {
        match &self.shards {
            Some(shards) => shards.whole(unit),
            None => self.held.model().whole(unit),
        }
    }

    /// The place for the gradient of a range of a unit of the model, unless it is frozen.
    fn gradient(&self, unit: usize, range: &Range<usize>) -> Option<Gradient> {
        let Some(adapted) = self.walk.adapted else {
            return Some(self.trained_gradient(unit).part(range));
        };
        let place = adapted.place(unit, range)?;
        Some(self.trained_gradient(0).part(&place))
    }

    /// The place for the gradient of a trained unit of this micro-batch.
    pub(super) fn trained_gradient(&self, unit: usize) -> Gradient {
        let (state, training) = (&self.held.trained, self.training());
        let tied = state.scratch_of_tied.filter(|_| unit == 0);
        match state.scratch {
            Some(scratch) if training.apart => Gradient {
                address: tied.unwrap_or(scratch[unit % 2]),
                add: false,
            },
            _ => Gradient {
                address: state.units[unit].gradient,
                add: !training.first,
            },
        }
    }

    /// An acquired unit's vectors, f32.
    fn vector(&self, unit: usize, vector: &Vector) -> u64 {
        self.whole(unit).vectors[vector.index]
    }

    /// The place to which the gradient of vectors is added, unless they are frozen.
    fn vector_gradient(&self, unit: usize, vector: &Vector) -> Result<Option<u64>, CudaError> {
        let Some(gradient) = self.gradient(unit, &vector.range) else {
            return Ok(None);
        };
        self.zero_unless_added(gradient, vector.range.len())?;
        Ok(Some(gradient.address))
    }

    /// The position embeddings within the first unit.
    fn positions(&self) -> Option<Range<usize>> {
        let unit = &self.walk.layout.units[0];
        let has_them = self.walk.config.position_embeddings;
        has_them.then(|| unit.of(Role::Positions).range())
    }

    fn stash(&self, layer: usize) -> &'a Stash {
        let stashes = &self.work.stashes;
        &stashes[layer % stashes.len()]
    }

    /// Tokens of the sequence before the micro-batch.
    fn past(&self) -> usize {
        self.sequence.map_or(0, |sequence| sequence.past)
    }

    pub(super) fn tokens(&self) -> usize {
        self.shape.tokens()
    }

    fn address(&self, slot: Slot) -> u64 {
        match slot {
            Slot::Residual(layer) => self.work.residual[layer % self.work.residual.len()],
            Slot::InputStatistics(layer) => self.stash(layer).input_statistics,
            Slot::Qkv(layer) => self.stash(layer).qkv,
            Slot::Unnormed(layer) => self.stash(layer).unnormed,
            Slot::LogSums(layer) => self.stash(layer).log_sums,
            Slot::Attended(layer) => self.stash(layer).attended,
            Slot::Middle(layer) => self.stash(layer).middle,
            Slot::MiddleStatistics(layer) => self.stash(layer).middle_statistics,
            Slot::GateUp(layer) => self.stash(layer).gate_up,
            Slot::Narrow => self.work.narrow,
            Slot::Wide => self.work.wide,
            Slot::DResidual => self.work.dx,
            Slot::DOutput => self.work.dx_operand,
        }
    }

    pub(super) fn real_at(&self, address: u64, elements: usize) -> u64 {
        address + (elements * self.precision.size()) as u64
    }

    fn weights(&self, linear: &Linear) -> Operand {
        let unit = self.whole(linear.unit).operands;
        self.operand(self.real_at(unit, linear.weights.start), linear.inputs)
    }

    /// Activations or weights of `width` elements a row.
    pub(super) fn operand(&self, address: u64, width: usize) -> Operand {
        Operand {
            address,
            element: self.precision,
            stride: width,
            transposed: false,
        }
    }

    /// y `[n, outputs]` = x `[n, inputs]` · wᵀ, plus `added`. x is real.
    fn product(
        &self,
        linear: &Linear,
        x: u64,
        (result, element): (u64, Precision),
        added: Option<u64>,
        n: usize,
    ) -> Enqueued {
        let sizes = [n, linear.inputs, linear.outputs()];
        let (x, w) = (self.operand(x, linear.inputs), self.weights(linear));
        self.multiply(Product {
            added,
            element,
            ..product(sizes, x, transposed(w), result)
        })
    }

    /// As [`CudaBackend::product`] of the micro-batch's tokens, plus the layer's bias.
    fn biased_product(
        &self,
        linear: &Linear,
        x: u64,
        y: (u64, Precision),
        added: Option<u64>,
    ) -> Enqueued {
        let n = self.tokens();
        self.product(linear, x, y, added, n)?;
        let Some(bias) = &linear.bias else {
            return Ok(());
        };
        let of_columns = (self.vector(linear.unit, bias), linear.outputs());
        self.kernels
            .add_bias(&self.streams.compute, y, of_columns, n)
    }

    /// dx `[n, inputs]` = dy `[n, outputs]` · w, both real.
    fn product_of_input(&self, linear: &Linear, dy: u64, dx: u64, n: usize) -> Enqueued {
        let sizes = [n, linear.outputs(), linear.inputs];
        let dy = self.operand(dy, linear.outputs());
        self.multiply(product(sizes, dy, self.weights(linear), dx))
    }

    /// The gradient of the weights, f32 `[outputs, inputs]`: dyᵀ · x, of real dy `[n, outputs]` and x `[n, inputs]`.
    fn product_of_weights(
        &self,
        linear: &Linear,
        (dy, x): (u64, u64),
        gradient: Gradient,
        n: usize,
    ) -> Enqueued {
        let dy = self.operand(dy, linear.outputs());
        let x = self.operand(x, linear.inputs);
        self.gradient_product((dy, linear.outputs()), (x, linear.inputs), gradient, n)
    }

    /// The gradient of a matrix, f32 `[outputs, inputs]`: dyᵀ · x, of real dy `[n, outputs]` and x `[n, inputs]`.
    pub(super) fn gradient_product(
        &self,
        (dy, outputs): (Operand, usize),
        (x, inputs): (Operand, usize),
        gradient: Gradient,
        n: usize,
    ) -> Enqueued {
        self.multiply(Product {
            added: gradient.add.then_some(gradient.address),
            element: Precision::F32,
            ..product([outputs, n, inputs], transposed(dy), x, gradient.address)
        })
    }

    pub(super) fn multiply(&self, product: Product) -> Enqueued {
        let workspace = (self.work.blas, Blas::WORKSPACE);
        // SAFETY: the operands lie in the state and the workspace, which live longer than the stream's work.
        unsafe {
            self.blas
                .multiply(&self.streams.compute, &product, workspace)
        }
    }

    /// Computes the logits of the rows from `first` on whose logits exist together, from the normed rows in `narrow`, and their
    /// losses. Returns the number of these rows, and the address of the normed ones.
    fn cross_entropies(
        &self,
        linear: &Linear,
        first: usize,
        gradient: (bool, Option<u64>),
    ) -> Result<(usize, u64), CudaError> {
        let (work, compute) = (self.work, &self.streams.compute);
        let rows = work.logits_rows.min(self.tokens() - first);
        let normed = self.real_at(work.narrow, first * self.walk.config.hidden_size);
        self.product(linear, normed, (work.logits, self.precision), None, rows)?;
        let losses = work.losses + (first * size_of::<f64>()) as u64;
        let targets = (f32_at(work.inputs.targets, first), rows);
        self.kernels
            .cross_entropy(compute, losses, work.logits, targets, gradient)?;
        Ok((rows, normed))
    }

    /// Computes the losses of all tokens from the normed rows in `narrow`, and returns the address of the factors that the
    /// loss gives them. Waits for the device.
    fn weighed(&self, linear: &Linear, weighing: Weighing<'_>) -> Result<u64, CudaError> {
        let (n, work, compute) = (self.tokens(), self.work, &self.streams.compute);
        for first in (0..n).step_by(work.logits_rows) {
            self.cross_entropies(linear, first, (false, None))?;
        }
        let Weighing { weigh, host } = weighing;
        let of_losses = n * size_of::<f64>();
        // SAFETY: the losses have these bytes; the host reads them after the copy.
        unsafe { compute.download(host, 0, work.losses, of_losses)? };
        match (self.peers, &self.shards) {
            // The walk has waited for gathered weights, and a rank may be lost.
            (Some(peers), Some(_)) => peers.synchronize_with(compute)?,
            _ => compute.synchronize()?,
        }
        let mut losses = vec![0.0f64; n];
        bytemuck::cast_slice_mut(&mut losses).copy_from_slice(&host.bytes()[..of_losses]);
        let weights = weigh(&losses);
        let range = of_losses..of_losses + n * F32;
        host.bytes_mut()[range.clone()].copy_from_slice(bytemuck::cast_slice(&weights[..n]));
        // SAFETY: the factors have these bytes, and the host does not change them until the pass is done.
        unsafe { compute.upload(work.weights, host, range)? };
        Ok(work.weights)
    }

    fn zero_unless_added(&self, gradient: Gradient, elements: usize) -> Enqueued {
        if gradient.add {
            return Ok(());
        }
        self.zero(gradient.address, elements * F32)
    }

    fn zero(&self, address: u64, bytes: usize) -> Enqueued {
        // SAFETY: the callers name whole buffers of the state or the workspace.
        unsafe { self.streams.compute.fill_zero(address, bytes) }
    }
}

impl Backend for CudaBackend<'_> {
    type Error = CudaError;

    fn acquire(&mut self, unit: usize) -> Enqueued {
        if let Some(quantised) = &self.held.model().quantised {
            for layer in &quantised.layers[unit] {
                let weights = self.real_at(quantised.place, layer.range.start);
                let compute = &self.streams.compute;
                if let Some(nested) = &layer.nested {
                    let numbers = quantised.numbers;
                    self.kernels
                        .dequantise_scales(compute, layer.scales, nested, numbers)?;
                }
                self.kernels
                    .dequantise(compute, weights, layer, quantised.table)?;
            }
        }
        match &self.shards {
            Some(shards) => shards.acquire(unit),
            None => Ok(()),
        }
    }

    fn release(&mut self, unit: usize, direction: Direction) -> Enqueued {
        match &self.shards {
            Some(shards) => shards.release(unit, direction),
            None => Ok(()),
        }
    }

    /// Waits until no other stream reads the scratch that the unit is about to use.
    fn open(&mut self, unit: usize) -> Enqueued {
        let before = unit + 2;
        let last = self.walk.layout.units.len() - 1;
        // Else the compute stream has waited for the walk before: for its end, or for weights gathered since.
        if self.training().apart && before <= last {
            let free = match &self.shards {
                Some(shards) if shards.state.scatters() => shards.scattered(before),
                _ => &self.streams.added[before],
            };
            self.streams.compute.wait(free)?;
        }
        Ok(())
    }

    /// The side stream adds and measures the gradient.
    fn complete(&mut self, unit: usize) -> Enqueued {
        let training = self.training();
        let Streams {
            compute,
            side,
            complete,
            added,
        } = self.streams;
        if !adds(training) {
            return Ok(());
        }
        compute.record(&complete[unit])?;
        side.wait(&complete[unit])?;

        let (kernels, work) = (self.kernels, self.work);
        let trained = &self.held.trained;
        let addresses = &trained.units[unit];
        let (sum, own) = (addresses.gradient, self.trained_gradient(unit).address);
        let elements = self.trained().units[unit].len;
        let [own_norm, whole_norm] = [8, 16].map(|offset| work.scalars + offset);
        let [own_partials, whole_partials, reduced_partials] = work.square_partials;
        if let Some(squares) = addresses.squares
            && training.micro_batch_squares
        {
            let factor = work.inputs.factors;
            kernels.add_squares(side, squares, own, factor, elements)?;
        }
        if trained.scatters() {
            if training.measured {
                kernels.squared_norm(side, (own_norm, own_partials), own, elements)?;
            }
        } else if training.apart && (training.measured || training.last) {
            let (results, partials) = ([own_norm, whole_norm], [own_partials, whole_partials]);
            kernels.add_gradient_measuring(side, sum, results, partials, (own, elements))?;
        } else if training.apart {
            kernels.add_gradient(side, sum, own, elements)?;
        } else {
            // The first micro-batch of a step is the step so far; if it is also the last, it is the whole step.
            if training.last {
                kernels.squared_norm(side, (whole_norm, whole_partials), sum, elements)?;
            } else if training.measured {
                kernels.squared_norm(side, (own_norm, own_partials), sum, elements)?;
            }
        }
        if let Some(squares) = addresses.squares
            && training.step_squares
        {
            let factor = f32_at(work.inputs.factors, 1);
            kernels.add_squares(side, squares, sum, factor, elements)?;
        }
        side.record(&added[unit])?;
        match (&self.shards, self.peers) {
            (Some(shards), _) if trained.scatters() => {
                shards.scatter(unit, &added[unit], training.first)
            }
            (None, Some(peers)) if training.last => {
                peers.stream.wait(&added[unit])?;
                peers.all_reduce(sum, elements)?;
                let result = (work.reduced_norm, reduced_partials);
                kernels.squared_norm(&peers.stream, result, sum, elements)
            }
            _ => Ok(()),
        }
    }

    fn recomputes(&self) -> bool {
        self.work.stashes.len() < self.walk.config.num_hidden_layers
    }

    fn embed(&mut self) -> Enqueued {
        let table = self.whole(0).table;
        let past = self.past() * self.walk.config.hidden_size;
        let positions = self.positions();
        let positions = positions.map(|range| f32_at(table, range.start + past));
        let (compute, x) = (&self.streams.compute, self.address(Slot::Residual(0)));
        self.kernels.embedding_forward(
            compute,
            x,
            (table, positions),
            &self.work.inputs,
            self.shape,
        )
    }

    fn embed_backward(&mut self) -> Enqueued {
        let compute = &self.streams.compute;
        let (dx, n, inputs) = (self.work.dx, self.tokens(), &self.work.inputs);
        if let Some(range) = self.positions()
            && let Some(gradient) = self.gradient(0, &range)
        {
            self.zero_unless_added(gradient, range.len())?;
            let positions = gradient.address;
            self.kernels
                .positions_backward(compute, positions, dx, inputs, self.shape)?;
        }
        let table = self.walk.layout.units[0].of(Role::Embedding).range();
        let Some(gradient) = self.gradient(0, &table) else {
            return Ok(());
        };
        // Tied embeddings already hold the head's part.
        if !self.walk.config.tie_word_embeddings {
            self.zero_unless_added(gradient, table.len())?;
        }
        self.kernels
            .embedding_backward(compute, gradient.address, dx, inputs, n)
    }

    /// Rows are processed in chunks, so that only one chunk's logits exist; their gradient overwrites them.
    fn head(&mut self, head: &Head, gradient: bool) -> Enqueued {
        let (n, work, linear) = (self.tokens(), self.work, &head.logits);
        let hidden = self.walk.config.hidden_size;
        let (kernels, compute) = (self.kernels, &self.streams.compute);
        let x = self.address(Slot::Residual(self.walk.config.num_hidden_layers));
        let norm_weights = self.vector(head.unit, &head.norm);

        let normed = (work.narrow, work.head_statistics);
        kernels.norm_forward(compute, normed, x, norm_weights, n)?;
        let weights = match self.weighing.take() {
            Some(weighing) => Some(self.weighed(linear, weighing)?),
            None => None,
        };
        let (kernels, compute) = (self.kernels, &self.streams.compute);
        for first in (0..n).step_by(work.logits_rows) {
            let weights = weights.map(|weights| f32_at(weights, first));
            let (rows, normed) = self.cross_entropies(linear, first, (gradient, weights))?;
            if gradient {
                // The weights' gradient first, then that of the norm's output in place of the output.
                if let Some(gradient) = self.gradient(linear.unit, &linear.weights) {
                    let dw = Gradient {
                        add: gradient.add || first > 0,
                        ..gradient
                    };
                    self.product_of_weights(linear, (work.logits, normed), dw, rows)?;
                }
                self.product_of_input(linear, work.logits, normed, rows)?;
            }
        }
        kernels.sum_losses(compute, work.scalars, work.losses, n)?;
        if !gradient {
            return Ok(());
        }
        let weights = (norm_weights, self.vector_gradient(head.unit, &head.norm)?);
        self.zero(work.dx, n * hidden * F32)?;
        kernels.norm_backward(compute, work, (x, work.head_statistics), weights, true, n)
    }

    fn logits(&mut self, head: &Head) -> Enqueued {
        let (work, config) = (self.work, self.walk.config);
        let x = self.address(Slot::Residual(config.num_hidden_layers));
        let last = f32_at(x, (self.tokens() - 1) * config.hidden_size);
        let normed = (work.narrow, work.head_statistics);
        let weights = self.vector(head.unit, &head.norm);
        let compute = &self.streams.compute;
        self.kernels
            .norm_forward(compute, normed, last, weights, 1)?;
        let logits = (work.logits, self.precision);
        self.product(&head.logits, work.narrow, logits, None, 1)
    }

    fn norm(&mut self, norm: &Norm, x: Slot, normed: Slot) -> Enqueued {
        let weights = self.vector(norm.unit, &norm.weights);
        let y = (self.address(normed), self.address(norm.statistics));
        let compute = &self.streams.compute;
        self.kernels
            .norm_forward(compute, y, self.address(x), weights, self.tokens())
    }

    fn norm_backward(&mut self, norm: &Norm, x: Slot) -> Enqueued {
        let dw = self.vector_gradient(norm.unit, &norm.weights)?;
        let input = (self.address(x), self.address(norm.statistics));
        let weights = (self.vector(norm.unit, &norm.weights), dw);
        let (compute, n) = (&self.streams.compute, self.tokens());
        self.kernels
            .norm_backward(compute, self.work, input, weights, norm.publishes, n)
    }

    fn linear(&mut self, linear: &Linear, x: Slot, y: Slot) -> Enqueued {
        let y = (self.address(y), self.precision);
        self.biased_product(linear, self.address(x), y, None)?;
        self.adapt(linear, self.address(x), y)
    }

    fn linear_add(&mut self, linear: &Linear, x: Slot, residual: Slot, sum: Slot) -> Enqueued {
        let sum = (self.address(sum), Precision::F32);
        let added = Some(self.address(residual));
        self.biased_product(linear, self.address(x), sum, added)?;
        self.adapt(linear, self.address(x), sum)
    }

    fn backward_input(&mut self, linear: &Linear, dy: Slot, dx: Slot) -> Enqueued {
        let (dy, dx) = (self.address(dy), self.address(dx));
        self.product_of_input(linear, dy, dx, self.tokens())?;
        self.adapt_backward_input(linear, dy, dx)
    }

    fn backward_weight(&mut self, linear: &Linear, dy: Slot, x: Slot) -> Enqueued {
        let (dy, x) = (self.address(dy), self.address(x));
        if let Some(dw) = self.gradient(linear.unit, &linear.weights) {
            self.product_of_weights(linear, (dy, x), dw, self.tokens())?;
        }
        if let Some(bias) = &linear.bias
            && let Some(db) = self.vector_gradient(linear.unit, bias)?
        {
            let (compute, db) = (&self.streams.compute, (db, linear.outputs()));
            self.kernels
                .add_row_sums(compute, self.work, db, dy, self.tokens())?;
        }
        self.adapt_backward_weight(linear, dy, x)
    }

    fn head_norms(&mut self, norms: &HeadNorms) -> Enqueued {
        let qkv = self.address(Slot::Qkv(norms.layer));
        let unnormed = self.address(Slot::Unnormed(norms.layer));
        let weights = self.vector(norms.unit, &norms.weights);
        let compute = &self.streams.compute;
        self.kernels
            .head_norms_forward(compute, (qkv, unnormed), weights, self.tokens())
    }

    fn head_norms_backward(&mut self, norms: &HeadNorms) -> Enqueued {
        let dw = self.vector_gradient(norms.unit, &norms.weights)?;
        let weights = (self.vector(norms.unit, &norms.weights), dw);
        let unnormed = self.address(Slot::Unnormed(norms.layer));
        let compute = &self.streams.compute;
        self.kernels
            .head_norms_backward(compute, self.work, unnormed, weights, self.tokens())
    }

    fn rope(&mut self, qkv: Slot, direction: Direction) -> Enqueued {
        let past = self.past() * self.walk.config.rotary_dim();
        let (compute, table) = (&self.streams.compute, f32_at(self.work.rope, past));
        let of = (self.address(qkv), table);
        self.kernels
            .rope(compute, of, &self.work.inputs, self.shape, direction)
    }

    fn attention(&mut self, layer: usize) -> Enqueued {
        let compute = &self.streams.compute;
        let window = self.walk.config.window(layer);
        if let Some(sequence) = self.sequence {
            let stash = self.stash(layer);
            let cache = (sequence.caches[layer], sequence.past);
            let of_tokens = (stash.attended, stash.qkv);
            return (self.kernels).attention_over_cache(
                compute,
                of_tokens,
                cache,
                self.tokens(),
                window,
            );
        }
        let of = (&self.work.inputs, self.shape);
        self.kernels
            .attention_forward(compute, self.stash(layer), of, window)
    }

    fn attention_backward(&mut self, layer: usize) -> Enqueued {
        let compute = &self.streams.compute;
        let (stash, window) = (self.stash(layer), self.walk.config.window(layer));
        self.kernels
            .attention_backward(compute, self.work, stash, self.shape, window)
    }

    fn activate(&mut self, layer: usize) -> Enqueued {
        let (h, gate_up) = (self.work.wide, self.stash(layer).gate_up);
        let compute = &self.streams.compute;
        self.kernels
            .activate(compute, Direction::Forward, h, gate_up, self.tokens())
    }

    fn activate_backward(&mut self, layer: usize) -> Enqueued {
        let (h, gate_up) = (self.work.wide, self.stash(layer).gate_up);
        let compute = &self.streams.compute;
        self.kernels
            .activate(compute, Direction::Backward, h, gate_up, self.tokens())
    }
}

/// Whether the side stream has work for this micro-batch.
fn adds(training: Training) -> bool {
    training.apart || training.measured || training.last
}

/// The address of an f32 element.
fn f32_at(address: u64, elements: usize) -> u64 {
    address + (elements * F32) as u64
}

/// `result` `[rows, columns]` = a `[rows, inner]` · b `[inner, columns]`, all of one element.
pub(super) fn product(
    [rows, inner, columns]: [usize; 3],
    a: Operand,
    b: Operand,
    result: u64,
) -> Product {
    Product {
        rows,
        columns,
        inner,
        a,
        b,
        added: None,
        factor: 1.0,
        result,
        stride: columns,
        element: a.element,
    }
}
