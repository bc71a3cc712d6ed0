//! The agent of a pod: follows its TrainingJob, starts the ranks of each generation that contains
//! this pod, and reports their state to the controller.
//!
//! One loop reads one queue: job changes, rank reports, signals, ticks. Its actions follow from the
//! newest job and from the running ranks, so duplicate inputs are harmless.

mod begin;
mod contact;
mod heard;
mod standby;
mod waiting;

#[cfg(test)]
mod tests;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::{Answer, EventLog, Identity, Input, Membership, Preparation, retention};
use crate::checkpoint::Retention;
use crate::host::{Event as RankEvent, HostGeneration};
use crate::lifecycle::agent_state::{AgentState, Problem};
use crate::lifecycle::generation::{Generation, Peer};
use crate::lifecycle::protocol::{Ending, exit};
use crate::lifecycle::rank_status::RankStatus;
use crate::telemetry::{Event, Pace};
use crate::train::TrainError;

use super::bucket_run::BucketRun;
use super::later::Search;
use super::mirror::Mirror;
use contact::{Contact, ContactSource};
use standby::Standby;
use waiting::Waiting;

/// Longest time between two passes of the loop.
const TICK: Duration = Duration::from_millis(100);

/// The state of an agent that has started no ranks.
fn state_of(identity: &Identity) -> AgentState {
    AgentState {
        job: identity.job.clone(),
        pod: identity.pod.clone(),
        devices: identity.devices,
        continues: true,
        ..AgentState::default()
    }
}

/// The agent's loop and its state.
pub struct PodAgent {
    identity: Identity,
    inputs: Receiver<Input>,
    events: Sender<RankEvent>,
    published: watch::Sender<AgentState>,
    /// Pods whose agents are asked for their generation.
    asked: watch::Sender<Vec<Peer>>,
    state: AgentState,
    job: Option<Arc<Membership>>,
    contact: Contact,
    terminating: bool,
    /// Since when the job is known to be gone.
    gone: Option<Instant>,
    preparation: Option<Preparation>,
    /// The pod's own preparation, and whether it has ended or there is none.
    setup: Option<Preparation>,
    is_set_up: bool,
    bucket_run: BucketRun,
    waiting: Option<Waiting>,
    /// The generation that waits for a prerequisite, and whether all are met: then the volume is searched once more.
    delayed: Option<(u64, bool)>,
    /// The generation whose start has failed last, and when.
    pause: Option<(u64, Instant)>,
    /// Time of the last device check.
    inspected: Option<Instant>,
    /// The generation whose ranks were started here.
    current: Option<HostGeneration>,
    /// What waits to join a world.
    standby: Option<Standby>,
    /// The generation for which it was last decided whether processes stand by.
    joins: Option<u64>,
    /// Processes that stand by beside the ranks.
    spares: usize,
    /// Copies its external trainer's checkpoints to the bucket.
    mirror: Option<Mirror>,
    pace: Pace,
    retention: Retention<TrainError>,
    /// Whether the volume has later generations than the newest status.
    later: Option<Search>,
    /// The bucket did not answer, and [`AgentState::problem`] says so.
    search_failed: bool,
    log: EventLog,
}

impl PodAgent {
    /// Creates an agent that reads `inputs`, gives `events` to its ranks, publishes its state in
    /// `published`, and lists in `asked` the hosts whose agents must be asked.
    pub fn new(
        identity: Identity,
        inputs: Receiver<Input>,
        events: Sender<RankEvent>,
        published: watch::Sender<AgentState>,
        asked: watch::Sender<Vec<Peer>>,
        log: EventLog,
    ) -> PodAgent {
        let state = AgentState {
            version: 1,
            prepares: true,
            ..state_of(&identity)
        };
        let mut agent = PodAgent {
            is_set_up: !identity.setup,
            identity,
            inputs,
            events,
            published,
            asked,
            state,
            job: None,
            contact: Contact::new(),
            terminating: false,
            gone: None,
            preparation: None,
            setup: None,
            bucket_run: BucketRun::default(),
            waiting: None,
            delayed: None,
            pause: None,
            inspected: None,
            current: None,
            standby: None,
            joins: None,
            spares: 0,
            mirror: None,
            pace: Pace::default(),
            retention: Retention::default(),
            later: None,
            search_failed: false,
            log,
        };
        // Before the state is published: a pod reports missing devices before it counts.
        agent.inspect();
        agent.published.send_replace(agent.state.clone());
        agent
    }

    /// Runs until the job is over or the pod must exit.
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
            if let Some(current) = &mut self.current {
                current.kill_silent();
            }
            self.follow_ranks(false);
            self.tidy();
            self.warn_of_copies();
            if self.all_ended() && self.is_kept() {
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
                self.contact.heard(ContactSource::ApiServer);
                self.job = Some(Arc::from(job));
            }
            Input::Polled => self.contact.heard(ContactSource::Controller),
            Input::Peer(answer) => self.take_answer(answer),
            Input::Gone => {
                self.contact.heard(ContactSource::ApiServer);
                if self.gone.is_none() {
                    self.gone = Some(Instant::now());
                    self.warn("the TrainingJob is gone; its ranks commit and stop".into());
                    self.terminate();
                }
            }
            Input::Terminate => self.terminate(),
            Input::Rank(event) => self.take_event(event),
        }
    }

    fn terminate(&mut self) {
        self.terminating = true;
        if let Some(current) = &mut self.current {
            current.leave();
        }
    }

    /// Removes expired checkpoints: those of the run on the pod of rank 0, copies on every pod.
    fn tidy(&mut self) {
        let checkpoint_ref = self.job.as_ref().and_then(|job| job.checkpoint.as_ref());
        let (Some(checkpoint_ref), Some(current)) = (checkpoint_ref, &self.current) else {
            return;
        };
        let first = self.state.first == 0;
        if !first && self.identity.bucket.is_none() {
            return;
        }
        let start = current.record.start.as_ref();
        let identity = &self.identity;
        let tended = (self.retention).tend(checkpoint_ref, || {
            retention::begin(identity, first, checkpoint_ref, start)
        });
        if let Some(problem) = tended {
            self.warn(problem);
        }
    }

    fn warn_of_copies(&mut self) {
        let warnings = self.mirror.as_ref().map(Mirror::warnings);
        for warning in warnings.unwrap_or_default() {
            self.warn(warning);
        }
    }

    /// Whether the bucket has what the ended ranks have left: the checkpoints of an external trainer, and the logs, unless
    /// these take too long.
    fn is_kept(&mut self) -> bool {
        let (Some(bucket), Some(current)) = (&self.identity.bucket, &self.current) else {
            return true;
        };
        let is_finished = |rank: &RankStatus| rank.ending() == Some(Ending::Code(exit::FINISHED));
        let finished = current.statuses().iter().all(is_finished);
        if (self.mirror.as_ref()).is_some_and(|mirror| !mirror.end(finished)) {
            return false;
        }
        self.bucket_run.keep_logs(
            bucket,
            &self.identity.run,
            current.record.number,
            current.ranks(),
        )
    }

    fn warn(&mut self, message: String) {
        self.log.of_training(Event::Warning { message });
    }

    /// Performs what the newest job requires.
    fn act(&mut self) {
        if self.fence() {
            return;
        }
        let Some(job) = self.job.clone() else { return };
        let published = job.generation.as_ref();
        let joins = published.is_some_and(|wanted| {
            let record = &wanted.record;
            wanted.outcome.is_none() && record.ranks_of_pod(&self.identity.pod).is_none()
        });
        if !joins {
            self.show_standby();
        }
        if self.gone.is_some_and(|since| since.elapsed() >= job.drain)
            && let Some(current) = &mut self.current
        {
            // No kubelet ends the pods of a job that was deleted with `--cascade=orphan`.
            current.fence();
        }
        if let (Some(wanted), Some(current)) = (published, &mut self.current)
            && current.record.number < wanted.record.number
            && !current.has_ended()
            && (wanted.outcome.is_some() || joins || !current.continues_in(&wanted.record))
        {
            // The world continues without these ranks. What they commit until their end must be found by the search.
            current.fence();
            return;
        }
        if !self.is_newest(published.map(|wanted| &wanted.record)) {
            return;
        }
        let Some(wanted) = published else { return };
        let number = wanted.record.number;
        if self.state.generation < number && !self.terminating && wanted.outcome.is_none() {
            self.begin(&wanted.record);
            return;
        }
        self.end_wait();
        let Some(current) = &mut self.current else {
            return;
        };
        if current.record.number < number || wanted.outcome.is_some() {
            // The world continued without these ranks.
            current.fence();
            return;
        }
        if wanted.drain && wanted.pause {
            current.pause();
        } else {
            current.set_draining(wanted.drain);
        }
        if let Some(after) = wanted.after_loss {
            current.settle(after.commit);
        }
        self.keep_spares();
    }

    /// Whether the volume has no later generation than the published one; false while that is not known. Ranks of a
    /// later one continue until a generation above it is published.
    fn is_newest(&mut self, published: Option<&Generation>) -> bool {
        let search = match self.later.take() {
            Some(search) if search.is_for(published) => search,
            _ => Search::begin(&self.identity, published),
        };
        let found = match self.later.insert(search).result() {
            None => return false,
            Some(Ok(found)) => found.clone(),
            Some(Err(problem)) => {
                let problem = problem.clone();
                self.search_again(problem);
                return false;
            }
        };
        let newest = found.is_none();
        if std::mem::take(&mut self.search_failed) {
            self.state.problem = None;
            self.publish();
        }
        if self.state.later != found {
            self.state.later = found;
            self.publish();
        }
        newest
    }

    /// Reports that the bucket does not answer, and searches it again after a while.
    fn search_again(&mut self, problem: Problem) {
        let number = self.state.generation;
        if !self.pauses(number) {
            self.pause = Some((number, Instant::now()));
            self.later = None;
            self.search_failed = true;
            self.report_problem(problem);
        }
    }

    /// Records the generation of another pod's agent.
    fn take_answer(&mut self, answer: Answer) {
        self.contact.heard(ContactSource::Peer);
        if let Some(waiting) = &mut self.waiting {
            waiting.take(answer);
        }
        if let Some(current) = &mut self.current
            && answer.generation > current.record.number
        {
            // The world continued without these ranks, and the API server could not report it.
            current.fence();
        }
    }

    /// Chooses the agents to ask: the first member while this pod waits for it; all other members
    /// while the API server, the controller and the peers are silent.
    fn ask_peers(&mut self) {
        let fence_after = self.job.as_ref().map(|job| job.fence_after);
        let misses = fence_after.is_some_and(|after| self.contact.misses_the_cluster(after));
        let whom = match (&self.waiting, &self.current) {
            (Some(waiting), _) => waiting.first().into_iter().cloned().collect(),
            (None, Some(current)) if misses && !current.has_ended() => {
                current.record.peers(&self.identity.pod)
            }
            _ => Vec::new(),
        };
        self.asked.send_if_modified(|asked| {
            let changed = *asked != whom;
            *asked = whom;
            changed
        });
    }

    /// Stops the ranks of a pod that is cut off: the world may already run without them. Returns
    /// true while the pod is cut off; then it also starts no ranks.
    fn fence(&mut self) -> bool {
        let Some(job) = &self.job else { return false };
        let fence_after = job.fence_after;
        self.contact.look(fence_after);
        let statuses = self.current.as_ref().map(HostGeneration::statuses);
        let mut statuses = statuses.unwrap_or_default().iter();
        let lost_peer = statuses.any(|rank| rank.held().is_some());
        if !self.contact.is_cut_off(fence_after, lost_peer) {
            return false;
        }
        let Some(current) = &mut self.current else {
            return true;
        };
        let message = contact::cut_off_message(fence_after);
        if current.kill(&message) {
            self.warn(format!("{message}; its ranks are stopped"));
            self.publish();
        }
        true
    }

    /// The job, if an external trainer runs it.
    fn external_job(&self) -> Option<&Membership> {
        self.job.as_deref().filter(|job| !job.command.is_empty())
    }

    fn all_ended(&self) -> bool {
        self.current.as_ref().is_none_or(HostGeneration::has_ended)
    }

    /// Publishes a changed state to waiting callers.
    fn publish(&mut self) {
        self.state.version += 1;
        self.describe();
        self.published.send_replace(self.state.clone());
    }

    /// Brings the statuses of the ranks into the state, and shortens its texts.
    fn describe(&mut self) {
        if let Some(current) = &self.current {
            self.state.ranks = current.statuses().to_vec();
        }
        self.state.bound();
    }
}
