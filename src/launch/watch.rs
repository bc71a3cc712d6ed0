//! One generation's ranks as the launcher sees them, from their start to one outcome.

use std::time::{Duration, Instant};

use crate::agent::{Ending, Event, Ranks};
use crate::job::protocol::{Order, Report, exit};
use crate::job::{Outcome, Pin};

/// How long survivors of a loss may take until each has noticed it (the collectives' own limit is
/// 5 s), before they are killed.
const NOTICE: Duration = Duration::from_secs(10);
/// How long a lone commit may take before it is given up for the last pinned checkpoint.
const COMMIT: Duration = Duration::from_secs(120);

/// What is known of one rank.
#[derive(Debug, Clone, Default)]
struct Seen {
    lost: Option<Lost>,
    out_of_memory: Option<String>,
    failed: Option<(String, bool)>,
    ending: Option<Ending>,
    ready: bool,
}

#[derive(Debug, Clone)]
struct Lost {
    rank: u64,
    why: String,
    samples: u64,
    whole: bool,
}

impl Seen {
    /// The peer that this rank lost.
    fn lost_rank(&self) -> Option<u64> {
        self.lost.as_ref().map(|lost| lost.rank)
    }
}

/// The ranks of one generation.
pub struct Watch {
    ranks: Ranks,
    seen: Vec<Seen>,
    /// Since when something is wrong.
    trouble: Option<Instant>,
    /// Survivors were told what to do.
    settled: bool,
    /// The newest checkpoint that this generation committed.
    pub committed: Option<Pin>,
}

impl Watch {
    /// Watches ranks that were just started.
    pub fn new(ranks: Ranks, world: u64) -> Watch {
        Watch {
            ranks,
            seen: vec![Seen::default(); usize::try_from(world).unwrap_or(0)],
            trouble: None,
            settled: false,
            committed: None,
        }
    }

    /// Tells every rank to drain.
    pub fn drain(&mut self) {
        self.ranks.order_all(Order::Drain);
    }

    /// Tells every rank to forget the drain.
    pub fn stay(&mut self) {
        self.ranks.order_all(Order::Stay);
    }

    /// Whether all ranks have met and loaded their state.
    pub fn is_ready(&self) -> bool {
        self.seen.iter().all(|seen| seen.ready)
    }

    /// Kills every rank.
    pub fn kill(&mut self) {
        self.ranks.kill();
    }

    /// Takes in what happened.
    pub fn take(&mut self, event: &Event) {
        match event {
            Event::Report { rank, report, .. } => self.take_report(*rank, report),
            Event::Exited { rank, ending, .. } => {
                if let Some(seen) = self
                    .seen
                    .get_mut(usize::try_from(*rank).unwrap_or(usize::MAX))
                {
                    seen.ending = Some(*ending);
                }
                let planned = [exit::FINISHED, exit::DRAINED].map(Ending::Code);
                if !planned.contains(ending) {
                    self.trouble.get_or_insert_with(Instant::now);
                }
            }
        }
    }

    fn take_report(&mut self, rank: u64, report: &Report) {
        let Some(seen) = self
            .seen
            .get_mut(usize::try_from(rank).unwrap_or(usize::MAX))
        else {
            return;
        };
        match report {
            Report::Ready => seen.ready = true,
            Report::Committed { pin, .. } => self.committed = Some(pin.clone()),
            Report::Lost {
                rank,
                why,
                samples,
                whole,
            } => {
                seen.lost = Some(Lost {
                    rank: *rank,
                    why: why.clone(),
                    samples: *samples,
                    whole: *whole,
                });
                self.trouble.get_or_insert_with(Instant::now);
            }
            Report::OutOfMemory { message } => seen.out_of_memory = Some(message.clone()),
            Report::Failed {
                message,
                deterministic,
            } => seen.failed = Some((message.clone(), *deterministic)),
            Report::Step(_)
            | Report::Evaluation(_)
            | Report::Straggler { .. }
            | Report::Warning { .. } => {}
        }
    }

    /// Once something went wrong: waits until every rank is gone or says what it holds, then lets
    /// the one that holds the most commit it. `pinned`: samples of the checkpoint that would be
    /// gone back to otherwise.
    pub fn settle(&mut self, pinned: u64) {
        let Some(since) = self.trouble else { return };
        if self.settled {
            if since.elapsed() > COMMIT {
                self.ranks.kill();
            }
            return;
        }
        let undecided = self.undecided();
        let named = |rank: &u64| self.seen.iter().any(|s| s.lost_rank() == Some(*rank));
        // A rank that the others lost, or that did not even notice, hangs: it will not answer.
        if !undecided.iter().all(named) && since.elapsed() < NOTICE {
            return;
        }
        for rank in undecided {
            self.ranks.kill_one(rank);
        }
        self.settled = true;
        let newest = self.committed.as_ref().map_or(pinned, |pin| pin.samples);
        let holders = self.seen.iter().zip(0u64..).filter_map(|(seen, rank)| {
            let lost = seen.lost.as_ref()?;
            (seen.ending.is_none() && lost.whole && lost.samples > newest)
                .then_some((lost.samples, std::cmp::Reverse(rank)))
        });
        let committer = holders.max().map(|(_, rank)| rank.0);
        for rank in 0..self.seen.len() as u64 {
            let order = match committer {
                Some(chosen) if chosen == rank => Order::Commit,
                _ => Order::Stop,
            };
            self.ranks.order(rank, order);
        }
    }

    /// Ranks that have neither ended nor said what they hold.
    fn undecided(&self) -> Vec<u64> {
        let undecided = |seen: &Seen| seen.ending.is_none() && seen.lost.is_none();
        (0..)
            .zip(&self.seen)
            .filter(|(_, seen)| undecided(seen))
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Ranks whose processes a signal ended.
    pub fn killed(&self) -> u64 {
        let killed = |seen: &&Seen| matches!(seen.ending, Some(Ending::Signal(_)));
        self.seen.iter().filter(killed).count() as u64
    }

    /// How the generation ended, once every rank has: the root cause, not what it led to.
    /// `descent` says how an out-of-memory error of this plan goes on; `oom_killed` that the
    /// kernel's out-of-memory killer struck meanwhile.
    pub fn outcome(
        &self,
        micro: u64,
        descent: impl Fn() -> Option<u64>,
        oom_killed: impl FnOnce() -> bool,
    ) -> Option<Outcome> {
        let endings: Vec<Ending> = self.seen.iter().map(|s| s.ending).collect::<Option<_>>()?;
        let numbered = || self.seen.iter().zip(0u64..);
        let out_of_memory = |why: String| Outcome::OutOfMemory {
            micro,
            smaller: descent(),
            why,
        };
        if let Some(why) = self.seen.iter().find_map(|s| s.out_of_memory.clone()) {
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
            Some(Ending::Signal(signal)) => Some((rank, signal)),
            _ => None,
        });
        if let Some((rank, signal)) = signalled {
            let why = format!("killed by signal {signal}");
            if signal == 9 && oom_killed() {
                return Some(out_of_memory(format!(
                    "rank {rank} was killed by the kernel's out-of-memory killer"
                )));
            }
            if self.killed() == self.seen.len() as u64 {
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
        let lost = self.seen.iter().find_map(|s| s.lost.clone());
        Some(Outcome::Failed {
            rank: lost.as_ref().map_or(0, |l| l.rank),
            why: lost.map_or_else(|| "the ranks ended apart".into(), |l| l.why),
            deterministic: false,
        })
    }
}
