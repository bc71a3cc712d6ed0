//! The agent's view of its TrainingJob. `follow` keeps it current.

use std::time::Duration;

use kube::ResourceExt;

use crate::api::status::{Current, RecipeSnapshot};
use crate::api::{RemainderPolicy, TrainingJob};
use crate::external_trainer::call::Source;
use crate::lifecycle::stall::{OnStall, ProgressDeadline};
use crate::lifecycle::{CheckpointRef, DeviceKind};

/// A TrainingJob as its pods see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Membership {
    pub recipe: RecipeSnapshot,
    /// How to treat a batch that no rank count divides exactly.
    pub remainder: RemainderPolicy,
    /// The job's name, used as the run's name.
    pub name: String,
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
            remainder: self.remainder,
            command: &self.command,
        }
    }

    /// Reads a TrainingJob; `None` before it is planned.
    pub fn of(job: &TrainingJob) -> Option<Membership> {
        let status = job.status.as_ref()?;
        Some(Membership {
            recipe: status.recipe.clone()?,
            remainder: job.spec.elasticity.remainder,
            name: job.name_any(),
            device: job.spec.trainer.device.kind(),
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
