//! What is known of a generation's ranks, and what follows from it: who commits after a loss, and
//! how the generation ended. Pure; the launcher and the controller both look through it.

use serde::{Deserialize, Serialize};

use super::Outcome;
use super::protocol::{Ending, Report, exit};

/// What is known of one rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Seen {
    /// It is in the world, with its state loaded.
    pub ready: bool,
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
            Report::Ready => self.ready = true,
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

    /// Whether something is wrong with it, or it says so of a peer.
    pub fn in_trouble(&self) -> bool {
        let planned = [exit::FINISHED, exit::DRAINED].map(Ending::Code);
        self.lost.is_some() || self.ending.is_some_and(|ending| !planned.contains(&ending))
    }

    /// What there is to say of a process that a signal ended.
    pub fn ended_by(&self, signal: i32) -> String {
        match &self.given_up {
            Some(why) => format!("{why}, so it was killed"),
            None => format!("killed by signal {signal}"),
        }
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

/// Ranks that have neither ended nor said what they hold, and that no peer names as lost: more can
/// be heard of them.
pub fn awaited(seen: &[Seen]) -> Vec<u64> {
    let named = |rank: u64| {
        seen.iter()
            .any(|s| s.lost.as_ref().is_some_and(|l| l.rank == rank))
    };
    ranks(seen, Seen::undecided)
        .filter(|rank| !named(*rank))
        .collect()
}

/// Ranks that have neither ended nor said what they hold.
pub fn undecided(seen: &[Seen]) -> Vec<u64> {
    ranks(seen, Seen::undecided).collect()
}

/// What a peer saw of a rank that it lost.
pub fn seen_of(seen: &[Seen], rank: u64) -> Option<&str> {
    let mut lost = seen.iter().filter_map(|s| s.lost.as_ref());
    lost.find(|lost| lost.rank == rank)
        .map(|lost| lost.why.as_str())
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
    ranks(seen, |s| matches!(s.ending, Some(Ending::Signal(_)))).count() as u64
}

/// How the generation ended, once every rank has: the root cause, not what it led to. `descent`
/// says how an out-of-memory error of this plan goes on; `oom_killed` that the kernel's
/// out-of-memory killer struck meanwhile.
pub fn outcome(
    seen: &[Seen],
    micro: u64,
    descent: impl Fn() -> Option<u64>,
    oom_killed: impl FnOnce() -> bool,
) -> Option<Outcome> {
    let endings: Vec<Ending> = seen.iter().map(|s| s.ending).collect::<Option<_>>()?;
    let numbered = || seen.iter().zip(0u64..);
    let out_of_memory = |why: String| Outcome::OutOfMemory {
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
        Some(Ending::Signal(signal)) => Some((rank, s, signal)),
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
    if endings.iter().all(|e| *e == Ending::Code(exit::DRAINED)) {
        return Some(Outcome::Drained);
    }
    let failed = numbered().find_map(|(s, rank)| match s.ending {
        Some(Ending::Code(code))
            if ![exit::FINISHED, exit::DRAINED, exit::PEER_LOST].contains(&code) =>
        {
            Some((rank, format!("exit code {code}")))
        }
        _ => None,
    });
    if let Some((rank, why)) = failed {
        return Some(Outcome::Failed {
            rank,
            why,
            deterministic: false,
        });
    }
    // Only ranks that lost each other: the network between them, with every process well.
    let lost = seen.iter().find_map(|s| s.lost.clone());
    Some(Outcome::Failed {
        rank: lost.as_ref().map_or(0, |l| l.rank),
        why: lost.map_or_else(|| "the ranks ended apart".into(), |l| l.why),
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
    fn only_a_kill_by_somebody_else_may_be_the_kernels() {
        let seen = [survivor(1), killed()];
        let ended = |oom: bool| outcome(&seen, 2, || Some(1), || oom);
        assert!(matches!(ended(true), Some(Outcome::OutOfMemory { .. })));
        let why = "killed by signal 9".to_owned();
        assert_eq!(ended(false), Some(Outcome::Lost { rank: 1, why }));
    }
}
