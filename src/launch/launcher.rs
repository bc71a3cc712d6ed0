//! The local launcher: observe, decide, act, again, until the job ends. The operator of a cluster
//! does the same with pods; here the agent runs in this process.

mod out_of_memory;
mod own_program;
mod reports;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use own_program::Own;

use super::run_dir::{GenerationRow, Phase, RunDir, RunState};
use super::watch::Watch;
use super::worlds::{self, Feasible};
use super::{Claim, LaunchError, Prepared, Request, port};
use crate::agent::{Event as RankEvent, OomKills, Program, Ranks as RankProcesses, Start, Tail};
use crate::batch::{self, OomPolicy};
use crate::job::generation::Address;
use crate::job::{Action, End, Generation, Member, Observed, Outcome, Ranks, Reason, decide};
use crate::telemetry::divergence::LossWatch;
use crate::telemetry::{Display, Event, StepRecord, now};
use crate::train::{Setup, checkpoint};
use crate::words::count;

/// How often the launcher looks around when nothing happens.
const TICK: Duration = Duration::from_millis(50);
/// Failures of the program itself that are forgiven without progress between them.
const RESTARTS: u64 = 3;

/// One run on this machine.
pub struct Launcher<'a> {
    run: RunDir,
    setup: Setup,
    /// Cores that the ranks share.
    cores: u64,
    program: PathBuf,
    /// The recipe of the user's own program, where that trains, and the run's absolute path.
    own: Option<Own>,
    state: RunState,
    desired: u64,
    /// Ranks that could run, as long as none is lost.
    capacity: u64,
    restarts_left: u64,
    oom_policy: OomPolicy,
    feasible: Feasible,
    /// Signals so far: one drains, a second one kills.
    signals: Arc<AtomicUsize>,
    current: Option<Current>,
    events: (Sender<RankEvent>, Receiver<RankEvent>),
    display: &'a mut Display,
    /// The request in the run's directory cannot be read, which was said.
    request_damaged: bool,
    /// The newest step, for the last word.
    last_step: Option<StepRecord>,
    last_evaluation: Option<f64>,
    losses: Option<LossWatch>,
    started: Instant,
    /// When the reason for the next generation was seen, and the world before it.
    trouble: Option<(Instant, u64)>,
}

/// The generation whose ranks run.
struct Current {
    generation: Generation,
    watch: Watch,
    /// Kills by the kernel since its ranks were started.
    oom_kills: OomKills,
    /// What the user's own program prints, where that trains.
    tails: Vec<Tail>,
    draining: bool,
    /// Its ranks have met.
    trains: bool,
    stepped: bool,
}

impl<'a> Launcher<'a> {
    /// A launcher of what was prepared in the run that the caller holds.
    pub fn new(
        claim: &Claim,
        prepared: Prepared,
        ranks: u64,
        request: &Request,
        display: &'a mut Display,
    ) -> Result<Launcher<'a>, LaunchError> {
        let program = std::env::current_exe().map_err(|error| LaunchError::Program { error })?;
        let setup = prepared.setup;
        let mut state = prepared.state.unwrap_or_default();
        let own = prepared
            .own
            .map(|recipe| Own::new(recipe, &setup, claim.run()));
        // A request made of an earlier launcher is not made of this one.
        state.request = claim.earlier_request();
        Ok(Launcher {
            run: claim.run().clone(),
            losses: setup
                .model
                .as_ref()
                .map(|model| LossWatch::new(model.vocab_size as u64)),
            own: own.transpose()?,
            feasible: Feasible::default(),
            setup,
            cores: request.cores,
            program,
            state,
            desired: ranks,
            capacity: u64::MAX,
            restarts_left: RESTARTS,
            oom_policy: request.oom_policy,
            signals: Arc::clone(&request.signals),
            current: None,
            events: channel(),
            display,
            trouble: None,
            request_damaged: false,
            last_step: None,
            last_evaluation: None,
            started: Instant::now(),
        })
    }

    /// Runs the job to its end.
    pub fn run(mut self) -> Result<End, LaunchError> {
        loop {
            self.read_desired()?;
            if self.signals.load(Ordering::Relaxed) > 1
                && let Some(current) = &mut self.current
            {
                current.watch.kill("stopped at once, as asked");
            }
            let ranks = self.ranks();
            if let Ranks::Ended { .. } = ranks {
                self.own_progress();
            }
            let capacity = self.capacity(&ranks);
            let reached = self.state.reached(&self.setup);
            let action = decide(&Observed {
                desired: self.desired,
                capacity,
                bounds: self.bounds(),
                feasible: &|world| self.feasible.at(&self.setup, world, reached),
                stop: self.signals.load(Ordering::Relaxed) > 0,
                restarts_left: self.restarts_left,
                ranks,
            });
            match action {
                Action::Wait => self.wait()?,
                Action::Drain => self.drain()?,
                Action::Stay => self.stay()?,
                Action::Start {
                    world,
                    reason,
                    micro_limit,
                } => {
                    self.in_trouble();
                    self.capacity = capacity;
                    if let Reason::Failed { .. } = reason {
                        self.restarts_left = self.restarts_left.saturating_sub(1);
                    }
                    self.start(world, reason, micro_limit)?;
                }
                // Nothing but a person changes what this machine has.
                Action::Infeasible { why } => return self.end(End::Failed { why }),
                Action::End(end) => return self.end(end),
            }
        }
    }

    fn bounds(&self) -> std::ops::RangeInclusive<u64> {
        let elasticity = &self.setup.spec.elasticity;
        elasticity.min.unwrap_or(1)..=elasticity.max.unwrap_or(batch::MOST_GPUS)
    }

    /// The current generation's ranks, as the state machine sees them.
    fn ranks(&self) -> Ranks {
        let Some(current) = &self.current else {
            let own = self.own.as_ref().and_then(|own| own.newest.as_ref());
            return Ranks::None {
                resuming: self.state.pin.is_some() || own.is_some(),
            };
        };
        let plan = &current.generation.plan;
        let outcome = current.watch.outcome(
            plan.per_device_batch_size,
            || self.smaller(plan),
            || current.oom_kills.raised(),
        );
        let world = current.generation.world();
        match outcome {
            None => Ranks::Running {
                world,
                draining: current.draining,
            },
            Some(outcome) => Ranks::Ended { world, outcome },
        }
    }

    /// Ranks that could run: a process that was killed is a device that is gone.
    fn capacity(&self, ranks: &Ranks) -> u64 {
        match (ranks, &self.current) {
            (
                Ranks::Ended {
                    world,
                    outcome: Outcome::Lost { .. },
                },
                Some(current),
            ) => world.saturating_sub(current.watch.killed()),
            _ => self.capacity,
        }
    }

    /// Takes a new request for another number of ranks; it also says that ranks lost before can be
    /// had again.
    fn read_desired(&mut self) -> Result<(), LaunchError> {
        let desired = match self.run.desired() {
            Ok(desired) => desired,
            // A request is no reason to stop a run.
            Err(error) => {
                if !std::mem::replace(&mut self.request_damaged, true) {
                    self.warn(format!(
                        "a request cannot be read, and is ignored: {error}, or ask again with \
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
            self.desired = desired.ranks;
            self.capacity = u64::MAX;
            self.write_state()?;
        }
        Ok(())
    }

    /// Waits for the next event of a rank, or a tick.
    fn wait(&mut self) -> Result<(), LaunchError> {
        match self.events.1.recv_timeout(TICK) {
            Ok(event) => {
                self.take(&event)?;
                while let Ok(event) = self.events.1.try_recv() {
                    self.take(&event)?;
                }
            }
            // The launcher holds a sender itself, so the channel never closes.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        let pinned = self.state.pin.as_ref().map_or(0, |pin| pin.samples);
        let current = self.current.as_mut();
        if let Some(message) = current.and_then(|current| current.watch.settle(pinned)) {
            self.warn(message);
        }
        self.pass_on();
        Ok(())
    }

    fn drain(&mut self) -> Result<(), LaunchError> {
        let stop = self.signals.load(Ordering::Relaxed) > 0;
        let mut met = true;
        if let Some(current) = &mut self.current {
            current.draining = true;
            met = current.watch.has_begun();
            match stop && !met {
                // Ranks that wait for each other hear nothing, and have nothing to commit.
                true => current
                    .watch
                    .kill("stopped before the ranks had met, as asked"),
                false => current.watch.drain(),
            }
        }
        self.in_trouble();
        let why = if stop && !met {
            "stop asked for".to_string()
        } else if stop && self.own.is_some() {
            let (signal, seconds) = self.drain_by();
            format!("stop asked for: {signal} sent, {seconds} s to save (again to stop at once)")
        } else if stop {
            "stop asked for: committing a checkpoint (again to stop at once)".to_string()
        } else {
            format!("{} asked for", count(self.desired, "rank"))
        };
        self.display.event(&Event::Draining { why });
        self.state.phase = Phase::Draining;
        self.write_state()
    }

    /// Calls a drain off. Ranks that have agreed on a step already do not hear it.
    fn stay(&mut self) -> Result<(), LaunchError> {
        if let Some(current) = &mut self.current {
            current.draining = false;
            current.watch.stay();
            self.state.phase = match current.trains {
                true => Phase::Running,
                false => Phase::Starting,
            };
            // Without a step it is still what led to this generation that is timed.
            if current.stepped {
                self.trouble = None;
            }
        }
        self.display.event(&Event::Staying {
            why: format!(
                "the drain is called off: {} asked for",
                count(self.desired, "rank")
            ),
        });
        self.write_state()
    }

    /// Publishes the next generation and starts its ranks.
    fn start(
        &mut self,
        world: u64,
        reason: Reason,
        micro_limit: Option<u64>,
    ) -> Result<(), LaunchError> {
        if let Some(micro) = micro_limit.filter(|_| self.shrinks()) {
            self.shrink(micro)?;
        }
        self.leave();
        self.state.micro_limit = micro_limit.or(self.state.micro_limit);
        let plan = worlds::plan(&self.setup, world, self.state.reached(&self.setup))?;
        let last = self.run.last_generation(&self.state)?;
        let number = last.checked_add(1).ok_or_else(|| LaunchError::Usage {
            message: format!(
                "{}: no generation comes after number {last}: somebody made a directory of that \
                 name, or edited state.json; remove it, or put back a copy",
                self.run.path().display()
            ),
        })?;
        // The ranks of all generations before are gone; what they did not finish goes, too.
        checkpoint::sweep(self.run.path(), number)?;
        let generation = Generation {
            job: self.setup.job.clone(),
            number,
            reason,
            members: vec![Member {
                pod: None,
                seat: 0,
                ranks: world,
            }],
            plan,
            start: self.state.pin.clone(),
            master: Address {
                host: "127.0.0.1".into(),
                port: port::free(world)?,
            },
            created: now(),
        };
        self.run.write_record(&generation)?;
        let own = self.own.as_ref().map(|own| own.foreign(&self.setup));
        let call = own.map(|own| own.call(number, &generation.plan, own.newest()));
        let call = call.transpose()?;
        if let Some(call) = &call {
            call.write()?;
        }
        self.state.phase = Phase::Starting;
        self.state.generations.push(GenerationRow {
            number,
            reason: generation.reason.clone(),
            world,
            proof: generation.proof(),
            start_samples: generation.start_samples(),
            created: generation.created,
            first_step_seconds: None,
            call: call.clone(),
        });
        self.write_state()?;
        let oom_kills = OomKills::watch();
        let (drain, seconds) = self.drain_by();
        let ranks = RankProcesses::start(
            &Start {
                evenkeel: &self.program,
                program: match &call {
                    None => Program::BuiltIn,
                    Some(call) => Program::Foreign { call, drain },
                },
                run: own.map_or(self.run.path(), |own| own.run),
                generation: &generation,
                first: 0,
                count: world,
                threads: (self.cores / world).max(1),
            },
            &self.events.0,
        )
        .map_err(|error| LaunchError::Spawn { error })?;
        let printing = if call.is_some() { world } else { 0 };
        self.current = Some(Current {
            watch: match call {
                None => Watch::new(ranks, world),
                Some(_) => Watch::foreign(ranks, world, Duration::from_secs(seconds)),
            },
            tails: (0..printing)
                .map(|rank| Tail::of(self.run.path(), number, rank))
                .collect(),
            generation,
            oom_kills,
            draining: false,
            trains: false,
            stepped: false,
        });
        Ok(())
    }

    fn end(mut self, end: End) -> Result<End, LaunchError> {
        self.leave();
        self.state.phase = match &end {
            End::Finished => Phase::Finished,
            End::Drained => Phase::Drained,
            End::Failed { why } => Phase::Failed { why: why.clone() },
        };
        self.write_state()?;
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
        self.run.write_state(&self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::testing::Launched;
    use crate::telemetry::Mode;

    #[test]
    fn a_request_made_while_a_resume_prepares_is_answered() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), "batch: {global: 12, micro: 2}", &[]);
        launched.run.write_desired(4).unwrap();
        let claim = Claim::take(launched.run.clone()).unwrap();
        launched.run.write_desired(1).unwrap();
        let prepared = launched.resume(|_| {}).unwrap();
        let mut display = Display::new(Mode::Quiet);
        let request = &launched.request;
        let mut launcher = Launcher::new(&claim, prepared, 2, request, &mut display).unwrap();
        // That of the launcher before is not made of this one.
        assert_eq!((launcher.desired, launcher.state.request), (2, 1));
        launcher.read_desired().unwrap();
        assert_eq!((launcher.desired, launcher.state.request), (1, 2));
    }
}
