//! The state machine of the ranks: observed state in, action out. It is pure and level-triggered:
//! it depends on the current state, not on events, so a crash between two calls loses nothing.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::generation::Reason;
use crate::util::format::count;

/// Number of larger worlds tried when a message suggests one.
const LOOK_AHEAD: usize = 64;

/// Input of a decision: the requested, possible and current ranks.
pub struct TransitionInput<'a> {
    /// Ranks of the requested world.
    pub desired: u64,
    /// Ranks that can run; after a loss, without the lost ones.
    pub capacity: u64,
    /// World sizes that the job allows.
    pub bounds: RangeInclusive<u64>,
    /// Whether a plan without errors exists for a world size.
    pub feasible: &'a dyn Fn(u64) -> bool,
    /// Why a world that is not feasible cannot run although it splits every batch; `None`: it does not
    /// split them, or the reason is unknown.
    pub refusal: &'a dyn Fn(u64) -> Option<String>,
    /// The job is asked to stop for now (a signal, `spec.suspend`).
    pub stop: bool,
    /// Remaining restarts after failures of the program.
    pub restarts_left: u64,
    /// Ranks of the current generation.
    pub ranks: Ranks,
}

/// The ranks of the current generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ranks {
    /// No generation yet: the job starts, or resumes in a new process.
    None {
        /// Whether a checkpoint exists to resume from.
        resuming: bool,
    },
    Running {
        world: u64,
        /// The ranks were ordered to drain.
        draining: bool,
    },
    /// All ranks have exited.
    Ended { world: u64, outcome: Outcome },
}

/// How a generation ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Outcome {
    /// The sample budget is reached.
    Finished,
    /// Ended on request, with a checkpoint.
    Drained,
    /// A rank is lost (killed, or its host is gone).
    Lost {
        rank: u64,
        /// How the loss was observed.
        #[serde(rename = "message")]
        message: String,
    },
    /// A micro-batch did not fit in memory.
    OutOfMemory {
        /// The micro-batch that did not fit.
        per_device_batch_size: u64,
        /// The next smaller micro-batch to try; `None` if no smaller one keeps the batch exact.
        smaller: Option<u64>,
        #[serde(rename = "message")]
        message: String,
    },
    /// The program itself failed.
    Failed {
        /// Rank of the root cause.
        rank: u64,
        #[serde(rename = "message")]
        message: String,
        /// A restart would fail again (a NaN loss, a refused checkpoint).
        deterministic: bool,
    },
}

/// Next action for the ranks. `World`: how the decision gives the next world, its size or its members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankAction<World = u64> {
    /// The ranks continue unchanged.
    Keep,
    /// Order the ranks to commit and exit.
    Drain,
    /// Cancel the drain because its reason is gone. Ranks that have already agreed on a step to exit
    /// at ignore it; the next generation then has the same world size.
    CancelDrain,
    /// Publish the next generation.
    Publish {
        world: World,
        reason: Reason,
        /// Upper limit of the micro-batch after an out-of-memory error.
        per_device_batch_size_limit: Option<u64>,
    },
    /// No world size is feasible, requested, possible and allowed: no generation can start now.
    Wait { message: String },
    /// The job stops, finally or until it is resumed.
    End(End),
}

/// End of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The sample budget is reached.
    Finished,
    /// Stopped on request; it can be resumed.
    Drained,
    /// The job cannot continue.
    Failed { message: String },
}

impl TransitionInput<'_> {
    /// The largest world size that is feasible, requested, possible and allowed.
    pub fn world(&self) -> Option<u64> {
        (*self.bounds.start()..=self.most())
            .rev()
            .find(|&world| (self.feasible)(world))
    }

    fn most(&self) -> u64 {
        self.desired.min(self.capacity).min(*self.bounds.end())
    }

    fn start(
        &self,
        reason: impl FnOnce(u64) -> Reason,
        per_device_batch_size_limit: Option<u64>,
    ) -> RankAction {
        match self.world() {
            Some(world) => RankAction::Publish {
                world,
                reason: reason(world),
                per_device_batch_size_limit,
            },
            None => RankAction::Wait {
                message: self.infeasible_message(),
            },
        }
    }

    /// The largest world of these that splits every batch and is refused for another reason.
    fn refused(&self, least: u64, most: u64) -> Option<(u64, String)> {
        (least..=most)
            .rev()
            .find_map(|world| Some((world, (self.refusal)(world)?)))
    }

    /// Why none of these worlds is feasible.
    fn no_world(&self, least: u64, most: u64) -> String {
        let worlds = if least == most {
            count(most, "rank")
        } else {
            format!("{least} to {most} ranks")
        };
        match self.refused(least, most) {
            Some((_, reason)) if least == most => format!("{worlds} cannot run the job: {reason}"),
            Some((world, reason)) => {
                let with = count(world, "rank");
                format!("no world of {worlds} can run the job; with {with}, {reason}")
            }
            None => format!("no world of {worlds} splits every batch of the job exactly"),
        }
    }

    /// A warning for a world of `world` ranks that cannot lose any: no smaller world is feasible, although
    /// the bounds allow smaller ones.
    pub fn without_fallback(&self, world: u64) -> Option<String> {
        let (least, most) = (*self.bounds.start(), world.saturating_sub(1));
        if most < least || (least..=most).rev().any(|smaller| (self.feasible)(smaller)) {
            return None;
        }
        Some(format!(
            "the loss of a rank will end the run, because {}; it can then be resumed with {world}",
            self.no_world(least, most)
        ))
    }

    /// Message for a job without a feasible world; suggests a world that is feasible.
    fn infeasible_message(&self) -> String {
        let (least, most) = (*self.bounds.start(), self.most());
        let problem = if most < least {
            let (are, left) = (if most == 1 { "is" } else { "are" }, count(most, "rank"));
            format!("{left} {are} left, and the job needs at least {least}")
        } else {
            self.no_world(least, most)
        };
        let above = most.max(least.saturating_sub(1)).saturating_add(1);
        let next = (above..=*self.bounds.end())
            .take(LOOK_AHEAD)
            .find(|&world| (self.feasible)(world));
        match next {
            Some(world) => format!("{problem}; it can be resumed with {world}"),
            None if self.refused(least, most).is_some() => {
                format!("{problem}; start a new run with another recipe")
            }
            None => format!(
                "{problem}; start a new run with uneven batches (--remainder uneven) or another global \
                batch"
            ),
        }
    }
}

/// Next action for the observed state.
pub fn decide(observed: &TransitionInput<'_>) -> RankAction {
    match &observed.ranks {
        Ranks::None { .. } if observed.stop => RankAction::End(End::Drained),
        Ranks::None { resuming: false } => observed.start(|_| Reason::Started, None),
        Ranks::None { resuming: true } => observed.start(|_| Reason::Resumed, None),
        Ranks::Running { world, draining } => {
            // Without a feasible world a running job keeps its world.
            let elsewhere = || observed.world().is_some_and(|better| better != *world);
            match (*draining, observed.stop || elsewhere()) {
                (false, true) => RankAction::Drain,
                (true, false) => RankAction::CancelDrain,
                _ => RankAction::Keep,
            }
        }
        Ranks::Ended { world, outcome } => after_end(observed, *world, outcome),
    }
}

fn after_end(observed: &TransitionInput<'_>, from: u64, outcome: &Outcome) -> RankAction {
    match outcome {
        Outcome::Finished => RankAction::End(End::Finished),
        Outcome::Failed {
            rank,
            message,
            deterministic,
        } if *deterministic || observed.restarts_left == 0 => RankAction::End(End::Failed {
            message: format!("rank {rank}: {message}"),
        }),
        Outcome::OutOfMemory {
            per_device_batch_size,
            smaller: None,
            message,
        } => RankAction::End(End::Failed {
            message: format!(
                "{message}; no micro-batch below {per_device_batch_size} keeps the batch exact: shard the model (fsdp, \
                 which more ranks make smaller still), checkpoint activations, shorten the \
                 sequences, give each rank more memory, or train a smaller model"
            ),
        }),
        _ if observed.stop => RankAction::End(End::Drained),
        Outcome::Drained => observed.start(
            |to| match to == from {
                // The reason to drain disappeared after the ranks had agreed to exit.
                true => Reason::Resumed,
                false => Reason::Resized { from, to },
            },
            None,
        ),
        Outcome::Lost { rank, message } => {
            let (rank, message) = (*rank, message.clone());
            observed.start(|_| Reason::RankLost { rank, message }, None)
        }
        Outcome::OutOfMemory {
            per_device_batch_size,
            smaller: Some(to),
            ..
        } => {
            let (from, to) = (*per_device_batch_size, *to);
            observed.start(|_| Reason::OutOfMemory { from, to }, Some(to))
        }
        Outcome::Failed { rank, message, .. } => {
            let (rank, message) = (*rank, message.clone());
            observed.start(|_| Reason::Failed { rank, message }, None)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn observed(ranks: Ranks, feasible: &dyn Fn(u64) -> bool) -> TransitionInput<'_> {
        TransitionInput {
            desired: 4,
            capacity: 4,
            bounds: 1..=16,
            feasible,
            refusal: &|_| None,
            stop: false,
            restarts_left: 1,
            ranks,
        }
    }

    fn running(world: u64) -> Ranks {
        Ranks::Running {
            world,
            draining: false,
        }
    }

    #[test]
    fn a_lost_rank_moves_to_the_largest_feasible_world() {
        let feasible = |w: u64| 128 % w == 0;
        let lost = Outcome::Lost {
            rank: 2,
            message: "killed by signal 9".into(),
        };
        let mut input = observed(
            Ranks::Ended {
                world: 4,
                outcome: lost,
            },
            &feasible,
        );
        input.capacity = 3;
        assert!(matches!(
            decide(&input),
            RankAction::Publish { world: 2, .. }
        ));
    }

    #[test]
    fn a_running_job_keeps_its_world_when_none_is_feasible() {
        let feasible = |w: u64| w == 4;
        let mut input = observed(running(4), &feasible);
        input.desired = 3;
        assert_eq!(decide(&input), RankAction::Keep);
    }

    #[test]
    fn a_drain_is_cancelled_when_its_reason_is_gone() {
        let feasible = |_| true;
        let draining = Ranks::Running {
            world: 2,
            draining: true,
        };
        let mut input = observed(draining, &feasible);
        assert_eq!(decide(&input), RankAction::Keep);
        input.desired = 2;
        assert_eq!(decide(&input), RankAction::CancelDrain);
        input.stop = true;
        assert_eq!(decide(&input), RankAction::Keep);
    }

    #[test]
    fn a_drain_that_could_not_be_cancelled_resumes_the_same_world() {
        let feasible = |_| true;
        let drained = |world| Ranks::Ended {
            world,
            outcome: Outcome::Drained,
        };
        let reason = |world| match decide(&observed(drained(world), &feasible)) {
            RankAction::Publish { reason, .. } => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(reason(4), Reason::Resumed);
        assert_eq!(reason(2), Reason::Resized { from: 2, to: 4 });
    }

    #[test]
    fn infeasible_message_suggests_a_feasible_world() {
        let lost = || Ranks::Ended {
            world: 4,
            outcome: Outcome::Lost {
                rank: 2,
                message: "killed by signal 9".into(),
            },
        };
        let message = |input: &TransitionInput<'_>| match decide(input) {
            RankAction::Wait { message } => message,
            other => panic!("{other:?}"),
        };
        let feasible = |w| w == 4;
        let mut input = observed(lost(), &feasible);
        input.capacity = 3;
        assert_eq!(
            message(&input),
            "no world of 1 to 3 ranks splits every batch of the job exactly; it can be resumed \
             with 4"
        );
        input.bounds = 4..=16;
        assert_eq!(
            message(&input),
            "3 ranks are left, and the job needs at least 4; it can be resumed with 4"
        );
        input.feasible = &|_| false;
        assert!(message(&input).contains("start a new run"));
    }

    #[test]
    fn a_world_that_splits_the_batch_is_refused_with_its_own_reason() {
        let feasible = |world| world == 2;
        let refusal = |world| (world == 1).then(|| "`groups: workers` compares workers".to_owned());
        let lost = Ranks::Ended {
            world: 2,
            outcome: Outcome::Lost {
                rank: 1,
                message: "killed by signal 9".into(),
            },
        };
        let mut input = observed(lost, &feasible);
        input.refusal = &refusal;
        input.capacity = 1;
        let message = |input: &TransitionInput<'_>| match decide(input) {
            RankAction::Wait { message } => message,
            other => panic!("{other:?}"),
        };
        insta::assert_snapshot!(message(&input), @"1 rank cannot run the job: `groups: workers` compares workers; it can be resumed with 2");
        insta::assert_snapshot!(input.without_fallback(2).unwrap(), @"the loss of a rank will end the run, because 1 rank cannot run the job: `groups: workers` compares workers; it can then be resumed with 2");
        insta::assert_snapshot!(input.without_fallback(4).unwrap_or_default(), @"");
        input.feasible = &|world| world == 4;
        input.desired = 3;
        input.capacity = 3;
        insta::assert_snapshot!(message(&input), @"no world of 1 to 3 ranks can run the job; with 1 rank, `groups: workers` compares workers; it can be resumed with 4");
        input.feasible = &|_| false;
        insta::assert_snapshot!(message(&input), @"no world of 1 to 3 ranks can run the job; with 1 rank, `groups: workers` compares workers; start a new run with another recipe");
        // The user set the smallest world.
        input.bounds = 2..=16;
        assert_eq!(input.without_fallback(2), None);
    }

    #[test]
    fn a_deterministic_failure_is_not_repeated() {
        let feasible = |_| true;
        let outcome = Outcome::Failed {
            rank: 0,
            message: "loss is NaN".into(),
            deterministic: true,
        };
        let input = observed(Ranks::Ended { world: 4, outcome }, &feasible);
        assert!(matches!(
            decide(&input),
            RankAction::End(End::Failed { .. })
        ));
    }

    #[test]
    fn the_descent_ends_in_an_error_at_micro_batch_one() {
        let feasible = |_| true;
        let outcome = Outcome::OutOfMemory {
            per_device_batch_size: 1,
            smaller: None,
            message: "out of memory".into(),
        };
        let input = observed(Ranks::Ended { world: 4, outcome }, &feasible);
        assert!(matches!(
            decide(&input),
            RankAction::End(End::Failed { .. })
        ));
    }

    fn outcomes() -> impl Strategy<Value = Outcome> {
        prop_oneof![
            Just(Outcome::Drained),
            (0..8u64).prop_map(|rank| Outcome::Lost {
                rank,
                message: "killed".into()
            }),
            (1..8u64).prop_map(|per_device_batch_size| Outcome::OutOfMemory {
                per_device_batch_size: per_device_batch_size * 2,
                smaller: Some(per_device_batch_size),
                message: "oom".into()
            }),
            (0..8u64, any::<bool>()).prop_map(|(rank, deterministic)| Outcome::Failed {
                rank,
                message: "failed".into(),
                deterministic
            }),
            Just(Outcome::Finished),
        ]
    }

    fn ranks() -> impl Strategy<Value = Ranks> {
        prop_oneof![
            any::<bool>().prop_map(|resuming| Ranks::None { resuming }),
            (1..32u64, any::<bool>())
                .prop_map(|(world, draining)| Ranks::Running { world, draining }),
            (1..32u64, outcomes()).prop_map(|(world, outcome)| Ranks::Ended { world, outcome }),
        ]
    }

    proptest! {
        #[test]
        fn a_published_world_is_feasible_requested_possible_and_allowed(
            ranks in ranks(),
            desired in 0..40u64,
            capacity in 0..40u64,
            (min, max) in (1..8u64, 8..40u64),
            batch in 1..512u64,
            stop: bool,
            restarts_left in 0..3u64,
        ) {
            let feasible = |w: u64| batch.is_multiple_of(w);
            let input = TransitionInput {
                desired, capacity, bounds: min..=max, feasible: &feasible, refusal: &|_| None, stop,
                restarts_left, ranks,
            };
            if let RankAction::Publish { world, .. } = decide(&input) {
                prop_assert!(feasible(world));
                prop_assert!(world <= desired && world <= capacity);
                prop_assert!((min..=max).contains(&world));
                prop_assert!(!stop);
                // It is the largest such world, and no ranks run.
                let most = desired.min(capacity).min(max);
                prop_assert!((world + 1..=most).all(|w| !feasible(w)));
                let idle = !matches!(input.ranks, Ranks::Running { .. });
                prop_assert!(idle);
            }
        }

        #[test]
        fn a_world_of_the_requested_size_is_kept(world in 1..32u64, each in 1..16u64) {
            let feasible = |w: u64| (world * each).is_multiple_of(w);
            let input = TransitionInput {
                desired: world, capacity: world, bounds: 1..=64, feasible: &feasible,
                refusal: &|_| None, stop: false, restarts_left: 0, ranks: running(world),
            };
            prop_assert_eq!(decide(&input), RankAction::Keep);
        }
    }
}
