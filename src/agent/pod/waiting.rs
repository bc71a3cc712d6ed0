//! Waiting for what a generation's first member does for all of them. That may take long, so it is
//! said what is waited for; and if the first member has long gone on, what it has written is on
//! another volume.

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::agent::Answer;
use crate::job::agent_state::Problem;
use crate::job::generation::Generation;

/// What takes no longer needs no word.
const WORTH_A_WORD: Duration = Duration::from_secs(10);
/// What one pod writes the others may see late: network volumes are cached.
const LATE: Duration = Duration::from_secs(15);

/// Waiting for the first member of a generation.
#[derive(Debug)]
pub struct Waiting {
    pub(super) generation: u64,
    first: Option<IpAddr>,
    /// The first member's pod.
    name: String,
    pub(super) begun: Instant,
    /// Since when the first member is known to have started its ranks.
    pub(super) alone: Option<Instant>,
}

/// What there is to say.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing yet.
    Patience,
    /// What is waited for.
    Word,
    /// The first member has gone on, and nothing of it is to be seen.
    NotShared,
}

impl Waiting {
    /// Begins to wait.
    pub fn begin(record: &Generation) -> Waiting {
        let first = record.members.first().and_then(|first| first.pod.as_ref());
        Waiting {
            generation: record.number,
            first: first.and_then(|pod| pod.ip.parse().ok()),
            name: first.map_or_else(|| "the first pod".into(), |pod| pod.name.clone()),
            begun: Instant::now(),
            alone: None,
        }
    }

    /// The first member's agent, which is asked how far it is.
    pub fn first(&self) -> Option<IpAddr> {
        self.first
    }

    /// Takes in how far another pod is.
    pub fn take(&mut self, answer: Answer) {
        let started = |generation| generation >= self.generation;
        if Some(answer.host) == self.first && answer.generation.is_some_and(started) {
            self.alone.get_or_insert_with(Instant::now);
        }
    }

    /// What there is to say by now.
    pub fn verdict(&self) -> Verdict {
        verdict(
            self.begun.elapsed(),
            self.alone.map(|since| since.elapsed()),
        )
    }

    /// What is waited for.
    pub fn words(&self, run: &Path) -> String {
        let name = &self.name;
        format!("waits for {name} to prepare the run in {}", run.display())
    }

    /// What it means that `file` is not here, though the first member goes on with it.
    pub fn not_shared(&self, file: &Path) -> Problem {
        Problem {
            reason: "VolumeNotShared".into(),
            message: format!(
                "{} has started its ranks, and this pod has no {}: each of them has a volume of its \
                 own; give checkpoint.claim a claim that all nodes may write (ReadWriteMany), or \
                 mount such a volume at checkpoint.path",
                self.name,
                file.display()
            ),
            deterministic: false,
        }
    }
}

fn verdict(waited: Duration, alone: Option<Duration>) -> Verdict {
    match alone {
        Some(alone) if alone > LATE => Verdict::NotShared,
        _ if waited > WORTH_A_WORD => Verdict::Word,
        _ => Verdict::Patience,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_comes_late_is_not_missed_at_once() {
        let second = Duration::from_secs(1);
        assert_eq!(verdict(WORTH_A_WORD, None), Verdict::Patience);
        assert_eq!(verdict(WORTH_A_WORD + second, None), Verdict::Word);
        let hours = Duration::from_secs(7200);
        assert_eq!(verdict(hours, None), Verdict::Word, "it may take long");
        assert_eq!(verdict(hours, Some(LATE)), Verdict::Word);
        assert_eq!(verdict(second, Some(LATE + second)), Verdict::NotShared);
    }
}
