//! Ranks continue in the next generation with their processes and states: those that are left after a loss, and all of them
//! when the world is to change. What a larger world needs is started while the smaller one trains.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Current, Launcher};
use crate::host::{Share, Start, gpus};
use crate::launch::LaunchError;
use crate::lifecycle::generation::Carried;
use crate::lifecycle::{Member, RankAction, Reason, in_place, rank_status};
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

    /// The processes that continue in the world which is to be published. `None`: new ones start.
    pub(super) fn continuation(&self, action: &RankAction) -> Option<Continuation> {
        let current = self.current.as_ref().filter(|it| it.host.waits())?;
        let RankAction::Publish {
            world,
            reason: Reason::RankLost { .. } | Reason::Resized { .. } | Reason::Resumed,
            per_device_batch_size_limit: None,
        } = action
        else {
            return None;
        };
        let host = &current.host;
        let (members, shares) = self.members(*world);
        let (members, carried) = in_place::continued(&host.record, host.statuses(), members)?;
        // A host that brings files from a bucket may take longer than ranks wait.
        let is_known = |member: &Member| !member.carries.is_empty();
        let are_known = self.bucket_run.is_none() || members.iter().all(is_known);
        let is_newest = carried.samples >= self.state.committed_samples();
        let is_planned = self.reached().batch == Some(carried.batch);
        let continues = is_newest && is_planned && are_known;
        let continuation = Continuation {
            members,
            shares,
            carried,
        };
        (host.can_carry_on() && continues).then_some(continuation)
    }

    /// The GPUs of all ranks of the next generation, in the order of the ranks. `shares`: those of other hosts, each with all
    /// GPUs of the host; they keep those of their ranks.
    pub(super) fn place_gpus(
        &self,
        earlier: Option<&Current>,
        members: &[Member],
        shares: &mut [Share],
    ) -> Vec<String> {
        let place = |member: &Member, all: &[String]| {
            let mut gpus = match earlier {
                Some(earlier) => earlier.gpus_for(member, all),
                None => all.to_vec(),
            };
            gpus.truncate(usize::try_from(member.ranks).unwrap_or(usize::MAX));
            gpus
        };
        if self.hosts.is_none() {
            return members
                .iter()
                .flat_map(|it| place(it, &self.gpus))
                .collect();
        }
        for (member, share) in members.iter().zip(&mut *shares) {
            share.gpus = place(member, &share.gpus);
        }
        shares.iter().flat_map(|share| share.gpus.clone()).collect()
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
        let here = self.hosts.is_none();
        let Some(current) = (self.current.as_mut()).filter(|_| here && pauses && takes_others)
        else {
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

/// The processes that continue in the next generation.
pub(super) struct Continuation {
    pub members: Vec<Member>,
    /// Those of other hosts.
    pub shares: Vec<Share>,
    pub carried: Carried,
}

impl Current {
    /// The GPUs of a member of the next generation, of those that work there: first those of its processes that continue or
    /// stand by.
    fn gpus_for(&self, member: &Member, all: &[String]) -> Vec<String> {
        let local = |rank: u64| usize::try_from(rank).unwrap_or(usize::MAX);
        let theirs = (member.carries.iter()).filter_map(|rank| self.gpus.get(local(*rank)));
        let kept: Vec<String> = theirs.chain(self.host.gpus_of_spares()).cloned().collect();
        let mut shares = self.host.record.shares();
        let its = shares.find(|(_, before)| before.slot == member.slot);
        let its = its.map_or(0..0, |(first, before)| {
            local(first)..local(first + before.ranks)
        });
        let before = self.gpus.get(its).unwrap_or_default();
        gpus::in_place(&kept, before, all)
    }
}
