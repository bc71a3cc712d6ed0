//! What the end of a generation counts: failures against their budget, each with a pause after it;
//! nodes and pods that went away never.

use crate::job::Outcome;
use crate::job::api::status::{PodFailures, TrainingJobStatus};

/// The first pause after a failure, seconds; twice as long after each.
const BACK_OFF: f64 = 2.0;
/// The longest pause, seconds.
const LONGEST_BACK_OFF: f64 = 300.0;

/// A generation that ended.
pub struct Ended {
    /// How.
    pub outcome: Outcome,
    /// No pod or node went away: a rank that is lost was killed where its pod lives, or crashes.
    pub killed: bool,
    /// Failures that are forgiven without progress between them.
    pub budget: u32,
}

impl Ended {
    /// Counts it. Returns what it comes to: a rank that is killed again and again in a pod that lives
    /// is a failure.
    pub fn count(self, status: &mut TrainingJobStatus, now: f64) -> Outcome {
        let again = status.restarts > 0;
        match &self.outcome {
            Outcome::Failed { .. } => back_off(status, now),
            Outcome::Lost { .. } => match (self.killed, again) {
                (true, true) => back_off(status, now),
                // Once, it is started again at once.
                (true, false) => status.restarts += 1,
                (false, _) => status.disruptions += 1,
            },
            Outcome::Finished | Outcome::Drained | Outcome::OutOfMemory { .. } => {}
        }
        match self.outcome {
            Outcome::Lost { rank, why } if self.killed && status.restarts > self.budget => {
                Outcome::Failed {
                    rank,
                    why,
                    deterministic: false,
                }
            }
            outcome => outcome,
        }
    }
}

/// A round of pods that ended before they could train: the next one is made after a pause. Those that
/// end in it are of the same round.
pub fn count_pods(status: &mut TrainingJobStatus, last: String, now: f64) {
    if let Some(failures) = status.pod_failures.as_mut().filter(|f| now < f.again) {
        failures.last = last;
        return;
    }
    let count = status
        .pod_failures
        .as_ref()
        .map_or(0, |failures| failures.count);
    status.pod_failures = Some(PodFailures {
        count: count.saturating_add(1),
        last,
        again: now + pause(count, now),
    });
}

fn back_off(status: &mut TrainingJobStatus, now: f64) {
    status.not_before = Some(now + pause(status.restarts, now));
    status.restarts += 1;
}

/// Seconds to wait after so many failures and one more.
fn pause(before: u32, now: f64) -> f64 {
    let pause = BACK_OFF * f64::from(2u32.saturating_pow(before.min(16)));
    // Between half of it and all of it, so that jobs that failed together part.
    pause.min(LONGEST_BACK_OFF) * (0.5 + 0.5 * fraction(now))
}

/// The digits of a clock that nobody chooses.
pub fn fraction(now: f64) -> f64 {
    (now * 1000.0).fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: f64 = 1000.0;

    /// Ends so many generations in the same way; what the last comes to, and the pause after it.
    fn after(times: u32, outcome: &Outcome, killed: bool) -> (TrainingJobStatus, Outcome, f64) {
        let mut status = TrainingJobStatus::default();
        let mut last = Outcome::Drained;
        for _ in 0..times {
            status.not_before = None;
            let ended = Ended {
                outcome: outcome.clone(),
                killed,
                budget: 3,
            };
            last = ended.count(&mut status, NOW);
        }
        let pause = status.not_before.map_or(0.0, |at| at - NOW);
        (status, last, pause)
    }

    fn lost() -> Outcome {
        Outcome::Lost {
            rank: 1,
            why: "killed by signal 11".into(),
        }
    }

    #[test]
    fn lost_nodes_never_count_and_never_wait() {
        let (status, last, pause) = after(20, &lost(), false);
        assert_eq!((status.restarts, status.disruptions, pause), (0, 20, 0.0));
        assert_eq!(last, lost());
    }

    #[test]
    fn a_rank_that_crashes_for_ever_in_a_pod_that_lives_is_a_failure_in_the_end() {
        let (status, last, pause) = after(1, &lost(), true);
        assert_eq!(
            (status.restarts, pause),
            (1, 0.0),
            "at once, the first time"
        );
        assert_eq!(last, lost());
        let (_, last, pause) = after(3, &lost(), true);
        assert!((4.0..=8.0).contains(&pause), "{pause}");
        assert_eq!(last, lost());
        let (_, last, _) = after(4, &lost(), true);
        assert!(
            matches!(&last, Outcome::Failed { rank: 1, why, .. } if why == "killed by signal 11"),
            "{last:?}"
        );
    }

    #[test]
    fn pods_that_end_in_a_pause_are_of_the_same_round() {
        let mut status = TrainingJobStatus::default();
        for (now, count) in [(NOW, 1), (NOW + 0.9, 1), (NOW + 2.1, 2), (NOW + 3.9, 2)] {
            count_pods(&mut status, format!("at {now}"), now);
            let failures = status.pod_failures.as_ref().unwrap();
            assert_eq!(
                (failures.count, &*failures.last),
                (count, &*format!("at {now}"))
            );
        }
    }

    #[test]
    fn pauses_after_failures_double_up_to_five_minutes() {
        let failed = Outcome::Failed {
            rank: 0,
            why: "exit code 3".into(),
            deterministic: false,
        };
        for (times, longest) in [(1, 2.0), (2, 4.0), (5, 32.0), (30, 300.0)] {
            let (status, last, pause) = after(times, &failed, true);
            assert_eq!(status.restarts, times);
            assert_eq!(last, failed);
            assert!(
                (longest / 2.0..=longest).contains(&pause),
                "{times}: {pause}"
            );
        }
    }
}
