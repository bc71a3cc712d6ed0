//! Ranks continue in the next generation with their processes and states: those that are left after a loss, and all of them
//! when the world is to change. The processes that a larger world needs are started while the smaller one trains.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Launcher;
use crate::host::{HostGeneration, LOST, Share, Start};
use crate::launch::LaunchError;
use crate::lifecycle::generation::Carried;
use crate::lifecycle::in_place::{self, Terms};
use crate::lifecycle::{Member, RankAction, Reason, rank_status};
use crate::plan::{DeviceKind, Reached};
use crate::recipe::schema::spec::Strategy;
use crate::util::key::Key;

/// Time in which a killed process ends.
const ENDING: Duration = Duration::from_secs(2);
/// Time in which it ends on another host, or that host counts as lost.
const ENDING_ELSEWHERE: Duration = LOST.saturating_add(ENDING);
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
        let terms = Terms {
            committed: self.state.committed_samples(),
            batch: self.reached().batch,
            apart: self.bucket_run.is_some(),
        };
        let continued = in_place::continued(&host.record, host.statuses(), members, &terms);
        let (members, carried) = continued.filter(|_| host.can_carry_on())?;
        Some(Continuation {
            members,
            shares,
            carried,
        })
    }

    /// The GPUs of all ranks of the next generation, in the order of the ranks. `shares`: those of other hosts, each with all
    /// GPUs of the host; they keep those of their ranks.
    pub(super) fn place_gpus(
        &self,
        earlier: Option<&HostGeneration>,
        members: &[Member],
        shares: &mut [Share],
    ) -> Vec<String> {
        let place = |member: &Member, all: &[String]| {
            let mut gpus = match earlier {
                Some(earlier) => earlier.gpus_in(&member.carries, member.slot, all),
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

    /// Whether the ranks, which are to leave their world, wait in place of a commit: they continue in another one.
    pub(super) fn pauses(&self) -> bool {
        let host = self.current.as_ref().map(|current| &current.host);
        let can_carry_on = host.is_some_and(|it| {
            let is_whole = it.record.plan.facts.strategy == Strategy::Ddp;
            it.can_carry_on() && is_whole && it.is_ready() && it.trouble().is_none()
        });
        can_carry_on && !self.stops()
    }

    /// Whether the user or the machine wants the run to stop.
    fn stops(&self) -> bool {
        self.stop.is_some() || self.signals.load(Ordering::Relaxed) > 0
    }

    /// Before a change `towards` a larger world: starts the processes that it needs besides those of this one, on the hosts
    /// that will run them. True while they begin to stand by.
    pub(super) fn prepares(&mut self, towards: Option<u64>) -> Result<bool, LaunchError> {
        let world = self.current.as_ref().map_or(0, |it| it.host.record.world());
        let larger = towards.filter(|towards| *towards > world);
        // A host with its own disk brings what they read when its ranks start.
        let plan = self.current.as_ref().map(|it| &it.host.record.plan);
        let takes = plan.is_some_and(|plan| self.run.takes_processes(plan));
        let is_possible = takes && self.pauses() && self.bucket_run.is_none();
        let Some(larger) = larger.filter(|_| is_possible) else {
            return Ok(false);
        };
        if let (Some(since), Some(current)) = (self.preparing, &self.current) {
            // One that has ended will be started again with the next world.
            return Ok(!current.host.are_spares_ready() && since.elapsed() < PREPARING);
        }
        let (members, shares) = self.members(larger);
        let Some(mut current) = self.current.take() else {
            return Ok(false);
        };
        self.preparing = Some(Instant::now());
        let mut started = Ok(());
        for (index, member) in members.iter().enumerate() {
            let share = shares.get(index);
            let mut here = current.host.record.members.iter();
            let here = here.find(|it| it.slot == member.slot);
            let here = here.map_or(0, |it| it.ranks) + current.host.spares(member.slot);
            for _ in here..member.ranks {
                let one = self.stand_by(&mut current.host, share, member.ranks);
                started = started.and(one);
            }
        }
        self.current = Some(current);
        started.map(|()| true)
    }

    /// Starts a process that stands by on this machine or on another host, with a free GPU. `count`: processes that share the
    /// machine's processors.
    fn stand_by(
        &self,
        host: &mut HostGeneration,
        share: Option<&Share>,
        count: u64,
    ) -> Result<(), LaunchError> {
        let (slot, all) = share.map_or((0, &self.gpus), |share| (share.slot, &share.gpus));
        let gpus: Vec<String> = host.free_gpu(slot, all).cloned().into_iter().collect();
        let cannot = |error| LaunchError::Spawn { error };
        let record = host.record.clone();
        let start = Start {
            evenkeel: &self.program,
            run_dir: self.run_dir.path(),
            generation: &record,
            first: 0,
            count,
            cores: self.cores,
            gpus: &gpus,
            key: &Key::random().map_err(cannot)?,
            progress_deadline: self.progress_deadline,
            bucket: None,
            shows_built_in: false,
        };
        let started = match share {
            Some(share) => host.stand_by_on(share, &start, &self.events.0),
            None => host.stand_by(&start, &self.events.0),
        };
        started.map_err(cannot)
    }

    /// Keeps as many processes standing by as the recipe asks for, and ends others that no change needs any more.
    pub(super) fn keep_spares(&mut self) {
        let Some(mut current) = self.current.take_if(|it| !it.host.is_draining()) else {
            return;
        };
        self.preparing = None;
        let plan = &current.host.record.plan;
        let (world, is_on_cpu) = (plan.facts.world_size, self.run.device == DeviceKind::Cpu);
        let wanted = match self.hosts {
            None => self.run.spares(plan),
            // Each host would need its own.
            Some(_) => 0,
        };
        current.host.dismiss(wanted);
        let mut kept = Ok(());
        while kept.is_ok() && current.host.lacks_spares(wanted) {
            if !is_on_cpu && current.host.free_gpu(0, &self.gpus).is_none() {
                break;
            }
            kept = self.stand_by(&mut current.host, None, world);
        }
        self.current = Some(current);
        if let Err(error) = kept {
            self.warn(format!("no process stands by: {error}"));
        }
    }

    /// Lets the ranks that wait commit what no checkpoint has, and end; false if none waits.
    pub(super) fn release(&mut self) -> bool {
        let committed = self.state.committed_samples();
        let ending = if self.hosts.is_some() && !self.stops() {
            ENDING_ELSEWHERE
        } else {
            ENDING
        };
        let Some(current) = self.current.as_mut().filter(|it| it.host.waits()) else {
            return false;
        };
        let host = &mut current.host;
        // One that cannot answer has been killed, and ends soon.
        let is_complete = host.statuses().iter().all(|it| it.as_left().is_some());
        let is_overdue = host.settled().is_some_and(|since| since.elapsed() > ending);
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
