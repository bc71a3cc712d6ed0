//! Follows a job until it ends: its status tells how it moves, the log of rank 0's pod what the
//! training does, and both become the events that a local launch shows.

use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::watcher::watch_object;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

use super::{ClientError, Cluster, logs};
use crate::job::api::TrainingJob;
use crate::job::api::status::{State, TrainingJobStatus};
use crate::telemetry::Event;
use crate::words::count;

/// Between two tries to read a log that ended though its generation goes on.
const AGAIN: Duration = Duration::from_secs(1);
/// How long the next of a log's last lines is waited for once the job has ended: a busy kubelet hands
/// them on late.
const LAST_WORDS: Duration = Duration::from_secs(15);
/// How long an API server may be away before that is said.
const SILENCE: Duration = Duration::from_secs(10);

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The budget is reached.
    Complete,
    /// It cannot go on.
    Failed {
        /// In words.
        why: String,
        /// The last lines that a failed rank printed.
        last_words: String,
    },
    /// Somebody deleted it.
    Deleted,
}

/// Follows a job that exists; every event goes to `each`.
pub async fn follow(
    cluster: &Cluster,
    name: &str,
    each: &mut (dyn FnMut(&Event) + Send),
) -> Result<End, ClientError> {
    // A name that does not exist is told at once, and so is a cluster that is not there.
    cluster.job(name).await?;
    let mut seen = std::pin::pin!(watch_object(cluster.jobs(), name));
    let (heard, mut events) = unbounded_channel();
    let mut follower = Follower::new(cluster.clone(), heard);
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
                                "the cluster does not answer, the job goes on without us: {error}"
                            ),
                        });
                    }
                    tokio::time::sleep(AGAIN).await;
                }
            },
            Some(event) = events.recv() => follower.event(event, each),
        }
    }
}

fn end(job: &TrainingJob) -> Option<End> {
    let status = job.status.as_ref()?;
    match status.state {
        State::Complete => Some(End::Complete),
        State::Failed => Some(End::Failed {
            why: status.why.clone(),
            last_words: status.last_words.clone(),
        }),
        _ => None,
    }
}

/// What has been said already.
struct Follower {
    cluster: Cluster,
    heard: UnboundedSender<Event>,
    begun: Instant,
    planned: bool,
    generation: u64,
    draining: bool,
    why: String,
    /// The generation whose first step was announced as a rescale.
    rescaled: u64,
    /// Samples of the newest step.
    samples: u64,
    /// Loss of the newest evaluation, else of the newest step.
    loss: f64,
    evaluated: bool,
    reader: Option<Reader>,
}

impl Follower {
    fn new(cluster: Cluster, heard: UnboundedSender<Event>) -> Follower {
        Follower {
            cluster,
            heard,
            begun: Instant::now(),
            planned: false,
            generation: 0,
            draining: false,
            why: String::new(),
            rescaled: 0,
            samples: 0,
            loss: f64::NAN,
            evaluated: false,
            reader: None,
        }
    }

    fn job(&mut self, job: &TrainingJob, each: &mut (dyn FnMut(&Event) + Send)) {
        let Some(status) = &job.status else { return };
        self.plan(job, status, each);
        self.words(status, each);
        self.world(job, status, each);
    }

    /// The plan, once its length is known too: a bar needs an end.
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
            proof: plan.proof.clone(),
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

    /// Why nothing trains, or what is wrong while something does.
    fn words(&mut self, status: &TrainingJobStatus, each: &mut (dyn FnMut(&Event) + Send)) {
        if status.why == self.why {
            return;
        }
        self.why.clone_from(&status.why);
        if self.why.is_empty() {
            return;
        }
        match status.state {
            State::Pending | State::Placing | State::Waiting | State::Suspended => {
                each(&Event::Waiting {
                    why: self.why.clone(),
                });
            }
            State::Running => each(&Event::Warning {
                message: self.why.clone(),
            }),
            State::Draining | State::Complete | State::Failed => {}
        }
    }

    /// Generations, and what lies between them.
    fn world(
        &mut self,
        job: &TrainingJob,
        status: &TrainingJobStatus,
        each: &mut (dyn FnMut(&Event) + Send),
    ) {
        let draining = status.state == State::Draining;
        if std::mem::replace(&mut self.draining, draining) != draining && draining {
            each(&Event::Draining {
                why: status.why.clone(),
            });
        }
        let Some(current) = &status.generation else {
            return;
        };
        let record = &current.record;
        if record.number > self.generation && status.state == State::Running {
            self.generation = record.number;
            each(&Event::GenerationStarted {
                generation: record.number,
                world: record.world(),
                proof: record.plan.proof.clone(),
                reason: record.reason.to_string(),
                start_samples: record.start_samples(),
            });
            if let Some(pod) = logs::pod_of(record, 0) {
                self.read(pod, record.created);
            }
        }
        if let Some(change) = status.history.last()
            && let Some(seconds) = change.first_step
            && change.from != 0
            && change.generation > self.rescaled
        {
            self.rescaled = change.generation;
            let ranks = |nodes: u32| u64::from(nodes) * u64::from(job.spec.gpus_per_node);
            each(&Event::Rescaled {
                from: ranks(change.from),
                to: ranks(change.to),
                seconds,
                why: change.reason.clone(),
            });
        }
    }

    /// Reads the log of the pod of rank 0; one that is read already goes on being read.
    fn read(&mut self, pod: &str, since: f64) {
        if self.reader.as_ref().is_some_and(|reader| reader.pod == pod) {
            return;
        }
        let since = Timestamp::from_millisecond((since * 1000.0) as i64).ok();
        self.reader = Some(Reader::start(
            self.cluster.clone(),
            pod.to_owned(),
            since,
            self.heard.clone(),
        ));
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
            // A rank's own lines are for `evenkeel logs --rank`.
            Event::Said { .. } => return,
            _ => {}
        }
        each(&event);
    }

    /// Says what the log still has, and the end.
    async fn finish(
        &mut self,
        job: &TrainingJob,
        events: &mut UnboundedReceiver<Event>,
        each: &mut (dyn FnMut(&Event) + Send),
    ) {
        let Some(status) = &job.status else { return };
        let progress = status.progress.clone().unwrap_or_default();
        while self.reader.is_some() && self.samples < progress.samples {
            match tokio::time::timeout(LAST_WORDS, events.recv()).await {
                Ok(Some(event)) => self.event(event, each),
                Ok(None) | Err(_) => break,
            }
        }
        if status.state == State::Complete {
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

/// Reads one pod's log for as long as it is wanted.
struct Reader {
    pod: String,
    task: JoinHandle<()>,
}

impl Reader {
    fn start(
        cluster: Cluster,
        pod: String,
        mut since: Option<Timestamp>,
        heard: UnboundedSender<Event>,
    ) -> Reader {
        let name = pod.clone();
        let task = tokio::spawn(async move {
            // Lines up to this time were heard before the log was opened again.
            let mut last = String::new();
            loop {
                if let Ok(log) = logs::read(&cluster, &name, since, true).await {
                    let mut log = std::pin::pin!(log);
                    while let Some(line) = log.next().await {
                        if line.time <= last {
                            continue;
                        }
                        since = line.time.parse().ok().or(since);
                        last = line.time;
                        if let Some(event) = line.event
                            && heard.send(event).is_err()
                        {
                            return;
                        }
                    }
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
        Reader { pod, task }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.task.abort();
    }
}
