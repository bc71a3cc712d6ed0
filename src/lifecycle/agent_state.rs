//! State that an agent reports of itself and its ranks. The controller reads it over HTTP; it is
//! the only source for the outcome of a generation.

use std::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::ExternalCheckpoint;
use super::generation::CheckpointRef;
use crate::lifecycle::rank_status::RankStatus;
use crate::telemetry::StepRecord;
use crate::util::durable::FileError;
use crate::util::format::shorten;

/// Ranks of one agent, at most: `gpusPerNode` is at most 64.
pub const RANKS: usize = 64;
/// Longest message, bytes.
pub const MESSAGE: usize = 1024;
/// Longest log tail, bytes.
pub const LOG_TAIL: usize = 4096;
/// Messages of all ranks together, bytes. The controller keeps the state of every agent in memory.
pub const RANK_MESSAGES: usize = 8192;
/// Longest path of a checkpoint, bytes. The schema of the status has the same limit.
pub const PATH: usize = 4096;

/// State of an agent and of the ranks of the newest generation that it started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentState {
    /// Increases with every change that the controller should read at once.
    pub version: u64,
    /// Uid of the agent's TrainingJob.
    pub job: String,
    /// Uid of the agent's pod.
    pub pod: String,
    /// Devices on which it can start ranks.
    pub devices: u64,
    /// Whether its ranks can continue in another generation with their processes. Agents of earlier versions cannot.
    pub continues: bool,
    /// It is not ready to join a world: it does not know its job yet, or starts processes for that.
    pub prepares: bool,
    /// The last generation whose ranks it started; 0 before the first.
    pub generation: u64,
    /// First rank of this agent.
    pub first: u64,
    /// One entry for each of its ranks, from `first`.
    #[serde(deserialize_with = "ranks")]
    pub ranks: Vec<RankStatus>,
    /// The newest checkpoint that one of its ranks committed in this generation.
    pub committed: Option<CheckpointRef>,
    /// The newest step, on the agent of rank 0.
    pub step: Option<StepRecord>,
    /// Samples after which training ends; `None` until the run is prepared.
    pub budget: Option<u64>,
    /// Seconds until the budget is used up, at the speed of this generation; on the agent of rank 0.
    pub seconds_left: Option<f64>,
    /// Time at which it started its ranks, seconds since the Unix epoch.
    pub started: Option<f64>,
    /// Time at which its last rank was ready, seconds since the Unix epoch.
    pub ready: Option<f64>,
    /// End of the generation's first step, seconds since the Unix epoch; on the agent of rank 0.
    pub first_step: Option<f64>,
    /// With an external trainer: the checkpoint it resumed from and, on the agent of rank 0, the newest
    /// one after its ranks have ended.
    pub external_checkpoint: Option<ExternalCheckpoint>,
    /// Set if it cannot start ranks.
    pub problem: Option<Problem>,
    /// What delays the start of its ranks. A long wait is not an error.
    pub waiting_for: Option<String>,
    /// Set if the volume has a later generation or checkpoint than the job's status.
    pub later: Option<LaterGeneration>,
    /// A rank that makes no progress, if the job only reports it.
    pub stalled: Option<String>,
    /// Last lines of a failed rank's output.
    pub log_tail: String,
}

/// The newest generation on the volume. The status has an older one, or another one of its number, after the API
/// server was restored from an older copy of its data. Or the published one has not begun, and starts before the newest
/// checkpoint of this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaterGeneration {
    pub number: u64,
    /// Its newest checkpoint, or the one from which it started.
    pub checkpoint: Option<CheckpointRef>,
}

impl LaterGeneration {
    /// Samples of its checkpoint.
    pub fn samples(&self) -> Option<u64> {
        Some(self.checkpoint.as_ref()?.samples)
    }
}

/// Reads at most [`RANKS`] ranks. Each takes a hundred times more memory than the JSON of an empty one.
fn ranks<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<RankStatus>, D::Error> {
    struct Ranks;
    impl<'de> Visitor<'de> for Ranks {
        type Value = Vec<RankStatus>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {RANKS} ranks")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
            let mut ranks = Vec::new();
            while let Some(rank) = from.next_element()? {
                if ranks.len() == RANKS {
                    return Err(A::Error::invalid_length(RANKS + 1, &self));
                }
                ranks.push(rank);
            }
            Ok(ranks)
        }
    }
    from.deserialize_seq(Ranks)
}

impl AgentState {
    /// Shortens all texts to their limits. The agent does it before it publishes its state, so that its
    /// answers are small, and the controller does it again.
    pub fn bound(&mut self) {
        if let Some(problem) = &mut self.problem {
            // Compared with the reasons of conditions, of which the longest has 21 letters.
            shorten(&mut problem.reason, 64);
            shorten(&mut problem.message, MESSAGE);
        }
        for message in [&mut self.waiting_for, &mut self.stalled]
            .into_iter()
            .flatten()
        {
            shorten(message, MESSAGE);
        }
        let later = self.later.as_mut();
        let later = later.and_then(|later| later.checkpoint.as_mut());
        for checkpoint in self.committed.iter_mut().chain(later) {
            shorten(&mut checkpoint.path, MESSAGE);
            shorten(&mut checkpoint.checksum, MESSAGE);
        }
        let mut left = RANK_MESSAGES;
        for rank in &mut self.ranks {
            for message in rank.messages() {
                shorten(message, MESSAGE.min(left));
                left -= message.len();
            }
        }
        if let Some(step) = &mut self.step {
            let norm_test = step.norm_test.as_mut().map(|test| &mut test.reason);
            let coordinate_test = step.coordinate_test.as_mut();
            let undefined = coordinate_test.and_then(|test| test.undefined.as_mut());
            for message in norm_test.into_iter().chain(undefined) {
                shorten(message, MESSAGE);
            }
        }
        let excess = self.log_tail.len().saturating_sub(LOG_TAIL);
        if excess > 0 {
            let from = self.log_tail.ceil_char_boundary(excess);
            self.log_tail.drain(..from);
        }
        shorten(&mut self.log_tail, LOG_TAIL);
    }
}

/// Why an agent cannot start ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// One CamelCase word; the reason of a condition.
    pub reason: String,
    /// The problem and how to solve it.
    pub message: String,
    /// The problem would recur in any pool.
    pub deterministic: bool,
}

/// Reason for a problem of the pod's devices.
const HARDWARE: &str = "HardwareMismatch";

impl Problem {
    /// A problem that may pass.
    pub fn new(reason: &str, message: String) -> Problem {
        Problem {
            reason: reason.to_owned(),
            message,
            deterministic: false,
        }
    }

    /// The pod's devices are not the requested ones.
    pub fn hardware(message: String) -> Problem {
        Problem::new(HARDWARE, message)
    }

    /// Whether the pod's devices are the problem; restarting the ranks does not solve it.
    pub fn is_hardware(&self) -> bool {
        self.reason == HARDWARE
    }
}

impl From<FileError> for Problem {
    /// An error of the run's volume as a problem of the pod, with the remedy.
    fn from(error: FileError) -> Problem {
        use std::io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem, StorageFull};
        let kind = match &error {
            FileError::Io { source, .. } => Some(source.kind()),
            FileError::NoSpace { .. } => Some(StorageFull),
            _ => None,
        };
        let (reason, what) = match kind {
            Some(StorageFull) => (
                "VolumeFull",
                "the checkpoint volume is full; free space or enlarge the claim",
            ),
            Some(ReadOnlyFilesystem) => (
                "VolumeReadOnly",
                "the checkpoint volume is read-only; mount it ReadWriteMany",
            ),
            Some(PermissionDenied) => (
                "VolumeDenied",
                "the checkpoint volume denies access to this user; set securityContext.fsGroup in podTemplate, or the volume's permissions",
            ),
            Some(NotFound) => (
                "VolumeMissing",
                "the checkpoint volume does not exist; mount a claim at checkpoint.path",
            ),
            _ => ("StartFailed", "the ranks cannot start"),
        };
        Problem::new(reason, format!("{error}; {what}"))
    }
}

/// The first thing that keeps ranks from starting on these agents; problems take precedence over waits.
pub fn held_up<'a>(agents: impl Iterator<Item = &'a AgentState> + Clone) -> Option<Problem> {
    let waits = |agent: &AgentState| Some(Problem::new("Preparing", agent.waiting_for.clone()?));
    let problem = agents.clone().find_map(|agent| agent.problem.clone());
    problem.or_else(|| agents.into_iter().find_map(waits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_takes_precedence_over_a_wait() {
        let waiting = AgentState {
            waiting_for: Some("waits for run-0-1".into()),
            ..AgentState::default()
        };
        let problem = Problem {
            reason: "VolumeFull".into(),
            message: "free space".into(),
            deterministic: false,
        };
        let stuck = AgentState {
            problem: Some(problem.clone()),
            ..AgentState::default()
        };
        let held_up_by = |agents: &[&AgentState]| held_up(agents.iter().copied());
        assert_eq!(held_up_by(&[&waiting, &stuck]), Some(problem));
        let message =
            held_up_by(&[&AgentState::default(), &waiting]).map(|held_up| held_up.message);
        assert_eq!(message, waiting.waiting_for);
        assert_eq!(held_up_by(&[]), None);
    }
}
