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

use super::cublaslt::{Blas, Element, Operand, Product};
use super::driver::{Event, Stream};
use super::error::CudaError;
use super::launches::{AttentionBackward, Kernels, NormBackward, Rotation};
use super::parameters::Parameters;
use super::precision::Precision;
use super::sharded::Direction;
use super::state::{State, Whole};
use super::workspace::{Scalars, Shape, Stash, Workspace, qkv};
use crate::engine::{Layout, Measure, ModelConfig};

type Walked = Result<(), CudaError>;

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
    pub blas: &'a mut Blas,
    pub streams: &'a Streams,
    pub state: &'a State,
    pub work: &'a Workspace,
    pub parameters: Parameters<'a>,
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

/// A block's tensors within its unit.
struct Tensors {
    norm_input: Range<usize>,
    qkv: Range<usize>,
    output: Range<usize>,
    norm_middle: Range<usize>,
    gate_up: Range<usize>,
    down: Range<usize>,
}

impl<'a> Walk<'a> {
    /// Loss and gradient of a micro-batch.
    pub fn train(&mut self, training: Training) -> Walked {
        let layers = self.config.num_hidden_layers;
        let head = layers + 1;
        self.begin(training)?;
        self.forward()?;

        self.head(Some(training))?;
        self.parameters.release(head, Direction::Backward)?;
        self.complete(head, training)?;
        for layer in (0..layers).rev() {
            self.parameters.acquire(layer + 1)?;
            if self.checkpointing() {
                self.fill_stash(layer)?;
            }
            self.await_scratch(layer + 1, training)?;
            self.block_backward(layer, training)?;
            self.parameters.release(layer + 1, Direction::Backward)?;
            self.complete(layer + 1, training)?;
        }
        self.embedding_backward(training)?;
        self.complete(0, training)?;
        self.join(training)
    }

    /// Summed loss of a micro-batch.
    pub fn evaluate(&mut self) -> Walked {
        self.clear_scalars()?;
        self.forward()?;
        self.head(None)
    }

    /// From the tokens to the last block's output, and to the head's weights.
    fn forward(&mut self) -> Walked {
        self.parameters.begin()?;
        self.parameters.acquire(0)?;
        self.embed()?;
        // The head needs tied embeddings, too.
        if !self.config.tie_word_embeddings {
            self.parameters.release(0, Direction::Forward)?;
        }
        let layers = self.config.num_hidden_layers;
        for layer in 0..layers {
            self.parameters.acquire(layer + 1)?;
            self.block_forward(layer)?;
            self.parameters.release(layer + 1, Direction::Forward)?;
        }
        self.parameters.acquire(layers + 1)
    }

    fn begin(&mut self, training: Training) -> Walked {
        self.clear_scalars()?;
        self.zero(self.work.reduced_norm, size_of::<f64>())?;
        if training.first {
            for (addresses, unit) in self.state.units.iter().zip(&self.layout.units) {
                if let Some(squares) = addresses.squares {
                    self.zero(squares, unit.len * F32)?;
                }
            }
        }
        Ok(())
    }

    fn clear_scalars(&self) -> Walked {
        self.zero(self.work.scalars, Scalars::BYTES)
    }

    fn embed(&self) -> Walked {
        let tokens = (self.work.inputs.tokens, self.tokens());
        let table = self.parameters.whole(0).table;
        let compute = &self.streams.compute;
        self.kernels
            .embedding_forward(compute, self.work.residual[0], table, tokens)
    }

    fn block_forward(&mut self, layer: usize) -> Walked {
        self.fill_stash(layer)?;
        let (n, work) = (self.tokens(), self.work);
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let (unit, tensors) = self.block(layer);
        let stash = self.stash(layer);
        let compute = &self.streams.compute;
        self.kernels
            .swiglu_forward(compute, work.wide, stash.gate_up, n)?;
        let down = self.weights(unit, &tensors.down, inner);
        let h = self.activation(work.wide, inner);
        let next = self.residual(work.residual[layer + 1]);
        self.multiply(
            (n, hidden, inner),
            h,
            transposed(down),
            next,
            Some(stash.middle),
        )
    }

    /// From the block's input to its stash.
    fn fill_stash(&mut self, layer: usize) -> Walked {
        let (n, work, shape) = (self.tokens(), self.work, self.shape);
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let (queries, qkv) = (self.queries(), qkv(self.config));
        let (unit, tensors) = self.block(layer);
        let (kernels, compute) = (self.kernels, &self.streams.compute);
        let stash = self.stash(layer);
        let x = work.residual[layer];

        let norm = unit.norms[0];
        kernels.rmsnorm_forward(compute, (work.narrow, stash.inverse_input), x, norm, n)?;
        let normed = self.activation(work.narrow, hidden);
        let weights = self.weights(unit, &tensors.qkv, hidden);
        let result = self.activation(stash.qkv, qkv);
        self.multiply((n, qkv, hidden), normed, transposed(weights), result, None)?;
        kernels.rope(compute, stash.qkv, work.rope, shape, Rotation::Forward)?;

        let output = (stash.attended, stash.log_sums);
        kernels.attention_forward(compute, output, stash.qkv, shape)?;
        let attended = self.activation(stash.attended, queries);
        let weights = self.weights(unit, &tensors.output, queries);
        let middle = self.residual(stash.middle);
        self.multiply(
            (n, hidden, queries),
            attended,
            transposed(weights),
            middle,
            Some(x),
        )?;

        let norm = unit.norms[1];
        let normed = (work.narrow, stash.inverse_middle);
        kernels.rmsnorm_forward(compute, normed, stash.middle, norm, n)?;
        let normed = self.activation(work.narrow, hidden);
        let weights = self.weights(unit, &tensors.gate_up, hidden);
        let result = self.activation(stash.gate_up, 2 * inner);
        self.multiply(
            (n, 2 * inner, hidden),
            normed,
            transposed(weights),
            result,
            None,
        )
    }

    /// From the gradient of the block's output in `dx` to that of its input, in place. Overwrites the stash.
    fn block_backward(&mut self, layer: usize, training: Training) -> Walked {
        let (n, work, shape) = (self.tokens(), self.work, self.shape);
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let (queries, qkv) = (self.queries(), qkv(self.config));
        let (unit, tensors) = self.block(layer);
        let (kernels, compute) = (self.kernels, &self.streams.compute);
        let stash = self.stash(layer);
        let gradient = self.gradient(layer + 1, training);
        for norm in [&tensors.norm_input, &tensors.norm_middle] {
            self.zero_unless_added(gradient.part(norm), hidden)?;
        }
        let dx = self.activation(work.dx_operand, hidden);

        let weights = self.weights(unit, &tensors.down, inner);
        let h = self.activation(work.wide, inner);
        self.multiply((n, inner, hidden), dx, weights, h, None)?;
        kernels.swiglu_backward(compute, work.wide, stash.gate_up, n)?;
        let down = gradient.part(&tensors.down);
        self.accumulate((hidden, inner), dx, h, down)?;

        let weights = self.weights(unit, &tensors.gate_up, hidden);
        let dgate_up = self.activation(stash.gate_up, 2 * inner);
        let normed = self.activation(work.narrow, hidden);
        self.multiply((n, hidden, 2 * inner), dgate_up, weights, normed, None)?;
        let norm = NormBackward {
            dx: work.dx,
            dx_operand: work.dx_operand,
            dy_to_y: work.narrow,
            x: stash.middle,
            inverse: stash.inverse_middle,
            weights: unit.norms[1],
            gradient: gradient.part(&tensors.norm_middle).address,
            partials: work.norm_partials,
        };
        kernels.rmsnorm_backward(compute, norm, n)?;
        let gate_up = gradient.part(&tensors.gate_up);
        self.accumulate((2 * inner, hidden), dgate_up, normed, gate_up)?;

        let weights = self.weights(unit, &tensors.output, queries);
        let dattended = self.activation(work.narrow, queries);
        self.multiply((n, queries, hidden), dx, weights, dattended, None)?;
        let attended = self.activation(stash.attended, queries);
        let output = gradient.part(&tensors.output);
        self.accumulate((hidden, queries), dx, attended, output)?;
        let attention = AttentionBackward {
            dqkv: work.wide,
            dattended: work.narrow,
            attended: stash.attended,
            qkv: stash.qkv,
            log_sums: stash.log_sums,
            delta: work.delta,
        };
        kernels.attention_backward(compute, attention, shape)?;
        kernels.rope(compute, work.wide, work.rope, shape, Rotation::Backward)?;

        let weights = self.weights(unit, &tensors.qkv, hidden);
        let dqkv = self.activation(work.wide, qkv);
        self.multiply((n, hidden, qkv), dqkv, weights, normed, None)?;
        let norm = NormBackward {
            x: work.residual[layer],
            inverse: stash.inverse_input,
            weights: unit.norms[0],
            gradient: gradient.part(&tensors.norm_input).address,
            ..norm
        };
        kernels.rmsnorm_backward(compute, norm, n)?;
        self.accumulate((qkv, hidden), dqkv, normed, gradient.part(&tensors.qkv))
    }

    /// Final norm, head and loss; with `training` also their gradients, in `dx` and in the store.
    ///
    /// Rows are processed in chunks, so that only one chunk's logits exist; their gradient overwrites them.
    fn head(&mut self, training: Option<Training>) -> Walked {
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
        let weights = self.weights(self.parameters.whole(matrix_unit), &matrix, hidden);
        let x = work.residual[self.config.num_hidden_layers];
        let norm_weights = self.parameters.whole(unit).norms[0];

        let normed = (work.narrow, work.inverse_head);
        kernels.rmsnorm_forward(compute, normed, x, norm_weights, n)?;
        for first in (0..n).step_by(work.logits_rows) {
            let rows = work.logits_rows.min(n - first);
            let normed = self.activation(self.real_at(work.narrow, first * hidden), hidden);
            let logits = self.activation(work.logits, vocabulary);
            let product = (rows, vocabulary, hidden);
            self.multiply(product, normed, transposed(weights), logits, None)?;
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
                self.accumulate_rows((vocabulary, hidden, rows), logits, normed, gradient)?;
                self.multiply((rows, hidden, vocabulary), logits, weights, normed, None)?;
            }
        }
        kernels.sum_losses(compute, work.scalars, work.losses, n)?;
        let Some(training) = training else {
            return Ok(());
        };
        let gradient = self.gradient(unit, training);
        self.zero_unless_added(gradient, hidden)?;
        self.zero(work.dx, n * hidden * F32)?;
        let norm = NormBackward {
            dx: work.dx,
            dx_operand: work.dx_operand,
            dy_to_y: work.narrow,
            x,
            inverse: work.inverse_head,
            weights: norm_weights,
            gradient: gradient.address,
            partials: work.norm_partials,
        };
        kernels.rmsnorm_backward(compute, norm, n)
    }

    fn embedding_backward(&mut self, training: Training) -> Walked {
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
    fn complete(&mut self, unit: usize, training: Training) -> Walked {
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
        match &self.parameters {
            Parameters::Replicated(_, Some(peers)) if training.last => {
                peers.stream.wait(&added[unit])?;
                peers.all_reduce(sum, elements)?;
                let result = (work.reduced_norm, reduced_partials);
                kernels.squared_norm(&peers.stream, result, sum, elements)
            }
            Parameters::Sharded(shards) if self.state.share.scatters() => {
                shards.scatter(unit, &added[unit], training.first)
            }
            Parameters::Replicated(..) | Parameters::Sharded(_) => Ok(()),
        }
    }

    /// Whether the side stream has work for this micro-batch.
    fn adds(&self, training: Training) -> bool {
        training.apart || training.measured || training.last
    }

    /// Waits until no other stream reads the scratch that the unit is about to use.
    fn await_scratch(&self, unit: usize, training: Training) -> Walked {
        let before = unit + 2;
        let last = self.layout.units.len() - 1;
        // Else the compute stream has waited for the walk before: for its end, or for weights gathered since.
        if training.apart && before <= last {
            let free = match &self.parameters {
                Parameters::Sharded(shards) if self.state.share.scatters() => {
                    shards.scattered(before)
                }
                _ => &self.streams.added[before],
            };
            self.streams.compute.wait(free)?;
        }
        Ok(())
    }

    /// The compute stream waits for the side stream.
    fn join(&self, training: Training) -> Walked {
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

    fn block(&self, layer: usize) -> (Whole, Tensors) {
        let parameters = &self.layout.units[layer + 1].parameters;
        let span = |first: usize, last: usize| {
            parameters[first].range().start..parameters[last].range().end
        };
        let tensors = Tensors {
            norm_input: span(0, 0),
            qkv: span(1, 3),
            output: span(4, 4),
            norm_middle: span(5, 5),
            gate_up: span(6, 7),
            down: span(8, 8),
        };
        (self.parameters.whole(layer + 1), tensors)
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

    fn queries(&self) -> usize {
        self.config.num_attention_heads * self.config.head_dim
    }

    fn real_at(&self, address: u64, elements: usize) -> u64 {
        address + (elements * self.precision.size()) as u64
    }

    /// Activations of `width` elements a row.
    fn activation(&self, address: u64, width: usize) -> Operand {
        Operand {
            address,
            element: self.precision.element(),
            stride: width,
            transposed: false,
        }
    }

    /// The residual stream as a result.
    fn residual(&self, address: u64) -> Operand {
        Operand {
            address,
            element: Element::F32,
            stride: self.config.hidden_size,
            transposed: false,
        }
    }

    /// A weight matrix `[out, width]`.
    fn weights(&self, unit: Whole, range: &Range<usize>, width: usize) -> Operand {
        self.activation(self.real_at(unit.operands, range.start), width)
    }

    /// `result[rows, columns] = a[rows, inner] · b[inner, columns]`, plus `added`.
    fn multiply(
        &mut self,
        (rows, columns, inner): (usize, usize, usize),
        a: Operand,
        b: Operand,
        result: Operand,
        added: Option<u64>,
    ) -> Walked {
        let product = Product {
            rows,
            columns,
            inner,
            a,
            b,
            added,
            result,
        };
        let workspace = (self.work.blas, Blas::WORKSPACE);
        // SAFETY: the operands lie in the state and the workspace, which live longer than the stream's work.
        unsafe {
            self.blas
                .multiply(&self.streams.compute, &product, workspace)
        }
    }

    /// The gradient of a weight matrix `[out, width]`, dYᵀ · X over all tokens.
    fn accumulate(
        &mut self,
        (out, width): (usize, usize),
        dy: Operand,
        x: Operand,
        gradient: Gradient,
    ) -> Walked {
        self.accumulate_rows((out, width, self.tokens()), dy, x, gradient)
    }

    fn accumulate_rows(
        &mut self,
        (out, width, rows): (usize, usize, usize),
        dy: Operand,
        x: Operand,
        gradient: Gradient,
    ) -> Walked {
        let result = Operand {
            address: gradient.address,
            element: Element::F32,
            stride: width,
            transposed: false,
        };
        let added = gradient.add.then_some(gradient.address);
        self.multiply((out, width, rows), transposed(dy), x, result, added)
    }

    fn zero_unless_added(&self, gradient: Gradient, elements: usize) -> Walked {
        if gradient.add {
            return Ok(());
        }
        self.zero(gradient.address, elements * F32)
    }

    fn zero(&self, address: u64, bytes: usize) -> Walked {
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
        transposed: !operand.transposed,
        ..operand
    }
}
