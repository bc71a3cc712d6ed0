//! Waits for the first member of a generation, which prepares the run or chooses a checkpoint for
//! all. A long wait is reported. If the first member has already started, its files are on a
//! different volume.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::agent::Answer;
use crate::lifecycle::agent_state::Problem;
use crate::lifecycle::generation::{Generation, Peer, PodRef};

/// Shorter waits are not reported.
const REPORT_AFTER: Duration = Duration::from_secs(10);
/// Network volumes are cached, so a file of one pod may appear late in the others.
const CACHE_DELAY: Duration = Duration::from_secs(15);

/// A wait for the first member of a generation.
#[derive(Debug)]
pub struct Waiting {
    pub(super) generation: u64,
    first: Option<Peer>,
    /// Name of the first member's pod.
    name: String,
    pub(super) begun: Instant,
    /// Time when the first member was first known to have started its ranks.
    pub(super) first_started: Option<Instant>,
}

/// The result of a wait so far.
#[derive(Debug, PartialEq, Eq)]
pub enum WaitState {
    /// Too early to report.
    TooEarly,
    /// Report what the pod waits for.
    Report,
    /// The first member has started, and its files are missing here.
    NotShared,
}

impl Waiting {
    pub fn begin(record: &Generation) -> Waiting {
        let first = record.members.first().and_then(|first| first.pod.as_ref());
        Waiting {
            generation: record.number,
            first: first.and_then(PodRef::peer),
            name: first.map_or_else(|| "the first pod".into(), |pod| pod.name.clone()),
            begun: Instant::now(),
            first_started: None,
        }
    }

    /// The first member's agent, which is asked for its generation.
    pub fn first(&self) -> Option<&Peer> {
        self.first.as_ref()
    }

    /// Records the generation of another pod's agent.
    pub fn take(&mut self, answer: Answer) {
        let of_first = self.first().is_some_and(|first| first.host == answer.host);
        if of_first && answer.generation >= self.generation {
            self.first_started.get_or_insert_with(Instant::now);
        }
    }

    pub fn verdict(&self) -> WaitState {
        verdict(
            self.begun.elapsed(),
            self.first_started.map(|since| since.elapsed()),
        )
    }

    /// Message that names the pod and the directory waited for.
    pub fn message(&self, run: &Path) -> String {
        let name = &self.name;
        format!("waiting for {name} to prepare the run in {}", run.display())
    }

    /// The problem of a `file` that is missing here although the first member has started.
    pub fn not_shared(&self, file: &Path) -> Problem {
        Problem {
            reason: "VolumeNotShared".into(),
            message: format!(
                "{} has started its ranks, and this pod has no {}: the pods do not share a \
                 volume; set checkpoint.claim to a claim that all nodes may write \
                 (ReadWriteMany), or mount such a volume at checkpoint.path",
                self.name,
                file.display()
            ),
            deterministic: false,
        }
    }
}

fn verdict(waited: Duration, first_started: Option<Duration>) -> WaitState {
    match first_started {
        Some(first_started) if first_started > CACHE_DELAY => WaitState::NotShared,
        _ if waited > REPORT_AFTER => WaitState::Report,
        _ => WaitState::TooEarly,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_file_is_not_reported_as_missing_at_once() {
        let second = Duration::from_secs(1);
        assert_eq!(verdict(REPORT_AFTER, None), WaitState::TooEarly);
        assert_eq!(verdict(REPORT_AFTER + second, None), WaitState::Report);
        let hours = Duration::from_secs(7200);
        assert_eq!(
            verdict(hours, None),
            WaitState::Report,
            "preparation may take hours"
        );
        assert_eq!(verdict(hours, Some(CACHE_DELAY)), WaitState::Report);
        assert_eq!(
            verdict(second, Some(CACHE_DELAY + second)),
            WaitState::NotShared
        );
    }
}
