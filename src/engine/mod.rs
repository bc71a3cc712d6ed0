//! Engines: forward, backward and optimiser step over a model of named parameters.
//!
//! An engine owns the parameters, gradients and optimiser states of its rank, whole (DDP) or sharded (FSDP),
//! and communicates with the other ranks through a [`crate::comm::Collective`]. The training loop is the same
//! for every engine. Losses and gradients are *sums* over target tokens. The loop divides by the number of
//! target tokens in the whole global batch, so that neither accumulation nor the world size changes the
//! result.

mod adapters;
mod capacity;
pub mod config;
pub mod cpu;
pub mod cuda;
mod dropout;
pub mod initial;
mod layout;
pub mod nf4;
mod noise;
mod sequence;
mod step;
#[cfg(test)]
mod testing;
mod walk;

pub use adapters::{ADAPTER, Adapted, Adapter, Adapters, is_layer};
use capacity::Capacity;
pub use config::{Activation, Cause, ConfigError, Family, ModelConfig, NormKind, RopeScaling};
pub use cpu_kernels::adamw::AdamW;
pub use cpu_kernels::cross_entropy::TokenLoss;
use dropout::Dropout;
pub use layout::layout;
use layout::part;
pub use noise::Noise;
use sequence::{Sequence, cache_len, no_sequence, trains};
use step::{Keeps, Pass, Step, Training, no_worker_gradient};
use walk::Walk;

use std::ops::Range;
use std::sync::Arc;

use crate::comm::activity::Activity;
use crate::comm::{CommError, World};

/// A target that carries no loss (padding, prompts).
pub const IGNORE: u32 = u32::MAX;

/// Why an engine failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The step needs more memory than the limit; every rank descends together.
    #[error("out of memory: {needed} bytes needed for {what}, {limit} allowed per rank")]
    OutOfMemory {
        /// Bytes that the step would use.
        needed: u64,
        /// The limit per rank, in bytes.
        limit: u64,
        /// The purpose of the memory.
        what: String,
    },
    /// A collective failed, because of a peer or a misuse.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The engine does not support the model's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A GPU, or a library of CUDA, failed.
    #[error(transparent)]
    Cuda(#[from] cuda::CudaError),
    /// A tensor or an index has the wrong size.
    #[error("{0}")]
    Shape(String),
}

impl EngineError {
    /// Whether a new process would fail again.
    pub fn is_deterministic(&self) -> bool {
        match self {
            EngineError::Comm(_) => false,
            EngineError::Cuda(error) => error.is_deterministic(),
            EngineError::OutOfMemory { .. } | EngineError::Config(_) | EngineError::Shape(_) => {
                true
            }
        }
    }
}

/// Distribution of the state over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// Every rank holds everything (DDP).
    #[default]
    Replicated,
    /// Every rank holds a shard of everything (FSDP, ZeRO-3).
    Sharded {
        /// Keep a rank's gradient whole until the step is reduced, at the cost of a whole model's memory.
        /// With several micro-batches a step, [`Measure::worker`] needs it.
        unsharded_accumulation: bool,
    },
}

/// Direction of a pass over the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

/// One parameter tensor within its unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Hugging Face's name, for example `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// What the walk uses it for.
    pub role: Role,
    /// Row-major shape in files, `[out, in]` for linear layers unless their order is transposed.
    pub shape: Vec<usize>,
    /// Offset within the unit, in elements.
    pub offset: usize,
    pub order: Order,
}

/// How files order a parameter's elements. In the engines a linear layer is `[out, in]`, with the queries of all heads, then
/// their keys, then their values. [`Engine::export`] and [`Engine::import`] have the order of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Native,
    /// `[in, out]` (GPT-2's `Conv1D`).
    Transposed,
    /// Queries, keys and values of a head of this size, then those of the next (GPT-NeoX).
    ByHead(usize),
}

/// What a parameter is in its unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Embedding,
    Positions,
    InputNorm,
    Query,
    Key,
    Value,
    QueryBias,
    KeyBias,
    ValueBias,
    /// Queries, keys and values in one tensor.
    Qkv,
    QkvBias,
    QueryNorm,
    KeyNorm,
    Output,
    OutputBias,
    MiddleNorm,
    Gate,
    Up,
    GateBias,
    UpBias,
    Down,
    DownBias,
    FinalNorm,
    /// The first matrix of an adapter, which its input meets, and the second.
    AdapterA,
    AdapterB,
    /// Of the norm before it.
    NormBias,
    Head,
}

impl Role {
    pub fn kind(self) -> Kind {
        match self {
            Role::Embedding
            | Role::Positions
            | Role::Query
            | Role::Key
            | Role::Value
            | Role::Qkv
            | Role::Output
            | Role::Gate
            | Role::Up
            | Role::Down
            | Role::Head
            | Role::AdapterA
            | Role::AdapterB => Kind::Matrix,
            Role::InputNorm
            | Role::QueryNorm
            | Role::KeyNorm
            | Role::MiddleNorm
            | Role::FinalNorm => Kind::Norm,
            Role::QueryBias
            | Role::KeyBias
            | Role::ValueBias
            | Role::QkvBias
            | Role::OutputBias
            | Role::GateBias
            | Role::UpBias
            | Role::DownBias
            | Role::NormBias => Kind::Bias,
        }
    }
}

/// The kinds of parameters: they begin from other values, and only matrices decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Matrix,
    /// The weights of a norm.
    Norm,
    Bias,
}

/// A unit: parameters that are gathered, reduced and checkpointed together (the embedding, one block, or the
/// final norm with the head).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Name in messages and files, for example `block-03`.
    pub name: String,
    /// Adjacent parameters in order of their offsets.
    pub parameters: Vec<Parameter>,
    /// Number of elements in total.
    pub len: usize,
}

/// All units in the order of the forward pass. Tied embeddings live in the first unit only.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layout {
    /// All units, in the order of the forward pass.
    pub units: Vec<Unit>,
}

/// One micro-batch: `batch` rows of `seq_len` tokens, padded on the right with [`IGNORE`] targets.
#[derive(Debug, Clone, Copy, Default)]
pub struct MicroBatch<'a> {
    /// Token ids, `[batch, seq_len]` row-major.
    pub tokens: &'a [u32],
    /// Next-token targets, `[batch, seq_len]`; [`IGNORE`] carries no loss.
    pub targets: &'a [u32],
    pub batch: usize,
    /// Number of tokens in a row.
    pub seq_len: usize,
    /// What draws the dropout of adapters in each row, `[batch]`; empty for none.
    pub dropout: &'a [u64],
    /// Noise on the embeddings of each row, `[batch]`; empty for none.
    pub noise: &'a [Noise],
    /// Where sequences that do not see each other begin, ascending: every row, and the documents that are packed into it.
    /// Empty where each row is one sequence.
    pub starts: &'a [u32],
}

impl MicroBatch<'_> {
    /// The number of targets that carry loss.
    pub fn target_tokens(&self) -> u64 {
        let carry_loss = self.targets.iter().filter(|&&target| target != IGNORE);
        carry_loss.count() as u64
    }

    /// The tokens of each sequence.
    fn sequences(&self) -> Vec<Range<usize>> {
        let n = self.tokens.len();
        if self.starts.is_empty() {
            let starts = (0..n).step_by(self.seq_len.max(1));
            return starts.map(|start| start..start + self.seq_len).collect();
        }
        let ends = self.starts[1..].iter().map(|&end| end as usize);
        let starts = self.starts.iter().map(|&start| start as usize);
        starts
            .zip(ends.chain([n]))
            .map(|(start, end)| start..end)
            .collect()
    }

    /// The position of each token in its sequence, of which `past` tokens are before the micro-batch.
    fn positions(&self, past: usize) -> Vec<u32> {
        let sequences = self.sequences().into_iter();
        sequences
            .flat_map(|sequence| past as u32..(past + sequence.len()) as u32)
            .collect()
    }

    /// Refuses sizes that do not match, and tokens outside the model's vocabulary.
    fn check(&self, config: &ModelConfig) -> Result<(), EngineError> {
        let MicroBatch {
            tokens,
            targets,
            batch,
            seq_len,
            noise,
            starts,
            dropout,
        } = *self;
        config.check_sequence(seq_len)?;
        if tokens.is_empty()
            || batch.checked_mul(seq_len) != Some(tokens.len())
            || targets.len() != tokens.len()
        {
            return Err(EngineError::Shape(format!(
                "a micro-batch of {batch} × {seq_len} has {} tokens and {} targets",
                tokens.len(),
                targets.len()
            )));
        }
        if !noise.is_empty() && noise.len() != batch {
            return Err(EngineError::Shape(format!(
                "a micro-batch of {batch} rows has noise for {}",
                noise.len()
            )));
        }
        if !dropout.is_empty() && dropout.len() != batch {
            return Err(EngineError::Shape(format!(
                "a micro-batch of {batch} rows has dropout for {}",
                dropout.len()
            )));
        }
        let are_ascending = starts.first().is_none_or(|&first| first == 0)
            && starts.is_sorted_by(|one, next| one < next)
            && starts
                .last()
                .is_none_or(|&last| (last as usize) < tokens.len());
        let begin = |row: usize| starts.binary_search(&((row * seq_len) as u32)).is_ok();
        let are_parts = are_ascending && (0..batch).all(begin);
        if !(starts.is_empty() || are_parts) {
            return Err(EngineError::Shape(format!(
                "the {} sequences of a micro-batch of {batch} × {seq_len} are not parts of its rows, in their order",
                starts.len()
            )));
        }
        let outside = |&&token: &&u32| token as usize >= config.vocab_size;
        let mut wanted = targets.iter().filter(|&&target| target != IGNORE);
        match tokens.iter().find(outside).or(wanted.find(outside)) {
            Some(token) => Err(EngineError::Shape(format!(
                "token {token} is outside the model's vocabulary of {}",
                config.vocab_size
            ))),
            None => Ok(()),
        }
    }
}

/// The result of one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Accumulated {
    /// Sum of the cross-entropies over target tokens, nats.
    pub loss: f64,
    /// Number of target tokens.
    pub targets: u64,
    /// ‖gradient of the summed loss of this micro-batch‖², unsharded, if measured.
    pub squared_norm: Option<f64>,
}

/// The result of the reduction over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Reduced {
    /// ‖summed gradient over all micro-batches of all ranks‖², before any scaling or clipping.
    pub squared_norm: f64,
    /// ‖this rank's own accumulated gradient‖² before the reduction, if measured.
    pub local_squared_norm: Option<f64>,
}

/// An engine's place among others.
pub struct Place {
    /// `None` if it trains alone.
    pub world: Option<World>,
    /// Threads to compute with on processors.
    pub threads: usize,
    /// Where waits for other ranks are recorded that are not calls of the world.
    pub activity: Arc<Activity>,
}

/// The error for an engine that holds a part only.
fn not_whole() -> EngineError {
    EngineError::Shape("an engine with a shard of the state cannot leave its world".to_owned())
}

/// The measurements of a step for the norm test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Measure {
    /// ‖·‖² of every micro-batch's gradient.
    pub micro_batches: bool,
    /// ‖·‖² of this rank's accumulated gradient before the reduction.
    pub worker: bool,
    /// The sums that [`Engine::coordinates`] passes on. Its groups are the micro-batches if their norms are
    /// measured, otherwise the ranks.
    pub coordinates: bool,
}

impl Measure {
    /// Whether this rank's gradient over all of its micro-batches is measured.
    pub fn whole_step(self) -> bool {
        self.worker || (self.coordinates && !self.micro_batches)
    }
}

/// The sum of every rank's part of ‖gradient‖². Collective.
fn sum_over_ranks(world: &World, part: f64) -> Result<f64, EngineError> {
    let mut sum = 0.0;
    for part in world.exchange(&part.to_le_bytes())? {
        let part = part.try_into().map(f64::from_le_bytes);
        sum += part.map_err(|_| not_norms())?;
    }
    Ok(sum)
}

/// The error for another message than norms.
fn not_norms() -> EngineError {
    EngineError::Shape("another rank exchanges something else than norms".to_owned())
}

/// Parameters and optimiser states of one unit, unsharded, in the order of files.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct UnitState {
    /// Weights, `unit.len` elements.
    pub parameters: Vec<f32>,
    /// First moment of AdamW, `unit.len` elements.
    pub exp_avg: Vec<f32>,
    /// Second moment of AdamW, `unit.len` elements.
    pub exp_avg_sq: Vec<f32>,
}

/// From the cross-entropy of each token, nats, `[batch, seq_len]`, 0 without a target, to the derivatives of a loss by them.
pub type Weigh<'a> = Box<dyn FnOnce(&[f64]) -> Vec<f32> + Send + 'a>;

/// The loss of a micro-batch, of which a step takes the mean.
pub enum BatchLoss<'a> {
    /// The sum of the cross-entropies, for a mean over target tokens.
    OfTokens,
    /// The same sum, for a mean over samples: this many.
    OfSamples(u64),
    /// A loss of this many samples that is no plain sum of cross-entropies.
    Weighed(u64, Weigh<'a>),
}

impl<'a> BatchLoss<'a> {
    /// What the micro-batch counts as, in target tokens or samples, and how its tokens are weighed.
    fn counted(self, micro_batch: MicroBatch<'_>) -> (u64, Option<Weigh<'a>>) {
        match self {
            BatchLoss::OfTokens => (micro_batch.target_tokens(), None),
            BatchLoss::OfSamples(samples) => (samples, None),
            BatchLoss::Weighed(samples, weigh) => (samples, Some(weigh)),
        }
    }
}

fn not_frozen(unit: usize) -> EngineError {
    EngineError::Shape(format!(
        "unit {unit} is not frozen, the engine has no adapters"
    ))
}

/// Forward, backward and optimiser step on one rank.
pub trait Engine: Send {
    /// The units and parameters that are trained.
    fn layout(&self) -> &Layout;

    /// The frozen model below adapters.
    fn frozen(&self) -> Option<&Layout> {
        None
    }

    /// Sets the parameters of one unit of the frozen model, unsharded, in the order of files.
    fn import_frozen(&mut self, unit: usize, _parameters: &[f32]) -> Result<(), EngineError> {
        Err(not_frozen(unit))
    }

    /// Reserves memory for micro-batches up to `batch` × `seq_len` before the first step.
    fn reserve(&mut self, batch: usize, seq_len: usize) -> Result<(), EngineError>;

    /// Runs a micro-batch forward and backward and adds its gradient to the step's. `last` marks the last of
    /// this rank's micro-batches in the step: reductions may start after it.
    fn accumulate(
        &mut self,
        micro_batch: MicroBatch<'_>,
        measure: Measure,
        last: bool,
    ) -> Result<Accumulated, EngineError> {
        self.accumulate_loss(micro_batch, BatchLoss::OfTokens, measure, last)
    }

    /// As [`Engine::accumulate`] for another loss. Its samples take the place of target tokens in [`Engine::coordinates`].
    /// [`BatchLoss::Weighed`] turns the cross-entropies of the tokens into the loss's derivatives by them, between forward and
    /// backward. [`Accumulated::loss`] is the sum of the cross-entropies.
    fn accumulate_loss(
        &mut self,
        micro_batch: MicroBatch<'_>,
        loss: BatchLoss<'_>,
        measure: Measure,
        last: bool,
    ) -> Result<Accumulated, EngineError>;

    /// Takes part in a micro-batch of the other ranks without one. Under sharding, ranks with fewer
    /// micro-batches call this so that the collectives match. Under DDP it does nothing.
    fn join(&mut self, last: bool) -> Result<(), EngineError>;

    /// Finishes the reduction of the step's gradient over the ranks.
    fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError>;

    /// Passes this rank's part of the model's coordinates to `show`, after a reduction with
    /// [`Measure::coordinates`] and before the update. The arguments are slices `(weighted, summed)` of equal
    /// length: `weighted[d]` is Σ G_{i,d}²/n_i over the groups of all ranks, where group i holds n_i target
    /// tokens and G_i is the gradient of its summed loss; `summed[d]` is Σ G_{i,d}. The parts of all ranks
    /// together cover every coordinate once. Not collective.
    fn coordinates(&mut self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError>;

    /// The optimiser step; clears the step's gradient.
    fn update(&mut self, step: AdamW) -> Result<(), EngineError>;

    /// Discards the step's gradient (a NaN loss, an abandoned step).
    fn discard(&mut self);

    /// Leaves its world, which may have failed, between two steps, and takes part in another one. Collective there. Only
    /// for an engine that holds everything ([`Strategy::Replicated`]).
    fn rejoin(&mut self, place: Place) -> Result<(), EngineError>;

    /// Summed loss and target tokens of a micro-batch, forward only.
    fn evaluate(&mut self, micro_batch: MicroBatch<'_>) -> Result<(f64, u64), EngineError>;

    /// The cross-entropy of each token, forward only: nats, `[batch, seq_len]`, 0 without a target.
    fn losses(&mut self, micro_batch: MicroBatch<'_>) -> Result<Vec<f64>, EngineError>;

    /// Takes part in a forward pass of the other ranks, when this rank has nothing left to evaluate (sharding
    /// only).
    fn join_evaluation(&mut self) -> Result<(), EngineError>;

    /// Begins an empty sequence of up to `len` tokens, in place of an earlier one, and reserves memory for it.
    ///
    /// # Errors
    /// The model cannot have such a sequence.
    fn begin_sequence(&mut self, len: usize) -> Result<(), EngineError>;

    /// Continues the sequence by these tokens. Returns the logits of the token after them, `[vocabulary]`.
    ///
    /// # Errors
    /// There are no tokens, or more than [`Engine::begin_sequence`] has reserved memory for.
    fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError>;

    /// One unit's state, unsharded. Under sharding it is collective: every rank calls it, in the same order.
    /// Ranks for which `wanted` is false may return `None` and keep nothing.
    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError>;

    /// Sets one unit's state; a sharded engine keeps its part. Not collective.
    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError>;

    /// Bytes held by this engine now, and most bytes so far.
    fn memory(&self) -> (u64, u64);
}
