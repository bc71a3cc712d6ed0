//! The watchdog of the training loop: names the slowest rank when a step takes too long.
//!
//! It uses the times that ranks exchange with the scalars of a step. It only names a rank: a human or the
//! planner decides, and a slow rank ends no world. The collective names a rank that does not reach the
//! exchange at all (see [`super::tcp::TcpOptions::patience`]).

use std::collections::VecDeque;
use std::fmt;

/// Recent steps whose median is the usual time.
const WINDOW: usize = 31;

/// Steps before the first judgement.
const WARM_UP: usize = 5;

/// Least excess over the usual time that is reported, in seconds.
const MIN_EXCESS: f64 = 1.0;

/// Learns the usual duration of a step.
#[derive(Debug, Clone)]
pub struct StepWatch {
    factor: f64,
    recent: VecDeque<f64>,
}

/// A step that took too long, and its slowest rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Straggler {
    pub rank: usize,
    /// Seconds that the rank computed in this step.
    pub seconds: f64,
    /// Seconds that the slowest rank of a usual step computes.
    pub usual: f64,
}

impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {} is slow: {:.1} s for this step, where {:.1} s are usual",
            self.rank, self.seconds, self.usual
        )
    }
}

impl StepWatch {
    /// A step is too long when it takes more than `factor` times the usual.
    pub fn new(factor: f64) -> Self {
        StepWatch {
            factor,
            recent: VecDeque::with_capacity(WINDOW),
        }
    }

    /// Records one step: every rank's compute seconds, without the time it waited for others. Steps of
    /// another batch size are not comparable: call [`StepWatch::forget`] before them.
    pub fn observe(&mut self, seconds: &[f64]) -> Option<Straggler> {
        let by_time = |one: &(usize, &f64), other: &(usize, &f64)| one.1.total_cmp(other.1);
        let (rank, &seconds) = seconds.iter().enumerate().max_by(by_time)?;
        let usual = self.usual();
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(seconds);
        let late = |usual: &f64| seconds > self.factor * usual && seconds - usual > MIN_EXCESS;
        let usual = usual.filter(late)?;
        Some(Straggler {
            rank,
            seconds,
            usual,
        })
    }

    /// Discards the recorded steps.
    pub fn forget(&mut self) {
        self.recent.clear();
    }

    /// The median of recent steps.
    fn usual(&self) -> Option<f64> {
        if self.recent.len() < WARM_UP {
            return None;
        }
        let mut sorted: Vec<f64> = self.recent.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        Some(sorted[sorted.len() / 2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_of_a_long_step_is_named() {
        let mut watch = StepWatch::new(3.0);
        for _ in 0..10 {
            assert_eq!(watch.observe(&[1.0, 1.1, 0.9]), None);
        }
        let straggler = watch.observe(&[1.0, 1.2, 4.0]).unwrap();
        assert_eq!(straggler.rank, 2);
        assert_eq!(
            straggler.to_string(),
            "rank 2 is slow: 4.0 s for this step, where 1.1 s are usual"
        );
        assert_eq!(watch.observe(&[1.0, 1.2, 1.0]), None);
    }

    #[test]
    fn no_step_is_slow_at_first_or_after_a_change_of_batch() {
        let mut watch = StepWatch::new(2.0);
        assert_eq!(watch.observe(&[1.0]), None);
        assert_eq!(watch.observe(&[100.0]), None);
        for _ in 0..10 {
            watch.observe(&[1.0]);
        }
        watch.forget();
        assert_eq!(watch.observe(&[8.0]), None);
    }

    #[test]
    fn one_slow_step_does_not_change_the_usual_time() {
        let mut watch = StepWatch::new(2.0);
        for _ in 0..5 {
            watch.observe(&[1.0]);
        }
        for _ in 0..3 {
            assert!(watch.observe(&[9.0]).is_some());
        }
    }
}
