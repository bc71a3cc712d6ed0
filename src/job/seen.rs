//! What is known of a generation's ranks, and what follows from it: who commits after a loss, and
//! how the generation ended. Pure; the launcher and the controller both look through it.

use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::Outcome;
use super::protocol::{Ending, Report, exit};

/// What is known of one rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Seen {
    /// It lives and waits for the others to be met.
    pub waiting: bool,
    /// It is in the world, with its state loaded.
    pub ready: bool,
    /// A peer that it knows to be lost, and how; it computes to the end of what it does.
    pub noticed: Option<(u64, String)>,
    /// The peer that it lost, and what it holds itself.
    pub lost: Option<Lost>,
    /// Memory could not be had: its words.
    pub out_of_memory: Option<String>,
    /// Its last words, and whether the same would happen again.
    pub failed: Option<(String, bool)>,
    /// How its process ended.
    pub ending: Option<Ending>,
    /// Why its agent killed it, where it was the agent that did.
    pub given_up: Option<String>,
    /// It ended, or its agent ended it, because of ranks that are gone, or since it did not leave in
    /// time: nothing is wrong with it.
    pub dismissed: bool,
}

/// What a rank that lost a peer says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lost {
    /// The peer.
    pub rank: u64,
    /// What was seen.
    pub why: String,
    /// Samples in the state of the rank that says it.
    pub samples: u64,
    /// Whether it holds the whole state.
    pub whole: bool,
}

impl Seen {
    /// Takes in what the rank says.
    pub fn take(&mut self, report: &Report) {
        match report {
            Report::Waiting => self.waiting = true,
            Report::Met => self.waiting = false,
            Report::Ready => self.ready = true,
            Report::Noticed { rank, why } => self.noticed = Some((*rank, why.clone())),
            Report::Lost {
                rank,
                why,
                samples,
                whole,
            } => {
                self.lost = Some(Lost {
                    rank: *rank,
                    why: why.clone(),
                    samples: *samples,
                    whole: *whole,
                });
            }
            Report::OutOfMemory { message } => self.out_of_memory = Some(message.clone()),
            Report::Failed {
                message,
                deterministic,
            } => self.failed = Some((message.clone(), *deterministic)),
            Report::Step(_)
            | Report::Evaluation(_)
            | Report::Committed { .. }
            | Report::Straggler { .. }
            | Report::Warning { .. } => {}
        }
    }

    /// Takes in how its process ended. `follows`: it is a program of the user's own, and something
    /// was wrong before. Such a program cannot say that it failed because a peer was gone: it ends
    /// with an error, or NCCL's watchdog aborts it.
    pub fn end(&mut self, ending: Ending, follows: bool) {
        self.ending = Some(ending);
        let killed = match ending {
            Ending::Signal(signal) => signal != Signal::ABORT.as_raw(),
            Ending::Code(_) | Ending::Unasked => false,
        };
        self.dismissed |= follows && !killed;
    }

    /// Whether something is wrong with it, or it says so of a peer.
    pub fn in_trouble(&self) -> bool {
        let well = |ending| match ending {
            Ending::Code(code) => [exit::FINISHED, exit::DRAINED].contains(&code),
            // Its peers may have been asked, and have told it.
            Ending::Unasked => true,
            Ending::Signal(_) => false,
        };
        self.lost.is_some() || self.noticed.is_some() || self.ending.is_some_and(|e| !well(e))
    }

    /// What there is to say of a process that a signal ended.
    pub fn ended_by(&self, signal: i32) -> String {
        match &self.given_up {
            Some(why) => format!("{why}, so it was killed"),
            None => format!("killed by signal {signal}"),
        }
    }

    /// Whether it has said why it ends: its process is about to.
    fn is_leaving(&self) -> bool {
        self.failed.is_some() || self.out_of_memory.is_some()
    }

    /// Whether somebody else than its agent, or its agent with a reason, took its process away.
    fn is_killed(&self) -> bool {
        matches!(self.ending, Some(Ending::Signal(_))) && !self.dismissed
    }

    /// Whether it has neither ended nor said what it holds.
    fn undecided(&self) -> bool {
        self.ending.is_none() && self.lost.is_none()
    }
}

/// Ranks by number, those for which `which` holds.
fn ranks<'a>(
    seen: &'a [Seen],
    which: impl Fn(&Seen) -> bool + 'a,
) -> impl Iterator<Item = u64> + 'a {
    (0..)
        .zip(seen)
        .filter(move |(_, s)| which(s))
        .map(|(rank, _)| rank)
}

/// How long a rank may say nothing before the ranks have met; afterwards their own heartbeats count.
pub const SILENCE: Duration = Duration::from_secs(10);
/// How long ranks that wait to meet the others may take to say that they have met after all, once
/// one of them is lost.
const MEETING: Duration = Duration::from_secs(1);
/// How long ranks may take until they have noticed a loss (the collectives' own limit is 5 s).
pub const NOTICE: Duration = Duration::from_secs(10);
/// How long a rank that has noticed it may compute on: it looks up after every micro-batch.
pub const ANSWER: Duration = Duration::from_secs(120);
/// How long the survivors may take to commit and leave once they were told to.
pub const COMMIT: Duration = Duration::from_secs(600);

/// Whether nobody is to be waited for any more after a loss that was seen `waited` ago: every rank
/// has ended, said what it holds, is named as lost by a peer, waits for ranks that will not come, or
/// hangs.
pub fn is_settled(seen: &[Seen], waited: Duration) -> bool {
    let named = |rank: u64| seen_of(seen, rank).is_some();
    let awaited = (0..).zip(seen).filter(|(_, s)| s.undecided());
    awaited
        .filter(|(rank, s)| s.is_leaving() || !named(*rank))
        .all(|(_, s)| match s.noticed {
            Some(_) => waited > ANSWER,
            None if s.waiting => waited > MEETING,
            None => waited > NOTICE,
        })
}

/// Marks those of one host's ranks, the first of which is `first`, that will not answer any more
/// after a loss: they wait for ranks that will not come, or they hang. A `foreign` program hangs in a
/// collective because of the loss, with nothing wrong with itself. Returns their numbers; their
/// processes are to be killed.
pub fn leave_behind(seen: &mut [Seen], first: u64, foreign: bool) -> Vec<u64> {
    let named: Vec<Option<String>> = (first..)
        .zip(seen.iter())
        .map(|(rank, _)| seen_of(seen, rank).map(str::to_owned))
        .collect();
    let mut behind = Vec::new();
    for ((rank, seen), named) in (first..).zip(seen).zip(named) {
        if !seen.undecided() {
            continue;
        }
        match named {
            None if seen.waiting || foreign => seen.dismissed = true,
            named => {
                let hung = || format!("not a word for {} s after a loss", NOTICE.as_secs());
                seen.given_up = Some(named.unwrap_or_else(hung));
            }
        }
        behind.push(rank);
    }
    behind
}

/// The ranks that peers have lost, and what was seen of them.
fn named(seen: &[Seen]) -> impl Iterator<Item = (u64, &str)> {
    let lost = seen.iter().filter_map(|s| s.lost.as_ref());
    let lost = lost.map(|lost| (lost.rank, lost.why.as_str()));
    let noticed = seen.iter().filter_map(|s| s.noticed.as_ref());
    lost.chain(noticed.map(|(rank, why)| (*rank, why.as_str())))
}

/// What a peer saw of a rank that it lost.
pub fn seen_of(seen: &[Seen], rank: u64) -> Option<&str> {
    named(seen)
        .find(|(lost, _)| *lost == rank)
        .map(|(_, why)| why)
}

/// The living rank that holds the newest whole state, if it is newer than `pinned` samples: it may
/// commit alone.
pub fn committer(seen: &[Seen], pinned: u64) -> Option<u64> {
    let holders = seen.iter().zip(0u64..).filter_map(|(seen, rank)| {
        let lost = seen.lost.as_ref()?;
        (seen.ending.is_none() && lost.whole && lost.samples > pinned)
            .then_some((lost.samples, std::cmp::Reverse(rank)))
    });
    holders.max().map(|(_, rank)| rank.0)
}

/// Ranks whose processes a signal ended.
pub fn killed(seen: &[Seen]) -> u64 {
    ranks(seen, Seen::is_killed).count() as u64
}

/// How the generation ended, once every rank has: the root cause, not what it led to. `descent`
/// says how an out-of-memory error of this plan goes on; `oom_killed` that the kernel's
/// out-of-memory killer struck meanwhile.
pub fn outcome(
    seen: &[Seen],
    micro: u64,
    mut descent: impl FnMut() -> Option<u64>,
    oom_killed: impl FnOnce() -> bool,
) -> Option<Outcome> {
    let endings: Vec<Ending> = seen.iter().map(|s| s.ending).collect::<Option<_>>()?;
    let numbered = || seen.iter().zip(0u64..);
    let mut out_of_memory = |why: String| Outcome::OutOfMemory {
        micro,
        smaller: descent(),
        why,
    };
    if let Some(why) = seen.iter().find_map(|s| s.out_of_memory.clone()) {
        return Some(out_of_memory(why));
    }
    if let Some((rank, (why, deterministic))) =
        numbered().find_map(|(s, rank)| Some((rank, s.failed.clone()?)))
    {
        return Some(Outcome::Failed {
            rank,
            why,
            deterministic,
        });
    }
    let signalled = numbered().find_map(|(s, rank)| match s.ending {
        Some(Ending::Signal(signal)) if s.is_killed() => Some((rank, s, signal)),
        _ => None,
    });
    if let Some((rank, lost, signal)) = signalled {
        let why = lost.ended_by(signal);
        if signal == 9 && lost.given_up.is_none() && oom_killed() {
            return Some(out_of_memory(format!(
                "rank {rank} was killed by the kernel's out-of-memory killer"
            )));
        }
        if killed(seen) == seen.len() as u64 {
            // Nobody survived: nothing says that fewer ranks would do better.
            return Some(Outcome::Failed {
                rank,
                why,
                deterministic: false,
            });
        }
        return Some(Outcome::Lost { rank, why });
    }
    if endings.iter().all(|e| *e == Ending::Code(exit::FINISHED)) {
        return Some(Outcome::Finished);
    }
    let drained = Ending::Code(exit::DRAINED);
    // Ranks of one world agree on a step to leave at: one that was asked leaves with all.
    let asked = endings.contains(&drained);
    let left = |s: &Seen| match s.ending {
        Some(Ending::Unasked) => asked || s.dismissed,
        ending => s.dismissed || ending == Some(drained),
    };
    if seen.iter().all(left) {
        return Some(Outcome::Drained);
    }
    let mut own_fault = numbered().filter(|(s, _)| !left(s));
    if let Some((rank, why)) = own_fault.find_map(|(s, rank)| Some((rank, s.ending?.failure()?))) {
        return Some(Outcome::Failed {
            rank,
            why,
            deterministic: false,
        });
    }
    // Only ranks that lost each other: the network between them, with every process well.
    let (rank, why) = named(seen).next().unwrap_or((0, "the ranks ended apart"));
    Some(Outcome::Failed {
        rank,
        why: why.to_owned(),
        deterministic: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn killed() -> Seen {
        Seen {
            ending: Some(Ending::Signal(9)),
            ..Seen::default()
        }
    }

    fn survivor(of: u64) -> Seen {
        Seen {
            lost: Some(Lost {
                rank: of,
                why: "no heartbeat for 3.0 s".into(),
                samples: 24,
                whole: true,
            }),
            ending: Some(Ending::Code(exit::PEER_LOST)),
            ..Seen::default()
        }
    }

    #[test]
    fn a_rank_that_its_agent_killed_is_told_by_what_was_seen_of_it() {
        let why = |seen: &[Seen]| match outcome(seen, 2, || None, || true) {
            Some(Outcome::Lost { rank: 1, why }) => why,
            other => panic!("{other:?}"),
        };
        let mut seen = [survivor(1), killed()];
        let words = seen_of(&seen, 1).map(str::to_owned);
        seen[1].given_up = words;
        assert_eq!(why(&seen), "no heartbeat for 3.0 s, so it was killed");
    }

    #[test]
    fn rank_that_computes_on_is_waited_for_and_one_that_hangs_is_not() {
        let computing = Seen {
            noticed: Some((1, "connection closed".into())),
            ..Seen::default()
        };
        let settled = |other: Seen, waited: Duration| {
            let all = [survivor(1), killed(), other];
            is_settled(&all, waited)
        };
        let second = Duration::from_secs(1);
        assert!(!settled(Seen::default(), NOTICE), "it may not know yet");
        assert!(settled(Seen::default(), NOTICE + second), "it hangs");
        assert!(!settled(computing.clone(), NOTICE + second), "it computes");
        assert!(settled(computing.clone(), ANSWER + second));
        // Peers know of a rank that failed by itself before its process has ended.
        let leaving = Seen {
            failed: Some(("no such file".into(), true)),
            ..Seen::default()
        };
        assert!(!is_settled(&[survivor(1), leaving.clone()], second));
        assert!(is_settled(&[survivor(1), leaving], NOTICE + second));
        assert!(settled(survivor(1), second));
        // A frozen rank never ends; its peers' word is enough.
        assert!(is_settled(&[survivor(1), Seen::default()], second));
        assert_eq!(
            seen_of(&[computing, Seen::default()], 1),
            Some("connection closed")
        );
    }

    #[test]
    fn only_ranks_that_will_not_answer_are_left_behind() {
        let waiting = Seen {
            waiting: true,
            ..Seen::default()
        };
        let mut seen = [
            survivor(5),
            killed(),
            waiting,
            Seen::default(),
            Seen::default(),
        ];
        assert_eq!(leave_behind(&mut seen, 2, false), [4, 5, 6]);
        assert!(
            seen[..2]
                .iter()
                .all(|s| s.given_up.is_none() && !s.dismissed)
        );
        assert!(seen[2].dismissed);
        assert_eq!(seen[3].given_up.as_deref(), Some("no heartbeat for 3.0 s"));
        assert_eq!(
            seen[4].given_up.as_deref(),
            Some("not a word for 10 s after a loss")
        );
    }

    #[test]
    fn ranks_that_wait_for_a_silent_one_are_no_loss() {
        let waiting = Seen {
            waiting: true,
            ..Seen::default()
        };
        let silent = Seen {
            given_up: Some("not a word for 10 s".into()),
            ..killed()
        };
        let mut seen = [waiting, silent];
        assert!(!is_settled(&seen, MEETING), "they may just have met");
        assert!(is_settled(&seen, MEETING + Duration::from_millis(1)));
        seen[0] = Seen {
            dismissed: true,
            ..killed()
        };
        assert_eq!(super::killed(&seen), 1);
        assert_eq!(
            outcome(&seen, 2, || None, || true),
            Some(Outcome::Lost {
                rank: 1,
                why: "not a word for 10 s, so it was killed".into(),
            })
        );
    }

    #[test]
    fn ranks_that_never_met_name_the_one_that_was_missed() {
        let left = Seen {
            noticed: Some((2, "it did not come".into())),
            ending: Some(Ending::Code(exit::PEER_LOST)),
            ..Seen::default()
        };
        let blamed = |seen: &[Seen]| match outcome(seen, 2, || None, || false) {
            Some(Outcome::Failed { rank, why, .. }) => (rank, why),
            other => panic!("{other:?}"),
        };
        let mut seen = [left.clone(), left.clone(), left];
        assert_eq!(blamed(&seen), (2, "it did not come".into()));
        seen[2] = Seen {
            failed: Some(("no route".into(), false)),
            ending: Some(Ending::Code(exit::FAILED)),
            ..Seen::default()
        };
        assert_eq!(blamed(&seen), (2, "no route".into()));
    }

    #[test]
    fn ranks_that_leave_with_one_that_was_asked_are_drained_too() {
        let ended = |ending| Seen {
            ending: Some(ending),
            ..Seen::default()
        };
        let (asked, unasked) = (Ending::Code(exit::DRAINED), Ending::Unasked);
        let of = |endings: [Ending; 2]| outcome(&endings.map(ended), 2, || None, || false);
        assert_eq!(of([asked, unasked]), Some(Outcome::Drained));
        let why = |outcome| match outcome {
            Some(Outcome::Failed { why, .. }) => why,
            other => panic!("{other:?}"),
        };
        assert!(why(of([unasked, unasked])).contains("nobody had asked it to"));
        assert_eq!(why(of([asked, Ending::Code(3)])), "exit code 3");
        // The others save meanwhile.
        assert!(!ended(unasked).in_trouble() && ended(Ending::Code(3)).in_trouble());
    }

    #[test]
    fn only_a_kill_by_somebody_else_may_be_the_kernels() {
        let seen = [survivor(1), killed()];
        let ended = |oom: bool| outcome(&seen, 2, || Some(1), || oom);
        assert!(matches!(ended(true), Some(Outcome::OutOfMemory { .. })));
        let why = "killed by signal 9".to_owned();
        assert_eq!(ended(false), Some(Outcome::Lost { rank: 1, why }));
    }
}
