//! Where parameters, gradients and optimiser states live.
//!
//! The model walks the units and asks its [`Store`] for each one's parameters and for a place for
//! its gradient. It does not know whether the store holds whole units ([`Replicated`]) or gathers
//! shards of them ([`Sharded`]). With n units, one walk is, always and on every rank:
//!
//! ```text
//! begin(pass)
//! forward    acquire(0) … acquire(n-1)
//! backward   complete(n-1)                                       (Pass::Training only)
//!            acquire(n-2) complete(n-2) … acquire(1) complete(1) complete(0)
//! end()
//! ```
//!
//! The last unit's forward and backward are one (the head never keeps its logits), so it is
//! acquired once, and the embedding's backward needs no parameters, so it is not acquired again.
//! `release(u)` follows as soon as a unit's parameters are not needed any more: before the next
//! `acquire`, except that tied embeddings stay acquired until the head is done with them. The next
//! unit to prefetch therefore follows from the calls alone.
//!
//! A walk that fails is not continued; the caller answers with [`Store::discard`] or gives up.

mod replicated;
mod sharded;
mod squares;

pub use replicated::Replicated;
pub use sharded::{Holds, Sharded};

use std::ops::Range;

use crate::comm::{CommError, Operation, Pending};
use crate::engine::{AdamW, EngineError, Measure, Reduced, UnitState};

/// What a walk over the units is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Forward only.
    Evaluation,
    /// A micro-batch forward and backward.
    Training {
        /// What the norm test wants measured.
        measure: Measure,
        /// Target tokens of the micro-batch.
        targets: u64,
        /// This is the last of this rank's micro-batches in the step.
        last: bool,
    },
}

/// A place for a unit's gradient of the current micro-batch.
#[derive(Debug)]
pub struct Gradient<'a> {
    /// `unit.len` elements.
    pub values: &'a mut [f32],
    /// Whether to add to the values; otherwise they mean nothing yet and are to be overwritten,
    /// every one of them.
    pub add: bool,
}

/// Parameters, gradients and optimiser states of every unit; see the module for the order of calls.
pub trait Store: Send {
    /// A walk begins.
    fn begin(&mut self, pass: Pass) -> Result<(), EngineError>;

    /// Makes the unit's parameters whole, until it is released.
    fn acquire(&mut self, unit: usize) -> Result<(), EngineError>;

    /// An acquired unit's parameters, `unit.len` elements.
    fn parameters(&self, unit: usize) -> &[f32];

    /// An acquired unit's parameters together with the place for its gradient (the parameters of
    /// the first unit, in backward, may be empty: it is not acquired there). The place stays the
    /// same, and keeps its values, until the unit's [`Store::complete`]; `add` is the same in
    /// every call, too.
    fn gradient(&mut self, unit: usize) -> (&[f32], Gradient<'_>);

    /// The unit's parameters are not needed any more for now.
    fn release(&mut self, unit: usize);

    /// The unit's gradient of this micro-batch is complete: it may be measured, reduced and freed.
    fn complete(&mut self, unit: usize) -> Result<(), EngineError>;

    /// The walk is over. Gives ‖gradient of this micro-batch‖² when [`Measure::micro_batches`]
    /// asked for it.
    fn end(&mut self) -> Result<Option<f64>, EngineError>;

    /// Takes part in a walk of the other ranks with nothing of its own.
    fn join(&mut self, pass: Pass) -> Result<(), EngineError>;

    /// Finishes the reduction of the step's gradient over the ranks; without any micro-batch in
    /// this step, this rank's part of it is zero.
    fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError>;

    /// Shows this rank's part of the coordinates; see [`crate::engine::Engine::coordinates`].
    fn coordinates(&self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError>;

    /// The optimiser step on the reduced gradient; the step's gradient is gone afterwards.
    fn update(&mut self, step: AdamW) -> Result<(), EngineError>;

    /// Throws the step's gradient away, also in the middle of a walk or of a reduction.
    fn discard(&mut self);

    /// One unit's state, unsharded; every rank calls it, only those with `wanted` need the result.
    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError>;

    /// Sets one unit's state, whose lengths are the unit's.
    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError>;
}

/// The part of a unit of `len` elements that is one rank's. All but the last are equally long.
fn part(len: usize, rank: usize, world: usize) -> Range<usize> {
    let part = len.div_ceil(world);
    (rank * part).min(len)..((rank + 1) * part).min(len)
}

/// Waits for an all-reduce and takes its elements back.
fn all_reduced(reduction: Box<dyn Pending>) -> Result<Vec<f32>, EngineError> {
    match reduction.wait()? {
        Operation::AllReduce(elements) => Ok(elements),
        other => {
            Err(CommError::Misuse(format!("{} came back for an all-reduce", other.name())).into())
        }
    }
}
