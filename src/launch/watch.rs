//! One generation's ranks as the launcher sees them, from their start to one outcome.

use std::time::{Duration, Instant};

use crate::agent::{Event, Ranks, Silence, silence};
use crate::job::Outcome;
use crate::job::protocol::Order;
use crate::job::seen::{self, COMMIT, Seen};

/// The ranks of one generation.
pub struct Watch {
    ranks: Ranks,
    seen: Vec<Seen>,
    silence: Silence,
    /// Since when something is wrong.
    trouble: Option<Instant>,
    /// When the survivors were told what to do.
    settled: Option<Instant>,
    /// Of a program of the user's own, which says nothing of itself.
    foreign: Option<Foreign>,
}

/// What is known of a program of the user's own.
struct Foreign {
    /// How long it may take to leave once it was asked to.
    patience: Duration,
    /// Since when it is asked to.
    leaving: Option<Instant>,
}

impl Watch {
    /// Watches ranks that were just started.
    pub fn new(ranks: Ranks, world: u64) -> Watch {
        Watch {
            ranks,
            seen: vec![Seen::default(); usize::try_from(world).unwrap_or(0)],
            silence: Silence::new(world),
            trouble: None,
            settled: None,
            foreign: None,
        }
    }

    /// The same of the user's own program, which may take so long to leave once it was asked to.
    pub fn foreign(ranks: Ranks, world: u64, patience: Duration) -> Watch {
        let leaving = None;
        Watch {
            foreign: Some(Foreign { patience, leaving }),
            ..Watch::new(ranks, world)
        }
    }

    /// Tells every rank to drain.
    pub fn drain(&mut self) {
        self.ranks.order_all(Order::Drain);
        if let Some(foreign) = &mut self.foreign {
            foreign.leaving.get_or_insert_with(Instant::now);
        }
    }

    /// Tells every rank to forget the drain.
    pub fn stay(&mut self) {
        self.ranks.order_all(Order::Stay);
    }

    /// Whether all ranks have met and loaded their state.
    pub fn is_ready(&self) -> bool {
        self.seen.iter().all(|seen| seen.ready)
    }

    /// Whether some rank has met all others: it may have taken a step.
    pub fn has_begun(&self) -> bool {
        self.seen.iter().any(|seen| seen.ready)
    }

    /// Kills every rank that still runs; `why` is what is said of it.
    pub fn kill(&mut self, why: &str) {
        for seen in self.seen.iter_mut().filter(|seen| seen.ending.is_none()) {
            seen.given_up.get_or_insert_with(|| why.to_owned());
        }
        self.ranks.kill();
    }

    /// What is known of a rank.
    pub fn seen(&self, rank: u64) -> Option<&Seen> {
        self.seen.get(usize::try_from(rank).ok()?)
    }

    /// Takes in what happened.
    pub fn take(&mut self, event: &Event) {
        let (Event::Report { rank, .. } | Event::Exited { rank, .. }) = event;
        let index = usize::try_from(*rank).unwrap_or(usize::MAX);
        self.silence.take(index, event);
        let Some(seen) = self.seen.get_mut(index) else {
            return;
        };
        match event {
            Event::Report { report, .. } => seen.take(report),
            Event::Exited { ending, .. } => {
                seen.end(*ending, self.foreign.is_some() && self.trouble.is_some());
            }
        }
        if seen.in_trouble() {
            self.trouble.get_or_insert_with(Instant::now);
        }
    }

    /// Gives up ranks that are silent before the meeting. Once something went wrong: waits until
    /// every rank is gone or says what it holds, then lets the one that holds the most commit it.
    /// `pinned`: samples of the checkpoint that would be gone back to otherwise. Returns what people
    /// should know, a line each.
    pub fn settle(&mut self, pinned: u64) -> Option<String> {
        let overdue = self.end_overdue();
        self.settle_loss(pinned);
        overdue
    }

    /// Ends a program of the user's own that was asked to leave and does not.
    fn end_overdue(&mut self) -> Option<String> {
        let foreign = self.foreign.as_ref()?;
        let overdue = foreign.leaving?.elapsed() > foreign.patience;
        let mut ended = Vec::new();
        for (rank, seen) in (0..).zip(&mut self.seen) {
            if overdue && seen.ending.is_none() && !seen.dismissed {
                seen.dismissed = true;
                self.ranks.kill_one(rank);
                ended.push(format!("rank {rank}"));
            }
        }
        (!ended.is_empty()).then(|| {
            format!(
                "{} did not leave within {} s and was killed: what was not saved by then is trained \
                 again",
                ended.join(", "),
                foreign.patience.as_secs()
            )
        })
    }

    fn settle_loss(&mut self, pinned: u64) {
        for rank in self.silence.look() {
            if let Some(seen) = self.seen.get_mut(rank) {
                seen.given_up = Some(silence::words());
            }
            self.ranks.kill_one(rank as u64);
        }
        let Some(since) = self.trouble else { return };
        if let Some(told) = self.settled {
            if told.elapsed() > COMMIT {
                self.kill(&format!("no commit within {} s", COMMIT.as_secs()));
            }
            return;
        }
        if !seen::is_settled(&self.seen, since.elapsed()) {
            return;
        }
        for rank in seen::leave_behind(&mut self.seen, 0, self.foreign.is_some()) {
            self.ranks.kill_one(rank);
        }
        self.settled = Some(Instant::now());
        let committer = seen::committer(&self.seen, pinned);
        for rank in 0..self.seen.len() as u64 {
            let order = match committer {
                Some(chosen) if chosen == rank => Order::Commit,
                _ => Order::Stop,
            };
            self.ranks.order(rank, order);
        }
    }

    /// Ranks whose processes a signal ended.
    pub fn killed(&self) -> u64 {
        seen::killed(&self.seen)
    }

    /// How the generation ended, once every rank has; see [`seen::outcome`].
    pub fn outcome(
        &self,
        micro: u64,
        descent: impl Fn() -> Option<u64>,
        oom_killed: impl FnOnce() -> bool,
    ) -> Option<Outcome> {
        seen::outcome(&self.seen, micro, descent, oom_killed)
    }
}
