//! Control messages between ranks and their agent, one JSON object a line: reports on the rank's
//! standard output, orders on its standard input. End of file on standard input means that the
//! agent is gone: the rank commits and exits.

use serde::{Deserialize, Serialize};

use super::generation::CheckpointRef;
use crate::telemetry::{EvaluationRecord, Event, StepRecord};

/// A message from a rank to its agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum Report {
    /// Sent every second until the rank has connected to all others.
    Connecting,
    /// Connected to all others. From here on the ranks watch each other's heartbeats.
    Connected,
    /// Sent every second by the only rank of a world, which has no peers to watch it.
    Alive,
    /// State loaded; the first step follows.
    Ready,
    /// A step ended (rank 0 only, or the rank that commits after the loss of rank 0).
    Step(StepRecord),
    /// An evaluation ended (rank 0 only).
    Evaluation(EvaluationRecord),
    /// A checkpoint is committed; sent by the rank that committed it.
    Committed {
        checkpoint_ref: CheckpointRef,
        /// Time from the snapshot to the commit.
        seconds: f64,
        /// Bytes written by all ranks.
        bytes: u64,
    },
    /// A slow step, with its slowest rank; that rank is not killed (rank 0 only).
    Straggler {
        rank: u64,
        /// Compute time of this rank in the step.
        seconds: f64,
        /// Compute time of the slowest rank in a usual step, seconds.
        usual: f64,
    },
    /// The rank lives but makes no progress. Its stacks are written down.
    Stalled {
        /// For how long, and what it does.
        message: String,
        /// It waits for other ranks, one of which may be the cause. Unknown of an external trainer: false.
        waiting: bool,
    },
    /// The rank makes progress again after [`Report::Stalled`].
    Progressing,
    /// Printed as one line.
    Warning {
        /// Lower case, no full stop.
        message: String,
    },
    /// The rank's connections detected the loss of a peer. The rank finishes its current computation
    /// and then reports [`Report::Lost`].
    LossDetected {
        /// Rank of the root cause.
        rank: u64,
        /// How the loss was detected.
        message: String,
    },
    /// A peer is lost. The rank waits for [`Order::Commit`], [`Order::Continue`] or [`Order::Stop`].
    Lost {
        /// Rank of the root cause.
        rank: u64,
        /// How the loss was detected.
        message: String,
        #[serde(flatten)]
        held: HeldState,
    },
    /// The rank has left its world in order, after [`Order::Pause`]. It waits as after [`Report::Lost`].
    Paused {
        #[serde(flatten)]
        held: HeldState,
    },
    /// A process outside of any generation has all that does not depend on one. It waits for [`Order::Continue`].
    StandingBy,
    /// The rank continues in another generation, after [`Order::Continue`]. Its later reports are of that one.
    Entered { generation: u64, rank: u64 },
    /// The plan's micro-batch does not fit in memory.
    OutOfMemory {
        /// Includes the sizes that did not fit.
        message: String,
    },
    /// The rank's GPU no longer works. Its last report; the process ends as if it was killed, so the rank counts
    /// as lost.
    DeviceLost {
        /// Names the GPU and its error.
        message: String,
    },
    /// The rank failed. Its last report; the process exits with 1.
    Failed {
        message: String,
        /// A restart would fail again: a NaN loss, unreadable data.
        deterministic: bool,
    },
    /// The run directory cannot be written: the disk is full, read-only or broken. The rank's last report; the process
    /// exits with 1.
    VolumeFailed { message: String },
}

impl Report {
    /// The event shown to the user for a report of `rank`; `None` for reports that are not shown.
    pub fn event(&self, rank: u64) -> Option<Event> {
        Some(match self {
            Report::Step(record) => Event::Step(record.clone()),
            Report::Evaluation(record) => Event::Evaluation(record.clone()),
            Report::Committed {
                checkpoint_ref,
                seconds,
                bytes,
            } => Event::Checkpoint {
                samples: checkpoint_ref.samples,
                seconds: *seconds,
                bytes: *bytes,
            },
            Report::Straggler {
                rank,
                seconds,
                usual,
            } => Event::Straggler {
                rank: *rank,
                seconds: *seconds,
                usual: *usual,
            },
            Report::Warning { message } => Event::Warning {
                message: message.clone(),
            },
            Report::OutOfMemory { message }
            | Report::Failed { message, .. }
            | Report::Stalled { message, .. }
            | Report::VolumeFailed { message } => Event::Warning {
                message: format!("rank {rank}: {message}"),
            },
            Report::Progressing => Event::Warning {
                message: format!("rank {rank} makes progress again"),
            },
            // The loss of the rank is shown with it.
            Report::DeviceLost { .. }
            | Report::Connecting
            | Report::Connected
            | Report::Alive
            | Report::Ready
            | Report::LossDetected { .. }
            | Report::Lost { .. }
            | Report::Paused { .. }
            | Report::StandingBy
            | Report::Entered { .. } => return None,
        })
    }
}

/// A message from an agent to its rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// Agree on a step with the others, commit, exit 143.
    Drain,
    /// Agree on a step with the others, and wait for another order.
    Pause,
    /// Cancel [`Order::Drain`] and [`Order::Pause`], unless the ranks have already agreed on a step.
    CancelDrain,
    /// After [`Report::Lost`] or [`Report::Paused`]: commit the complete state alone, then exit.
    Commit,
    /// After the same: continue with this state in another generation.
    Continue(Assignment),
    Stop,
}

/// The place of a process in a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    pub generation: u64,
    pub rank: u64,
    /// Threads to compute with.
    pub threads: u64,
    /// Whether it is the first rank of its host.
    pub first_of_host: bool,
    /// The secret of the generation's ranks ([`crate::util::key::Key::reveal`]).
    pub key: String,
}

/// What a rank holds that waits for an order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldState {
    /// Steps taken.
    #[serde(default)]
    pub step: u64,
    pub samples: u64,
    /// The batch of the next step, samples.
    #[serde(default)]
    pub batch: u64,
    /// Whether the state is complete, so that the rank can commit it alone.
    pub whole: bool,
    /// Whether a process without a state can take it and train on.
    #[serde(default)]
    pub joinable: bool,
}

/// End of a rank's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    Code(u8),
    /// Number of the signal that killed it.
    Signal(i32),
    /// An external trainer returned [`exit::DRAINED`] without [`Order::Drain`]. It may have saved a
    /// checkpoint, but it would exit again after every restart.
    Unrequested,
}

impl Ending {
    /// Message for a process that failed by itself; `None` for all other endings.
    pub fn failure(self) -> Option<String> {
        match self {
            Ending::Code(exit::FINISHED | exit::DRAINED | exit::PEER_LOST) | Ending::Signal(_) => {
                None
            }
            Ending::Code(code) => Some(format!("exit code {code}")),
            Ending::Unrequested => Some(format!(
                "it exited with code {} without a request to drain",
                exit::DRAINED
            )),
        }
    }
}

/// Exit codes of ranks and of the preparation of a run.
pub mod exit {
    /// The budget is reached and the final checkpoint is committed.
    pub const FINISHED: u8 = 0;
    /// Training failed, or a rule refused the run.
    pub const FAILED: u8 = 1;
    /// The arguments of the process are invalid.
    pub const UNUSABLE: u8 = 2;
    /// The volume or the machine failed; a retry may succeed (preparation only).
    pub const TRY_AGAIN: u8 = 74;
    /// The rank lost a peer.
    pub const PEER_LOST: u8 = 75;
    /// The memory of the device or host is exhausted.
    pub const OUT_OF_MEMORY: u8 = 76;
    /// Drained: a checkpoint is committed, the run can be resumed.
    pub const DRAINED: u8 = 143;
}
