//! Where a walk finds the weights of its units: in the state, or gathered from the shards of all ranks.

use super::error::CudaError;
use super::peers::Peers;
use super::sharded::{Direction, Shards};
use super::state::{State, Whole};

/// The weights of all units. A walk acquires a unit before it reads its weights, and releases it before it
/// acquires the next one.
pub enum Parameters<'a> {
    /// Every rank holds everything; `None`: there is no other rank.
    Replicated(&'a State, Option<&'a Peers>),
    /// Every rank holds a part of everything.
    Sharded(Shards<'a>),
}

impl Parameters<'_> {
    /// Starts a walk over the units.
    pub fn begin(&self) -> Result<(), CudaError> {
        match self {
            Parameters::Replicated(..) => Ok(()),
            Parameters::Sharded(shards) => shards.begin(),
        }
    }

    /// The compute stream's next work may read the unit's weights.
    pub fn acquire(&self, unit: usize) -> Result<(), CudaError> {
        match self {
            Parameters::Replicated(..) => Ok(()),
            Parameters::Sharded(shards) => shards.acquire(unit),
        }
    }

    /// An acquired unit's weights.
    pub fn whole(&self, unit: usize) -> Whole {
        match self {
            Parameters::Replicated(state, _) => state.units[unit].whole(),
            Parameters::Sharded(shards) => shards.whole(unit),
        }
    }

    /// The compute stream has read the unit's weights for now. Tied embeddings are not released.
    pub fn release(&self, unit: usize, direction: Direction) -> Result<(), CudaError> {
        match self {
            Parameters::Replicated(..) => Ok(()),
            Parameters::Sharded(shards) => shards.release(unit, direction),
        }
    }
}
