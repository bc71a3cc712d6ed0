//! What ranks and their agent say to each other: one JSON object a line, reports on the rank's
//! standard output, orders on its standard input. The end of standard input is an order too: the
//! agent is gone, commit and leave.

use serde::{Deserialize, Serialize};

use super::generation::Pin;
use crate::telemetry::{EvaluationRecord, Event, StepRecord};

/// Rank to agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum Report {
    /// It lives and has not met all others yet: said every second until it has.
    Waiting,
    /// It has met all others. From here on they see each other's signs of life themselves.
    Met,
    /// In the world, state loaded, about to take its first step.
    Ready,
    /// A step is done (rank 0 only).
    Step(StepRecord),
    /// An evaluation is done (rank 0 only).
    Evaluation(EvaluationRecord),
    /// A checkpoint is committed (by whoever committed it).
    Committed {
        /// The checkpoint.
        pin: Pin,
        /// Seconds from the snapshot to the commit.
        seconds: f64,
        /// Bytes written by all ranks.
        bytes: u64,
    },
    /// A step takes long; its slowest rank is named, not killed (rank 0 only).
    Straggler {
        /// Which rank.
        rank: u64,
        /// How long its own work of the step took, seconds.
        seconds: f64,
        /// What the slowest rank of a usual step takes, seconds.
        usual: f64,
    },
    /// Something worth a line.
    Warning {
        /// Lower case, no full stop.
        message: String,
    },
    /// A peer is gone, as the rank's communication saw at once; what it computes comes to an end
    /// first, then it says [`Report::Lost`].
    Noticed {
        /// The root cause's rank.
        rank: u64,
        /// What was seen.
        why: String,
    },
    /// A peer is gone. The rank waits for [`Order::Commit`] or [`Order::Stop`].
    Lost {
        /// The root cause's rank.
        rank: u64,
        /// What was seen.
        why: String,
        /// Samples in this rank's state.
        samples: u64,
        /// Whether this rank holds the whole state and could commit it alone.
        whole: bool,
    },
    /// Memory for the plan's micro-batch could not be had.
    OutOfMemory {
        /// In words, with the numbers.
        message: String,
    },
    /// The rank failed; its last words. The process exits with 1.
    Failed {
        /// In words.
        message: String,
        /// It would happen again: a NaN loss, unreadable data, a full disk.
        deterministic: bool,
    },
}

impl Report {
    /// What people are shown of it, said by `rank`; `None` where the report alone shows nothing.
    pub fn event(&self, rank: u64) -> Option<Event> {
        Some(match self {
            Report::Step(record) => Event::Step(record.clone()),
            Report::Evaluation(record) => Event::Evaluation(record.clone()),
            Report::Committed {
                pin,
                seconds,
                bytes,
            } => Event::Checkpoint {
                samples: pin.samples,
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
            Report::OutOfMemory { message } | Report::Failed { message, .. } => Event::Warning {
                message: format!("rank {rank}: {message}"),
            },
            Report::Waiting
            | Report::Met
            | Report::Ready
            | Report::Noticed { .. }
            | Report::Lost { .. } => return None,
        })
    }
}

/// Agent to rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// Agree on a step with the others, commit, exit 143.
    Drain,
    /// Forget [`Order::Drain`], unless a step was agreed on already.
    Stay,
    /// After [`Report::Lost`]: commit the whole state alone, then exit.
    Commit,
    /// After [`Report::Lost`]: exit.
    Stop,
}

/// How a rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// It returned a code.
    Code(u8),
    /// A signal ended it.
    Signal(i32),
    /// A program of the user's own returned [`exit::DRAINED`], and nobody had asked it to leave: it
    /// saved, perhaps, but it would leave again and again.
    Unasked,
}

impl Ending {
    /// What there is to say of a process that returned, if that was a failure of its own.
    pub fn failure(self) -> Option<String> {
        match self {
            Ending::Code(exit::FINISHED | exit::DRAINED | exit::PEER_LOST) | Ending::Signal(_) => {
                None
            }
            Ending::Code(code) => Some(format!("exit code {code}")),
            Ending::Unasked => Some(format!(
                "it left (exit code {}) and nobody had asked it to",
                exit::DRAINED
            )),
        }
    }
}

/// The codes that a rank's process ends with, and that of a preparation.
pub mod exit {
    /// The budget is reached and the final checkpoint committed.
    pub const FINISHED: u8 = 0;
    /// The training itself said no, or a rule.
    pub const FAILED: u8 = 1;
    /// What it was called with cannot be used.
    pub const UNUSABLE: u8 = 2;
    /// The volume or the machine said no: the same may work later (preparations only).
    pub const TRY_AGAIN: u8 = 74;
    /// A peer was lost.
    pub const PEER_LOST: u8 = 75;
    /// Memory could not be had.
    pub const OUT_OF_MEMORY: u8 = 76;
    /// Drained: a checkpoint is committed, the run can be resumed.
    pub const DRAINED: u8 = 143;
}
