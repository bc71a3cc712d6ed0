//! Collectives: operations that all ranks run together.
//!
//! Every rank issues the same operations in the same order. An operation owns its buffers, so that it can run
//! beside compute; [`Pending::wait`] returns the buffers.

use std::sync::Arc;

pub mod activity;
pub mod solo;
pub mod tcp;
pub mod watch;

/// Receives one-line notices for a human (a refused connection, a late rank).
pub type Notify = Arc<dyn Fn(&str) + Send + Sync>;

/// Called once, from any thread, when the world has failed.
pub type Ended = Arc<dyn Fn(&CommError) + Send + Sync>;

/// Why a collective failed. A variant that a peer causes names the peer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommError {
    /// A peer did not connect, its connection broke, or its heartbeats stopped.
    #[error("lost rank {rank}: {reason}")]
    PeerLost {
        /// The rank of the root cause: a survivor that leaves because it lost a peer reports that peer.
        rank: usize,
        /// The symptom, for example `connection closed` or `no heartbeat for 3.0 s`.
        reason: String,
    },
    /// A peer stopped the collectives (out of memory, an internal error) and reported the reason.
    #[error("rank {rank} stopped the collectives: {reason}")]
    Aborted {
        /// The rank that stopped.
        rank: usize,
        /// The reason as that rank reported it.
        reason: String,
    },
    /// This rank could not connect to the others.
    #[error("rendezvous failed: {0}")]
    Rendezvous(String),
    /// A programming error: buffer sizes do not fit the world.
    #[error("collective misuse: {0}")]
    Misuse(String),
}

/// What an operation does with its buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// `data` becomes the sum over ranks, on every rank; `shard` is empty.
    AllReduce,
    /// `shard` of rank r becomes the sum of the r-th parts of all ranks' `data`, whose content afterwards is
    /// unspecified.
    ReduceScatter,
    /// `data` receives the shards of all ranks in rank order.
    AllGather,
    /// `data` of the ranks that hold it, which is equal, becomes that of the others: each holder sends a part. `shard` is
    /// empty.
    Broadcast {
        /// Whether a rank holds it, in rank order.
        holders: Vec<bool>,
    },
}

impl Kind {
    /// The operation's name in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Kind::AllReduce => "all-reduce",
            Kind::ReduceScatter => "reduce-scatter",
            Kind::AllGather => "all-gather",
            Kind::Broadcast { .. } => "broadcast",
        }
    }
}

/// One operation with its buffers, of `f32` or of integers. With a shard, `data.len() == world × shard.len()`.
#[derive(Debug)]
pub struct Operation<T = f32> {
    pub kind: Kind,
    pub data: Vec<T>,
    pub shard: Vec<T>,
}

impl<T> Operation<T> {
    pub fn all_reduce(data: Vec<T>) -> Operation<T> {
        Operation {
            kind: Kind::AllReduce,
            data,
            shard: Vec::new(),
        }
    }

    pub fn broadcast(data: Vec<T>, holders: Vec<bool>) -> Operation<T> {
        Operation {
            kind: Kind::Broadcast { holders },
            data,
            shard: Vec::new(),
        }
    }

    /// Checks that the buffers fit a world of this size.
    pub fn check(&self, world: usize) -> Result<(), CommError> {
        let (data, shard) = (self.data.len(), self.shard.len());
        let fits = match &self.kind {
            Kind::AllReduce => true,
            Kind::ReduceScatter | Kind::AllGather => data == world * shard,
            Kind::Broadcast { holders } if holders.len() == world && holders.contains(&true) => {
                true
            }
            Kind::Broadcast { holders } => {
                return Err(CommError::Misuse(format!(
                    "a broadcast in a world of {world} whose holders are {holders:?}"
                )));
            }
        };
        if fits {
            return Ok(());
        }
        Err(CommError::Misuse(format!(
            "{} of {data} elements with a shard of {shard}, but a world of {world} needs {}",
            self.kind.name(),
            world * shard
        )))
    }
}

type Wait<T> = Box<dyn FnOnce() -> Result<Operation<T>, CommError> + Send>;

/// An operation in progress.
pub struct Pending<T = f32>(Wait<T>);

impl<T> Pending<T> {
    /// `wait` blocks until the operation is complete.
    pub fn new(
        wait: impl FnOnce() -> Result<Operation<T>, CommError> + Send + 'static,
    ) -> Pending<T> {
        Pending(Box::new(wait))
    }

    /// Blocks until the operation is complete and returns the buffers.
    pub fn wait(self) -> Result<Operation<T>, CommError> {
        (self.0)()
    }
}

/// The collective operations of the world of one generation.
pub trait Collective: Send + Sync {
    /// This rank, counted from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world(&self) -> usize;

    /// Starts an operation and returns at once. Operations run in the order in which they start.
    fn start(&self, operation: Operation) -> Pending;

    /// As [`Collective::start`], of integers, whose sums wrap around.
    fn start_fixed(&self, operation: Operation<i64>) -> Pending<i64>;

    /// Gives every rank the messages of all ranks, in rank order. It is meant for small messages (the scalars
    /// of a step) and runs on its own connections, beside the operations of [`Collective::start`].
    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;

    /// Fails when the world has ended. The call is cheap: a long computation calls it now and then, so that
    /// it does not finish work that no rank needs any more.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Leaves the world and reports the reason to every rank; their operations fail with
    /// [`CommError::Aborted`].
    fn abort(&self, reason: &str);

    /// Leaves in order: finishes started operations and sends a goodbye, so that a rank that is a little
    /// behind does not count this one as lost. No operation may start afterwards. A world without connections
    /// has nothing to close.
    fn close(&self) -> Result<(), CommError> {
        Ok(())
    }
}

/// The collective that the engine and the training loop share.
pub type World = Arc<dyn Collective>;
