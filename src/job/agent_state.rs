//! What an agent says of itself and its ranks: the controller reads it over HTTP, and decides by
//! nothing else what became of a generation.

use serde::{Deserialize, Serialize};

use super::OwnCheckpoint;
use super::generation::Pin;
use super::seen::Seen;
use crate::telemetry::StepRecord;

/// An agent, and the ranks of the newest generation that it started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentState {
    /// One more with every change that the controller should hear of at once.
    pub version: u64,
    /// The pod's uid.
    pub pod: String,
    /// Devices that it can start ranks on.
    pub devices: u64,
    /// The generation whose ranks it started last; 0 before the first.
    pub generation: u64,
    /// The first of its ranks.
    pub first: u64,
    /// Its ranks.
    pub ranks: Vec<Seen>,
    /// The newest checkpoint that one of its ranks committed in this generation.
    pub committed: Option<Pin>,
    /// The newest step, where rank 0 runs.
    pub step: Option<StepRecord>,
    /// Samples after which training ends, once the run is prepared.
    pub budget: Option<u64>,
    /// When its ranks were told to start, seconds since the Unix epoch.
    pub started: Option<f64>,
    /// When the last of its ranks was ready.
    pub ready: Option<f64>,
    /// When the first step of the generation ended, where rank 0 runs.
    pub first_step: Option<f64>,
    /// Of the user's own program: the checkpoint that it went on from, and where rank 0 runs the
    /// newest one once its ranks have ended.
    pub own_checkpoint: Option<OwnCheckpoint>,
    /// Why it cannot start ranks at all.
    pub problem: Option<Problem>,
    /// What it waits for before it starts them, where that takes long: nothing is wrong with it.
    pub waits_for: Option<String>,
    /// The last lines that a failed rank printed.
    pub last_words: String,
}

/// Why an agent cannot start ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// One CamelCase word, a condition's reason.
    pub reason: String,
    /// In words, with the way out.
    pub message: String,
    /// The same would happen again, whatever the pool looks like.
    pub deterministic: bool,
}

/// The reason where a pod's devices are the problem.
const HARDWARE: &str = "HardwareMismatch";

impl Problem {
    /// The pod's devices are not those that it was promised.
    pub fn of_hardware(message: String) -> Problem {
        Problem {
            reason: HARDWARE.into(),
            message,
            deterministic: false,
        }
    }

    /// Whether it is the pod's devices, which no other start of the ranks mends.
    pub fn is_of_hardware(&self) -> bool {
        self.reason == HARDWARE
    }
}

/// What holds up ranks, of all that these agents say: a problem before what is only waited for.
pub fn held_up<'a>(agents: impl Iterator<Item = &'a AgentState> + Clone) -> Option<Problem> {
    let waits = |agent: &AgentState| {
        Some(Problem {
            reason: "Waiting".into(),
            message: agent.waits_for.clone()?,
            deterministic: false,
        })
    };
    let problem = agents.clone().find_map(|agent| agent.problem.clone());
    problem.or_else(|| agents.into_iter().find_map(waits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_told_before_what_waits_for_its_end() {
        let waiting = AgentState {
            waits_for: Some("waits for run-0-1".into()),
            ..AgentState::default()
        };
        let problem = Problem {
            reason: "VolumeFull".into(),
            message: "make room".into(),
            deterministic: false,
        };
        let stuck = AgentState {
            problem: Some(problem.clone()),
            ..AgentState::default()
        };
        let told = |agents: &[&AgentState]| held_up(agents.iter().copied());
        assert_eq!(told(&[&waiting, &stuck]), Some(problem));
        let message = told(&[&AgentState::default(), &waiting]).map(|held_up| held_up.message);
        assert_eq!(message, waiting.waits_for);
        assert_eq!(told(&[]), None);
    }
}
