//! What a pod's agent is, and what its loop reacts to.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::external::Source;
use crate::api::recipe_snapshot::RecipeSnapshot;
use crate::api::status::Current;
use crate::api::{RemainderPolicy, TrainingJob};
use crate::bucket::Bucket;
use crate::host::Event;
use crate::lifecycle::CheckpointRef;
use crate::lifecycle::stall::{OnStall, ProgressDeadline};
use crate::plan::DeviceKind;
use crate::util::key::Key;

/// Identity and resources of this agent.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Path of the `evenkeel` executable.
    pub program: PathBuf,
    /// Uid of the TrainingJob.
    pub job: String,
    pub key: Key,
    /// Uid of the pod.
    pub pod: String,
    /// The run directory: on the volume that all pods of the job share, or on this pod's disk if there is a bucket.
    pub run: PathBuf,
    /// Where the pods of the job share the run's files without a volume.
    pub bucket: Option<Bucket>,
    /// Whether the job has code or a setup command for its pods.
    pub setup: bool,
    /// Devices available to ranks.
    pub devices: u64,
    /// CPU cores shared by the ranks.
    pub cores: u64,
}

/// An input of the loop.
#[derive(Debug)]
pub enum Input {
    /// The job, as just received from the API server.
    Job(Box<Membership>),
    /// The API server has no such job, or another one of its name.
    Gone,
    /// The controller has requested this agent's state.
    Polled,
    /// The agent of another pod has answered.
    Peer(Answer),
    /// A rank reported or ended.
    Rank(Event),
    /// SIGTERM: the pod is about to be deleted.
    Terminate,
}

/// The answer of another pod's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Address of the agent.
    pub host: IpAddr,
    /// The newest generation whose ranks it has started.
    pub generation: u64,
}

/// A TrainingJob as its pods see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Membership {
    pub recipe: RecipeSnapshot,
    /// How to treat a batch that no rank count divides exactly.
    pub remainder: RemainderPolicy,
    /// Where the built-in trainer computes.
    pub device: DeviceKind,
    /// Memory limit of one rank, bytes.
    pub rank_memory: Option<String>,
    /// Command of the external trainer; empty for the built-in trainer.
    pub command: Vec<String>,
    /// The newest generation; `None` before the first one.
    pub generation: Option<Current>,
    /// The newest committed checkpoint of the current lineage.
    pub checkpoint: Option<CheckpointRef>,
    /// Time without contact to the API server or peers after which ranks are stopped.
    pub fence_after: Duration,
    /// Time in which ranks commit and exit when their pod ends.
    pub drain: Duration,
    /// Time that ranks may take without progress; it counts from the next generation on.
    pub progress_deadline: ProgressDeadline,
    pub on_stall: OnStall,
    /// The job succeeded or failed.
    pub over: bool,
}

impl Membership {
    /// The recipe and the command of the external trainer.
    pub fn trainer_source(&self) -> Source<'_> {
        Source {
            recipe: &self.recipe,
            remainder: self.remainder.into(),
            command: &self.command,
        }
    }

    /// Reads a TrainingJob; `None` before it is planned.
    pub fn of(job: &TrainingJob) -> Option<Membership> {
        let status = job.status.as_ref()?;
        Some(Membership {
            recipe: RecipeSnapshot::of_job(&job.spec, status.recipe.as_ref()?),
            remainder: job.spec.elasticity.remainder,
            device: job.spec.trainer.device.on(&job.spec.resource_name),
            rank_memory: job.spec.trainer.rank_memory.clone(),
            command: status.command(&job.spec).to_vec(),
            generation: status.generation.clone(),
            checkpoint: status.checkpoint.clone(),
            fence_after: Duration::from_secs(job.spec.elasticity.fence_after_seconds.into()),
            drain: Duration::from_secs(job.spec.elasticity.drain_seconds.into()),
            progress_deadline: ProgressDeadline::of(job.spec.progress_deadline_seconds),
            on_stall: job.spec.on_stall,
            over: status.is_over(),
        })
    }
}
