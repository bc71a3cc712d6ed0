//! The local launcher: observe, decide, act, again, until the job ends. The operator of a cluster
//! does the same with pods; here the agent runs in this process.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::run_dir::{GenerationRow, Phase, RunDir, RunState};
use super::watch::Watch;
use super::{LaunchError, resize};
use crate::agent::{Event as RankEvent, OomKills, Ranks as RankProcesses, Start};
use crate::batch::{self, Plan};
use crate::job::generation::Address;
use crate::job::protocol::Report;
use crate::job::{Action, End, Generation, Member, Observed, Pin, Ranks, Reason, decide};
use crate::telemetry::metrics::Writer as MetricsWriter;
use crate::telemetry::{Display, Event, Metric, StepRecord};
use crate::train::{Setup, checkpoint, now};

/// How often the launcher looks around when nothing happens.
const TICK: Duration = Duration::from_millis(50);
/// Failures of the program itself that are forgiven without progress between them.
const RESTARTS: u64 = 3;

/// One run on this machine.
pub struct Launcher<'a> {
    run: RunDir,
    setup: Setup,
    program: PathBuf,
    state: RunState,
    desired: u64,
    capacity: u64,
    restarts_left: u64,
    /// Signals so far: one drains, a second one kills.
    signals: Arc<AtomicUsize>,
    current: Option<Current>,
    oom_kills: OomKills,
    events: (Sender<RankEvent>, Receiver<RankEvent>),
    display: &'a mut Display,
    /// The newest step, for the last word.
    last_step: Option<StepRecord>,
    last_evaluation: Option<f64>,
    started: Instant,
    /// When the reason for the next generation was seen, and the world before it.
    trouble: Option<(Instant, u64)>,
}

/// The generation whose ranks run.
struct Current {
    generation: Generation,
    watch: Watch,
    metrics: MetricsWriter,
    draining: bool,
    stepped: bool,
}

impl<'a> Launcher<'a> {
    /// A launcher of `setup` in `run`, which the caller holds locked; `state` is what an earlier
    /// launcher left.
    pub fn new(
        run: RunDir,
        setup: Setup,
        ranks: u64,
        state: Option<RunState>,
        signals: Arc<AtomicUsize>,
        display: &'a mut Display,
    ) -> Result<Launcher<'a>, LaunchError> {
        let program = std::env::current_exe().map_err(|error| LaunchError::Program { error })?;
        let mut state = state.unwrap_or(RunState {
            phase: Phase::Starting,
            launcher: 0,
            pin: None,
            request: 0,
            micro_limit: None,
            generations: Vec::new(),
        });
        state.launcher = std::process::id();
        // A request made of an earlier launcher is not made of this one.
        state.request = run.desired()?.map_or(0, |desired| desired.request);
        Ok(Launcher {
            run,
            setup,
            program,
            state,
            desired: ranks,
            capacity: u64::MAX,
            restarts_left: RESTARTS,
            signals,
            current: None,
            oom_kills: OomKills::watch(),
            events: channel(),
            display,
            trouble: None,
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
                current.watch.kill();
            }
            let ranks = self.ranks();
            let settled_world = match &ranks {
                Ranks::Ended { world, .. } => Some(*world),
                _ => None,
            };
            let action = decide(&Observed {
                desired: self.desired,
                capacity: self.capacity,
                bounds: self.bounds(),
                feasible: &|world| self.plan(world, self.state.micro_limit).is_ok(),
                stop: self.signals.load(Ordering::Relaxed) > 0,
                restarts_left: self.restarts_left,
                ranks,
            });
            match action {
                Action::Wait => self.wait()?,
                Action::Drain => self.drain()?,
                Action::Start {
                    world,
                    reason,
                    micro_limit,
                } => {
                    self.trouble
                        .get_or_insert((Instant::now(), settled_world.unwrap_or(0)));
                    self.start(world, reason, micro_limit)?;
                }
                Action::End(end) => return self.end(end),
            }
        }
    }

    fn bounds(&self) -> std::ops::RangeInclusive<u64> {
        let elasticity = &self.setup.spec.elasticity;
        elasticity.min.unwrap_or(1)..=elasticity.max.unwrap_or(batch::MOST_GPUS)
    }

    fn plan(&self, world: u64, micro_limit: Option<u64>) -> Result<Plan, batch::Refused> {
        resize::plan_setup(&self.setup, world, micro_limit)
    }

    /// The current generation's ranks, as the state machine sees them.
    fn ranks(&mut self) -> Ranks {
        let Some(current) = &mut self.current else {
            return Ranks::None {
                resuming: self.state.pin.is_some(),
            };
        };
        let plan = &current.generation.plan;
        let descent = || batch::descend(plan);
        let world = current.generation.world();
        let outcome = current
            .watch
            .outcome(plan.per_device_batch_size, descent, || {
                self.oom_kills.raised()
            });
        match outcome {
            None => Ranks::Running {
                world,
                draining: current.draining,
            },
            Some(outcome) => {
                match &outcome {
                    crate::job::Outcome::Lost { .. } => {
                        self.capacity = world.saturating_sub(current.watch.killed());
                    }
                    crate::job::Outcome::Failed { .. } => {
                        self.restarts_left = self.restarts_left.saturating_sub(1);
                    }
                    _ => {}
                }
                Ranks::Ended { world, outcome }
            }
        }
    }

    /// Takes a new request for another number of ranks; it also says that ranks lost before can be
    /// had again.
    fn read_desired(&mut self) -> Result<(), LaunchError> {
        let Some(desired) = self.run.desired()? else {
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
        if let Some(current) = &mut self.current {
            current.watch.settle(pinned);
        }
        Ok(())
    }

    fn take(&mut self, event: &RankEvent) -> Result<(), LaunchError> {
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        let (RankEvent::Report { generation, .. } | RankEvent::Exited { generation, .. }) = event;
        if *generation != current.generation.number {
            return Ok(());
        }
        let world = current.generation.world();
        current.watch.take(event);
        match event {
            RankEvent::Report { report, rank, .. } => self.take_report(*rank, report)?,
            RankEvent::Exited { ending, rank, .. } => {
                if let crate::agent::Ending::Signal(signal) = ending {
                    self.trouble.get_or_insert((Instant::now(), world));
                    self.display.event(&Event::RankLost {
                        rank: *rank,
                        reason: format!("killed by signal {signal}"),
                    });
                }
            }
        }
        Ok(())
    }

    fn take_report(&mut self, rank: u64, report: &Report) -> Result<(), LaunchError> {
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        match report {
            Report::Ready => {}
            Report::Step(record) => {
                current.metrics.write(&Metric::Step(record.clone()))?;
                self.display.event(&Event::Step(record.clone()));
                if let Some(before) = &self.last_step
                    && before.batch != record.batch
                {
                    let test = before.norm_test.as_ref();
                    self.display.event(&Event::BatchChanged {
                        samples: before.samples,
                        from: before.batch,
                        to: record.batch,
                        ratio: test
                            .map(|test| test.ratio)
                            .filter(|ratio| ratio.is_finite()),
                        threshold: test.map(|test| test.threshold),
                        reason: test.map_or("as scheduled".into(), |test| test.reason.clone()),
                    });
                }
                self.last_step = Some(record.clone());
                if !std::mem::replace(&mut current.stepped, true) {
                    self.first_step()?;
                }
            }
            Report::Evaluation(record) => {
                current.metrics.write(&Metric::Evaluation(record.clone()))?;
                self.display.event(&Event::Evaluation(record.clone()));
                self.last_evaluation = Some(record.loss);
            }
            Report::Committed {
                pin,
                seconds,
                bytes,
            } => {
                self.display.event(&Event::Checkpoint {
                    samples: pin.samples,
                    seconds: *seconds,
                    bytes: *bytes,
                });
                self.committed(pin.clone())?;
            }
            Report::Straggler {
                rank,
                seconds,
                usual: _,
            } => self.display.event(&Event::Straggler {
                rank: *rank,
                seconds: *seconds,
            }),
            Report::Warning { message } => self.display.event(&Event::Warning {
                message: message.clone(),
            }),
            Report::Lost { .. } => {
                let world = current.generation.world();
                self.trouble.get_or_insert((Instant::now(), world));
            }
            Report::OutOfMemory { message } | Report::Failed { message, .. } => {
                self.display.event(&Event::Warning {
                    message: format!("rank {rank}: {message}"),
                });
            }
        }
        Ok(())
    }

    /// A checkpoint counts as soon as its launcher knows of it.
    fn committed(&mut self, pin: Pin) -> Result<(), LaunchError> {
        self.state.pin = Some(pin.clone());
        self.restarts_left = RESTARTS;
        self.write_state()?;
        if let Some(keep) = self.setup.spec.checkpoint.keep {
            let start = self
                .current
                .as_ref()
                .and_then(|c| c.generation.start.clone());
            let protected: Vec<PathBuf> = start
                .into_iter()
                .chain([pin])
                .map(|pin| self.run.path().join(pin.path))
                .collect();
            // A copy too many is no reason to stop.
            if let Err(error) = checkpoint::retain_in_run(self.run.path(), keep, &protected) {
                self.display.event(&Event::Warning {
                    message: error.to_string(),
                });
            }
        }
        Ok(())
    }

    fn first_step(&mut self) -> Result<(), LaunchError> {
        let Some((since, from)) = self.trouble.take() else {
            return Ok(());
        };
        let seconds = since.elapsed().as_secs_f64();
        if let Some(row) = self.state.generations.last_mut() {
            row.first_step_seconds = Some(seconds);
            if row.number > 1 && row.reason != Reason::Resumed {
                self.display.event(&Event::Rescaled {
                    from,
                    to: row.world,
                    seconds,
                    why: row.reason.to_string(),
                });
            }
        }
        self.write_state()
    }

    fn drain(&mut self) -> Result<(), LaunchError> {
        if let Some(current) = &mut self.current {
            current.draining = true;
            current.watch.drain();
            self.trouble
                .get_or_insert((Instant::now(), current.generation.world()));
        }
        let why = if self.signals.load(Ordering::Relaxed) > 0 {
            "stop asked for: committing a checkpoint (again to stop at once)".to_string()
        } else {
            format!("{} ranks asked for", self.desired)
        };
        self.display.event(&Event::Draining { why });
        self.state.phase = Phase::Draining;
        self.write_state()
    }

    /// Publishes the next generation and starts its ranks.
    fn start(
        &mut self,
        world: u64,
        reason: Reason,
        micro_limit: Option<u64>,
    ) -> Result<(), LaunchError> {
        self.current = None;
        self.state.micro_limit = micro_limit.or(self.state.micro_limit);
        let plan = self
            .plan(world, self.state.micro_limit)
            .map_err(|refused| LaunchError::Refused(Box::new(refused)))?;
        let number = self.run.next_generation();
        // The ranks of all generations before are gone; what they did not finish goes, too.
        checkpoint::sweep(self.run.path(), number)?;
        let generation = Generation {
            job: self.setup.job.clone(),
            number,
            reason,
            members: vec![Member {
                seat: 0,
                ranks: world,
            }],
            plan,
            start: self.state.pin.clone(),
            master: Address {
                host: "127.0.0.1".into(),
                port: free_port()?,
            },
            created: now(),
        };
        self.run.write_record(&generation)?;
        self.state.phase = Phase::Running;
        self.state.generations.push(GenerationRow {
            number,
            reason: generation.reason.clone(),
            world,
            proof: generation.plan.proof.clone(),
            start_samples: generation.start_samples(),
            created: generation.created,
            first_step_seconds: None,
        });
        self.write_state()?;
        let ranks = RankProcesses::start(
            &Start {
                program: &self.program,
                run: self.run.path(),
                generation: &generation,
                first: 0,
                count: world,
                threads: (self.setup.cores / world).max(1),
            },
            &self.events.0,
        )
        .map_err(|error| LaunchError::Spawn { error })?;
        self.display.event(&Event::GenerationStarted {
            generation: number,
            world,
            proof: generation.plan.proof.clone(),
            reason: generation.reason.to_string(),
            start_samples: generation.start_samples(),
        });
        self.current = Some(Current {
            metrics: MetricsWriter::append_to(self.run.metrics(number))?,
            watch: Watch::new(ranks, world),
            generation,
            draining: false,
            stepped: false,
        });
        Ok(())
    }

    fn end(mut self, end: End) -> Result<End, LaunchError> {
        self.state.phase = match &end {
            End::Finished => Phase::Finished,
            End::Drained => Phase::Drained,
            End::Failed { why } => Phase::Failed { why: why.clone() },
        };
        self.write_state()?;
        if let (End::Finished, Some(step)) = (&end, &self.last_step) {
            self.display.event(&Event::Finished {
                samples: step.samples,
                steps: step.step,
                loss: self.last_evaluation.unwrap_or(step.loss),
                seconds: self.started.elapsed().as_secs_f64(),
            });
        }
        Ok(end)
    }

    fn write_state(&self) -> Result<(), LaunchError> {
        self.run.write_state(&self.state)
    }
}

/// A port of the loopback interface that is free now. Rank 0 says so clearly if somebody takes it
/// before it listens.
fn free_port() -> Result<u16, LaunchError> {
    TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|error| LaunchError::Port { error })
}
