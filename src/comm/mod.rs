//! Collectives: what ranks do together.
//!
//! Every rank issues the same operations in the same order. Operations own their buffers, so that
//! they can run beside compute; [`Pending::wait`] gives the buffers back.

use std::sync::Arc;

pub mod solo;
pub mod tcp;
pub mod watch;

/// Where one-line notices for a human go (a refused stranger, a late rank).
pub type Notify = Arc<dyn Fn(&str) + Send + Sync>;

/// Told once, at once and from whatever thread has seen it, that the world has ended.
pub type Ended = Arc<dyn Fn(&CommError) + Send + Sync>;

/// Why a collective failed. Every variant that a peer causes names the peer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommError {
    /// A peer did not come, its connection broke, or its heartbeats stopped.
    #[error("lost rank {rank}: {reason}")]
    PeerLost {
        /// The root cause's rank: when a survivor leaves because it lost a peer, it says whom.
        rank: usize,
        /// What was seen, for example `connection closed` or `no heartbeat for 3.0 s`.
        reason: String,
    },
    /// A peer left on purpose (out of memory, an error of its own) and said why.
    #[error("rank {rank} stopped the collectives: {reason}")]
    Aborted {
        /// Who.
        rank: usize,
        /// In its own words.
        reason: String,
    },
    /// This rank could not meet the others.
    #[error("rendezvous failed: {0}")]
    Rendezvous(String),
    /// A programming error: sizes that do not fit the world.
    #[error("collective misuse: {0}")]
    Misuse(String),
}

/// One operation with its buffers. Lengths are in `f32`s.
#[derive(Debug)]
pub enum Operation {
    /// Sum over ranks, in place on every rank.
    AllReduce(Vec<f32>),
    /// `data.len() == world × shard.len()`; rank r receives the sum of everyone's r-th part.
    ReduceScatter {
        /// Everyone's addend, unchanged or scratch afterwards.
        data: Vec<f32>,
        /// This rank's part of the sum.
        shard: Vec<f32>,
    },
    /// `data.len() == world × shard.len()`; the parts of all ranks one after the other.
    AllGather {
        /// This rank's part.
        shard: Vec<f32>,
        /// All parts.
        data: Vec<f32>,
    },
}

impl Operation {
    /// Name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Operation::AllReduce(_) => "all-reduce",
            Operation::ReduceScatter { .. } => "reduce-scatter",
            Operation::AllGather { .. } => "all-gather",
        }
    }

    /// Checks that the buffers fit a world of this size.
    pub fn check(&self, world: usize) -> Result<(), CommError> {
        match self {
            Operation::AllReduce(_) => Ok(()),
            Operation::ReduceScatter { data, shard } | Operation::AllGather { shard, data } => {
                if data.len() == world * shard.len() {
                    return Ok(());
                }
                Err(CommError::Misuse(format!(
                    "{} of {} elements with a shard of {}, but a world of {world} needs {}",
                    self.name(),
                    data.len(),
                    shard.len(),
                    world * shard.len()
                )))
            }
        }
    }
}

/// An operation under way.
pub trait Pending: Send {
    /// Blocks until it is done and gives the buffers back.
    fn wait(self: Box<Self>) -> Result<Operation, CommError>;
}

/// The collective operations of one generation's world.
pub trait Collective: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world(&self) -> usize;

    /// Starts an operation and returns at once; operations run in the order they were started.
    fn start(&self, operation: Operation) -> Box<dyn Pending>;

    /// Gives every rank everyone's message, in rank order. Small messages (scalars of a step), on
    /// a lane of its own beside [`Collective::start`]'s operations.
    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;

    /// Whether the world still stands. Cheap: whoever computes for long asks now and then, and does
    /// not first finish what nobody waits for any more.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Leaves the world and tells everyone why; their operations fail with
    /// [`CommError::Aborted`].
    fn abort(&self, reason: &str);

    /// Leaves in order: finishes what was started and says goodbye, so that a rank that is a
    /// little behind does not take it for a death. Nothing may be started afterwards.
    /// A world without connections has nothing to do.
    fn close(&self) -> Result<(), CommError> {
        Ok(())
    }
}

/// A collective shared by the engine and the training loop.
pub type World = Arc<dyn Collective>;
