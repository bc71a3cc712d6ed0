//! Follows a job until it ends. Its status gives the rescales, [`super::event_reader`] the training progress;
//! both become the events that a local launch shows.

use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::watcher::watch_object;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

use super::event_reader::{Command, Pauses, RETRY_PAUSE, World, read_events};
use super::logs::PodLogs;
use super::{ClientError, Cluster, logs};
use crate::api::TrainingJob;
use crate::api::status::{Phase, TrainingJobStatus};
use crate::lifecycle::{Generation, files};
use crate::telemetry::Event;
use crate::util::format::count;

/// Time to wait for each remaining line of a log after the job has ended: a busy kubelet delivers
/// them late.
const LOG_TIMEOUT: Duration = Duration::from_secs(15);
/// Largest difference of the clocks of controller and nodes that costs no second read of a log.
const CLOCK_SKEW: Duration = Duration::from_secs(60);
/// Time without an answer of the API server after which a warning is shown.
const SILENCE: Duration = Duration::from_secs(10);

/// End of a followed job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The sample budget is reached.
    Complete,
    /// The job cannot continue.
    Failed {
        message: String,
        /// Last lines of a failed rank's output.
        log_tail: String,
    },
    /// The job was deleted.
    Deleted,
}

/// Follows an existing job and passes its events to `each`.
pub async fn follow(
    cluster: &Cluster,
    name: &str,
    each: &mut (dyn FnMut(&Event) + Send),
) -> Result<End, ClientError> {
    // An unknown job or an unreachable cluster fails at once.
    cluster.job(name).await?;
    let mut seen = std::pin::pin!(watch_object(cluster.jobs(), name));
    let (heard, mut events) = unbounded_channel();
    let (commands, commanded) = unbounded_channel();
    let pauses = Pauses {
        retry: RETRY_PAUSE,
        silence: LOG_TIMEOUT,
    };
    let logs = PodLogs::of(cluster);
    let reader = tokio::spawn(read_events(logs, commanded, heard, pauses));
    let mut follower = Follower::new(commands, reader);
    let mut silent: Option<Instant> = None;
    loop {
        tokio::select! {
            job = seen.next() => match job {
                Some(Ok(Some(job))) => {
                    silent = None;
                    follower.job(&job, each);
                    if let Some(end) = end(&job) {
                        follower.finish(&job, &mut events, each).await;
                        return Ok(end);
                    }
                }
                Some(Ok(None)) | None => return Ok(End::Deleted),
                Some(Err(error)) => {
                    let since = *silent.get_or_insert_with(Instant::now);
                    if since.elapsed() > SILENCE {
                        silent = Some(Instant::now());
                        each(&Event::Warning {
                            message: format!(
                                "the cluster does not answer, the job continues: {error}"
                            ),
                        });
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            },
            Some(event) = events.recv() => follower.event(event, each),
        }
    }
}

fn end(job: &TrainingJob) -> Option<End> {
    let status = job.status.as_ref()?;
    match status.phase {
        Phase::Complete => Some(End::Complete),
        Phase::Failed => Some(End::Failed {
            message: status.message.clone(),
            log_tail: status.log_tail.clone(),
        }),
        _ => None,
    }
}

/// Progress of the report, so that each event is shown once.
struct Follower {
    commands: UnboundedSender<Command>,
    /// The task that reads events; it ends with the follower.
    reader: JoinHandle<()>,
    begun: Instant,
    planned: bool,
    generation: u64,
    draining: bool,
    message: String,
    /// The generation whose first step was announced as a rescale.
    rescaled: u64,
    /// Samples of the newest step.
    samples: u64,
    /// Loss of the newest evaluation, else of the newest step.
    loss: f64,
    evaluated: bool,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Follower {
    fn new(commands: UnboundedSender<Command>, reader: JoinHandle<()>) -> Follower {
        Follower {
            commands,
            reader,
            begun: Instant::now(),
            planned: false,
            generation: 0,
            draining: false,
            message: String::new(),
            rescaled: 0,
            samples: 0,
            loss: f64::NAN,
            evaluated: false,
        }
    }

    fn job(&mut self, job: &TrainingJob, each: &mut (dyn FnMut(&Event) + Send)) {
        let Some(status) = &job.status else { return };
        self.plan(job, status, each);
        self.message(status, each);
        self.world(job, status, each);
    }

    /// Shows the plan once the sample budget is known, which the progress bar needs.
    fn plan(
        &mut self,
        job: &TrainingJob,
        status: &TrainingJobStatus,
        each: &mut (dyn FnMut(&Event) + Send),
    ) {
        let budget = status
            .progress
            .as_ref()
            .and_then(|progress| progress.budget);
        let (false, Some(plan), Some(budget)) = (self.planned, &status.plan, budget) else {
            return;
        };
        self.planned = true;
        let spec = &job.spec;
        each(&Event::Planned {
            name: job.metadata.name.clone().unwrap_or_default(),
            formula: plan.formula.clone(),
            world: plan.world_size,
            global_batch: plan.global_batch_size,
            budget,
            devices: format!(
                "{} × {} {}",
                count(status.nodes.into(), "node"),
                spec.gpus_per_node,
                spec.resource_name
            ),
            floor: None,
        });
    }

    /// Shows a changed status message.
    fn message(&mut self, status: &TrainingJobStatus, each: &mut (dyn FnMut(&Event) + Send)) {
        if status.message == self.message {
            return;
        }
        self.message.clone_from(&status.message);
        if self.message.is_empty() {
            return;
        }
        match status.phase {
            Phase::Pending | Phase::Placing | Phase::Waiting | Phase::Suspended => {
                each(&Event::Waiting {
                    message: self.message.clone(),
                });
            }
            Phase::Running => each(&Event::Warning {
                message: self.message.clone(),
            }),
            Phase::Draining | Phase::Complete | Phase::Failed => {}
        }
    }

    /// Shows new generations, drains and rescales.
    fn world(
        &mut self,
        job: &TrainingJob,
        status: &TrainingJobStatus,
        each: &mut (dyn FnMut(&Event) + Send),
    ) {
        let draining = status.phase == Phase::Draining;
        if std::mem::replace(&mut self.draining, draining) != draining && draining {
            each(&Event::Draining {
                message: status.message.clone(),
            });
        }
        let Some(current) = &status.generation else {
            return;
        };
        let record = &current.record;
        if status.phase == Phase::Running {
            self.generation(record, each);
        }
        if let Some(change) = status.history.last()
            && let Some(seconds) = change.stages.first_step_seconds
            && change.from_nodes != 0
            && change.generation > self.rescaled
        {
            self.rescaled = change.generation;
            let ranks = |nodes: u32| u64::from(nodes) * u64::from(job.spec.gpus_per_node);
            each(&Event::Rescaled {
                from: ranks(change.from_nodes),
                to: ranks(change.to_nodes),
                seconds,
                message: change.message.clone(),
            });
        }
    }

    /// Shows and reads a generation that trains or has trained.
    fn generation(&mut self, record: &Generation, each: &mut (dyn FnMut(&Event) + Send)) {
        if record.number <= self.generation {
            return;
        }
        self.generation = record.number;
        let started = Event::GenerationStarted {
            generation: record.number,
            world: record.world(),
            formula: record.plan.formula.clone(),
            reason: record.reason.to_string(),
            start_samples: record.start_samples(),
        };
        match logs::pod_of(record, 0) {
            // Shown after the last event of the generation before it.
            Some(pod) => self.read(record, pod, started),
            None => each(&started),
        }
    }

    /// Reads the events of a generation.
    fn read(&self, record: &Generation, pod: &str, started: Event) {
        let created = record.created - CLOCK_SKEW.as_secs_f64();
        let world = World {
            generation: record.number,
            pod: pod.to_owned(),
            created: Timestamp::from_millisecond((created * 1000.0) as i64).ok(),
            announcement: Some(started),
        };
        // The task ends only with the follower.
        let _ = self.commands.send(Command::World(Box::new(world)));
    }

    fn event(&mut self, event: Event, each: &mut (dyn FnMut(&Event) + Send)) {
        match &event {
            Event::Step(step) => {
                self.samples = step.samples;
                if !self.evaluated {
                    self.loss = step.loss;
                }
            }
            Event::Evaluation(evaluation) => {
                self.evaluated = true;
                self.loss = evaluation.loss;
            }
            // `evenkeel logs --rank` shows the output of a rank.
            Event::Output { .. } => return,
            _ => {}
        }
        each(&event);
    }

    /// Shows the remaining events of the log and the end.
    async fn finish(
        &mut self,
        job: &TrainingJob,
        events: &mut UnboundedReceiver<Event>,
        each: &mut (dyn FnMut(&Event) + Send),
    ) {
        let Some(status) = &job.status else { return };
        let progress = status.progress.clone().unwrap_or_default();
        if let (Phase::Complete, Some(current)) = (status.phase, &status.generation) {
            // It was too short to be seen running.
            self.generation(&current.record, each);
        }
        let samples = progress.samples;
        let _ = self.commands.send(Command::Over { samples });
        // The task ends once it has read the log to its end.
        while let Some(event) = events.recv().await {
            self.event(event, each);
        }
        if self.generation > 0 && self.samples < progress.samples {
            each(&Event::Warning {
                message: format!(
                    "the steps after sample {} cannot be read any more; the checkpoint volume has them in {}",
                    self.samples,
                    files::events(self.generation).display()
                ),
            });
        }
        if status.phase == Phase::Complete {
            let loss = match self.loss.is_finite() {
                true => self.loss,
                false => progress.loss.parse().unwrap_or(f64::NAN),
            };
            each(&Event::Finished {
                samples: progress.samples,
                steps: progress.step,
                loss,
                seconds: self.begun.elapsed().as_secs_f64(),
            });
        }
    }
}
