//! The walk over the model's units on the device: forward, and backward in reverse order.
//!
//! ```text
//! qkv      = rope(norm(x) · Wqkvᵀ)
//! middle   = x + attention(qkv) · Woᵀ
//! next     = middle + swiglu(norm(middle) · Wgate,upᵀ) · Wdownᵀ
//! ```
//!
//! The residual stream and its gradient are f32, as under PyTorch's autocast; the matrix products add to them
//! directly. Normed inputs and SwiGLU's product are cheap, so backward recomputes them instead of storing
//! them. The model runs on the compute stream. As soon as a unit's gradient is complete, the side stream adds
//! and measures it, while the compute stream continues with the next unit. With other ranks, their
//! stream then adds the step's gradient over all of them; or, if the model is sharded, it reduces every
//! micro-batch's gradient to shards.

use std::ops::Range;

use super::cublaslt::{Blas, Operand, Product};
use super::driver::{Event, Stream};
use super::launches::{Enqueued, Kernels};
use super::options::Precision;
use super::peers::Peers;
use super::sharded::Shards;
use super::state::{State, Whole};
use super::workspace::{Scalars, Shape, Stash, Workspace};
use crate::engine::{BlockTensors, Direction, Layout, Measure, ModelConfig};

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

/// The place of a micro-batch in its step; it decides which kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Training {
    /// The step has no gradient yet, so this one overwrites it.
    pub first: bool,
    /// The last of the step: ‖the step's gradient‖² is computed.
    pub last: bool,
    /// The gradient is kept apart from the step's until it is measured.
    pub apart: bool,
    /// ‖gradient of this micro-batch‖² is computed.
    pub measured: bool,
    /// Sums for the coordinate-wise test over micro-batches.
    pub micro_batch_squares: bool,
    /// Sums for the coordinate-wise test of the whole step.
    pub step_squares: bool,
}

impl Training {
    /// `accumulated` micro-batches of the step came before; `measures_micro_batches` says that any of the
    /// step's may be measured.
    pub fn new(
        measure: Measure,
        last: bool,
        accumulated: u64,
        measures_micro_batches: bool,
    ) -> Training {
        let squares = measure.coordinates;
        Training {
            first: accumulated == 0,
            last,
            apart: accumulated > 0 && (measures_micro_batches || measure.micro_batches),
            measured: measure.micro_batches,
            micro_batch_squares: squares && measure.micro_batches,
            step_squares: squares && !measure.micro_batches && last,
        }
    }

    /// A micro-batch whose gradient is reduced to shards at once. `first`: no rank has reduced another one in
    /// this step.
    pub fn scattered(measure: Measure, first: bool) -> Training {
        Training {
            first,
            last: false,
            apart: true,
            // A rank's gradient is whole only within a micro-batch.
            measured: measure.micro_batches || measure.worker,
            micro_batch_squares: measure.coordinates,
            step_squares: false,
        }
    }
}

/// One pass over the model. The methods only enqueue work.
pub struct Walk<'a> {
    pub config: &'a ModelConfig,
    pub layout: &'a Layout,
    pub precision: Precision,
    pub kernels: &'a Kernels,
    pub blas: &'a Blas,
    pub streams: &'a Streams,
    pub state: &'a State,
    pub work: &'a Workspace,
    /// `None` where this process trains alone.
    pub peers: Option<&'a Peers>,
    /// Gathers the weights of a sharded model; `None` if every rank holds everything.
    pub shards: Option<Shards<'a>>,
    pub shape: Shape,
}

/// The place for a unit's gradient.
#[derive(Debug, Clone, Copy)]
struct Gradient {
    address: u64,
    /// Whether to add to the values; otherwise they are unspecified and every one is overwritten.
    add: bool,
}

impl Gradient {
    /// The part of a tensor.
    fn part(self, range: &Range<usize>) -> Gradient {
        Gradient {
            address: f32_at(self.address, range.start),
            ..self
        }
    }
}

/// The weights `[outputs, inputs]` of a linear layer.
#[derive(Debug, Clone, Copy)]
struct Linear {
    weights: u64,
    outputs: usize,
    inputs: usize,
}

impl<'a> Walk<'a> {
    /// Loss and gradient of a micro-batch.
    pub fn train(&self, training: Training) -> Enqueued {
        let layers = self.config.num_hidden_layers;
        let head = layers + 1;
        self.begin(training)?;
        self.forward()?;

        self.head(Some(training))?;
        self.release(head, Direction::Backward)?;
        self.complete(head, training)?;
        for layer in (0..layers).rev() {
            self.acquire(layer + 1)?;
            if self.checkpointing() {
                self.fill_stash(layer)?;
            }
            self.await_scratch(layer + 1, training)?;
            self.block_backward(layer, training)?;
            self.release(layer + 1, Direction::Backward)?;
            self.complete(layer + 1, training)?;
        }
        self.embedding_backward(training)?;
        self.complete(0, training)?;
        self.join(training)
    }

    /// Summed loss of a micro-batch.
    pub fn evaluate(&self) -> Enqueued {
        self.clear_scalars()?;
        self.forward()?;
        self.head(None)
    }

    /// From the tokens to the last block's output, and to the head's weights.
    fn forward(&self) -> Enqueued {
        if let Some(shards) = &self.shards {
            shards.begin()?;
        }
        self.acquire(0)?;
        self.embed()?;
        // The head needs tied embeddings, too.
        if !self.config.tie_word_embeddings {
            self.release(0, Direction::Forward)?;
        }
        let layers = self.config.num_hidden_layers;
        for layer in 0..layers {
            self.acquire(layer + 1)?;
            self.block_forward(layer)?;
            self.release(layer + 1, Direction::Forward)?;
        }
        self.acquire(layers + 1)
    }

    /// The compute stream's next work may read the unit's weights.
    fn acquire(&self, unit: usize) -> Enqueued {
        match &self.shards {
            Some(shards) => shards.acquire(unit),
            None => Ok(()),
        }
    }

    /// The compute stream has read the unit's weights for now. Tied embeddings are not released.
    fn release(&self, unit: usize, direction: Direction) -> Enqueued {
        match &self.shards {
            Some(shards) => shards.release(unit, direction),
            None => Ok(()),
        }
    }

    /// An acquired unit's weights.
    fn whole(&self, unit: usize) -> Whole {
        match &self.shards {
            Some(shards) => shards.whole(unit),
            None => self.state.units[unit].whole(),
        }
    }

    fn begin(&self, training: Training) -> Enqueued {
        self.clear_scalars()?;
        self.zero(self.work.reduced_norm, size_of::<f64>())?;
        if training.first {
            for (squares, elements) in self.state.squares(self.layout) {
                self.zero(squares, elements * F32)?;
            }
        }
        Ok(())
    }

    fn clear_scalars(&self) -> Enqueued {
        self.zero(self.work.scalars, Scalars::BYTES)
    }

    fn embed(&self) -> Enqueued {
        let tokens = (self.work.inputs.tokens, self.tokens());
        let table = self.whole(0).table;
        let compute = &self.streams.compute;
        self.kernels
            .embedding_forward(compute, self.work.residual[0], table, tokens)
    }

    fn block_forward(&self, layer: usize) -> Enqueued {
        self.fill_stash(layer)?;
        let (n, work) = (self.tokens(), self.work);
        let (unit, tensors) = self.block(layer);
        let stash = self.stash(layer);
        let (kernels, compute) = (self.kernels, &self.streams.compute);
        kernels.swiglu(compute, "swiglu_forward", work.wide, stash.gate_up, n)?;
        let down = self.linear(unit, &tensors.down, self.config.intermediate_size);
        let next = (work.residual[layer + 1], Precision::F32);
        self.linear_forward(down, work.wide, next, Some(stash.middle), n)
    }

    /// From the block's input to its stash.
    fn fill_stash(&self, layer: usize) -> Enqueued {
        let (n, work, shape) = (self.tokens(), self.work, self.shape);
        let (hidden, queries) = (self.config.hidden_size, self.config.queries());
        let (unit, tensors) = self.block(layer);
        let (kernels, compute) = (self.kernels, &self.streams.compute);
        let stash = self.stash(layer);
        let x = work.residual[layer];

        let normed = (work.narrow, stash.inverse_input);
        kernels.rmsnorm_forward(compute, normed, x, unit.norms[0], n)?;
        let qkv = self.linear(unit, &tensors.qkv, hidden);
        self.linear_forward(qkv, work.narrow, (stash.qkv, self.precision), None, n)?;
        kernels.rope(compute, stash.qkv, work.rope, shape, Direction::Forward)?;

        kernels.attention_forward(compute, stash, shape)?;
        let output = self.linear(unit, &tensors.output, queries);
        let middle = (stash.middle, Precision::F32);
        self.linear_forward(output, stash.attended, middle, Some(x), n)?;

        let normed = (work.narrow, stash.inverse_middle);
        kernels.rmsnorm_forward(compute, normed, stash.middle, unit.norms[1], n)?;
        let gate_up = self.linear(unit, &tensors.gate_up, hidden);
        self.linear_forward(
            gate_up,
            work.narrow,
            (stash.gate_up, self.precision),
            None,
            n,
        )
    }

    /// From the gradient of the block's output in `dx` to that of its input, in place. Overwrites the stash.
    fn block_backward(&self, layer: usize, training: Training) -> Enqueued {
        let (n, work, shape) = (self.tokens(), self.work, self.shape);
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let (unit, tensors) = self.block(layer);
        let (kernels, compute) = (self.kernels, &self.streams.compute);
        let stash = self.stash(layer);
        let gradient = self.gradient(layer + 1, training);
        let [dnorm_input, dnorm_middle] =
            [&tensors.norm_input, &tensors.norm_middle].map(|norm| gradient.part(norm));
        for norm in [dnorm_input, dnorm_middle] {
            self.zero_unless_added(norm, hidden)?;
        }
        let dx = work.dx_operand;

        let down = self.linear(unit, &tensors.down, inner);
        self.backward_input(down, dx, work.wide, n)?;
        kernels.swiglu(compute, "swiglu_backward", work.wide, stash.gate_up, n)?;
        self.backward_weight(down, dx, work.wide, gradient.part(&tensors.down), n)?;

        let gate_up = self.linear(unit, &tensors.gate_up, hidden);
        self.backward_input(gate_up, stash.gate_up, work.narrow, n)?;
        let input = (stash.middle, stash.inverse_middle);
        let weights = (unit.norms[1], dnorm_middle.address);
        kernels.rmsnorm_backward(compute, work, input, weights, n)?;
        let dgate_up = gradient.part(&tensors.gate_up);
        self.backward_weight(gate_up, stash.gate_up, work.narrow, dgate_up, n)?;

        let output = self.linear(unit, &tensors.output, self.config.queries());
        self.backward_input(output, dx, work.narrow, n)?;
        let doutput = gradient.part(&tensors.output);
        self.backward_weight(output, dx, stash.attended, doutput, n)?;
        kernels.attention_backward(compute, work, stash, shape)?;
        kernels.rope(compute, work.wide, work.rope, shape, Direction::Backward)?;

        let qkv = self.linear(unit, &tensors.qkv, hidden);
        self.backward_input(qkv, work.wide, work.narrow, n)?;
        let input = (work.residual[layer], stash.inverse_input);
        let weights = (unit.norms[0], dnorm_input.address);
        kernels.rmsnorm_backward(compute, work, input, weights, n)?;
        self.backward_weight(qkv, work.wide, work.narrow, gradient.part(&tensors.qkv), n)
    }

    /// Final norm, head and loss; with `training` also their gradients, in `dx` and in the store.
    ///
    /// Rows are processed in chunks, so that only one chunk's logits exist; their gradient overwrites them.
    fn head(&self, training: Option<Training>) -> Enqueued {
        let (n, work) = (self.tokens(), self.work);
        let (hidden, vocabulary) = (self.config.hidden_size, self.config.vocab_size);
        let (kernels, compute) = (self.kernels, &self.streams.compute);
        let unit = self.layout.units.len() - 1;
        let matrix_unit = if self.config.tie_word_embeddings {
            0
        } else {
            unit
        };
        let len = self.layout.units[matrix_unit].len;
        let matrix = len - vocabulary * hidden..len;
        let linear = self.linear(self.whole(matrix_unit), &matrix, hidden);
        let x = work.residual[self.config.num_hidden_layers];
        let norm_weights = self.whole(unit).norms[0];

        let normed = (work.narrow, work.inverse_head);
        kernels.rmsnorm_forward(compute, normed, x, norm_weights, n)?;
        for first in (0..n).step_by(work.logits_rows) {
            let rows = work.logits_rows.min(n - first);
            let normed = self.real_at(work.narrow, first * hidden);
            self.linear_forward(linear, normed, (work.logits, self.precision), None, rows)?;
            let losses = work.losses + (first * size_of::<f64>()) as u64;
            let targets = (f32_at(work.inputs.targets, first), rows);
            kernels.cross_entropy(compute, losses, work.logits, targets, training.is_some())?;
            if let Some(training) = training {
                // The weights' gradient first, then that of the norm's output in place of the output.
                let gradient = self.gradient(matrix_unit, training).part(&matrix);
                let gradient = Gradient {
                    add: gradient.add || first > 0,
                    ..gradient
                };
                self.backward_weight(linear, work.logits, normed, gradient, rows)?;
                self.backward_input(linear, work.logits, normed, rows)?;
            }
        }
        kernels.sum_losses(compute, work.scalars, work.losses, n)?;
        let Some(training) = training else {
            return Ok(());
        };
        let gradient = self.gradient(unit, training);
        self.zero_unless_added(gradient, hidden)?;
        self.zero(work.dx, n * hidden * F32)?;
        let weights = (norm_weights, gradient.address);
        kernels.rmsnorm_backward(compute, work, (x, work.inverse_head), weights, n)
    }

    fn embedding_backward(&self, training: Training) -> Enqueued {
        let gradient = self.gradient(0, training);
        // Tied embeddings already hold the head's part.
        if !self.config.tie_word_embeddings {
            self.await_scratch(0, training)?;
            self.zero_unless_added(gradient, self.layout.units[0].len)?;
        }
        let compute = &self.streams.compute;
        let (dx, n) = (self.work.dx, self.tokens());
        self.kernels
            .embedding_backward(compute, gradient.address, dx, &self.work.inputs, n)
    }

    /// The unit's gradient of this micro-batch is complete: the side stream adds and measures it.
    fn complete(&self, unit: usize, training: Training) -> Enqueued {
        let Streams {
            compute,
            side,
            complete,
            added,
        } = self.streams;
        if !self.adds(training) {
            return Ok(());
        }
        compute.record(&complete[unit])?;
        side.wait(&complete[unit])?;

        let (kernels, work) = (self.kernels, self.work);
        let addresses = &self.state.units[unit];
        let (sum, own) = (addresses.gradient, self.gradient(unit, training).address);
        let elements = self.layout.units[unit].len;
        let [own_norm, whole_norm] = [8, 16].map(|offset| work.scalars + offset);
        let [own_partials, whole_partials, reduced_partials] = work.square_partials;
        if let Some(squares) = addresses.squares
            && training.micro_batch_squares
        {
            let factor = work.inputs.factors;
            kernels.add_squares(side, squares, own, factor, elements)?;
        }
        if self.state.share.scatters() {
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
            (Some(shards), _) if self.state.share.scatters() => {
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

    /// Whether the side stream has work for this micro-batch.
    fn adds(&self, training: Training) -> bool {
        training.apart || training.measured || training.last
    }

    /// Waits until no other stream reads the scratch that the unit is about to use.
    fn await_scratch(&self, unit: usize, training: Training) -> Enqueued {
        let before = unit + 2;
        let last = self.layout.units.len() - 1;
        // Else the compute stream has waited for the walk before: for its end, or for weights gathered since.
        if training.apart && before <= last {
            let free = match &self.shards {
                Some(shards) if self.state.share.scatters() => shards.scattered(before),
                _ => &self.streams.added[before],
            };
            self.streams.compute.wait(free)?;
        }
        Ok(())
    }

    /// The compute stream waits for the side stream.
    fn join(&self, training: Training) -> Enqueued {
        if self.adds(training) {
            self.streams.compute.wait(&self.streams.added[0])?;
        }
        Ok(())
    }

    /// The place for a unit's gradient of this micro-batch.
    fn gradient(&self, unit: usize, training: Training) -> Gradient {
        let state = self.state;
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

    fn block(&self, layer: usize) -> (Whole, BlockTensors) {
        let tensors = self.layout.units[layer + 1].block_tensors();
        (self.whole(layer + 1), tensors)
    }

    fn stash(&self, layer: usize) -> &'a Stash {
        let stashes = &self.work.stashes;
        &stashes[if self.checkpointing() { 0 } else { layer }]
    }

    fn checkpointing(&self) -> bool {
        self.work.stashes.len() < self.config.num_hidden_layers
    }

    fn tokens(&self) -> usize {
        self.shape.tokens()
    }

    fn real_at(&self, address: u64, elements: usize) -> u64 {
        address + (elements * self.precision.size()) as u64
    }

    /// The layer whose weights are a range of a unit.
    fn linear(&self, unit: Whole, range: &Range<usize>, inputs: usize) -> Linear {
        Linear {
            weights: self.real_at(unit.operands, range.start),
            outputs: range.len() / inputs,
            inputs,
        }
    }

    /// Activations or weights of `width` elements a row.
    fn operand(&self, address: u64, width: usize) -> Operand {
        Operand {
            address,
            element: self.precision,
            stride: width,
            transposed: false,
        }
    }

    /// y `[n, outputs]` = x `[n, inputs]` · wᵀ, plus `added`. x is real.
    fn linear_forward(
        &self,
        layer: Linear,
        x: u64,
        (result, element): (u64, Precision),
        added: Option<u64>,
        n: usize,
    ) -> Enqueued {
        self.multiply(Product {
            rows: n,
            columns: layer.outputs,
            inner: layer.inputs,
            a: self.operand(x, layer.inputs),
            b: transposed(self.operand(layer.weights, layer.inputs)),
            added,
            result,
            element,
        })
    }

    /// dx `[n, inputs]` = dy `[n, outputs]` · w, both real.
    fn backward_input(&self, layer: Linear, dy: u64, dx: u64, n: usize) -> Enqueued {
        self.multiply(Product {
            rows: n,
            columns: layer.inputs,
            inner: layer.outputs,
            a: self.operand(dy, layer.outputs),
            b: self.operand(layer.weights, layer.inputs),
            added: None,
            result: dx,
            element: self.precision,
        })
    }

    /// The gradient of the weights, f32 `[outputs, inputs]`: dyᵀ · x, of real dy `[n, outputs]` and x `[n, inputs]`.
    fn backward_weight(
        &self,
        layer: Linear,
        dy: u64,
        x: u64,
        gradient: Gradient,
        n: usize,
    ) -> Enqueued {
        self.multiply(Product {
            rows: layer.outputs,
            columns: layer.inputs,
            inner: n,
            a: transposed(self.operand(dy, layer.outputs)),
            b: self.operand(x, layer.inputs),
            added: gradient.add.then_some(gradient.address),
            result: gradient.address,
            element: Precision::F32,
        })
    }

    fn multiply(&self, product: Product) -> Enqueued {
        let workspace = (self.work.blas, Blas::WORKSPACE);
        // SAFETY: the operands lie in the state and the workspace, which live longer than the stream's work.
        unsafe {
            self.blas
                .multiply(&self.streams.compute, &product, workspace)
        }
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

/// The address of an f32 element.
fn f32_at(address: u64, elements: usize) -> u64 {
    address + (elements * F32) as u64
}

fn transposed(operand: Operand) -> Operand {
    Operand {
        transposed: true,
        ..operand
    }
}
