//! Ranks that make no progress: the time that they may take, and what follows.

use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::protocol::Report;

/// The deadline is this many times the longest measured time between two signs of progress,
const FACTOR: u32 = 20;
/// but at least this for the built-in trainer,
const LEAST: Duration = Duration::from_secs(600);
/// this before it has made any progress, since it may read large files,
const FIRST: Duration = Duration::from_secs(3600);
/// and this for an external trainer.
const LEAST_EXTERNAL: Duration = Duration::from_secs(1800);
/// Longest time in which a stalled rank writes its stacks before it reports.
pub const STACKS: Duration = Duration::from_secs(10);
/// A rank that waits for other ranks has this many times the deadline, and [`STACKS`] more: a rank that keeps the
/// others waiting is found first.
const WAITING: u32 = 3;
/// Longest time that one look counts: the process may have been suspended meanwhile.
const LOOK: Duration = Duration::from_secs(2);

/// Reaction to a rank that makes no progress.
#[derive(
    JsonSchema, clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize,
)]
pub enum OnStall {
    /// Only report it.
    Report,
    /// Kill the rank; the next generation starts from the newest checkpoint.
    #[default]
    Restart,
    /// Kill the rank, and give its node no pods of this job any more, unless it waited for other ranks.
    ExcludeNode,
}

/// Time that ranks may take without progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum ProgressDeadline {
    /// Long in comparison with what was measured.
    #[default]
    Measured,
    After(Duration),
    /// Any time.
    Off,
}

impl ProgressDeadline {
    /// The deadline of a setting in seconds, where 0 turns it off.
    pub fn of(seconds: Option<u32>) -> ProgressDeadline {
        match seconds {
            None => ProgressDeadline::Measured,
            Some(0) => ProgressDeadline::Off,
            Some(seconds) => ProgressDeadline::After(Duration::from_secs(seconds.into())),
        }
    }

    pub fn seconds(self) -> Option<u64> {
        match self {
            ProgressDeadline::Measured => None,
            ProgressDeadline::Off => Some(0),
            ProgressDeadline::After(time) => Some(time.as_secs()),
        }
    }
}

/// Measures the time without progress, in looks of at least one a second.
#[derive(Debug)]
pub struct StallClock {
    deadline: ProgressDeadline,
    /// Least measured deadline.
    least: Duration,
    /// Measured deadline before anything was measured; `None`: any time.
    first: Option<Duration>,
    /// Time without progress so far.
    quiet: Duration,
    /// Longest time between two signs of progress.
    longest: Option<Duration>,
    looked: Instant,
    /// The present stall is reported.
    reported: bool,
}

impl StallClock {
    /// Of a rank of the built-in trainer.
    pub fn of_rank(deadline: ProgressDeadline) -> StallClock {
        StallClock {
            deadline,
            least: LEAST,
            first: Some(FIRST),
            quiet: Duration::ZERO,
            longest: None,
            looked: Instant::now(),
            reported: false,
        }
    }

    /// Of an external trainer. It may be silent for any time until it has reported two steps.
    pub fn of_external_trainer(deadline: ProgressDeadline) -> StallClock {
        StallClock {
            least: LEAST_EXTERNAL,
            first: None,
            ..StallClock::of_rank(deadline)
        }
    }

    /// Records progress, whose interval is a measure for the next one.
    pub fn progress(&mut self) {
        self.longest = self.longest.max(Some(self.quiet));
        self.quiet = Duration::ZERO;
    }

    /// Records a sign of life that says nothing of the time until the next one.
    pub fn sign(&mut self) {
        self.longest = self.longest.map(|longest| longest.max(self.quiet));
        self.quiet = Duration::ZERO;
    }

    /// Adds the time since the last look.
    pub fn look(&mut self) {
        let passed = self.looked.elapsed().min(LOOK);
        self.looked = Instant::now();
        self.pass(passed);
    }

    fn pass(&mut self, passed: Duration) {
        self.quiet = self.quiet.saturating_add(passed);
    }

    /// Reports a new stall, with what the rank does and whether it waits for other ranks, or the end of one.
    pub fn report(&mut self, doing: &str, waiting: bool) -> Option<Report> {
        let Some(quiet) = self.stalled(waiting) else {
            return std::mem::take(&mut self.reported).then_some(Report::Progressing);
        };
        let known = std::mem::replace(&mut self.reported, true);
        (!known).then(|| Report::Stalled {
            message: format!("no progress for {} s{doing}", quiet.as_secs()),
            waiting,
        })
    }

    /// The time without progress, if it is over the deadline of a rank that waits for other ranks or does not.
    pub fn stalled(&self, waiting: bool) -> Option<Duration> {
        let (deadline, first) = match self.deadline {
            ProgressDeadline::Off => (None, None),
            ProgressDeadline::After(deadline) => (Some(deadline), None),
            ProgressDeadline::Measured => {
                let measured = |longest: Duration| longest.saturating_mul(FACTOR).max(self.least);
                (self.longest.map(measured).or(self.first), self.first)
            }
        };
        let mut limit = deadline?;
        if waiting {
            // The others may still be before their first progress.
            let longest = limit.saturating_mul(WAITING).max(first.unwrap_or_default());
            limit = longest.saturating_add(STACKS);
        }
        (self.quiet > limit).then_some(self.quiet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn after(clock: &mut StallClock, seconds: u32) -> bool {
        clock.pass(SECOND * seconds);
        clock.stalled(false).is_some()
    }

    fn after_in_waiting(clock: &mut StallClock, seconds: u32) -> bool {
        clock.pass(SECOND * seconds);
        clock.stalled(true).is_some()
    }

    #[test]
    fn the_deadline_follows_the_longest_measured_interval() {
        let mut clock = StallClock::of_rank(ProgressDeadline::Measured);
        assert!(!after(&mut clock, 3600));
        assert!(after(&mut clock, 1));
        clock.progress();
        // The first interval took 3601 s.
        assert!(!after(&mut clock, 20 * 3601) && after(&mut clock, 1));

        let mut clock = StallClock::of_rank(ProgressDeadline::Measured);
        for _ in 0..3 {
            clock.pass(SECOND);
            clock.progress();
        }
        assert!(!after(&mut clock, 600) && after(&mut clock, 1));
        assert_eq!(clock.stalled(false), Some(601 * SECOND));
        // One that waits has as long as the others before their first progress.
        assert_eq!(clock.stalled(true), None);
        assert!(!after_in_waiting(&mut clock, 3600 + 10 - 601));
        assert!(after_in_waiting(&mut clock, 1));
    }

    #[test]
    fn an_external_trainer_may_be_silent_until_it_has_reported_two_steps() {
        let mut clock = StallClock::of_external_trainer(ProgressDeadline::Measured);
        clock.sign();
        assert!(!after(&mut clock, 1_000_000));
        clock.sign();
        clock.progress();
        clock.pass(200 * SECOND);
        clock.progress();
        assert!(!after(&mut clock, 4000));
        clock.sign();
        // Silence between two outputs is a measure, too.
        assert!(!after(&mut clock, 80_000) && after(&mut clock, 1));
    }

    #[test]
    fn a_deadline_in_seconds_holds_from_the_start_and_zero_turns_it_off() {
        let mut set = StallClock::of_external_trainer(ProgressDeadline::of(Some(30)));
        assert!(!after(&mut set, 30) && after(&mut set, 1));
        assert!(!after_in_waiting(&mut set, 69) && after_in_waiting(&mut set, 1));
        let mut off = StallClock::of_rank(ProgressDeadline::of(Some(0)));
        assert!(!after(&mut off, u32::MAX));
        for seconds in [None, Some(0), Some(30)] {
            let deadline = ProgressDeadline::of(seconds);
            assert_eq!(deadline.seconds(), seconds.map(u64::from));
        }
    }

    #[test]
    fn a_suspended_process_counts_little_of_its_pause() {
        let mut clock = StallClock::of_rank(ProgressDeadline::of(Some(5)));
        let Some(long_ago) = Instant::now().checked_sub(Duration::from_secs(60)) else {
            return;
        };
        clock.looked = long_ago;
        clock.look();
        assert_eq!(clock.stalled(false), None);
    }
}
