//! Detects ranks that send no heartbeat before they have connected to their peers. Later the peers
//! detect a loss; until then only the agent can. A waiting rank sends a heartbeat every second. The only
//! rank of a world has no peers: it sends heartbeats, and the agent expects them, until it exits.

use std::time::{Duration, Instant};

use super::ranks::News;
use crate::lifecycle::protocol::Report;
use crate::lifecycle::rank_status::SILENCE;

/// Longest time that one check counts: a suspended agent received no heartbeats.
const LOOK: Duration = Duration::from_secs(1);

/// Time since the last heartbeat of each local rank; `None` once it is no longer monitored.
pub struct Silence {
    quiet: Vec<Option<Duration>>,
    /// The rank is the only one of its world.
    alone: bool,
    last_check: Instant,
}

impl Silence {
    /// Starts to monitor `count` ranks of a world, which were just started.
    pub fn new(count: u64, world: u64) -> Silence {
        Silence {
            quiet: vec![Some(Duration::ZERO); usize::try_from(count).unwrap_or(0)],
            alone: world == 1,
            last_check: Instant::now(),
        }
    }

    /// Starts to monitor ranks of an external trainer, which send no heartbeats: only until they have
    /// started.
    pub fn of_external_trainer(count: u64) -> Silence {
        Silence {
            alone: false,
            ..Silence::new(count, count)
        }
    }

    /// Records an event of a rank, given by its index on this host.
    pub fn take(&mut self, local: usize, news: &News) {
        let Some(quiet) = self.quiet.get_mut(local).filter(|quiet| quiet.is_some()) else {
            return;
        };
        *quiet = match news {
            News::Exited(_) => None,
            News::Posted(_) | News::Printed(_) | News::Stacks(_) => return,
            News::Report(report) => match **report {
                // Only a connected rank sends these, or a trainer without heartbeats.
                Report::Connected | Report::Ready if !self.alone => None,
                _ => Some(Duration::ZERO),
            },
        };
    }

    /// Local indices of ranks whose heartbeat timed out; each is returned once.
    pub fn timed_out(&mut self) -> Vec<usize> {
        let passed = self.last_check.elapsed().min(LOOK);
        self.last_check = Instant::now();
        self.after(passed)
    }

    /// Message for a rank whose heartbeat timed out.
    pub fn message(&self) -> String {
        let seconds = SILENCE.as_secs();
        if self.alone {
            format!("no heartbeat for {seconds} s")
        } else {
            format!("no heartbeat for {seconds} s before the ranks had connected")
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::protocol::Ending;

    fn reported(report: Report) -> News {
        News::Report(Box::new(report))
    }

    #[test]
    fn only_monitored_ranks_time_out() {
        let mut silence = Silence::new(4, 4);
        let nearly = SILENCE - Duration::from_millis(1);
        assert!(silence.after(nearly).is_empty());
        silence.take(0, &reported(Report::Connecting));
        silence.take(1, &reported(Report::Connected));
        let exited = News::Exited(Ending::Signal(9));
        silence.take(2, &exited);
        // A rank outside this host is ignored.
        silence.take(9, &exited);
        assert_eq!(silence.after(Duration::from_millis(2)), [3]);
        let more = nearly - Duration::from_millis(2);
        assert!(silence.after(more).is_empty(), "each is returned once");
        assert_eq!(silence.after(Duration::from_millis(2)), [0]);
    }

    #[test]
    fn the_only_rank_of_a_world_is_monitored_until_it_exits() {
        let nearly = SILENCE - Duration::from_millis(1);
        let reports = [Report::Connected, Report::Ready, Report::Alive];
        let mut silence = Silence::new(1, 1);
        for report in reports.clone() {
            silence.take(0, &reported(report));
            assert!(silence.after(nearly).is_empty());
        }
        assert_eq!(silence.after(Duration::from_millis(2)), [0]);
        assert_eq!(silence.message(), "no heartbeat for 10 s");
        // An external trainer sends none, and a rank with peers need not.
        for mut silence in [Silence::of_external_trainer(1), Silence::new(1, 2)] {
            silence.take(0, &reported(Report::Ready));
            assert!(silence.after(10 * SILENCE).is_empty());
        }
    }

    #[test]
    fn a_suspended_agent_does_not_time_out_its_ranks() {
        let mut silence = Silence::new(1, 1);
        let Some(long_ago) = Instant::now().checked_sub(10 * SILENCE) else {
            return;
        };
        silence.last_check = long_ago;
        assert!(silence.timed_out().is_empty());
    }
}
