//! The kernels with their parameters and geometry: each method launches one kernel on a stream.
//!
//! Addresses are device memory of the shapes that the `.cu` files state. *Real* is the element type of the
//! engine's [`Precision`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::compiler::Compiler;
use super::driver::{Argument, Device, Function, Grid, Stream};
use super::error::CudaError;
use super::kernels;
use super::kernels::attention::{self, Variant};
use super::options::Precision;
use super::state::{Layer, NestedScales, UnitAddresses};
use super::workspace::{
    Grouped, Inputs, PARTIALS, Shape, Stash, Workspace, vector_blocks, vector_rows,
};
use crate::engine::dropout::odds;
use crate::engine::{Activation, Direction, ModelConfig, NormKind, TokenLoss};

use Argument::{Address, Float, Int, Size};

/// Threads of a block of most kernels.
const THREADS: u32 = 256;
/// Threads of a block of `column_sums`, which waits for memory more than it adds.
const COLUMN_SUM_THREADS: u32 = 1024;
/// Elements of a thread of an elementwise kernel, at least: 16 bytes of bf16. More blocks would find nothing to do, and
/// starting them takes as long as the work (SwiGLU at half the bandwidth of an H100).
const PER_THREAD: usize = 8;

/// Work that was put on a stream.
pub(super) type Enqueued = Result<(), CudaError>;

/// Loaded kernels by name.
type Functions = BTreeMap<&'static str, Function>;

/// The loaded kernels of one precision and head size.
pub struct Kernels {
    functions: Functions,
    precision: Precision,
    hidden: usize,
    intermediate: usize,
    vocabulary: usize,
    norm: NormKind,
    epsilon: f32,
    embedding_scale: f32,
    activation: Activation,
    gated: bool,
    rotary_dim: usize,
    attention: Attention,
    /// For layers with a window, unless `attention` has it.
    windowed: Option<Attention>,
    token_loss: TokenLoss,
}

/// What drops inputs of one adapter.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    pub share: f32,
    /// [`Inputs::dropout`].
    pub keys: u64,
    pub adapter: usize,
}

/// The kernels of one variant of attention.
struct Attention {
    geometry: attention::Geometry,
    functions: Functions,
}

impl Kernels {
    /// Compiles the kernels, or takes them from the compiler's cache.
    pub fn load(
        device: &Arc<Device>,
        compiler: &Compiler,
        config: &ModelConfig,
        precision: Precision,
        token_loss: TokenLoss,
    ) -> Result<Kernels, CudaError> {
        let variant = Variant::of(config, precision, device.capability);
        let mut options = precision.options();
        options.push(format!("-DHEAD_DIM={}", config.head_dim));
        let load = |functions: &mut Functions, unit: &kernels::Kernels| {
            let module = compiler.load(device, &unit.source, &options)?;
            for &name in unit.names {
                functions.insert(name, module.function(name)?);
            }
            Ok::<_, CudaError>(())
        };
        let mut functions = Functions::new();
        for unit in &kernels::SOURCES {
            load(&mut functions, unit)?;
        }
        let attention = |variant: Variant| {
            let mut loaded = Attention {
                geometry: attention::Geometry {
                    variant,
                    heads: config.num_attention_heads,
                    kv_heads: config.num_key_value_heads,
                    head_dim: config.head_dim,
                },
                functions: Functions::new(),
            };
            load(&mut loaded.functions, variant.kernels())?;
            for (kernel, function) in &loaded.functions {
                function.allow_shared(loaded.geometry.shared_bytes(kernel))?;
            }
            Ok::<_, CudaError>(loaded)
        };
        let windowed = config.sliding_window.filter(|_| variant != Variant::F32);
        let windowed = windowed.map(|_| attention(Variant::F32)).transpose()?;
        Ok(Kernels {
            functions,
            precision,
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            vocabulary: config.vocab_size,
            norm: config.norm,
            epsilon: config.norm_eps,
            embedding_scale: config.embedding_scale(),
            activation: config.activation,
            gated: config.gated,
            rotary_dim: config.rotary_dim(),
            attention: attention(variant)?,
            windowed,
            token_loss,
        })
    }

    /// The kernels for a layer whose queries see `window` keys.
    fn attention_of(&self, window: Option<usize>, shape: Shape) -> &Attention {
        let is_windowed = window.is_some_and(|window| window < shape.seq_len);
        let windowed = self.windowed.as_ref().filter(|_| is_windowed);
        windowed.unwrap_or(&self.attention)
    }

    /// The scaled rows of `table` that the tokens name, f32 `[n, hidden]`, plus the rows of `positions` if there are any,
    /// plus noise.
    pub fn embedding_forward(
        &self,
        stream: &Stream,
        x: u64,
        (table, positions): (u64, Option<u64>),
        inputs: &Inputs,
        shape: Shape,
    ) -> Enqueued {
        let arguments = [
            Address(x),
            Address(table),
            Address(positions.unwrap_or(0)),
            Address(inputs.tokens),
            int(self.hidden),
            int(shape.seq_len),
            Float(self.embedding_scale),
            Address(inputs.noise.unwrap_or(0)),
            Address(positions_of(inputs, shape)),
        ];
        self.rows(stream, "embedding_forward", shape.tokens(), &arguments)
    }

    /// Adds the rows of `dx`, f32 `[n, hidden]`, to the rows of the gradient of the position embeddings.
    pub fn positions_backward(
        &self,
        stream: &Stream,
        gradient: u64,
        dx: u64,
        inputs: &Inputs,
        shape: Shape,
    ) -> Enqueued {
        let packed = inputs.packed(shape);
        if let Some(groups) = packed.and_then(|packed| packed.by_position.as_ref()) {
            return self.add_grouped(stream, gradient, dx, groups, (shape.tokens(), 1.0));
        }
        let arguments = [
            Address(gradient),
            Address(dx),
            int(shape.batch),
            int(shape.seq_len),
            int(self.hidden),
        ];
        self.rows(stream, "positions_backward", shape.seq_len, &arguments)
    }

    /// Adds the rows of `dx`, f32 `[n, hidden]`, to the rows of the table's gradient that their tokens name.
    pub fn embedding_backward(
        &self,
        stream: &Stream,
        gradient: u64,
        dx: u64,
        inputs: &Inputs,
        n: usize,
    ) -> Enqueued {
        let factor = (n, self.embedding_scale);
        self.add_grouped(stream, gradient, dx, &inputs.by_token, factor)
    }

    /// Adds the rows of `dx`, f32 `[n, hidden]`, times a factor, to the rows of a table's gradient.
    fn add_grouped(
        &self,
        stream: &Stream,
        gradient: u64,
        dx: u64,
        groups: &Grouped,
        (n, factor): (usize, f32),
    ) -> Enqueued {
        let arguments = [
            Address(gradient),
            Address(dx),
            Address(groups.order),
            Address(groups.starts),
            Address(groups.distinct),
            Address(groups.count),
            int(self.hidden),
            Float(factor),
        ];
        self.rows(stream, "embedding_backward", n, &arguments)
    }

    /// What a norm adds to its weights; `None` for a LayerNorm.
    fn shift_of_rms(&self) -> Option<f32> {
        match self.norm {
            NormKind::Rms => Some(0.0),
            NormKind::RmsPlusOne => Some(1.0),
            NormKind::Layer => None,
        }
    }

    /// The norm `y`, real, of `x`, f32, both `[n, hidden]`; keeps the `statistics` of the rows.
    pub fn norm_forward(
        &self,
        stream: &Stream,
        (y, statistics): (u64, u64),
        x: u64,
        weights: u64,
        n: usize,
    ) -> Enqueued {
        let mut arguments = vec![
            Address(y),
            Address(statistics),
            Address(x),
            Address(weights),
            int(self.hidden),
            Float(self.epsilon),
        ];
        let shift = self.shift_of_rms();
        arguments.extend(shift.map(Float));
        let kernel = match shift {
            Some(_) => "rmsnorm_forward",
            None => "layernorm_forward",
        };
        self.rows(stream, kernel, n, &arguments)
    }

    /// Adds the norm's part to the gradient of its input in [`Workspace::dx`], and to `gradient`, that of its
    /// `weights` unless they are frozen, both f32 `[vectors, hidden]`. [`Workspace::narrow`] holds the gradient of the output, and then the output.
    /// `x`, f32 `[n, hidden]`, is the input, and `statistics` what forward has kept. `publishes` the new gradient for matrix
    /// products.
    pub fn norm_backward(
        &self,
        stream: &Stream,
        work: &Workspace,
        (x, statistics): (u64, u64),
        (weights, gradient): (u64, Option<u64>),
        publishes: bool,
        n: usize,
    ) -> Enqueued {
        let is_copied = publishes && work.dx_operand != work.dx;
        let mut arguments = vec![
            Address(work.dx),
            Address(if is_copied { work.dx_operand } else { 0 }),
            Address(work.vector_partials),
            Address(work.narrow),
            Address(x),
            Address(statistics),
            Address(weights),
            int(n),
            int(self.hidden),
            int(vector_rows(n)),
        ];
        let shift = self.shift_of_rms();
        arguments.extend(shift.map(Float));
        let kernel = match shift {
            Some(_) => "rmsnorm_backward",
            None => "layernorm_backward",
        };
        let blocks = vector_blocks(n);
        let threads = match self.hidden {
            ..=2048 => 256,
            2049..=4096 => 512,
            _ => 1024,
        };
        let geometry = grid(blocks, threads);
        self.launch(stream, kernel, geometry, &arguments)?;
        let Some(gradient) = gradient else {
            return Ok(());
        };
        let width = self.norm.vectors() * self.hidden;
        self.column_sums(stream, work, gradient, (blocks, width))
    }

    /// Adds the sums of the columns of [`Workspace::vector_partials`], f32 `[rows, width]`.
    fn column_sums(
        &self,
        stream: &Stream,
        work: &Workspace,
        sums: u64,
        (rows, width): (usize, usize),
    ) -> Enqueued {
        let arguments = [
            Address(sums),
            Address(work.vector_partials),
            int(rows),
            int(width),
        ];
        let grid = grid(width.div_ceil(32), COLUMN_SUM_THREADS);
        self.launch(stream, "column_sums", grid, &arguments)
    }

    /// Adds a bias, f32 `[width]`, to the rows of `y` `[n, width]`, of this element: real, or f32.
    pub fn add_bias(
        &self,
        stream: &Stream,
        (y, element): (u64, Precision),
        (bias, width): (u64, usize),
        n: usize,
    ) -> Enqueued {
        let arguments = [Address(y), Address(bias), int(width)];
        let kernel = match element == self.precision {
            true => "add_bias",
            false => "add_bias_to_sum",
        };
        self.rows(stream, kernel, n, &arguments)
    }

    /// Adds the rows of `dy`, real `[n, width]`, to the gradient of a bias, f32 `[width]`.
    pub fn add_row_sums(
        &self,
        stream: &Stream,
        work: &Workspace,
        (gradient, width): (u64, usize),
        dy: u64,
        n: usize,
    ) -> Enqueued {
        let arguments = [
            Address(work.vector_partials),
            Address(dy),
            int(n),
            int(width),
            int(vector_rows(n)),
        ];
        let blocks = vector_blocks(n);
        self.rows(stream, "row_sums", blocks, &arguments)?;
        self.column_sums(stream, work, gradient, (blocks, width))
    }

    /// Norms the queries and keys of `qkv`, real `[n, qkv]`, head by head, and keeps them as they were in `unnormed`,
    /// real `[n, queries and keys]`. `weights`: f32 `[2, head_dim]`.
    pub fn head_norms_forward(
        &self,
        stream: &Stream,
        (qkv, unnormed): (u64, u64),
        weights: u64,
        n: usize,
    ) -> Enqueued {
        let arguments = [
            Address(qkv),
            Address(unnormed),
            Address(weights),
            int(self.attention.geometry.heads),
            int(self.attention.geometry.kv_heads),
            Float(self.epsilon),
        ];
        self.rows(stream, "head_norms_forward", n, &arguments)
    }

    /// From the gradient of normed queries and keys in [`Workspace::wide`] to that of the unnormed ones; adds to `gradient`,
    /// that of the `weights` unless they are frozen, both f32 `[2, head_dim]`.
    pub fn head_norms_backward(
        &self,
        stream: &Stream,
        work: &Workspace,
        unnormed: u64,
        (weights, gradient): (u64, Option<u64>),
        n: usize,
    ) -> Enqueued {
        let arguments = [
            Address(work.wide),
            Address(work.vector_partials),
            Address(unnormed),
            Address(weights),
            int(n),
            int(self.attention.geometry.heads),
            int(self.attention.geometry.kv_heads),
            int(vector_rows(n)),
            Float(self.epsilon),
        ];
        let blocks = vector_blocks(n);
        self.rows(stream, "head_norms_backward", blocks, &arguments)?;
        let Some(gradient) = gradient else {
            return Ok(());
        };
        self.column_sums(
            stream,
            work,
            gradient,
            (blocks, 2 * self.attention.geometry.head_dim),
        )
    }

    /// Rotates the queries and keys of `qkv`, real `[n, qkv]`, in place.
    pub fn rope(
        &self,
        stream: &Stream,
        (qkv, table): (u64, u64),
        inputs: &Inputs,
        shape: Shape,
        direction: Direction,
    ) -> Enqueued {
        let direction = match direction {
            Direction::Forward => 1.0,
            Direction::Backward => -1.0,
        };
        let attention::Geometry {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.attention.geometry;
        let arguments = [
            Address(qkv),
            int((heads + 2 * kv_heads) * head_dim),
            int(heads + kv_heads),
            Address(table),
            int(shape.seq_len),
            int(head_dim),
            int(self.rotary_dim),
            Float(direction),
            Address(positions_of(inputs, shape)),
        ];
        self.rows(stream, "rope", shape.tokens(), &arguments)
    }

    /// Forward: `h`, real `[n, intermediate]`, from gates and ups, real `[n, 2 × intermediate]`, or from ups alone, real
    /// `[n, intermediate]`. Backward replaces the gradient of `h` by `h`, and gates and ups by their gradient.
    pub fn activate(
        &self,
        stream: &Stream,
        direction: Direction,
        h: u64,
        gate_up: u64,
        n: usize,
    ) -> Enqueued {
        let [forward, backward] = match (self.activation, self.gated) {
            (Activation::Silu, true) => ["gated_silu_forward", "gated_silu_backward"],
            (Activation::Silu, false) => ["plain_silu_forward", "plain_silu_backward"],
            (Activation::GeluTanh, true) => ["gated_gelu_tanh_forward", "gated_gelu_tanh_backward"],
            (Activation::GeluTanh, false) => {
                ["plain_gelu_tanh_forward", "plain_gelu_tanh_backward"]
            }
            (Activation::Gelu, true) => ["gated_gelu_forward", "gated_gelu_backward"],
            (Activation::Gelu, false) => ["plain_gelu_forward", "plain_gelu_backward"],
        };
        let kernel = match direction {
            Direction::Forward => forward,
            Direction::Backward => backward,
        };
        let elements = n * self.intermediate;
        let arguments = [
            Address(h),
            Address(gate_up),
            Size(elements as u64),
            int(self.intermediate),
        ];
        self.elements(stream, kernel, elements, &arguments)
    }

    /// Losses of tokens, f64 `[n]`, of logits, real `[n, vocabulary]`. With `gradient` the logits are replaced
    /// by the gradient of the sum, by row times `weights`, f32 `[n]`, if there are any.
    pub fn cross_entropy(
        &self,
        stream: &Stream,
        losses: u64,
        logits: u64,
        (targets, n): (u64, usize),
        (gradient, weights): (bool, Option<u64>),
    ) -> Enqueued {
        let (smoothing, dft) = match self.token_loss {
            TokenLoss::CrossEntropy => (0.0, false),
            TokenLoss::Smoothed(smoothing) => (smoothing, false),
            TokenLoss::Dft => (0.0, true),
        };
        let arguments = [
            Address(losses),
            Address(logits),
            Address(targets),
            Address(weights.unwrap_or(0)),
            int(self.vocabulary),
            Int(i32::from(gradient)),
            Float(smoothing),
            Int(i32::from(dft)),
        ];
        let threads = if self.vocabulary < 8192 { 256 } else { 1024 };
        self.launch(stream, "cross_entropy", grid(n, threads), &arguments)
    }

    /// Adds the `n` losses, f64, to `total`, f64.
    pub fn sum_losses(&self, stream: &Stream, total: u64, losses: u64, n: usize) -> Enqueued {
        let arguments = [Address(total), Address(losses), int(n)];
        self.launch(stream, "sum_losses", grid(1, 1024), &arguments)
    }

    /// Attention's output of the stash's `qkv`, of a layer whose queries see `window` keys; keeps the softmax sums'
    /// logarithms.
    pub fn attention_forward(
        &self,
        stream: &Stream,
        stash: &Stash,
        (inputs, shape): (&Inputs, Shape),
        window: Option<usize>,
    ) -> Enqueued {
        let attention = self.attention_of(window, shape);
        let mut arguments = vec![
            Address(stash.attended),
            Address(stash.log_sums),
            Address(stash.qkv),
            int(shape.seq_len),
            int(attention.geometry.heads),
            int(attention.geometry.kv_heads),
        ];
        arguments.extend(attention.window(window));
        arguments.push(Address(spans_of(inputs, shape)));
        attention.launch(stream, "attention_forward", shape, &arguments)
    }

    /// Puts the keys and values of `qkv`, real `[n, qkv]`, behind the `past` rows of a sequence's `cache`, and leaves
    /// attention over all of them in `attended`, real `[n, heads × head_dim]`.
    pub fn attention_over_cache(
        &self,
        stream: &Stream,
        (attended, qkv): (u64, u64),
        (cache, past): (u64, usize),
        n: usize,
        window: Option<usize>,
    ) -> Enqueued {
        let attention::Geometry {
            heads, kv_heads, ..
        } = self.attention.geometry;
        let shape = [int(heads), int(kv_heads), int(past)];
        let mut arguments = vec![Address(cache), Address(qkv)];
        arguments.extend(shape);
        self.rows(stream, "fill_cache", n, &arguments)?;
        let mut arguments = vec![Address(attended), Address(qkv), Address(cache)];
        arguments.extend(shape);
        arguments.push(window.map_or(Int(i32::MAX), int));
        self.launch(stream, "cached_attention", grid(n * heads, 128), &arguments)
    }

    /// From the gradient of attention's output in [`Workspace::narrow`] to that of queries, keys and values in
    /// [`Workspace::wide`].
    pub fn attention_backward(
        &self,
        stream: &Stream,
        work: &Workspace,
        stash: &Stash,
        shape: Shape,
        window: Option<usize>,
    ) -> Enqueued {
        let attention = self.attention_of(window, shape);
        let attention::Geometry {
            variant,
            heads,
            kv_heads,
            ..
        } = attention.geometry;
        let arguments = [
            Address(work.delta),
            Address(work.narrow),
            Address(stash.attended),
            int(shape.seq_len),
            int(heads),
            Address(spans_of(&work.inputs, shape)),
        ];
        attention.launch(stream, "attention_delta", shape, &arguments)?;
        if variant == Variant::Wgmma {
            return attention.backward_in_turns(stream, work, stash, shape);
        }
        let mut arguments = vec![
            Address(work.wide),
            Address(work.narrow),
            Address(stash.qkv),
            Address(stash.log_sums),
            Address(work.delta),
            int(shape.seq_len),
            int(heads),
            int(kv_heads),
        ];
        arguments.extend(attention.window(window));
        arguments.push(Address(spans_of(&work.inputs, shape)));
        attention.launch(stream, "attention_backward_queries", shape, &arguments)?;
        attention.launch(stream, "attention_backward_keys", shape, &arguments)
    }

    /// AdamW on a range of a rank's part of a unit, with the factors at `factors`; writes the copy for matrix
    /// products, if there is one.
    pub fn adamw(
        &self,
        stream: &Stream,
        unit: &UnitAddresses,
        range: Range<usize>,
        factors: u64,
    ) -> Enqueued {
        let f32s = |address: u64| Address(address + (range.start * size_of::<f32>()) as u64);
        let arguments = [
            f32s(unit.weights),
            Address(unit.copy.map_or(0, |copy| {
                copy + (range.start * self.precision.size()) as u64
            })),
            f32s(unit.gradient),
            f32s(unit.exp_avg),
            f32s(unit.exp_avg_sq),
            Size(range.len() as u64),
            Address(factors),
        ];
        self.elements(stream, "adamw", range.len(), &arguments)
    }

    /// Adds ‖g‖² of `elements` f32 to `result`, f64.
    pub fn squared_norm(
        &self,
        stream: &Stream,
        (result, partials): (u64, u64),
        g: u64,
        elements: usize,
    ) -> Enqueued {
        let arguments = [Address(partials), Address(g), Size(elements as u64)];
        let blocks = self.strided(stream, "squared_norm", elements, &arguments)?;
        self.sum_partials(stream, result, partials, blocks)
    }

    /// Adds `g` to `sum`, both f32.
    pub fn add_gradient(&self, stream: &Stream, sum: u64, g: u64, elements: usize) -> Enqueued {
        let arguments = [Address(sum), Address(g), Size(elements as u64)];
        self.strided(stream, "add_gradient", elements, &arguments)
            .map(|_| ())
    }

    /// Adds `g` to `sum`, both f32, ‖g‖² to the first result and ‖sum‖² to the second. Each has its partial
    /// sums.
    pub fn add_gradient_measuring(
        &self,
        stream: &Stream,
        sum: u64,
        results: [u64; 2],
        partials: [u64; 2],
        (g, elements): (u64, usize),
    ) -> Enqueued {
        let arguments = [
            Address(sum),
            Address(partials[0]),
            Address(partials[1]),
            Address(g),
            Size(elements as u64),
        ];
        let blocks = self.strided(stream, "add_gradient_measuring", elements, &arguments)?;
        for (result, partials) in results.into_iter().zip(partials) {
            self.sum_partials(stream, result, partials, blocks)?;
        }
        Ok(())
    }

    /// Adds factor · g² to `squares`, by element.
    pub fn add_squares(
        &self,
        stream: &Stream,
        squares: u64,
        g: u64,
        factor: u64,
        elements: usize,
    ) -> Enqueued {
        let arguments = [
            Address(squares),
            Address(g),
            Address(factor),
            Size(elements as u64),
        ];
        self.strided(stream, "add_squares", elements, &arguments)
            .map(|_| ())
    }

    fn sum_partials(&self, stream: &Stream, result: u64, partials: u64, blocks: usize) -> Enqueued {
        let arguments = [Address(result), Address(partials), int(blocks)];
        self.rows(stream, "sum_partials", 1, &arguments)
    }

    /// Rounds `elements` f32 at `from` to real at `to`.
    pub fn cast(&self, stream: &Stream, to: u64, from: u64, elements: usize) -> Enqueued {
        let arguments = [Address(to), Address(from), Size(elements as u64)];
        self.elements(stream, "cast", elements, &arguments)
    }

    /// `weights`, real, of a linear layer in 4 bits; `table` has the values of the codes.
    pub fn dequantise(&self, stream: &Stream, weights: u64, layer: &Layer, table: u64) -> Enqueued {
        let elements = layer.range.len();
        let arguments = [
            Address(weights),
            Address(layer.codes),
            Address(layer.scales),
            Address(table),
            Size(elements as u64),
        ];
        self.elements(stream, "dequantise", elements, &arguments)
    }

    /// `scales`, f32, of their codes; `numbers` has the values of these.
    pub fn dequantise_scales(
        &self,
        stream: &Stream,
        scales: u64,
        nested: &NestedScales,
        numbers: u64,
    ) -> Enqueued {
        let arguments = [
            Address(scales),
            Address(nested.codes),
            Address(nested.factors),
            Address(numbers),
            Size(nested.count as u64),
        ];
        self.elements(stream, "dequantise_scales", nested.count, &arguments)
    }

    /// `to` `[n, width]`: forward, `from` with the dropout of an adapter; backward, adds that. Both are real.
    pub fn dropout(
        &self,
        stream: &Stream,
        direction: Direction,
        (to, from): (u64, u64),
        width: usize,
        dropout: Dropout,
        shape: Shape,
    ) -> Enqueued {
        let (dropped, factor) = odds(dropout.share);
        let arguments = [
            Address(to),
            Address(from),
            int(width),
            int(shape.seq_len),
            Address(dropout.keys),
            int(dropout.adapter),
            int(dropped as usize),
            Float(factor),
        ];
        let kernel = match direction {
            Direction::Forward => "dropout",
            Direction::Backward => "dropout_backward",
        };
        self.rows(stream, kernel, shape.tokens(), &arguments)
    }

    /// One block for each row.
    fn rows(
        &self,
        stream: &Stream,
        kernel: &'static str,
        rows: usize,
        arguments: &[Argument],
    ) -> Enqueued {
        self.launch(stream, kernel, grid(rows, THREADS), arguments)
    }

    /// One thread for each [`PER_THREAD`] elements.
    fn elements(
        &self,
        stream: &Stream,
        kernel: &'static str,
        elements: usize,
        arguments: &[Argument],
    ) -> Enqueued {
        let rows = elements.div_ceil(THREADS as usize * PER_THREAD);
        self.rows(stream, kernel, rows, arguments)
    }

    /// At most [`PARTIALS`] blocks, whose threads stride over the elements; returns their number.
    fn strided(
        &self,
        stream: &Stream,
        kernel: &'static str,
        elements: usize,
        arguments: &[Argument],
    ) -> Result<usize, CudaError> {
        let blocks = elements.div_ceil(THREADS as usize).clamp(1, PARTIALS);
        self.rows(stream, kernel, blocks, arguments)?;
        Ok(blocks)
    }

    fn launch(
        &self,
        stream: &Stream,
        kernel: &'static str,
        grid: Grid,
        arguments: &[Argument],
    ) -> Enqueued {
        // SAFETY: every method passes the parameters that the kernel's source declares; the engine keeps the
        // memory that they point at until it has synchronised with the stream.
        unsafe { stream.launch(&self.functions[kernel], grid, arguments) }
    }
}

impl Attention {
    /// The parameter of the kernels that have windows.
    fn window(&self, window: Option<usize>) -> Option<Argument> {
        let has_it = self.geometry.variant == Variant::F32;
        has_it.then(|| window.map_or(Int(i32::MAX), int))
    }

    fn backward_in_turns(
        &self,
        stream: &Stream,
        work: &Workspace,
        stash: &Stash,
        shape: Shape,
    ) -> Enqueued {
        // The block's gates and ups have their gradient, and the weights theirs.
        let sums = self.geometry.sums(stash.gate_up, shape);
        // SAFETY: the turns lie in the gates and ups (`Sums::fit`), which live longer than the stream's work.
        unsafe { stream.fill_zero(sums.turns, sums.turn_bytes)? };
        let arguments = [
            Address(work.wide),
            Address(sums.queries),
            Address(sums.keys),
            Address(sums.turns),
            Address(work.narrow),
            Address(stash.qkv),
            Address(stash.log_sums),
            Address(work.delta),
            int(shape.seq_len),
            int(self.geometry.heads),
            int(self.geometry.kv_heads),
            Address(spans_of(&work.inputs, shape)),
        ];
        self.launch(stream, "attention_backward", shape, &arguments)
    }

    fn launch(
        &self,
        stream: &Stream,
        kernel: &'static str,
        shape: Shape,
        arguments: &[Argument],
    ) -> Enqueued {
        let grid = self.geometry.grid(kernel, shape);
        // SAFETY: as in `Kernels::launch`.
        unsafe { stream.launch(&self.functions[kernel], grid, arguments) }
    }
}

/// The positions of the tokens of packed rows; null where each row is one sequence.
fn positions_of(inputs: &Inputs, shape: Shape) -> u64 {
    inputs.packed(shape).map_or(0, |packed| packed.positions)
}

/// The spans of the sequences of packed rows; null where each row is one.
fn spans_of(inputs: &Inputs, shape: Shape) -> u64 {
    inputs.packed(shape).map_or(0, |packed| packed.spans)
}

/// An `int` of a kernel. Sizes are checked against it when the engine is created.
fn int(value: usize) -> Argument {
    Int(i32::try_from(value).unwrap_or(i32::MAX))
}

/// A grid of one dimension.
fn grid(blocks: usize, threads: u32) -> Grid {
    Grid {
        blocks: (u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1),
        threads,
        shared: 0,
    }
}
