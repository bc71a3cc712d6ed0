//! The local launcher: observes, decides and acts until the job ends. The controller does the same
//! with pods; here the agent runs in this process.

mod bucket;
mod external_trainer;
mod hosts;
mod in_place;
mod out_of_memory;
mod reports;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::launch::launcher::bucket::BucketRun;
use crate::launch::launcher::external_trainer::ExternalRun;
use crate::launch::launcher::in_place::Continuation;

use super::checkpoints::Checkpoints;
use super::hosts::Hosts;
use super::run_dir::{GenerationRow, Phase, RunDir, RunState, Stop, Wanted};
use super::{LaunchError, Prepared, Request, RunLock, port, resume};
use crate::checkpoint;
use crate::host::{Event as RankEvent, HostGeneration, Start};
use crate::lifecycle::rank_status::{self, COMMIT, RankStatus};
use crate::lifecycle::stall::{OnStall, ProgressDeadline};
use crate::lifecycle::{
    End, Generation, Outcome, RankAction, Ranks, Reason, TransitionInput, decide, files,
};
use crate::plan::{self, DeviceKind, OomPolicy, Runner, Worlds};
use crate::telemetry::divergence::LossWatch;
use crate::telemetry::{Display, Event, StepRecord, now};
use crate::train::Run;
use crate::util::format::count;
use crate::util::key::Key;

/// Longest time between two passes of the loop.
const TICK: Duration = Duration::from_millis(50);
/// Failures of the program that are tolerated without progress between them.
const RESTARTS: u64 = 3;

/// One run on this machine.
pub struct Launcher<'a> {
    run_dir: RunDir,
    run: Run,
    /// CPU cores shared by the ranks.
    cores: u64,
    /// Ids of the GPUs that ranks take, in this order. Lost ones are removed.
    gpus: Vec<String>,
    /// How many of them can train together.
    gpus_together: usize,
    /// The hosts that run the ranks; `None`: this machine.
    hosts: Option<Hosts>,
    /// Those of the newest request, if they are not the launch's.
    hosts_asked: Option<String>,
    /// Since when processes are started that the next world needs.
    preparing: Option<Instant>,
    /// The newest change of a host, as the reason of a drain.
    host_news: Option<String>,
    /// Until then ranks of a lost host may run on.
    fenced: Option<Instant>,
    program: PathBuf,
    /// Recipe and absolute run path of the external trainer; `None` for the built-in trainer.
    external: Option<ExternalRun>,
    /// The bucket of a run whose hosts share no directory.
    bucket_run: Option<BucketRun>,
    state: RunState,
    desired: u64,
    /// A stop was requested.
    stop: Option<Stop>,
    /// Ranks that could run; a lost rank reduces it.
    capacity: u64,
    restarts_left: u64,
    oom_policy: OomPolicy,
    progress_deadline: ProgressDeadline,
    on_stall: OnStall,
    worlds: Worlds,
    /// Number of signals received: the first drains, the second kills.
    signals: Arc<AtomicUsize>,
    current: Option<Current>,
    events: (Sender<RankEvent>, Receiver<RankEvent>),
    display: &'a mut Display,
    /// The run's request file is unreadable, and a warning was printed.
    request_damaged: bool,
    /// The newest step, for the final message.
    last_step: Option<StepRecord>,
    last_evaluation: Option<f64>,
    losses: Option<LossWatch>,
    /// The world for which the user was last warned if it cannot lose a rank.
    judged_world: u64,
    started: Instant,
    /// Time when the reason for the next generation was detected, and the world before it.
    trouble: Option<(Instant, u64)>,
}

/// The generation whose ranks run.
struct Current {
    host: HostGeneration,
    /// The ranks of each other host, by its number.
    shares: Vec<(usize, Range<u64>)>,
    /// A rank has reported that its GPU is lost.
    lost_gpu: bool,
    /// Its ranks have connected.
    trains: bool,
    stepped: bool,
}

impl<'a> Launcher<'a> {
    /// Creates a launcher for the prepared run that the caller has locked.
    pub fn new(
        run_lock: &RunLock,
        prepared: Prepared,
        ranks: u64,
        request: &Request,
        display: &'a mut Display,
    ) -> Result<Launcher<'a>, LaunchError> {
        let program = std::env::current_exe().map_err(|error| LaunchError::Program { error })?;
        let run = prepared.run;
        let mut state = prepared.state.unwrap_or_default();
        let external = prepared.external.map(|recipe| {
            ExternalRun::new(recipe, &run, run_lock.run_dir(), request.most_on_a_host)
        });
        // Requests to an earlier launcher are already answered.
        state.request = run_lock.earlier_request();
        state.waits = None;
        state.hosts.clear();
        Ok(Launcher {
            run_dir: run_lock.run_dir().clone(),
            losses: (run.built_in.as_ref())
                .filter(|_| run.spec.is_mean_over_tokens())
                .map(|built_in| LossWatch::new(built_in.model.vocab_size as u64)),
            external: external.transpose()?,
            bucket_run: BucketRun::of(&run)?,
            worlds: prepared.worlds,
            run,
            cores: request.cores,
            gpus: request.gpus.clone(),
            gpus_together: request.gpus_together,
            hosts: None,
            hosts_asked: None,
            preparing: None,
            host_news: None,
            fenced: None,
            program,
            state,
            desired: ranks,
            stop: None,
            capacity: u64::MAX,
            restarts_left: RESTARTS,
            oom_policy: request.oom_policy,
            progress_deadline: request.progress_deadline,
            on_stall: request.on_stall,
            signals: Arc::clone(&request.signals),
            current: None,
            events: channel(),
            display,
            trouble: None,
            request_damaged: false,
            last_step: None,
            last_evaluation: None,
            judged_world: 0,
            started: Instant::now(),
        })
    }

    /// Lets these hosts run the ranks. `all`: as many ranks as they have devices for.
    pub fn on(self, mut hosts: Hosts, all: bool) -> Launcher<'a> {
        let file = self.run_dir.path().join(files::RUN);
        match &self.bucket_run {
            Some(bucket_run) => hosts.recognise_bucket(bucket_run.bucket(), &file),
            None => hosts.recognise(&file),
        }
        Launcher {
            hosts: Some(hosts),
            desired: if all { plan::MOST_GPUS } else { self.desired },
            hosts_asked: self
                .run_dir
                .desired()
                .ok()
                .flatten()
                .and_then(|it| it.hosts),
            ..self
        }
    }

    /// Runs the job to its end.
    pub fn run(mut self) -> Result<End, LaunchError> {
        loop {
            self.read_desired()?;
            if self.signals.load(Ordering::Relaxed) > 1
                && let Some(current) = &mut self.current
            {
                current.host.kill("stopped immediately on request");
            }
            if self.waits_for_lost_ranks()? {
                self.wait()?;
                continue;
            }
            let (action, capacity, towards) = self.decide()?;
            let continuation = self.continuation(&action);
            if continuation.is_none() && self.release() {
                continue;
            }
            match action {
                RankAction::Keep => {
                    self.keep_spares();
                    self.show_hosts()?;
                    self.wait()?;
                }
                RankAction::Drain if self.prepares(towards)? => self.wait()?,
                RankAction::Drain => self.drain()?,
                RankAction::CancelDrain => self.cancel_drain()?,
                RankAction::Publish {
                    world,
                    reason,
                    per_device_batch_size_limit,
                } => {
                    self.in_trouble();
                    self.capacity = capacity;
                    let again = self.hosts.is_some() && matches!(reason, Reason::RankLost { .. });
                    if again || matches!(reason, Reason::Failed { .. }) {
                        self.restarts_left = self.restarts_left.saturating_sub(1);
                    }
                    self.start(world, reason, per_device_batch_size_limit, continuation)?;
                }
                RankAction::Wait { message } if self.misses_hosts() => {
                    self.wait_for_hosts(&message)?
                }
                // Only the user can change this machine's devices.
                RankAction::Wait { message } => return self.end(End::Failed { message }),
                RankAction::End(end) => return self.end(end),
            }
        }
    }

    /// Observes the ranks and decides. Also returns the number of ranks that could run if there were devices for them, and
    /// the best world.
    fn decide(&mut self) -> Result<(RankAction, u64, Option<u64>), LaunchError> {
        let mut ranks = self.ranks();
        if let Ranks::Ended { outcome, .. } = &mut ranks {
            self.follow_external_trainer(true)?;
            self.fall_back(outcome)?;
        }
        let capacity = self.capacity(&ranks);
        let reached = self.reached();
        let input = TransitionInput {
            desired: self.desired,
            capacity: capacity.min(self.most_ranks()),
            bounds: self.bounds(),
            feasible: &|world| self.worlds.is_feasible(world, reached),
            refusal: &|world| self.worlds.refused_split(world, reached),
            stop: self.stop.is_some() || self.signals.load(Ordering::Relaxed) > 0,
            restarts_left: self.restarts_left,
            ranks,
        };
        let action = decide(&input);
        let towards = input.world().filter(|_| !input.stop);
        if let RankAction::Publish { world, .. } = &action
            && *world != self.judged_world
        {
            let warning = input.without_fallback(*world);
            self.judged_world = *world;
            if let Some(message) = warning {
                self.warn(message);
            }
        }
        Ok((action, capacity, towards))
    }

    fn bounds(&self) -> std::ops::RangeInclusive<u64> {
        let elasticity = &self.run.spec.elasticity;
        elasticity.min.unwrap_or(1)..=elasticity.max.unwrap_or(plan::MOST_GPUS)
    }

    /// The current generation's ranks as input of the state machine.
    fn ranks(&self) -> Ranks {
        let Some(current) = &self.current else {
            let external = self
                .external
                .as_ref()
                .and_then(|external| external.newest.as_ref());
            return Ranks::None {
                resuming: self.state.checkpoint_ref.is_some() || external.is_some(),
            };
        };
        let host = &current.host;
        let plan = &host.record.plan;
        let seen = match host.waits() {
            true => host.statuses().iter().map(RankStatus::as_left).collect(),
            false => Some(host.statuses().to_vec()),
        };
        let outcome = rank_status::outcome(
            &seen.unwrap_or_else(|| host.statuses().to_vec()),
            plan.per_device_batch_size,
            || self.smaller(plan),
            || host.is_oom_killed(),
        );
        let world = host.record.world();
        match outcome {
            None => Ranks::Running {
                world,
                draining: host.is_draining(),
            },
            Some(outcome) => Ranks::Ended { world, outcome },
        }
    }

    /// Falls back to an older checkpoint if the ranks have refused a damaged one. Then their failure is not
    /// deterministic any more.
    fn fall_back(&mut self, outcome: &mut Outcome) -> Result<(), LaunchError> {
        let Outcome::Failed { deterministic, .. } = outcome else {
            return Ok(());
        };
        let refused = self.current.as_ref().is_some_and(|current| {
            // A later checkpoint is not the one that they have read.
            !current.stepped && current.host.record.start == self.state.checkpoint_ref
        });
        if !*deterministic || !refused || self.external.is_some() {
            return Ok(());
        }
        let checkpoints = Checkpoints::of(&self.run_dir, &self.run)?;
        if let Some(note) = resume::fall_back_if_damaged(&checkpoints, &mut self.state)? {
            self.warn(note);
            // Every fall-back has fewer checkpoints left, so it needs no other limit.
            self.restarts_left += 1;
            *deterministic = false;
        }
        Ok(())
    }

    /// Ranks for which this machine or the hosts have devices.
    fn most_ranks(&self) -> u64 {
        if let Some(hosts) = &self.hosts {
            return hosts.capacity();
        }
        // The user's program finds its GPUs itself.
        match self.worlds.request().runner {
            Runner::BuiltIn {
                device: DeviceKind::Cuda,
                ..
            } => self.gpus.len().min(self.gpus_together) as u64,
            _ => u64::MAX,
        }
    }

    /// A rank's GPU does not work: no further rank takes it.
    fn lose_gpu(&mut self, rank: u64) {
        let Some(current) = &mut self.current else {
            return;
        };
        let Some(lost) = current.host.gpu(rank) else {
            return;
        };
        current.lost_gpu = true;
        let Some(hosts) = &mut self.hosts else {
            self.gpus.retain(|gpu| gpu != lost);
            return;
        };
        let mut shares = current.shares.iter();
        if let Some((host, _)) = shares.find(|(_, ranks)| ranks.contains(&rank)) {
            hosts.lose_gpu(*host, lost);
        }
    }

    /// Ranks that could run: a killed process counts as a lost device.
    fn capacity(&self, ranks: &Ranks) -> u64 {
        match (ranks, &self.current) {
            // Another GPU of this machine may take its place.
            (Ranks::Ended { .. }, Some(Current { lost_gpu: true, .. })) => self.most_ranks(),
            (
                Ranks::Ended {
                    world,
                    outcome: Outcome::Lost { .. },
                },
                Some(current),
            ) => match rank_status::killed(current.host.statuses()) {
                // A host that is still there has its devices, and one that is lost may come back.
                killed if killed == 0 || self.hosts.is_some() && self.restarts_left > 0 => {
                    self.capacity
                }
                // A process that stands by takes the place of a killed one.
                killed => {
                    let spares = current.host.ready_spares(0, killed).len() as u64;
                    world.saturating_sub(killed - spares)
                }
            },
            _ => self.capacity,
        }
    }

    /// Reads a new request. One for a number of ranks also makes lost ranks available again.
    fn read_desired(&mut self) -> Result<(), LaunchError> {
        let desired = match self.run_dir.desired() {
            Ok(desired) => desired,
            // An unreadable request does not stop a run.
            Err(error) => {
                if !std::mem::replace(&mut self.request_damaged, true) {
                    self.warn(format!(
                        "an unreadable request is ignored: {error}, or repeat it with \
                         `evenkeel resize`"
                    ));
                }
                return Ok(());
            }
        };
        self.request_damaged = false;
        let Some(desired) = desired else {
            return Ok(());
        };
        if desired.request > self.state.request {
            self.state.request = desired.request;
            if desired.hosts != self.hosts_asked {
                desired.hosts.iter().for_each(|it| self.change_hosts(it));
                self.hosts_asked = desired.hosts;
            }
            let ranks = match desired.wanted {
                Wanted::Stop(stop) => {
                    self.stop = Some(stop);
                    None
                }
                Wanted::Ranks(ranks) => Some(ranks),
                Wanted::All => Some(plan::MOST_GPUS),
            };
            if let Some(ranks) = ranks {
                self.stop = None;
                self.desired = ranks;
                self.capacity = u64::MAX;
            }
            self.write_state()?;
        }
        Ok(())
    }

    /// Waits for the next event of a rank, or for a tick.
    fn wait(&mut self) -> Result<(), LaunchError> {
        match self.events.1.recv_timeout(TICK) {
            Ok(event) => {
                self.take(&event)?;
                while let Ok(event) = self.events.1.try_recv() {
                    self.take(&event)?;
                }
            }
            // The launcher keeps a sender, so the channel never closes.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        self.look_at_hosts();
        self.settle();
        self.follow_external_trainer(false)
    }

    /// Kills ranks that are silent or overdue. After a failure, waits until every rank has exited or reported its newest
    /// step, then lets the rank with the newest step commit it, if no checkpoint has that.
    fn settle(&mut self) {
        let Some(Current { host, .. }) = &mut self.current else {
            return;
        };
        let overdue = host.kill_overdue();
        host.kill_silent();
        match (host.trouble(), host.settled()) {
            (Some(_), Some(since)) if since.elapsed() > COMMIT => {
                host.kill(&format!("no commit within {} s", COMMIT.as_secs()));
            }
            (None, None) if rank_status::is_paused(host.statuses()) => host.hold(),
            (Some(since), None) if rank_status::is_settled(host.statuses(), since.elapsed()) => {
                host.hold();
            }
            _ => {}
        }
        if let Some(message) = overdue {
            self.warn(message);
        }
    }

    fn drain(&mut self) -> Result<(), LaunchError> {
        let stop = self.signals.load(Ordering::Relaxed) > 0;
        let pauses = self.pauses();
        let mut met = true;
        if let Some(Current { host, .. }) = &mut self.current {
            // Ranks with a state from before have it to commit.
            met = host.has_begun() || host.record.carried.is_some();
            if stop && !met {
                host.kill_undrained("stopped on request before the ranks had connected");
            } else if pauses {
                host.pause();
            } else {
                host.set_draining(true);
            }
        }
        self.in_trouble();
        let trainer = &self.run.spec.trainer;
        let saving = match &self.external {
            Some(_) => format!(
                "{} sent, {} s to save",
                trainer.drain_signal, trainer.drain_seconds
            ),
            None => "committing a checkpoint".to_owned(),
        };
        let message = if stop && !met {
            "stop requested".to_owned()
        } else if stop {
            format!("stop requested: {saving} (repeat to stop immediately)")
        } else if let Some(verb) = self.stop {
            format!("{verb} requested: {saving}")
        } else {
            let requested = match self.desired {
                plan::MOST_GPUS => "the hosts have changed".to_owned(),
                desired => format!("{} requested", count(desired, "rank")),
            };
            self.host_news.take().unwrap_or(requested)
        };
        self.display.event(&Event::Draining { message });
        self.preparing = None;
        self.state.phase = Phase::Draining;
        self.write_state()
    }

    /// Cancels a drain. Ranks that have already agreed on a step ignore it.
    fn cancel_drain(&mut self) -> Result<(), LaunchError> {
        if let Some(current) = &mut self.current {
            current.host.set_draining(false);
            self.state.phase = if current.trains {
                Phase::Running
            } else {
                Phase::Starting
            };
            // Without a step, the measured time still belongs to the cause of this generation.
            if current.stepped {
                self.trouble = None;
            }
        }
        self.display.event(&Event::DrainCancelled {
            message: format!("{} requested", count(self.desired, "rank")),
        });
        self.write_state()
    }

    /// Publishes the next generation and starts its ranks.
    fn start(
        &mut self,
        world: u64,
        reason: Reason,
        per_device_batch_size_limit: Option<u64>,
        continuation: Option<Continuation>,
    ) -> Result<(), LaunchError> {
        if let Some(per_device_batch_size) = per_device_batch_size_limit.filter(|_| self.shrinks())
        {
            self.shrink(per_device_batch_size)?;
        }
        self.state.per_device_batch_size_limit =
            per_device_batch_size_limit.or(self.state.per_device_batch_size_limit);
        let plan = self.worlds.plan(world, self.reached())?;
        let earlier = self.current.take().filter(|_| continuation.is_some());
        let last = self.last_generation()?;
        let number = last.checked_add(1).ok_or_else(|| {
            LaunchError::usage(format!(
                "{}: generation {last} leaves no number for the next one; a directory of that \
                 name or an edited state.json causes this: remove it, or restore a copy",
                self.run_dir.path().display()
            ))
        })?;
        self.state.waits = None;
        self.host_news = None;
        self.fenced = None;
        let carried = continuation.as_ref().map(|it| it.carried);
        let (members, mut shares) = match continuation {
            Some(Continuation {
                members, shares, ..
            }) => (members, shares),
            None => self.members(world),
        };
        let master = self.master(&members)?;
        // No rank of an earlier generation writes any more; remove their unfinished files.
        checkpoint::sweep(self.run_dir.path(), number)?;
        let generation = Generation {
            job: self.run.job.clone(),
            number,
            reason,
            members,
            plan,
            start: self.state.checkpoint_ref.clone(),
            carried,
            lost: Vec::new(),
            master,
            created: now(),
        };
        let generation = self.begin_in_bucket(generation)?;
        generation.write(self.run_dir.path())?;
        let trainer = (self.external.as_ref()).map(|external| external.trainer(&self.run));
        let external = match trainer {
            Some(trainer) => {
                trainer.choose(&generation)?;
                Some(Arc::new(trainer.begin(&generation)?))
            }
            None => None,
        };
        let call = external.as_ref().map(|external| external.call.clone());
        self.state.phase = Phase::Starting;
        self.state.generations.push(GenerationRow {
            number,
            reason: generation.reason.clone(),
            world,
            formula: generation.formula(),
            start_samples: call.is_none().then(|| generation.start_samples()),
            created: generation.created,
            first_step_seconds: None,
            call,
        });
        self.write_state()?;
        let earlier = earlier.map(|earlier| earlier.host);
        let gpus = self.place_gpus(earlier.as_ref(), &generation.members, &mut shares);
        let start = Start {
            evenkeel: &self.program,
            run_dir: trainer.map_or(self.run_dir.path(), |trainer| trainer.run_dir),
            generation: &generation,
            first: 0,
            count: world,
            cores: self.cores,
            gpus: &gpus,
            key: &Key::random().map_err(|error| LaunchError::Spawn { error })?,
            progress_deadline: self.progress_deadline,
            bucket: self.run.bucket.as_deref(),
            shows_built_in: false,
        };
        let events = &self.events.0;
        let host = match (earlier, &self.hosts) {
            (earlier, Some(_)) => {
                let host = HostGeneration::start_on(&start, external, &shares, earlier, events);
                Ok(host)
            }
            (Some(earlier), None) => earlier.carry_on(&start, events),
            (None, None) => HostGeneration::start(&start, external, events),
        };
        let host = host.map_err(|error| LaunchError::Spawn { error })?;
        let numbers = generation.members.iter().map(|member| member.slot as usize);
        let ranks = generation
            .shares()
            .map(|(first, member)| first..first + member.ranks);
        let shares = numbers
            .zip(ranks)
            .filter(|_| self.hosts.is_some())
            .collect();
        self.current = Some(Current {
            host,
            shares,
            lost_gpu: false,
            trains: false,
            stepped: false,
        });
        Ok(())
    }

    /// The port that the user names, else a free one.
    fn port(&mut self, world: u64) -> Result<u16, LaunchError> {
        let Some(named) = port::named(&self.run.spec.trainer)? else {
            return port::free(world);
        };
        let Some(error) = port::refused(named) else {
            return Ok(named);
        };
        let port = port::free(world)?;
        self.warn(format!(
            "port {named} cannot be used: {error}; the ranks connect through {port} instead (MASTER_PORT)"
        ));
        Ok(port)
    }

    fn end(mut self, end: End) -> Result<End, LaunchError> {
        self.state.phase = match &end {
            End::Finished => Phase::Finished,
            End::Drained if self.stop == Some(Stop::Cancel) => Phase::Cancelled,
            End::Drained => Phase::Drained,
            End::Failed { message } => Phase::Failed {
                message: message.clone(),
            },
        };
        self.write_state()?;
        self.end_in_bucket(&end);
        if let (End::Finished, Some(step)) = (&end, &self.last_step) {
            let loss = self.last_evaluation.unwrap_or(step.loss);
            let finished = Event::Finished {
                samples: step.samples,
                steps: step.step,
                loss,
                seconds: self.started.elapsed().as_secs_f64(),
            };
            if let Some(message) = self.losses.as_mut().and_then(|l| l.evaluation(loss)) {
                self.warn(message);
            }
            self.display.event(&finished);
        }
        Ok(end)
    }

    fn write_state(&self) -> Result<(), LaunchError> {
        self.run_dir.write_state(&self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::testing::Launched;
    use crate::telemetry::Mode;

    #[test]
    fn a_launch_plans_its_first_world_once_and_again_only_if_its_data_had_to_be_counted() {
        let file =
            "tokenizer: {path: byte}\ndata: {sequence_length: 8, train: [{path: text.jsonl}]}";
        for (data, plans) in [("", 1), (file, 2)] {
            let place = tempfile::tempdir().unwrap();
            let before = plan::examined().len();
            let path = place.path().join("text.jsonl");
            let text = "{\"text\": \"as many samples as the file has\"}\n";
            std::fs::write(&path, text.repeat(100)).unwrap();
            let data = data.replace("text.jsonl", path.to_str().unwrap());
            let batch = "batch: {global: 12, per_device_batch_size: 2}";
            let launched = Launched::at(place.path(), &format!("{batch}\n{data}"), &[]);
            let run_lock = RunLock::take(launched.run_dir.clone()).unwrap();
            let mut display = Display::new(Mode::Quiet);
            let request = &launched.request;
            let mut launcher =
                Launcher::new(&run_lock, launched.prepared, 2, request, &mut display).unwrap();
            let (action, ..) = launcher.decide().unwrap();
            assert!(matches!(action, RankAction::Publish { world: 2, .. }));
            let reached = launcher.state.reached(&launcher.run);
            launcher.worlds.plan(2, reached).unwrap();
            let examined = &plan::examined()[before..];
            let of_world = |world| examined.iter().filter(|other| **other == world).count();
            // The second is where the run would continue without a rank.
            assert_eq!((of_world(2), of_world(1)), (plans, 1), "{examined:?}");
        }
    }

    /// The user's program on GPUs runs by the plans that were shown, on as many ranks as were asked for.
    #[test]
    fn a_launch_of_a_program_on_gpus_keeps_its_plan() {
        let place = tempfile::tempdir().unwrap();
        let before = plan::examined().len();
        let batch = "batch: {global: 12, per_device_batch_size: 2}";
        let program = "trainer: {command: [sh, -c, 'exec true {per_device_batch_size}']}";
        let launched = Launched::on(
            place.path(),
            &format!("{batch}\n{program}"),
            DeviceKind::Cuda,
        );
        let run_lock = RunLock::take(launched.run_dir.clone()).unwrap();
        let mut display = Display::new(Mode::Quiet);
        let request = &launched.request;
        let mut launcher =
            Launcher::new(&run_lock, launched.prepared, 2, request, &mut display).unwrap();
        assert_eq!(launcher.run.runner().device(), DeviceKind::Cuda);
        let (action, ..) = launcher.decide().unwrap();
        assert!(matches!(action, RankAction::Publish { world: 2, .. }));
        let reached = launcher.state.reached(&launcher.run);
        launcher.worlds.plan(2, reached).unwrap();
        let examined = &plan::examined()[before..];
        assert_eq!(examined.iter().filter(|world| **world == 2).count(), 1);
    }

    #[test]
    fn a_request_made_while_a_resume_prepares_is_answered() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(
            place.path(),
            "batch: {global: 12, per_device_batch_size: 2}",
            &[],
        );
        launched.run_dir.request(Wanted::Ranks(4), None).unwrap();
        let run_lock = RunLock::take(launched.run_dir.clone()).unwrap();
        launched.run_dir.request(Wanted::Ranks(1), None).unwrap();
        let prepared = launched.resume(|_| {}).unwrap();
        let mut display = Display::new(Mode::Quiet);
        let request = &launched.request;
        let mut launcher = Launcher::new(&run_lock, prepared, 2, request, &mut display).unwrap();
        // A request to the previous launcher does not apply to this one.
        assert_eq!((launcher.desired, launcher.state.request), (2, 1));
        launcher.read_desired().unwrap();
        assert_eq!((launcher.desired, launcher.state.request), (1, 2));
    }
}
