//! Counts the outcome of a generation: failures count against the budget and cause a pause; lost
//! nodes and pods never count.

use crate::api::status::{PodFailures, TrainingJobStatus};
use crate::lifecycle::Outcome;
use crate::util::time::{micro_time, seconds};

/// First pause after a failure, seconds; it doubles with each failure.
const BACK_OFF: f64 = 2.0;
/// Upper limit of the pause, seconds.
const LONGEST_BACK_OFF: f64 = 300.0;

/// A generation whose ranks have all ended.
pub struct EndedGeneration {
    pub outcome: Outcome,
    /// No pod or node was lost: a lost rank crashed or was killed in a living pod.
    pub killed: bool,
    /// Allowed failures without progress between them.
    pub budget: u32,
}

impl EndedGeneration {
    /// Counts it and returns the resulting outcome: repeated kills of a rank in a living pod are a
    /// failure.
    pub fn count(self, status: &mut TrainingJobStatus, now: f64) -> Outcome {
        let again = status.restarts > 0;
        match &self.outcome {
            Outcome::Failed { .. } => back_off(status, now),
            Outcome::Lost { .. } => match (self.killed, again) {
                (true, true) => back_off(status, now),
                // The first loss restarts without a pause.
                (true, false) => status.restarts += 1,
                (false, _) => status.disruptions += 1,
            },
            Outcome::Finished | Outcome::Drained | Outcome::OutOfMemory { .. } => {}
        }
        match self.outcome {
            Outcome::Lost { rank, message } if self.killed && status.restarts > self.budget => {
                Outcome::Failed {
                    rank,
                    message,
                    deterministic: false,
                }
            }
            outcome => outcome,
        }
    }
}

/// Counts a round of pods that ended before they could train; the next round starts after a pause.
/// Pods that end during the pause belong to the same round.
pub fn count_pods(status: &mut TrainingJobStatus, last: String, now: f64) {
    if let Some(failures) = status
        .pod_failures
        .as_mut()
        .filter(|f| now < seconds(&f.retry_not_before))
    {
        failures.message = last;
        return;
    }
    let count = status
        .pod_failures
        .as_ref()
        .map_or(0, |failures| failures.count);
    status.pod_failures = Some(PodFailures {
        count: count.saturating_add(1),
        message: last,
        retry_not_before: micro_time(now + pause(count, now)),
    });
}

fn back_off(status: &mut TrainingJobStatus, now: f64) {
    status.restart_not_before = Some(micro_time(now + pause(status.restarts, now)));
    status.restarts += 1;
}

/// Seconds to wait after a failure that follows `before` others.
fn pause(before: u32, now: f64) -> f64 {
    let pause = BACK_OFF * f64::from(2u32.saturating_pow(before.min(16)));
    // Random factor between 0.5 and 1, so that jobs that failed together do not restart together.
    pause.min(LONGEST_BACK_OFF) * (0.5 + 0.5 * fraction(now))
}

/// Fraction of the current millisecond, as a cheap random number in 0..1.
pub fn fraction(now: f64) -> f64 {
    (now * 1000.0).fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: f64 = 1000.0;

    /// Ends `times` generations in the same way; returns the last outcome and the pause after it.
    fn after(times: u32, outcome: &Outcome, killed: bool) -> (TrainingJobStatus, Outcome, f64) {
        let mut status = TrainingJobStatus::default();
        let mut last = Outcome::Drained;
        for _ in 0..times {
            status.restart_not_before = None;
            let ended = EndedGeneration {
                outcome: outcome.clone(),
                killed,
                budget: 3,
            };
            last = ended.count(&mut status, NOW);
        }
        let pause = status
            .restart_not_before
            .as_ref()
            .map_or(0.0, |at| seconds(at) - NOW);
        (status, last, pause)
    }

    fn lost() -> Outcome {
        Outcome::Lost {
            rank: 1,
            message: "killed by signal 11".into(),
        }
    }

    #[test]
    fn lost_nodes_neither_count_nor_pause() {
        let (status, last, pause) = after(20, &lost(), false);
        assert_eq!((status.restarts, status.disruptions, pause), (0, 20, 0.0));
        assert_eq!(last, lost());
    }

    #[test]
    fn repeated_crashes_in_a_living_pod_become_a_failure() {
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
            matches!(&last, Outcome::Failed { rank: 1, message, .. } if message == "killed by signal 11"),
            "{last:?}"
        );
    }

    #[test]
    fn pods_that_end_during_a_pause_belong_to_the_same_round() {
        let mut status = TrainingJobStatus::default();
        for (now, count) in [(NOW, 1), (NOW + 0.9, 1), (NOW + 2.1, 2), (NOW + 3.9, 2)] {
            count_pods(&mut status, format!("at {now}"), now);
            let failures = status.pod_failures.as_ref().unwrap();
            assert_eq!(
                (failures.count, &*failures.message),
                (count, &*format!("at {now}"))
            );
        }
    }

    #[test]
    fn pauses_after_failures_double_up_to_five_minutes() {
        let failed = Outcome::Failed {
            rank: 0,
            message: "exit code 3".into(),
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
