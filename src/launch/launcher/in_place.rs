//! Ranks continue in the next generation with their processes and states: those that are left after a loss, and all of them
//! when the world is to change. What a larger world needs is started while the smaller one trains.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Current, Launcher};
use crate::host::Start;
use crate::launch::LaunchError;
use crate::lifecycle::protocol::HeldState;
use crate::lifecycle::{RankAction, Reason, rank_status};
use crate::plan::Reached;
use crate::recipe::schema::spec::Strategy;
use crate::train::preferences::Loss;
use crate::util::key::Key;

/// Time in which a killed process ends.
const ENDING: Duration = Duration::from_secs(2);
/// Time in which a process begins to stand by.
const PREPARING: Duration = Duration::from_secs(120);

impl Launcher<'_> {
    /// Constraints on every further plan of the run: by what its ranks hold, which no checkpoint may have yet, or by its
    /// newest checkpoint.
    pub(super) fn reached(&self) -> Reached {
        let reached = self.state.reached(&self.run);
        let current = self.current.as_ref().filter(|it| it.host.waits());
        let newest =
            current.and_then(|it| rank_status::carriers(it.host.statuses()).first().copied());
        match newest {
            Some((_, held)) => Reached {
                batch: Some(held.batch),
                ..reached
            },
            None => reached,
        }
    }

    /// The ranks that continue in the world which is to be published, with what they hold; rank 0 first. None if new
    /// processes start.
    pub(super) fn carriers(&self, action: &RankAction) -> Vec<(u64, HeldState)> {
        let Some(current) = self.current.as_ref().filter(|it| it.host.waits()) else {
            return Vec::new();
        };
        let RankAction::Publish {
            world,
            reason: Reason::RankLost { .. } | Reason::Resized { .. } | Reason::Resumed,
            per_device_batch_size_limit: None,
        } = action
        else {
            return Vec::new();
        };
        let mut carriers = rank_status::carriers(current.host.statuses());
        let world = usize::try_from(*world).unwrap_or(usize::MAX);
        let newest = carriers.first().map(|(_, held)| held.samples);
        let is_newest = newest.is_some_and(|samples| samples >= self.state.committed_samples());
        let is_large_enough = carriers.len() >= world || self.takes_others();
        if !current.host.can_carry_on() || !is_large_enough || !is_newest {
            return Vec::new();
        }
        carriers.truncate(world);
        carriers
    }

    /// Whether a process without a state can become one of the ranks: what a reference model says of the data is agreed on
    /// when a run starts or resumes.
    fn takes_others(&self) -> bool {
        Loss::of(&self.run.spec).is_none()
    }

    /// Whether the ranks, which are to leave their world, wait in place of a commit: they continue in another one.
    pub(super) fn pauses(&self) -> bool {
        let stops = self.stop.is_some() || self.signals.load(Ordering::Relaxed) > 0;
        let host = self.current.as_ref().map(|current| &current.host);
        let can_carry_on = host.is_some_and(|it| {
            let is_whole = it.record.plan.facts.strategy == Strategy::Ddp;
            it.can_carry_on() && is_whole && it.is_ready()
        });
        can_carry_on && !stops
    }

    /// Before a change `towards` another world: starts the processes that it needs besides those of this one. True while
    /// they begin to stand by.
    pub(super) fn prepares(&mut self, towards: Option<u64>) -> Result<bool, LaunchError> {
        let (pauses, takes_others) = (self.pauses(), self.takes_others());
        let Some(current) = self.current.as_mut().filter(|_| pauses && takes_others) else {
            return Ok(false);
        };
        let host = &mut current.host;
        let further = towards.unwrap_or(0).saturating_sub(host.record.world());
        let further = usize::try_from(further).unwrap_or(usize::MAX);
        if let Some(since) = self.preparing {
            // One that has ended will be started again with the next world.
            return Ok(!host.are_spares_ready() && since.elapsed() < PREPARING);
        }
        self.preparing = Some(Instant::now());
        let record = host.record.clone();
        let free = self.gpus.iter().filter(|gpu| !current.gpus.contains(gpu));
        let mut free = free.cloned();
        let key = Key::random().map_err(|error| LaunchError::Spawn { error })?;
        while host.spares() < further {
            let gpus: Vec<String> = free.next().into_iter().collect();
            let start = Start {
                evenkeel: &self.program,
                run_dir: self.run_dir.path(),
                generation: &record,
                first: 0,
                count: towards.unwrap_or(1),
                cores: self.cores,
                gpus: &gpus,
                key: &key,
                progress_deadline: self.progress_deadline,
                bucket: None,
                shows_built_in: false,
            };
            let started = host.stand_by(&start, &self.events.0);
            started.map_err(|error| LaunchError::Spawn { error })?;
        }
        Ok(further > 0)
    }

    /// Ends processes that no change needs any more.
    pub(super) fn dismiss_spares(&mut self) {
        if let Some(current) = self.current.as_mut().filter(|it| !it.host.is_draining()) {
            self.preparing = None;
            current.host.dismiss();
        }
    }

    /// Lets the ranks that wait commit what no checkpoint has, and end; false if none waits.
    pub(super) fn release(&mut self) -> bool {
        let committed = self.state.committed_samples();
        let Some(current) = self.current.as_mut().filter(|it| it.host.waits()) else {
            return false;
        };
        let host = &mut current.host;
        // One that cannot answer has been killed, and ends soon.
        let is_complete = host.statuses().iter().all(|it| it.as_left().is_some());
        let is_overdue = host.settled().is_some_and(|since| since.elapsed() > ENDING);
        if host.can_carry_on() && !is_complete && !is_overdue {
            return false;
        }
        host.settle(rank_status::committer(host.statuses(), committed));
        true
    }
}

impl Current {
    /// The GPUs of a generation in which these ranks continue, of those that work: theirs, those of the processes that stand
    /// by, and free ones.
    pub(super) fn gpus_for(&self, ranks: &[(u64, HeldState)], all: &[String]) -> Vec<String> {
        let local = |(rank, _): &(u64, HeldState)| usize::try_from(*rank).ok();
        let theirs = ranks.iter().filter_map(|rank| self.gpus.get(local(rank)?));
        let mut gpus: Vec<String> = theirs.chain(self.host.gpus_of_spares()).cloned().collect();
        let free = all.iter().filter(|gpu| !self.gpus.contains(gpu));
        let further: Vec<String> = free.filter(|gpu| !gpus.contains(gpu)).cloned().collect();
        gpus.extend(further);
        gpus
    }
}
