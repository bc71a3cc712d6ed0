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

    /// Whether the wait is long enough to be reported.
    pub fn is_long(&self) -> bool {
        self.begun.elapsed() > REPORT_AFTER
    }

    /// Whether the first member has started so long ago that its files must be here.
    pub fn first_runs(&self) -> bool {
        let since = self.first_started;
        since.is_some_and(|since| since.elapsed() > CACHE_DELAY)
    }

    /// Message that names the pod and the directory waited for.
    pub fn message(&self, run: &Path) -> String {
        let name = &self.name;
        format!("waiting for {name} to prepare the run in {}", run.display())
    }

    /// The problem of a `file` that is missing here although the first member has started.
    pub fn not_shared(&self, file: &Path) -> Problem {
        let message = format!(
            "{} has started its ranks, and this pod has no {}: the pods do not share a \
             volume; set checkpoint.claim to a claim that all nodes may write \
             (ReadWriteMany), or mount such a volume at checkpoint.path",
            self.name,
            file.display()
        );
        Problem::new("VolumeNotShared", message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_file_is_not_reported_as_missing_at_once() {
        let waiting = |waited: Duration, first_started: Option<Duration>| {
            let ago = |time| Instant::now().checked_sub(time).unwrap();
            let waiting = Waiting {
                generation: 1,
                first: None,
                name: String::new(),
                begun: ago(waited),
                first_started: first_started.map(ago),
            };
            (waiting.is_long(), waiting.first_runs())
        };
        let second = Duration::from_secs(1);
        assert_eq!(waiting(REPORT_AFTER - second, None), (false, false));
        assert_eq!(waiting(REPORT_AFTER + second, None), (true, false));
        let late = REPORT_AFTER + 2 * CACHE_DELAY;
        assert_eq!(
            waiting(late, Some(CACHE_DELAY - second)),
            (true, false),
            "preparation may take hours"
        );
        assert_eq!(waiting(late, Some(CACHE_DELAY + second)), (true, true));
    }
}
