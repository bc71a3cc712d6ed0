//! The launcher's view of one generation's ranks, from their start to one outcome.

use std::time::{Duration, Instant};

use crate::host::{Event, News, Ranks, Silence};
use crate::lifecycle::Outcome;
use crate::lifecycle::protocol::Order;
use crate::lifecycle::rank_status::{self, COMMIT, Cause, RankStatus, Stage};

/// The ranks of one generation.
pub struct Watch {
    ranks: Ranks,
    seen: Vec<RankStatus>,
    silence: Silence,
    /// Whether a rank has connected to all others; it may have taken a step.
    begun: bool,
    /// Time of the first problem.
    trouble: Option<Instant>,
    /// Time when the survivors received their orders.
    settled: Option<Instant>,
    /// Set for an external trainer, which sends no reports.
    external: Option<ExternalState>,
}

/// State of an external trainer.
struct ExternalState {
    /// Time limit for its exit after the drain signal.
    time_limit: Duration,
    /// Time of the drain signal.
    leaving: Option<Instant>,
}

impl Watch {
    /// Watches ranks that were just started.
    pub fn new(ranks: Ranks, world: u64) -> Watch {
        Watch {
            ranks,
            seen: vec![RankStatus::default(); usize::try_from(world).unwrap_or(0)],
            silence: Silence::new(world, world),
            begun: false,
            trouble: None,
            settled: None,
            external: None,
        }
    }

    /// Watches ranks of an external trainer, which may take `time_limit` to exit after the drain
    /// signal.
    pub fn external(ranks: Ranks, world: u64, time_limit: Duration) -> Watch {
        let leaving = None;
        Watch {
            external: Some(ExternalState {
                time_limit,
                leaving,
            }),
            silence: Silence::of_external_trainer(world),
            ..Watch::new(ranks, world)
        }
    }

    /// Orders every rank to drain.
    pub fn drain(&mut self) {
        self.ranks.order_all(Order::Drain);
        if let Some(external) = &mut self.external {
            external.leaving.get_or_insert_with(Instant::now);
        }
    }

    pub fn cancel_drain(&mut self) {
        self.ranks.order_all(Order::CancelDrain);
    }

    /// Whether all ranks have connected and loaded their state.
    pub fn is_ready(&self) -> bool {
        self.seen.iter().all(|seen| seen.stage == Stage::Ready)
    }

    /// Whether a rank has connected to all others; it may have taken a step.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Kills every running rank and records `message` as the reason.
    pub fn kill(&mut self, message: &str) {
        for seen in self.seen.iter_mut().filter(|seen| !seen.has_ended()) {
            seen.kill(|| message.to_owned());
        }
        self.ranks.kill();
    }

    /// Ends a rank that makes no progress; see [`Ranks::stall`].
    pub fn stall(&mut self, rank: u64, message: &str, waiting: bool) {
        self.ranks.stall(&mut self.seen, rank, message, waiting);
    }

    /// The recorded state of a rank.
    pub fn seen(&self, rank: u64) -> Option<&RankStatus> {
        self.seen.get(usize::try_from(rank).ok()?)
    }

    /// Handles an event of a rank.
    pub fn take(&mut self, event: &Event) {
        let index = usize::try_from(event.rank).unwrap_or(usize::MAX);
        self.silence.take(index, &event.news);
        let Some(seen) = self.seen.get_mut(index) else {
            return;
        };
        match &event.news {
            News::Report(report) => seen.take(report),
            News::Exited(ending) => {
                seen.end(*ending, self.external.is_some() && self.trouble.is_some());
            }
        }
        self.begun |= seen.stage == Stage::Ready;
        if seen.in_trouble() {
            self.trouble.get_or_insert_with(Instant::now);
        }
    }

    /// Kills ranks that miss their heartbeat before they have connected. After a failure, waits
    /// until every rank has exited or reported its newest step, then lets the rank with the newest
    /// step commit it. `pinned`: samples of the committed checkpoint, the alternative. Returns
    /// notes for the user, one per line.
    pub fn settle(&mut self, pinned: u64) -> Option<String> {
        let note = self.end_overdue();
        self.settle_loss(pinned);
        note
    }

    /// Kills an external trainer that exceeds its time limit after the drain signal.
    fn end_overdue(&mut self) -> Option<String> {
        let external = self.external.as_ref()?;
        let overdue = external.leaving?.elapsed() > external.time_limit;
        let mut ended = Vec::new();
        for (rank, seen) in (0..).zip(&mut self.seen) {
            if overdue && !seen.has_ended() && !seen.is_collateral() {
                seen.cause = Some(Cause::Collateral);
                self.ranks.kill_one(rank);
                ended.push(format!("rank {rank}"));
            }
        }
        (!ended.is_empty()).then(|| {
            format!(
                "{} did not exit within {} s and was killed; training repeats the steps since its last \
                 checkpoint",
                ended.join(", "),
                external.time_limit.as_secs()
            )
        })
    }

    fn settle_loss(&mut self, pinned: u64) {
        for rank in self.silence.timed_out() {
            if let Some(seen) = self.seen.get_mut(rank) {
                seen.kill(|| self.silence.message());
            }
            self.ranks.kill_one(rank as u64);
        }
        let Some(since) = self.trouble else { return };
        if let Some(since) = self.settled {
            if since.elapsed() > COMMIT {
                self.kill(&format!("no commit within {} s", COMMIT.as_secs()));
            }
            return;
        }
        if !rank_status::is_settled(&self.seen, since.elapsed()) {
            return;
        }
        self.settled = Some(Instant::now());
        let committer = rank_status::committer(&self.seen, pinned);
        let external = self.external.is_some();
        self.ranks.settle(&mut self.seen, external, committer);
    }

    /// Number of ranks whose processes were ended by a signal.
    pub fn killed(&self) -> u64 {
        rank_status::killed(&self.seen)
    }

    /// The generation's outcome once every rank has ended; see [`rank_status::outcome`].
    pub fn outcome(
        &self,
        per_device_batch_size: u64,
        descent: impl Fn() -> Option<u64>,
        oom_killed: impl FnOnce() -> bool,
    ) -> Option<Outcome> {
        rank_status::outcome(&self.seen, per_device_batch_size, descent, oom_killed)
    }
}
