//! Ranks that say nothing before they have met the others. Later their peers would notice it; until
//! then only the agent can, and a rank that waits for them says every second that it lives.

use std::time::{Duration, Instant};

use super::Event;
use crate::job::protocol::Report;
use crate::job::seen::SILENCE;

/// The longest that one look around counts: an agent that was stopped itself has heard nobody.
const LOOK: Duration = Duration::from_secs(1);

/// How long each rank of this host has been silent; `None` once nobody has to listen for it.
pub struct Silence {
    quiet: Vec<Option<Duration>>,
    looked: Instant,
}

impl Silence {
    /// Listens for ranks that were just started.
    pub fn new(count: u64) -> Silence {
        Silence {
            quiet: vec![Some(Duration::ZERO); usize::try_from(count).unwrap_or(0)],
            looked: Instant::now(),
        }
    }

    /// Takes in what happened to the rank that is `local` on this host.
    pub fn take(&mut self, local: usize, event: &Event) {
        let Some(quiet) = self.quiet.get_mut(local).filter(|quiet| quiet.is_some()) else {
            return;
        };
        *quiet = match event {
            Event::Exited { .. } => None,
            Event::Report { report, .. } => match report {
                // What only a rank says that has met the others, or a program that does not tell.
                Report::Met | Report::Ready => None,
                _ => Some(Duration::ZERO),
            },
        };
    }

    /// The ranks, as numbered on this host, that have been silent for too long; each is named once.
    pub fn look(&mut self) -> Vec<usize> {
        let passed = self.looked.elapsed().min(LOOK);
        self.looked = Instant::now();
        self.after(passed)
    }

    fn after(&mut self, passed: Duration) -> Vec<usize> {
        let mut silent = Vec::new();
        for (local, quiet) in self.quiet.iter_mut().enumerate() {
            let Some(long) = quiet else { continue };
            *long += passed;
            if *long > SILENCE {
                *quiet = None;
                silent.push(local);
            }
        }
        silent
    }
}

/// What is said of a rank that was silent for too long.
pub fn words() -> String {
    format!(
        "no sign of life for {} s before the ranks had met",
        SILENCE.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::protocol::Ending;

    fn said(rank: u64, report: Report) -> Event {
        Event::Report {
            generation: 1,
            rank,
            report,
        }
    }

    #[test]
    fn only_ranks_that_should_speak_and_do_not_are_silent() {
        let mut silence = Silence::new(4);
        let nearly = SILENCE - Duration::from_millis(1);
        assert!(silence.after(nearly).is_empty());
        silence.take(0, &said(0, Report::Waiting));
        silence.take(1, &said(1, Report::Met));
        let ending = Ending::Signal(9);
        let exited = Event::Exited {
            generation: 1,
            rank: 2,
            ending,
        };
        silence.take(2, &exited);
        // One that nobody started is nobody's.
        silence.take(9, &exited);
        assert_eq!(silence.after(Duration::from_millis(2)), [3]);
        let more = nearly - Duration::from_millis(2);
        assert!(silence.after(more).is_empty(), "each is named once");
        assert_eq!(silence.after(Duration::from_millis(2)), [0]);
    }

    #[test]
    fn an_agent_that_was_stopped_itself_has_heard_nobody() {
        let mut silence = Silence::new(1);
        let Some(long_ago) = Instant::now().checked_sub(10 * SILENCE) else {
            return;
        };
        silence.looked = long_ago;
        assert!(silence.look().is_empty());
    }
}
