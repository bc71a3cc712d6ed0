//! Follows a job until it ends. Its status gives the rescales, [`super::event_reader`] the training progress;
//! both become the events that a local launch shows.

use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::watcher::watch_object;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

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
    // The task that reads events ends with the follower.
    let mut reader = JoinSet::new();
    reader.spawn(read_events(PodLogs::of(cluster), commanded, heard, pauses));
    let mut follower = Follower {
        each,
        commands,
        begun: Instant::now(),
        planned: false,
        generation: 0,
        draining: false,
        message: String::new(),
        rescaled: 0,
        samples: 0,
        loss: f64::NAN,
        evaluated: false,
    };
    let mut silent: Option<Instant> = None;
    loop {
        tokio::select! {
            job = seen.next() => match job {
                Some(Ok(Some(job))) => {
                    silent = None;
                    let Some(status) = &job.status else { continue };
                    follower.status(&job, status);
                    if let Some(end) = end(status) {
                        follower.finish(status, &mut events).await;
                        return Ok(end);
                    }
                }
                Some(Ok(None)) | None => return Ok(End::Deleted),
                Some(Err(error)) => {
                    let since = *silent.get_or_insert_with(Instant::now);
                    if since.elapsed() > SILENCE {
                        silent = Some(Instant::now());
                        follower.warn(format!(
                            "the cluster does not answer, the job continues: {error}"
                        ));
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            },
            Some(event) = events.recv() => follower.event(&event),
        }
    }
}

fn end(status: &TrainingJobStatus) -> Option<End> {
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
struct Follower<'a> {
    each: &'a mut (dyn FnMut(&Event) + Send),
    commands: UnboundedSender<Command>,
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

impl Follower<'_> {
    fn warn(&mut self, message: String) {
        (self.each)(&Event::Warning { message });
    }

    /// Shows what has changed in the job's status.
    fn status(&mut self, job: &TrainingJob, status: &TrainingJobStatus) {
        self.plan(job, status);
        self.message(status);
        let draining = status.phase == Phase::Draining;
        if std::mem::replace(&mut self.draining, draining) != draining && draining {
            (self.each)(&Event::Draining {
                message: status.message.clone(),
            });
        }
        let Some(current) = &status.generation else {
            return;
        };
        if status.phase == Phase::Running {
            self.generation(&current.record);
        }
        if let Some(change) = status.history.last()
            && let Some(seconds) = change.stages.first_step_seconds
            && change.from_nodes != 0
            && change.generation > self.rescaled
        {
            self.rescaled = change.generation;
            let ranks = |nodes: u32| u64::from(nodes) * u64::from(job.spec.gpus_per_node);
            (self.each)(&Event::Rescaled {
                from: ranks(change.from_nodes),
                to: ranks(change.to_nodes),
                seconds,
                message: change.message.clone(),
            });
        }
    }

    /// Shows the plan once the sample budget is known, which the progress bar needs.
    fn plan(&mut self, job: &TrainingJob, status: &TrainingJobStatus) {
        let progress = status.progress.as_ref();
        let budget = progress.and_then(|progress| progress.budget);
        let (false, Some(plan), Some(budget)) = (self.planned, &status.plan, budget) else {
            return;
        };
        self.planned = true;
        let spec = &job.spec;
        (self.each)(&Event::Planned {
            name: job.name_any(),
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
    fn message(&mut self, status: &TrainingJobStatus) {
        if status.message == self.message {
            return;
        }
        self.message.clone_from(&status.message);
        if self.message.is_empty() {
            return;
        }
        let message = self.message.clone();
        match status.phase {
            Phase::Pending | Phase::Placing | Phase::Waiting | Phase::Suspended => {
                (self.each)(&Event::Waiting { message });
            }
            Phase::Running => self.warn(message),
            Phase::Draining | Phase::Complete | Phase::Failed => {}
        }
    }

    /// Shows and reads a generation that trains or has trained.
    fn generation(&mut self, record: &Generation) {
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
        let Some(pod) = logs::pod_of(record, 0) else {
            return (self.each)(&started);
        };
        let created = record.created - CLOCK_SKEW.as_secs_f64();
        // The task that receives it ends only with the follower.
        let _ = self.commands.send(Command::World(Box::new(World {
            generation: record.number,
            pod: pod.to_owned(),
            created: Timestamp::from_millisecond((created * 1000.0) as i64).ok(),
            // Shown after the last event of the generation before it.
            announcement: Some(started),
        })));
    }

    fn event(&mut self, event: &Event) {
        match event {
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
        (self.each)(event);
    }

    /// Shows the remaining events of the log and the end.
    async fn finish(&mut self, status: &TrainingJobStatus, events: &mut UnboundedReceiver<Event>) {
        let progress = status.progress.clone().unwrap_or_default();
        if let (Phase::Complete, Some(current)) = (status.phase, &status.generation) {
            // It was too short to be seen running.
            self.generation(&current.record);
        }
        let samples = progress.samples;
        let _ = self.commands.send(Command::Over { samples });
        // The task ends once it has read the log to its end.
        while let Some(event) = events.recv().await {
            self.event(&event);
        }
        if self.generation > 0 && self.samples < samples {
            self.warn(format!(
                "the steps after sample {} cannot be read any more; the checkpoint volume has them in {}",
                self.samples,
                files::events(self.generation).display()
            ));
        }
        if status.phase == Phase::Complete {
            if !self.loss.is_finite() {
                self.loss = progress.loss.parse().unwrap_or(f64::NAN);
            }
            (self.each)(&Event::Finished {
                samples,
                steps: progress.step,
                loss: self.loss,
                seconds: self.begun.elapsed().as_secs_f64(),
            });
        }
    }
}
