//! The agent of a pod: follows its TrainingJob, starts the ranks of each generation that names
//! this pod, and tells the controller how they do.
//!
//! One loop over one queue: the job's changes, what ranks say, signals, ticks. What it has to do
//! follows from the newest job and from what runs here, so hearing the same twice does no harm.

mod begin;
mod contact;
mod heard;
mod waiting;

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::own_call::OwnCall;
use super::{
    Answer, Event as RankEvent, Identity, Membership, OomKills, Preparation, Ranks, Retention,
    Silence, Tail,
};
use crate::job::agent_state::AgentState;
use crate::job::generation::Generation;
use crate::job::protocol::{Order, exit};
use crate::job::seen;
use crate::telemetry::{Display, Event};

use begin::Pause;
use contact::{Contact, Whom};
use waiting::Waiting;

/// How often it looks around when nothing happens.
const TICK: Duration = Duration::from_millis(100);

/// Something for the loop.
#[derive(Debug)]
pub enum Input {
    /// The job as it stands now, just heard from the API server.
    Job(Box<Membership>),
    /// The controller has asked for this agent's state.
    Polled,
    /// The agent of another pod has answered.
    Peer(Answer),
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
    /// The other pods whose agents are asked how far they are.
    asked: watch::Sender<Vec<IpAddr>>,
    state: AgentState,
    job: Option<Arc<Membership>>,
    contact: Contact,
    terminating: bool,
    preparation: Option<Preparation>,
    waiting: Option<Waiting>,
    pause: Option<Pause>,
    /// When its devices were last looked at.
    inspected: Option<Instant>,
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
    /// An agent that takes `inputs`, hands `events` to its ranks, tells how it does by `told`, and
    /// wants to hear of the agents on the hosts in `asked`.
    pub fn new(
        identity: Identity,
        inputs: Receiver<Input>,
        events: Sender<RankEvent>,
        told: watch::Sender<AgentState>,
        asked: watch::Sender<Vec<IpAddr>>,
        display: Display,
    ) -> PodAgent {
        let state = AgentState {
            version: 1,
            pod: identity.pod.clone(),
            devices: identity.devices,
            ..AgentState::default()
        };
        let mut agent = PodAgent {
            identity,
            inputs,
            events,
            told,
            asked,
            state,
            job: None,
            contact: Contact::new(),
            terminating: false,
            preparation: None,
            waiting: None,
            pause: None,
            inspected: None,
            current: None,
            retention: Retention::default(),
            display,
        };
        // Before anybody hears of this pod: one that tells first is counted on first.
        agent.inspect();
        agent.told.send_replace(agent.state.clone());
        agent
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
            self.inspect();
            self.ask_peers();
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
                self.contact.heard(Whom::ApiServer);
                self.job = Some(Arc::from(job));
            }
            Input::Polled => self.contact.heard(Whom::Controller),
            Input::Peer(answer) => self.take_answer(answer),
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
        if self.fence() {
            return;
        }
        let Some(job) = self.job.clone() else { return };
        let Some(wanted) = &job.generation else {
            return;
        };
        let number = wanted.record.number;
        if self.state.generation < number && !self.terminating && wanted.outcome.is_none() {
            self.begin(&wanted.record);
            return;
        }
        self.wait_no_longer();
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

    /// Takes in how far another pod is.
    fn take_answer(&mut self, answer: Answer) {
        self.contact.heard(Whom::Peer);
        if let Some(waiting) = &mut self.waiting {
            waiting.take(answer);
        }
        if let Some(current) = &mut self.current
            && answer.generation > Some(current.generation.number)
        {
            // The world went on without these ranks, and the API server could not say so.
            current.ranks.kill();
        }
    }

    /// Asks whom there is a reason to ask: the first member while it is waited for, and all other
    /// members while nothing is heard of the cluster.
    fn ask_peers(&mut self) {
        let fence_after = self.job.as_ref().map(|job| job.fence_after);
        let misses = fence_after.is_some_and(|after| self.contact.misses_the_cluster(after));
        let whom = match (&self.waiting, &self.current) {
            (Some(waiting), _) => waiting.first().into_iter().collect(),
            (None, Some(current)) if misses && !self.all_ended() => {
                current.generation.others(&self.identity.pod)
            }
            _ => Vec::new(),
        };
        self.asked.send_if_modified(|asked| {
            let changed = *asked != whom;
            *asked = whom;
            changed
        });
    }

    /// Stops the ranks of a pod that is cut off, whatever the others do by now: these are not part
    /// of it. Nothing is started here either, then.
    fn fence(&mut self) -> bool {
        let Some(job) = &self.job else { return false };
        let fence_after = job.fence_after;
        self.contact.look(fence_after);
        let lost_peer = self.state.ranks.iter().any(|seen| seen.lost.is_some());
        if !self.contact.is_cut_off(fence_after, lost_peer) {
            return false;
        }
        let Some(current) = &mut self.current else {
            return true;
        };
        current.ranks.kill();
        let mut stopped = false;
        for seen in self.state.ranks.iter_mut().filter(|s| s.ending.is_none()) {
            stopped |= seen.given_up.is_none();
            seen.given_up
                .get_or_insert_with(|| contact::words(fence_after));
        }
        if stopped {
            self.warn(format!(
                "{}; its ranks are stopped",
                contact::words(fence_after)
            ));
            self.tell();
        }
        true
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
