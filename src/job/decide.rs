//! The state machine: what was observed in, what to do out. Pure, and level-triggered: it looks at
//! how things are, not at what just happened, so that a crash between two calls loses nothing.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::generation::Reason;
use crate::words::count;

/// How many larger worlds are tried for one to name in a message.
const LOOK_AHEAD: usize = 64;

/// How things are.
pub struct Observed<'a> {
    /// Ranks that somebody asks for.
    pub desired: u64,
    /// Ranks that could run; after a loss, without those that are gone.
    pub capacity: u64,
    /// Worlds that the job allows itself.
    pub bounds: RangeInclusive<u64>,
    /// Whether a plan without errors exists for a world.
    pub feasible: &'a dyn Fn(u64) -> bool,
    /// Somebody wants the job to stop for now (a signal, a suspend).
    pub stop: bool,
    /// How many more failures of the program are forgiven.
    pub restarts_left: u64,
    /// The state of the current generation's ranks.
    pub ranks: Ranks,
}

/// The ranks of the current generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ranks {
    /// No generation yet: the job starts, or goes on in a new process.
    None {
        /// Whether a checkpoint exists to go on from.
        resuming: bool,
    },
    /// They run.
    Running {
        /// How many.
        world: u64,
        /// They were told to drain.
        draining: bool,
    },
    /// All have exited.
    Ended {
        /// How many there were.
        world: u64,
        /// How it ended.
        outcome: Outcome,
    },
}

/// How a generation ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Outcome {
    /// The budget is reached.
    Finished,
    /// A planned end, with a checkpoint.
    Drained,
    /// A rank is gone (killed, its host lost).
    Lost {
        /// Which.
        rank: u64,
        /// What was seen.
        why: String,
    },
    /// Memory could not be had. `smaller` is the next micro-batch of the descent, if there is one.
    OutOfMemory {
        /// The micro-batch that did not fit.
        micro: u64,
        /// The next one to try.
        smaller: Option<u64>,
        /// In words.
        why: String,
    },
    /// The program failed by itself.
    Failed {
        /// The root cause's rank.
        rank: u64,
        /// Its last words.
        why: String,
        /// The same would happen again (a NaN loss, a refused checkpoint).
        deterministic: bool,
    },
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Wait,
    /// Tell the ranks to commit and leave.
    Drain,
    /// The reason to drain is gone: tell the ranks to stay. Those that have agreed on a step to
    /// leave at do not hear it any more; then the next generation has the same world.
    Stay,
    /// Publish the next generation.
    Start {
        /// Its ranks.
        world: u64,
        /// Why.
        reason: Reason,
        /// The micro-batch must not be above this any more (the out-of-memory descent).
        micro_limit: Option<u64>,
    },
    /// No feasible world is asked for, possible and allowed: nothing can start as things are.
    Infeasible {
        /// In words.
        why: String,
    },
    /// It is over, for now or for good.
    End(End),
}

/// How a job ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The budget is reached.
    Finished,
    /// Stopped on request; it can be resumed.
    Drained,
    /// It cannot go on.
    Failed {
        /// In words.
        why: String,
    },
}

impl Observed<'_> {
    /// The largest feasible world that is asked for, possible and allowed.
    fn world(&self) -> Option<u64> {
        (*self.bounds.start()..=self.most())
            .rev()
            .find(|&world| (self.feasible)(world))
    }

    fn most(&self) -> u64 {
        self.desired.min(self.capacity).min(*self.bounds.end())
    }

    fn start(&self, reason: impl FnOnce(u64) -> Reason, micro_limit: Option<u64>) -> Action {
        match self.world() {
            Some(world) => Action::Start {
                world,
                reason: reason(world),
                micro_limit,
            },
            None => Action::Infeasible {
                why: self.nowhere_to_go(),
            },
        }
    }

    /// Why no world is left, and which would do.
    fn nowhere_to_go(&self) -> String {
        let (least, most) = (*self.bounds.start(), self.most());
        let problem = if most < least {
            let (are, left) = (if most == 1 { "is" } else { "are" }, count(most, "rank"));
            format!("{left} {are} left, and the job needs at least {least}")
        } else {
            let worlds = match least == most {
                true => count(most, "rank"),
                false => format!("{least} to {most} ranks"),
            };
            format!("no world of {worlds} splits every batch of the job exactly")
        };
        let above = most.max(least.saturating_sub(1)).saturating_add(1);
        let next = (above..=*self.bounds.end())
            .take(LOOK_AHEAD)
            .find(|&world| (self.feasible)(world));
        match next {
            Some(world) => format!("{problem}; it can be resumed with {world}"),
            None => format!(
                "{problem}; start it anew with uneven dealing (--remainder uneven) or another global \
                 batch"
            ),
        }
    }
}

/// Decides.
pub fn decide(observed: &Observed<'_>) -> Action {
    match &observed.ranks {
        Ranks::None { .. } if observed.stop => Action::End(End::Drained),
        Ranks::None { resuming: false } => observed.start(|_| Reason::Started, None),
        Ranks::None { resuming: true } => observed.start(|_| Reason::Resumed, None),
        Ranks::Running { world, draining } => {
            // With nothing feasible the job stays where it is while it can.
            let elsewhere = || observed.world().is_some_and(|better| better != *world);
            match (*draining, observed.stop || elsewhere()) {
                (false, true) => Action::Drain,
                (true, false) => Action::Stay,
                _ => Action::Wait,
            }
        }
        Ranks::Ended { world, outcome } => after(observed, *world, outcome),
    }
}

fn after(observed: &Observed<'_>, from: u64, outcome: &Outcome) -> Action {
    match outcome {
        Outcome::Finished => Action::End(End::Finished),
        Outcome::Failed {
            rank,
            why,
            deterministic,
        } if *deterministic || observed.restarts_left == 0 => Action::End(End::Failed {
            why: format!("rank {rank}: {why}"),
        }),
        Outcome::OutOfMemory {
            micro,
            smaller: None,
            why,
        } => Action::End(End::Failed {
            why: format!(
                "{why}; no micro-batch below {micro} keeps the batch exact: shard the model (fsdp, \
                 which more ranks make smaller still), checkpoint activations, shorten the \
                 sequences, give each rank more memory, or train a smaller model"
            ),
        }),
        _ if observed.stop => Action::End(End::Drained),
        Outcome::Drained => observed.start(
            |to| match to == from {
                // The reason to drain went away after the ranks had agreed to leave.
                true => Reason::Resumed,
                false => Reason::Resized { from, to },
            },
            None,
        ),
        Outcome::Lost { rank, why } => {
            let (rank, why) = (*rank, why.clone());
            observed.start(|_| Reason::RankLost { rank, why }, None)
        }
        Outcome::OutOfMemory {
            micro,
            smaller: Some(to),
            ..
        } => {
            let (from, to) = (*micro, *to);
            observed.start(|_| Reason::OutOfMemory { from, to }, Some(to))
        }
        Outcome::Failed { rank, why, .. } => {
            let (rank, why) = (*rank, why.clone());
            observed.start(|_| Reason::Failed { rank, why }, None)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn observed(ranks: Ranks, feasible: &dyn Fn(u64) -> bool) -> Observed<'_> {
        Observed {
            desired: 4,
            capacity: 4,
            bounds: 1..=16,
            feasible,
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
            why: "killed by signal 9".into(),
        };
        let mut seen = observed(
            Ranks::Ended {
                world: 4,
                outcome: lost,
            },
            &feasible,
        );
        seen.capacity = 3;
        assert!(matches!(decide(&seen), Action::Start { world: 2, .. }));
    }

    #[test]
    fn nothing_feasible_keeps_a_running_job_where_it_is() {
        let feasible = |w: u64| w == 4;
        let mut seen = observed(running(4), &feasible);
        seen.desired = 3;
        assert_eq!(decide(&seen), Action::Wait);
    }

    #[test]
    fn a_drain_is_called_off_when_its_reason_is_gone() {
        let feasible = |_| true;
        let draining = Ranks::Running {
            world: 2,
            draining: true,
        };
        let mut seen = observed(draining, &feasible);
        assert_eq!(decide(&seen), Action::Wait);
        seen.desired = 2;
        assert_eq!(decide(&seen), Action::Stay);
        seen.stop = true;
        assert_eq!(decide(&seen), Action::Wait);
    }

    #[test]
    fn a_drain_that_could_not_be_called_off_is_no_resize() {
        let feasible = |_| true;
        let drained = |world| Ranks::Ended {
            world,
            outcome: Outcome::Drained,
        };
        let reason = |world| match decide(&observed(drained(world), &feasible)) {
            Action::Start { reason, .. } => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(reason(4), Reason::Resumed);
        assert_eq!(reason(2), Reason::Resized { from: 2, to: 4 });
    }

    #[test]
    fn a_job_without_a_world_says_which_would_do() {
        let lost = || Ranks::Ended {
            world: 4,
            outcome: Outcome::Lost {
                rank: 2,
                why: "killed by signal 9".into(),
            },
        };
        let why = |seen: &Observed<'_>| match decide(seen) {
            Action::Infeasible { why } => why,
            other => panic!("{other:?}"),
        };
        let feasible = |w| w == 4;
        let mut seen = observed(lost(), &feasible);
        seen.capacity = 3;
        assert_eq!(
            why(&seen),
            "no world of 1 to 3 ranks splits every batch of the job exactly; it can be resumed \
             with 4"
        );
        seen.bounds = 4..=16;
        assert_eq!(
            why(&seen),
            "3 ranks are left, and the job needs at least 4; it can be resumed with 4"
        );
        seen.feasible = &|_| false;
        assert!(why(&seen).contains("start it anew"));
    }

    #[test]
    fn a_deterministic_failure_is_not_repeated() {
        let feasible = |_| true;
        let outcome = Outcome::Failed {
            rank: 0,
            why: "loss is NaN".into(),
            deterministic: true,
        };
        let seen = observed(Ranks::Ended { world: 4, outcome }, &feasible);
        assert!(matches!(decide(&seen), Action::End(End::Failed { .. })));
    }

    #[test]
    fn the_descent_ends_in_an_error_at_micro_batch_one() {
        let feasible = |_| true;
        let outcome = Outcome::OutOfMemory {
            micro: 1,
            smaller: None,
            why: "out of memory".into(),
        };
        let seen = observed(Ranks::Ended { world: 4, outcome }, &feasible);
        assert!(matches!(decide(&seen), Action::End(End::Failed { .. })));
    }

    fn outcomes() -> impl Strategy<Value = Outcome> {
        prop_oneof![
            Just(Outcome::Drained),
            (0..8u64).prop_map(|rank| Outcome::Lost {
                rank,
                why: "killed".into()
            }),
            (1..8u64).prop_map(|micro| Outcome::OutOfMemory {
                micro: micro * 2,
                smaller: Some(micro),
                why: "oom".into()
            }),
            (0..8u64, any::<bool>()).prop_map(|(rank, deterministic)| Outcome::Failed {
                rank,
                why: "failed".into(),
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
        fn a_started_world_is_feasible_asked_for_possible_and_allowed(
            ranks in ranks(),
            desired in 0..40u64,
            capacity in 0..40u64,
            (min, max) in (1..8u64, 8..40u64),
            batch in 1..512u64,
            stop: bool,
            restarts_left in 0..3u64,
        ) {
            let feasible = |w: u64| batch.is_multiple_of(w);
            let seen = Observed {
                desired, capacity, bounds: min..=max, feasible: &feasible, stop, restarts_left, ranks,
            };
            if let Action::Start { world, .. } = decide(&seen) {
                prop_assert!(feasible(world));
                prop_assert!(world <= desired && world <= capacity);
                prop_assert!((min..=max).contains(&world));
                prop_assert!(!stop);
                // The largest such world, and never beside running ranks.
                let most = desired.min(capacity).min(max);
                prop_assert!((world + 1..=most).all(|w| !feasible(w)));
                let idle = !matches!(seen.ranks, Ranks::Running { .. });
                prop_assert!(idle);
            }
        }

        #[test]
        fn a_settled_world_is_left_alone(world in 1..32u64, each in 1..16u64) {
            let feasible = |w: u64| (world * each).is_multiple_of(w);
            let seen = Observed {
                desired: world, capacity: world, bounds: 1..=64, feasible: &feasible,
                stop: false, restarts_left: 0, ranks: running(world),
            };
            prop_assert_eq!(decide(&seen), Action::Wait);
        }
    }
}
