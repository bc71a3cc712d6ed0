//! Storage of parameters, gradients and optimiser states.
//!
//! The model walks the units and requests each one's parameters and a place for its gradient from its
//! [`Store`]. It does not know whether the store holds whole units ([`Replicated`]) or gathers shards of them
//! ([`Sharded`]). With n units, every walk on every rank has this order:
//!
//! ```text
//! begin(pass)
//! forward    acquire(0) … acquire(n-1)
//! backward   complete(n-1)                                       (Pass::Training only)
//!            acquire(n-2) complete(n-2) … acquire(1) complete(1) complete(0)
//! end()
//! ```
//!
//! Forward and backward of the last unit are one step (the head never stores its logits), so it is acquired
//! once. The embedding's backward needs no parameters, so it is not acquired again. `release(u)` follows as
//! soon as the walk no longer needs a unit's parameters: before the next `acquire`, except that tied
//! embeddings stay acquired until the head is done. The calls alone therefore determine the next unit to
//! prefetch.
//!
//! A failed walk is not continued; the caller calls [`Store::discard`] or gives up.

mod replicated;
mod sharded;
mod squares;

pub use replicated::Replicated;
pub use sharded::{Holds, Sharded};

use crate::comm::{CommError, Operation, Pending};
use crate::engine::{AdamW, EngineError, Measure, Reduced, UnitState};

/// The purpose of a walk over the units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// A forward pass without gradients.
    Evaluation,
    /// A micro-batch forward and backward.
    Training {
        /// The measurements that the norm test requests.
        measure: Measure,
        /// Target tokens of the micro-batch.
        targets: u64,
        /// Whether this is the last of this rank's micro-batches in the step.
        last: bool,
    },
}

/// The place for a unit's gradient of the current micro-batch.
#[derive(Debug)]
pub struct Gradient<'a> {
    /// `unit.len` elements.
    pub values: &'a mut [f32],
    /// Whether to add to the values; otherwise they are unspecified and every one of them must be
    /// overwritten.
    pub add: bool,
}

/// Parameters, gradients and optimiser states of every unit; the module doc states the order of calls.
pub trait Store: Send {
    /// Starts a walk over the units.
    fn begin(&mut self, pass: Pass) -> Result<(), EngineError>;

    /// Makes the unit's parameters whole until they are released.
    fn acquire(&mut self, unit: usize) -> Result<(), EngineError>;

    /// An acquired unit's parameters, `unit.len` elements.
    fn parameters(&self, unit: usize) -> &[f32];

    /// An acquired unit's parameters and the place for its gradient. In backward the first unit's parameters
    /// may be empty, because it is not acquired there. The place and its values stay the same until the
    /// unit's [`Store::complete`], and so does `add`.
    fn gradient(&mut self, unit: usize) -> (&[f32], Gradient<'_>);

    /// The walk does not need the unit's parameters for now.
    fn release(&mut self, unit: usize);

    /// The unit's gradient of this micro-batch is complete: the store may measure, reduce and free it.
    fn complete(&mut self, unit: usize) -> Result<(), EngineError>;

    /// Ends the walk. Returns ‖gradient of this micro-batch‖² when [`Measure::micro_batches`] requests it.
    fn end(&mut self) -> Result<Option<f64>, EngineError>;

    /// Takes part in a walk of the other ranks without a micro-batch.
    fn join(&mut self, pass: Pass) -> Result<(), EngineError>;

    /// Finishes the reduction of the step's gradient over the ranks. The gradient of a rank without a
    /// micro-batch in this step is zero.
    fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError>;

    /// Passes this rank's part of the coordinates to `show`; see [`crate::engine::Engine::coordinates`].
    fn coordinates(&self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError>;

    /// The optimiser step on the reduced gradient; clears the step's gradient.
    fn update(&mut self, step: AdamW) -> Result<(), EngineError>;

    /// Discards the step's gradient, also during a walk or a reduction.
    fn discard(&mut self);

    /// One unit's state, unsharded. Every rank calls it; only ranks with `wanted` receive the result.
    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError>;

    /// Sets one unit's state; its vectors have the unit's length.
    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError>;
}

/// Waits for an all-reduce and returns its elements.
fn all_reduced(reduction: Box<dyn Pending>) -> Result<Vec<f32>, EngineError> {
    match reduction.wait()? {
        Operation::AllReduce(elements) => Ok(elements),
        other => {
            Err(CommError::Misuse(format!("{} came back for an all-reduce", other.name())).into())
        }
    }
}
