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
    /// A peer is lost. The rank waits for [`Order::Commit`] or [`Order::Stop`].
    Lost {
        /// Rank of the root cause.
        rank: u64,
        /// How the loss was detected.
        message: String,
        /// Samples in this rank's state.
        samples: u64,
        /// Whether this rank holds the complete state and can commit it alone.
        whole: bool,
    },
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
            | Report::Lost { .. } => return None,
        })
    }
}

/// A message from an agent to its rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// Agree on a step with the others, commit, exit 143.
    Drain,
    /// Cancel [`Order::Drain`], unless the ranks have already agreed on a step.
    CancelDrain,
    /// After [`Report::Lost`]: commit the complete state alone, then exit.
    Commit,
    Stop,
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
