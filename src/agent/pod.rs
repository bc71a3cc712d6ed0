//! The agent of a pod: follows its TrainingJob, starts the ranks of each generation that names
//! this pod, and tells the controller how they do.
//!
//! One loop over one queue: the job's changes, what ranks say, signals, ticks. What it has to do
//! follows from the newest job and from what runs here, so hearing the same twice does no harm.

mod heard;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::own_call::{self, OwnCall, own_call};
use super::volume::volume_problem;
use super::{
    Event as RankEvent, Identity, Membership, OomKills, Preparation, Program, Ranks, Retention,
    Silence, Start, Tail,
};
use crate::durable::FileError;
use crate::inventory::Inventory;
use crate::job::agent_state::{AgentState, Problem};
use crate::job::files;
use crate::job::generation::Generation;
use crate::job::protocol::{Order, exit};
use crate::job::seen::{self, Seen};
use crate::telemetry::{Display, Event, now};

/// How often it looks around when nothing happens.
const TICK: Duration = Duration::from_millis(100);

/// Something for the loop.
#[derive(Debug)]
pub enum Input {
    /// The job as it stands now, just heard from the API server.
    Job(Box<Membership>),
    /// Something of a rank.
    Rank(Box<RankEvent>),
    /// SIGTERM: the pod is about to go.
    Terminate,
}

/// The loop.
pub struct PodAgent {
    identity: Identity,
    inputs: Receiver<Input>,
    events: Sender<RankEvent>,
    told: watch::Sender<AgentState>,
    state: AgentState,
    job: Option<Arc<Membership>>,
    /// When the API server was last heard from.
    contact: Instant,
    terminating: bool,
    preparation: Option<Preparation>,
    current: Option<Current>,
    retention: Retention,
    display: Display,
}

/// The generation whose ranks were started here.
struct Current {
    generation: Generation,
    /// The call of the user's own program, where that trains.
    own: Option<OwnCall>,
    ranks: Ranks,
    tails: Vec<Tail>,
    /// Kills by the kernel since its ranks were started.
    oom_kills: OomKills,
    silence: Silence,
    draining: bool,
    settled: bool,
}

impl PodAgent {
    /// An agent that takes `inputs`, hands `events` to its ranks, and tells how it does by `told`.
    pub fn new(
        identity: Identity,
        inputs: Receiver<Input>,
        events: Sender<RankEvent>,
        told: watch::Sender<AgentState>,
        display: Display,
    ) -> PodAgent {
        let state = AgentState {
            version: 1,
            pod: identity.pod.clone(),
            devices: identity.devices,
            ..AgentState::default()
        };
        told.send_replace(state.clone());
        PodAgent {
            identity,
            inputs,
            events,
            told,
            state,
            job: None,
            contact: Instant::now(),
            terminating: false,
            preparation: None,
            current: None,
            retention: Retention::default(),
            display,
        }
    }

    /// Runs until the job is over or the pod must go.
    pub fn run(mut self) -> ExitCode {
        loop {
            match self.inputs.recv_timeout(TICK) {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return ExitCode::FAILURE,
            }
            while let Ok(input) = self.inputs.try_recv() {
                self.take(input);
            }
            self.act();
            self.give_up_the_silent();
            self.pass_on();
            self.tidy();
            if self.all_ended() {
                if self.terminating {
                    return ExitCode::from(exit::DRAINED);
                }
                if self.job.as_ref().is_some_and(|job| job.over) {
                    return ExitCode::SUCCESS;
                }
            }
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Job(job) => {
                self.contact = Instant::now();
                self.job = Some(Arc::from(job));
            }
            Input::Terminate => {
                self.terminating = true;
                if let Some(current) = &mut self.current {
                    // Ranks agree with their peers on a step: one that is told tells all.
                    current.ranks.order_all(Order::Drain);
                }
            }
            Input::Rank(event) => self.take_event(*event),
        }
    }

    /// Where rank 0 runs, removes checkpoints that are too old to be kept.
    fn tidy(&mut self) {
        let pin = self.job.as_ref().and_then(|job| job.checkpoint.as_ref());
        let current = self.current.as_ref().filter(|_| self.state.first == 0);
        let (Some(pin), Some(current)) = (pin, current) else {
            return;
        };
        let start = current.generation.start.as_ref();
        let run = self.identity.run.clone();
        if let Some(problem) = self.retention.tend(run, pin, start) {
            self.warn(problem);
        }
    }

    fn warn(&mut self, message: String) {
        self.display.event(&Event::Warning { message });
    }

    /// Does what the newest job asks for.
    fn act(&mut self) {
        self.fence();
        let Some(job) = self.job.clone() else { return };
        let Some(wanted) = &job.generation else {
            return;
        };
        let number = wanted.record.number;
        if self.state.generation < number && !self.terminating && wanted.outcome.is_none() {
            self.begin(&wanted.record);
            return;
        }
        let Some(current) = &mut self.current else {
            return;
        };
        if current.generation.number < number || wanted.outcome.is_some() {
            // The world went on without these ranks.
            current.ranks.kill();
            return;
        }
        if wanted.drain != std::mem::replace(&mut current.draining, wanted.drain) {
            current.ranks.order_all(match wanted.drain {
                true => Order::Drain,
                false => Order::Stay,
            });
        }
        if let Some(after) = wanted.after_loss
            && !std::mem::replace(&mut current.settled, true)
        {
            let ranks = &mut self.state.ranks;
            for rank in seen::leave_behind(ranks, self.state.first, !job.command.is_empty()) {
                current.ranks.kill_one(rank);
            }
            for (rank, _) in (self.state.first..).zip(ranks) {
                let order = match after.commit == Some(rank) {
                    true => Order::Commit,
                    false => Order::Stop,
                };
                current.ranks.order(rank, order);
            }
        }
    }

    /// Starts this pod's share of a generation, once the run is prepared and older ranks are gone.
    fn begin(&mut self, record: &Generation) {
        let Some((first, count)) = record.share_of(&self.identity.pod) else {
            return;
        };
        if !self.all_ended() {
            if let Some(current) = &mut self.current {
                current.ranks.kill();
            }
            return;
        }
        if count > self.identity.devices {
            self.stuck(Problem {
                reason: "HardwareMismatch".into(),
                message: format!(
                    "the plan counts on {count} devices of this pod, which has {}",
                    self.identity.devices
                ),
                deterministic: false,
            });
            return;
        }
        match self.prepared(record, first == 0) {
            Ok(true) => {}
            Ok(false) => return,
            Err(problem) => {
                self.stuck(problem);
                return;
            }
        }
        if let Some(message) = Inventory::discover().falls_short_of(count) {
            self.stuck(Problem {
                reason: "HardwareMismatch".into(),
                message,
                deterministic: false,
            });
            return;
        }
        match self.start(record, first, count) {
            Ok(()) => self.state.problem = None,
            Err(problem) => {
                self.stuck(problem);
                return;
            }
        }
        self.tell();
    }

    fn start(&mut self, record: &Generation, first: u64, count: u64) -> Result<(), Problem> {
        let volume = |error: FileError| volume_problem(&error);
        record.write(&self.identity.run).map_err(volume)?;
        let own = self
            .foreign()
            .map(|job| own_call(job, &self.identity.run, record));
        let own = own.transpose()?;
        let oom_kills = OomKills::watch();
        let ranks = Ranks::start(
            &Start {
                evenkeel: &self.identity.program,
                program: match &own {
                    None => Program::BuiltIn,
                    Some(own) => Program::Foreign {
                        call: &own.call,
                        drain: own.drain(),
                    },
                },
                run: &self.identity.run,
                generation: record,
                first,
                count,
                threads: (self.identity.cores / count).max(1),
            },
            &self.events,
        )
        .map_err(|error| {
            volume(FileError::from_io(
                "start ranks in",
                &self.identity.run,
                0,
                error,
            ))
        })?;
        self.state = AgentState {
            version: self.state.version,
            pod: self.identity.pod.clone(),
            devices: self.identity.devices,
            generation: record.number,
            first,
            ranks: vec![Seen::default(); usize::try_from(count).unwrap_or(0)],
            budget: self.state.budget,
            started: Some(now()),
            own_checkpoint: own.as_ref().and_then(|own| own.checkpoint.clone()),
            ..AgentState::default()
        };
        self.current = Some(Current {
            generation: record.clone(),
            own,
            ranks,
            tails: (first..first + count)
                .map(|rank| Tail::of(&self.identity.run, record.number, rank))
                .collect(),
            oom_kills,
            silence: Silence::new(count),
            draining: false,
            settled: false,
        });
        Ok(())
    }

    /// Whether the run is prepared. The first member prepares it, in a process of its own; the
    /// others wait for its file.
    fn prepared(&mut self, record: &Generation, mine: bool) -> Result<bool, Problem> {
        if let Some(job) = self.foreign() {
            // It prepares its own data.
            return own_call::choose(job, &self.identity.run, record, mine);
        }
        let setup = self.identity.run.join(files::RUN);
        if setup.exists() {
            self.preparation = None;
            if self.state.budget.is_none() {
                self.state.budget = super::preparation::budget(&setup);
            }
            return Ok(true);
        }
        let Some(job) = self.job.as_ref().filter(|_| mine) else {
            return Ok(false);
        };
        if self.preparation.is_none() {
            let begun = Preparation::start(&self.identity, job);
            self.preparation = Some(begun.map_err(|error| volume_problem(&error))?);
        }
        match self.preparation.as_mut().map(Preparation::ended) {
            Some(Ok(false)) | None => Ok(false),
            Some(Ok(true)) => Ok(setup.exists()),
            Some(Err(problem)) => Err(problem),
        }
    }

    fn stuck(&mut self, problem: Problem) {
        if self.state.problem.as_ref() == Some(&problem) {
            return;
        }
        self.warn(problem.message.clone());
        self.state.problem = Some(problem);
        self.tell();
    }

    /// Cut off from the API server, with peers lost as well: whatever the others do by now, these
    /// ranks are not part of it.
    fn fence(&mut self) {
        let Some(job) = &self.job else { return };
        let alone = self.state.ranks.iter().any(|seen| seen.lost.is_some());
        if alone
            && self.contact.elapsed() > job.fence_after
            && let Some(current) = &mut self.current
        {
            current.ranks.kill();
        }
    }

    /// The job, where the user's own program trains.
    fn foreign(&self) -> Option<&Membership> {
        self.job.as_deref().filter(|job| !job.command.is_empty())
    }

    fn all_ended(&self) -> bool {
        self.state.ranks.iter().all(|seen| seen.ending.is_some())
    }

    /// Wakes those who wait for a change.
    fn tell(&mut self) {
        self.state.version += 1;
        self.told.send_replace(self.state.clone());
    }
}
