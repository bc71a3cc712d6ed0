//! The work of a host on one generation, from the start of its ranks to their end.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::gpus;
use super::program::{ExternalProgram, Start};
use super::ranks::{Event, News, RankGroup, Ranks, STANDING_BY};
use super::remote::{Gate, RemoteRanks, Share};
use super::silence::Silence;
use super::stall::ExternalStall;
use super::tail::{Tail, new_output};
use crate::external_trainer::{ExternalCall, PostServer, ProgressWatch};
use crate::lifecycle::protocol::{Ending, HeldState, Order, Report};
use crate::lifecycle::rank_status::{self, Cause, RankStatus, Stage};
use crate::lifecycle::{ExternalCheckpoint, Generation, Member, files};
use crate::telemetry::StepRecord;

/// The ranks of one generation on a host: a machine or a pod.
pub struct HostGeneration {
    pub record: Generation,
    /// The external trainer; `None` for the built-in trainer.
    pub external: Option<Arc<ExternalCall>>,
    /// The first rank on this host.
    first: u64,
    /// The GPU of each rank on this host; empty if the ranks compute on the CPU.
    gpus: Vec<String>,
    ranks: Vec<Box<dyn RankGroup + Send>>,
    /// One status for each rank on this host.
    statuses: Vec<RankStatus>,
    silence: Silence,
    /// Output that is shown.
    tails: Vec<Tail>,
    /// Takes what the ranks of an external trainer on this machine post.
    posts: Option<PostServer>,
    /// The external trainer's progress, on the host of rank 0 until its ranks have ended.
    progress: Option<(ProgressWatch, ExternalStall)>,
    /// Whether a rank has reported that it is connected to all others.
    begun: bool,
    /// The file of its steps.
    metrics: PathBuf,
    draining: bool,
    /// Time of the first order to drain.
    leaving: Option<Instant>,
    /// Time of the first problem.
    trouble: Option<Instant>,
    /// Time when the survivors of a loss received their orders, or began to wait for them.
    settled: Option<Instant>,
    /// Ranks wait for what is decided.
    waits: bool,
    spares: Vec<Spare>,
    /// Number of the next one: events of one that has ended may still arrive.
    next_spare: u64,
    /// Processes that were started to stand by.
    spares_started: usize,
}

/// A process that stands by.
struct Spare {
    number: u64,
    /// Its host.
    slot: u64,
    gpu: Option<String>,
    is_ready: bool,
}

/// The processes on other hosts that continue in another generation.
#[derive(Default)]
struct LeftToHosts {
    /// States of those that were ranks, by their ranks there.
    held: Vec<(u64, HeldState)>,
    /// Numbers of those that stand by and become ranks, by their hosts.
    spares: BTreeMap<u64, Vec<u64>>,
}

/// What is new in a generation; see [`HostGeneration::follow`].
#[derive(Default)]
pub struct Followed {
    /// A step of the external trainer.
    pub step: Option<StepRecord>,
    /// The external trainer makes no progress, or makes progress again.
    pub stall: Option<Report>,
    /// The external trainer's newest checkpoint, if it was looked for.
    pub checkpoint: Option<ExternalCheckpoint>,
    /// The external trainer's ranks have ended, so nothing follows.
    pub is_last: bool,
}

impl HostGeneration {
    /// Starts the ranks on this machine; their reports and exits go to `events`. `external`: the external trainer, if it
    /// runs.
    pub fn start(
        start: &Start<'_>,
        external: Option<Arc<ExternalCall>>,
        events: &Sender<Event>,
    ) -> io::Result<HostGeneration> {
        let watch = watch(start, external.as_deref());
        let number = start.generation.number;
        let posts = external.as_ref();
        let posts = posts.and_then(|_| PostServer::start(start.run_dir, number, start.first));
        let program = external.as_deref().map(|external| {
            ExternalProgram::of(external)
                .with(watch.as_ref().map(ProgressWatch::variable))
                .with(posts.iter().flat_map(PostServer::variables))
        });
        let ranks = Ranks::start(start, program.as_ref(), events)?;
        Ok(HostGeneration {
            posts,
            ..HostGeneration::of(start, external, watch, vec![Box::new(ranks)])
        })
    }

    /// The same for a whole world on other hosts, each with its number of ranks and their GPUs. Processes of the generation
    /// `earlier` continue as the new one says.
    pub fn start_on(
        start: &Start<'_>,
        external: Option<Arc<ExternalCall>>,
        shares: &[Share],
        earlier: Option<HostGeneration>,
        events: &Sender<Event>,
    ) -> HostGeneration {
        let watch = watch(start, external.as_deref());
        let next_spare = earlier.as_ref().map_or(0, |earlier| earlier.next_spare);
        let left = earlier.map(|earlier| earlier.leave_to_hosts(start.generation));
        let LeftToHosts { held, mut spares } = left.unwrap_or_default();
        let firsts = start.generation.shares().map(|(first, _)| first);
        let gate = start.bucket.filter(|_| start.generation.carried.is_none());
        let gate = gate.map(|_| Gate::of(start.generation.number, shares));
        let mut ranks = |(share, first): (&Share, u64)| -> Box<dyn RankGroup + Send> {
            let progress = watch.as_ref().filter(|_| first == 0);
            let program = external.as_deref().map(ExternalProgram::of);
            let program = program.map(|it| it.with(progress.map(ProgressWatch::variable)));
            let gate = gate.clone();
            Box::new(RemoteRanks::start(
                start,
                program,
                (share, first),
                spares.remove(&share.slot).unwrap_or_default(),
                gate,
                events,
            ))
        };
        let ranks = shares.iter().zip(firsts).map(&mut ranks).collect();
        let next = HostGeneration {
            next_spare,
            ..HostGeneration::of(start, external, watch, ranks)
        };
        next.with_held(held)
    }

    /// Leaves to the other hosts what continues in another generation, and ends the rest.
    fn leave_to_hosts(mut self, next: &Generation) -> LeftToHosts {
        let held = self.held_in(next);
        let taken = |member: &Member| {
            let wanted = member.ranks.saturating_sub(member.carries.len() as u64);
            (member.slot, self.ready_spares(member.slot, wanted))
        };
        let spares: BTreeMap<u64, Vec<u64>> = next.members.iter().map(taken).collect();
        let is_left = |spare: &Spare| {
            let taken = spares.get(&spare.slot);
            taken.is_none_or(|taken| !taken.contains(&spare.number))
        };
        self.spares.retain(is_left);
        self.dismiss(0);
        for group in &mut self.ranks {
            let mut members = next.members.iter().filter(|it| it.slot == group.slot());
            if members.any(|it| !it.carries.is_empty() || !spares[&it.slot].is_empty()) {
                group.release();
            }
        }
        LeftToHosts { held, spares }
    }

    fn of(
        start: &Start<'_>,
        external: Option<Arc<ExternalCall>>,
        watch: Option<ProgressWatch>,
        ranks: Vec<Box<dyn RankGroup + Send>>,
    ) -> HostGeneration {
        let generation = start.generation;
        let (number, first, count) = (generation.number, start.first, start.count);
        let shown = if start.shows_built_in || external.is_some() {
            count
        } else {
            0
        };
        HostGeneration {
            record: generation.clone(),
            first,
            gpus: start.gpus.to_vec(),
            ranks,
            statuses: vec![RankStatus::default(); usize::try_from(count).unwrap_or(0)],
            silence: match external {
                Some(_) => Silence::of_external_trainer(count),
                None => Silence::new(count, generation.world()),
            },
            external,
            tails: (first..first + shown)
                .map(|rank| Tail::of(start.run_dir, number, rank))
                .collect(),
            posts: None,
            progress: watch.map(|watch| (watch, ExternalStall::new(start.progress_deadline))),
            begun: false,
            metrics: (start.run_dir)
                .join(files::generation(number))
                .join(files::METRICS),
            draining: false,
            leaving: None,
            trouble: None,
            settled: None,
            waits: false,
            spares: Vec::new(),
            next_spare: 0,
            spares_started: 0,
        }
    }

    /// Continues in another generation with processes of this one, as its record says. Its further ranks are the processes
    /// that stand by, in the order of [`HostGeneration::gpus_in`], and new ones.
    ///
    /// # Errors
    /// A process cannot be started.
    pub fn carry_on(self, start: &Start<'_>, events: &Sender<Event>) -> io::Result<HostGeneration> {
        let held = self.held_in(start.generation);
        let kept = start.generation.carries(start.first);
        let taken = self.ready_spares(0, start.count.saturating_sub(kept.len() as u64));
        let mut ranks = self.ranks;
        for group in &mut ranks {
            group.carry_on(start, kept, &taken, events)?;
        }
        let next = HostGeneration::of(start, None, None, ranks);
        let left = self.spares.into_iter();
        let next = HostGeneration {
            next_spare: self.next_spare,
            spares: left.filter(|it| !taken.contains(&it.number)).collect(),
            ..next
        };
        Ok(next.with_held(held))
    }

    /// What the processes hold that continue in another generation, by their ranks there.
    fn held_in(&self, next: &Generation) -> Vec<(u64, HeldState)> {
        let places = next.shares().flat_map(|(first, member)| {
            let places = (first..).zip(&member.carries);
            places.filter_map(|(rank, old)| Some((rank, self.status(*old)?.held()?)))
        });
        places.collect()
    }

    fn with_held(mut self, held: Vec<(u64, HeldState)>) -> HostGeneration {
        for (rank, held) in held {
            if let Some(local) = self.local(rank) {
                self.statuses[local] = RankStatus::carrying(held);
            }
        }
        self
    }

    /// Starts a process that stands by. `start` is that of this generation, with the GPU of the process as the only one.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn stand_by(&mut self, start: &Start<'_>, events: &Sender<Event>) -> io::Result<()> {
        self.stand_by_at(0, start, events)
    }

    /// The same on another host, which may have no rank of this generation. One that cannot be started ends.
    ///
    /// # Errors
    /// None on hosts that are reached.
    pub fn stand_by_on(
        &mut self,
        share: &Share,
        start: &Start<'_>,
        events: &Sender<Event>,
    ) -> io::Result<()> {
        if !self.ranks.iter().any(|group| group.slot() == share.slot) {
            self.ranks.push(Box::new(RemoteRanks::none(share, events)));
        }
        self.stand_by_at(share.slot, start, events)
    }

    fn stand_by_at(
        &mut self,
        slot: u64,
        start: &Start<'_>,
        events: &Sender<Event>,
    ) -> io::Result<()> {
        let number = self.next_spare;
        self.next_spare += 1;
        self.spares_started += 1;
        for group in self.ranks.iter_mut().filter(|it| it.slot() == slot) {
            group.stand_by(start, number, events)?;
        }
        self.spares.push(Spare {
            number,
            slot,
            gpu: start.gpus.first().cloned(),
            is_ready: false,
        });
        Ok(())
    }

    /// The same, whose processes that stand by are numbered from here on.
    pub fn with_spares_from(self, next_spare: u64) -> HostGeneration {
        HostGeneration { next_spare, ..self }
    }

    /// Processes that stand by on a host and become ranks there, at most `wanted`.
    pub fn ready_spares(&self, slot: u64, wanted: u64) -> Vec<u64> {
        let ready = self
            .spares
            .iter()
            .filter(|it| it.slot == slot && it.is_ready);
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        ready.map(|spare| spare.number).take(wanted).collect()
    }

    /// Ends the processes that stand by, except for the first ones.
    pub fn dismiss(&mut self, except: usize) {
        for spare in self.spares.drain(except.min(self.spares.len())..) {
            for group in &mut self.ranks {
                group.dismiss(spare.number);
            }
        }
    }

    /// Processes that stand by on a host or begin to.
    pub fn spares(&self, slot: u64) -> u64 {
        self.spares.iter().filter(|it| it.slot == slot).count() as u64
    }

    /// Whether one more process is to stand by here, of `wanted`. Those that end at once are not started for ever.
    pub fn lacks_spares(&self, wanted: usize) -> bool {
        let trains = self.is_ready() && !self.draining && self.trouble.is_none();
        trains && self.spares.len() < wanted && self.spares_started < 3 * wanted
    }

    /// A GPU of these, of a host, that no process there uses.
    pub fn free_gpu<'g>(&self, slot: u64, all: &'g [String]) -> Option<&'g String> {
        let ranks = self.gpus_on(slot);
        let is_used =
            |gpu: &String| ranks.contains(gpu) || self.gpus_of_spares(slot).any(|it| it == gpu);
        all.iter().find(|gpu| !is_used(gpu))
    }

    pub fn are_spares_ready(&self) -> bool {
        self.spares.iter().all(|spare| spare.is_ready)
    }

    /// The GPUs of the processes that stand by on a host, those first that are ready.
    fn gpus_of_spares(&self, slot: u64) -> impl Iterator<Item = &String> {
        let of = move |ready| {
            let on_host = self.spares.iter().filter(move |it| it.slot == slot);
            let spares = on_host.filter(move |it| it.is_ready == ready);
            spares.filter_map(|spare| spare.gpu.as_ref())
        };
        of(true).chain(of(false))
    }

    /// Whether its processes can continue in another generation: those of the built-in trainer.
    pub fn can_carry_on(&self) -> bool {
        self.external.is_none()
    }

    /// Whether processes of this host continue in another generation, or stand by to join it.
    pub fn continues_in(&self, next: &Generation) -> bool {
        let is_next = next.carried.is_some_and(|it| it.from == self.record.number);
        let ranks = self.ranks();
        let mut carried = next.members.iter().flat_map(|member| &member.carries);
        let stays = carried.any(|rank| ranks.contains(rank));
        let joins = self.spares.iter().any(|spare| spare.is_ready);
        is_next && self.can_carry_on() && (stays || joins)
    }

    /// The GPU of a rank.
    pub fn gpu(&self, rank: u64) -> Option<&String> {
        self.gpus.get(self.local(rank)?)
    }

    /// The GPUs of the ranks of a host.
    fn gpus_on(&self, slot: u64) -> Vec<String> {
        let groups = self.ranks.iter().filter(|group| group.slot() == slot);
        let ranks = groups.flat_map(|group| group.ranks());
        ranks.filter_map(|rank| self.gpu(rank)).cloned().collect()
    }

    /// The GPUs of the ranks of a host in another generation: first those of the ranks that continue (`carries`) and of
    /// processes that stand by. `all`: those that work there.
    pub fn gpus_in(&self, carries: &[u64], slot: u64, all: &[String]) -> Vec<String> {
        let kept = carries.iter().filter_map(|rank| self.gpu(*rank));
        let kept: Vec<String> = kept.chain(self.gpus_of_spares(slot)).cloned().collect();
        gpus::in_place(&kept, &self.gpus_on(slot), all)
    }

    /// The statuses of the ranks on this host.
    pub fn statuses(&self) -> &[RankStatus] {
        &self.statuses
    }

    /// The ranks on this host.
    pub fn ranks(&self) -> Range<u64> {
        self.first..self.first + self.statuses.len() as u64
    }

    /// The status of a rank; `None` if it is on another host.
    pub fn status(&self, rank: u64) -> Option<&RankStatus> {
        self.statuses.get(self.local(rank)?)
    }

    /// Index of a rank on this host.
    fn local(&self, rank: u64) -> Option<usize> {
        let local = usize::try_from(rank.checked_sub(self.first)?).ok()?;
        (local < self.statuses.len()).then_some(local)
    }

    /// Whether all ranks have connected and loaded their state.
    pub fn is_ready(&self) -> bool {
        self.statuses.iter().all(|rank| rank.stage == Stage::Ready)
    }

    /// Whether a rank has connected to all others; it may have taken a step.
    pub fn has_begun(&self) -> bool {
        // On a busy machine ranks may have taken steps before their reports arrive.
        self.begun || self.metrics.metadata().is_ok_and(|steps| steps.len() > 0)
    }

    pub fn has_ended(&self) -> bool {
        self.statuses.iter().all(RankStatus::has_ended)
    }

    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Time of the first problem.
    pub fn trouble(&self) -> Option<Instant> {
        self.trouble
    }

    /// Time when the survivors of a loss received their orders.
    pub fn settled(&self) -> Option<Instant> {
        self.settled
    }

    /// Whether the kernel's out-of-memory killer has struck since the ranks were started.
    pub fn is_oom_killed(&self) -> bool {
        self.ranks.iter().any(|group| group.is_oom_killed())
    }

    /// Records an event of a process that stands by.
    fn take_of_spare(&mut self, number: u64, news: &News) {
        match news {
            News::Report(report) if **report == Report::StandingBy => {
                let mut spares = self.spares.iter_mut();
                if let Some(spare) = spares.find(|spare| spare.number == number) {
                    spare.is_ready = true;
                }
            }
            News::Exited(_) => self.spares.retain(|spare| spare.number != number),
            News::Report(_) | News::Posted(_) | News::Printed(_) | News::Stacks(_) => {}
        }
    }

    /// Records an event of a rank; false if it is of another generation or of another host's rank.
    pub fn take(&mut self, event: &Event) -> bool {
        if event.generation == STANDING_BY {
            self.take_of_spare(event.rank, &event.news);
            return false;
        }
        let local = self.local(event.rank);
        let Some(local) = local.filter(|_| event.generation == self.record.number) else {
            return false;
        };
        self.silence.take(local, &event.news);
        let status = &mut self.statuses[local];
        match &event.news {
            News::Report(report) => status.take(report),
            News::Posted(progress) => {
                if let Some((watch, _)) = &mut self.progress {
                    watch.take_post(*progress);
                }
            }
            News::Printed(_) | News::Stacks(_) => {}
            News::Exited(ending) => {
                status.end(*ending, self.external.is_some() && self.trouble.is_some());
            }
        }
        self.begun |= status.stage == Stage::Ready;
        if status.in_trouble() {
            self.trouble.get_or_insert_with(Instant::now);
        }
        true
    }

    /// Records that a rank ran out of memory.
    pub fn out_of_memory(&mut self, rank: u64, message: String) {
        if let Some(local) = self.local(rank) {
            self.statuses[local].out_of_memory(message);
        }
    }

    /// Shows the new output of the ranks, and follows the external trainer. `ended`: the ranks have exited, so this is
    /// the last report, and the newest checkpoint counts.
    pub fn follow(&mut self, ended: bool, show: impl FnMut(u64, String)) -> Followed {
        let watch = self.progress.as_mut().map(|(watch, _)| watch);
        new_output(&mut self.tails, watch, ended, show);
        let (Some((watch, stall)), Some(external)) = (&mut self.progress, &self.external) else {
            return Followed::default();
        };
        if let Some(posted) = self.posts.as_ref().and_then(PostServer::newest) {
            watch.take_post(posted);
        }
        let mut checkpoint = None;
        let step = watch.next(&self.record, ended, || {
            checkpoint = external.newest();
            Some(checkpoint.as_ref()?.path.clone())
        });
        let stall = if ended {
            None
        } else {
            let newest = checkpoint.as_ref().map(|newest| newest.path.as_path());
            stall.look(&self.tails, newest, step.is_some())
        };
        if ended {
            self.progress = None;
        }
        Followed {
            step,
            stall,
            checkpoint,
            is_last: ended,
        }
    }

    /// Lets the ranks drain, or cancels that. Ranks that have already agreed on a step ignore the cancellation.
    pub fn set_draining(&mut self, draining: bool) {
        if std::mem::replace(&mut self.draining, draining) == draining {
            return;
        }
        if draining {
            self.leave();
        } else {
            self.order_all(Order::CancelDrain);
        }
    }

    /// Lets the ranks leave their world and wait, as a drain that [`HostGeneration::set_draining`] cancels.
    pub fn pause(&mut self) {
        if !std::mem::replace(&mut self.draining, true) {
            self.order_all(Order::Pause);
        }
    }

    /// Lets the ranks drain because their host leaves, whatever is decided for the generation. They agree with their
    /// peers on a step, so one drained rank drains all.
    pub fn leave(&mut self) {
        self.order_all(Order::Drain);
        self.leaving.get_or_insert_with(Instant::now);
    }

    /// Kills the ranks in place of a drain: ranks that still connect read no orders and have nothing to commit.
    pub fn kill_undrained(&mut self, message: &str) {
        self.draining = true;
        self.kill(message);
    }

    /// Kills the running ranks and records `message` as the reason; true if nothing else had ended one of them.
    pub fn kill(&mut self, message: &str) -> bool {
        let mut first = false;
        for rank in self.statuses.iter_mut().filter(|rank| !rank.has_ended()) {
            first |= rank.kill(|| message.to_owned());
        }
        self.fence();
        first
    }

    /// Kills the running ranks, without which the world has continued.
    pub fn fence(&mut self) {
        self.ranks.iter_mut().for_each(|group| group.kill());
    }

    /// Records that the host of these ranks is lost.
    pub fn lose(&mut self, ranks: Range<u64>, message: &str) {
        for rank in ranks {
            let Some(local) = self.local(rank) else {
                continue;
            };
            let status = &mut self.statuses[local];
            if !status.has_ended() {
                // This explains what its peers have noticed.
                status.cause = Some(Cause::HostLost(message.to_owned()));
                status.end(Ending::Signal(Signal::KILL.as_raw()), false);
                self.trouble.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Forgets the processes that stood by on a host that is lost.
    pub fn lose_spares(&mut self, slot: u64) {
        self.spares.retain(|spare| spare.slot != slot);
        (self.ranks).retain(|group| group.slot() != slot || !group.ranks().is_empty());
    }

    /// This checkpoint is committed: hosts with their own disks need no copies of older ones.
    pub fn committed(&mut self, path: &str) {
        self.ranks
            .iter_mut()
            .for_each(|group| group.committed(path));
    }

    fn order_all(&mut self, order: Order) {
        for group in &mut self.ranks {
            group
                .ranks()
                .for_each(|rank| group.order(rank, order.clone()));
        }
    }

    fn group(&mut self, rank: u64) -> Option<&mut Box<dyn RankGroup + Send>> {
        self.ranks
            .iter_mut()
            .find(|group| group.ranks().contains(&rank))
    }

    fn kill_one(&mut self, rank: u64) {
        if let Some(group) = self.group(rank) {
            group.kill_one(rank);
        }
    }

    /// Kills ranks that miss their heartbeat before they have connected to their peers.
    pub fn kill_silent(&mut self) {
        for local in self.silence.timed_out() {
            if let Some(rank) = self.statuses.get_mut(local) {
                rank.kill(|| self.silence.message());
            }
            self.kill_one(self.first + local as u64);
        }
    }

    /// Ends a rank that makes no progress. One that was `waiting` for other ranks does not count as the stalled one. Of an
    /// external trainer it is not known which rank keeps the others waiting: all are aborted.
    pub fn stall(&mut self, rank: u64, message: &str, waiting: bool) {
        if self.external.is_some() {
            for status in &mut self.statuses {
                status.stall(message.to_owned());
            }
            self.ranks.iter_mut().for_each(|group| group.abort());
        } else if let Some(local) = self.local(rank) {
            let status = &mut self.statuses[local];
            if waiting {
                status.kill(|| message.to_owned());
            } else {
                status.stall(message.to_owned());
            }
            self.kill_one(rank);
        }
    }

    /// Whether ranks wait, after a loss or a pause, for [`HostGeneration::settle`] or [`HostGeneration::carry_on`].
    pub fn waits(&self) -> bool {
        self.waits && !self.has_ended()
    }

    /// Once after a loss: kills the ranks that cannot answer any more. The others wait.
    pub fn hold(&mut self) {
        if self.settled.is_some() {
            return;
        }
        self.settled = Some(Instant::now());
        self.waits = true;
        let (first, external) = (self.first, self.external.is_some());
        for rank in rank_status::give_up_unresponsive(&mut self.statuses, first, external) {
            self.kill_one(rank);
        }
    }

    /// Once after a loss: kills the ranks that cannot answer any more, and lets `committer` commit and the others stop.
    pub fn settle(&mut self, committer: Option<u64>) {
        self.hold();
        if !std::mem::take(&mut self.waits) {
            return;
        }
        self.settled = Some(Instant::now());
        for rank in self.ranks() {
            let order = match committer {
                Some(chosen) if chosen == rank => Order::Commit,
                _ => Order::Stop,
            };
            if let Some(group) = self.group(rank) {
                group.order(rank, order);
            }
        }
    }

    /// Kills ranks of an external trainer that exceed its time limit after the drain signal. Returns a note for the
    /// user.
    pub fn kill_overdue(&mut self) -> Option<String> {
        let limit = self.external.as_ref()?.recipe.spec.trainer.drain_seconds;
        if self.leaving?.elapsed() <= Duration::from_secs(limit) {
            return None;
        }
        let mut ended = Vec::new();
        for (rank, status) in (self.first..).zip(&mut self.statuses) {
            if !status.has_ended() && !status.is_collateral() {
                status.cause = Some(Cause::Collateral);
                ended.push(rank);
            }
        }
        ended.iter().for_each(|rank| self.kill_one(*rank));
        let ended: Vec<String> = ended.iter().map(|rank| format!("rank {rank}")).collect();
        (!ended.is_empty()).then(|| {
            format!(
                "{} did not exit within {limit} s and was killed; training repeats the steps since its last checkpoint",
                ended.join(", ")
            )
        })
    }
}

/// What watches the external trainer, if rank 0 is among the ranks.
fn watch(start: &Start<'_>, external: Option<&ExternalCall>) -> Option<ProgressWatch> {
    let external = external.filter(|_| start.first == 0)?;
    let pattern = external.recipe.spec.trainer.progress_pattern.as_deref();
    let resumed = external.call.checkpoint.as_deref();
    Some(ProgressWatch::start(
        start.run_dir,
        start.generation.number,
        pattern,
        resumed,
    ))
}
