//! The input of the planner: the world, the limits, and the caller's findings from sources that the planner
//! cannot read.

use std::collections::BTreeMap;

use serde_json::Value;

use super::oom_policy::OomPolicy;
use crate::recipe::Spec;
use crate::util::format;

/// The world and the limits of a plan.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PlanRequest {
    /// Devices over all axes; ranks on the CPU count as devices.
    pub gpus: u64,
    /// Machines of the world, if stated.
    pub nodes: Option<u64>,
    /// Whether ranks run on GPUs or on shares of the CPU.
    pub devices: Devices,
    /// The trainer that will run the plan.
    pub trainer: Trainer,
    /// The built-in trainer is known to compute on CPUs.
    pub on_cpu: bool,
    /// The global batch, samples; overrides the recipe (a run keeps its own).
    pub global_batch_size: Option<u64>,
    /// Bytes of every device, if known.
    pub device_memory: Option<u64>,
    /// Memory limit of a rank of the built-in trainer, bytes; `None`: no separate limit.
    pub rank_memory: Option<u64>,
    /// Use the largest micro-batch that fits, whatever the recipe states.
    pub estimate: bool,
    /// Upper limit of the micro-batch, samples (set by the out-of-memory descent).
    pub per_device_batch_size_limit: Option<u64>,
    /// The batch that the run has reached, samples, if a schedule has changed it: the plan keeps that one
    /// exact too.
    pub current_batch: Option<u64>,
    /// Training samples of the data, if counted.
    pub data_samples: Option<u64>,
    /// The keys of the `config.json` at the model's path, if the caller has read one.
    pub model_config: Option<BTreeMap<String, Value>>,
    /// The trainer's reaction to an out-of-memory error.
    pub oom_policy: OomPolicy,
    /// Errors that the caller found in the model and the data; also empty if it did not check them.
    pub flaws: Vec<Flaw>,
}

/// The state of a run that every further plan keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reached {
    /// The global batch that it started with and keeps, samples; `None` before it has started.
    pub global_batch_size: Option<u64>,
    /// The upper limit of the micro-batch after an out-of-memory error, samples.
    pub per_device_batch_size_limit: Option<u64>,
    /// The batch of the next step, samples; `None` before the first checkpoint.
    pub batch: Option<u64>,
}

/// The devices of a plan's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Devices {
    /// One GPU for each rank.
    #[default]
    Gpus,
    /// A share of this machine's cores for each rank.
    Processes,
}

/// The trainer that will run a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trainer {
    /// Unknown: any trainer, and perhaps another machine.
    #[default]
    Any,
    /// An external trainer, whatever the recipe states: limits of the built-in trainer do not apply.
    External,
    /// The built-in trainer, now, on this machine.
    BuiltIn,
}

/// An error in something that a recipe names, found by a caller that opens files and knows the
/// engines. The rule that it belongs to reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// The id of the rule that reports it.
    pub rule: &'static str,
    /// Native paths of the cause; the finding is at the first one that the recipe contains.
    pub paths: Vec<String>,
    /// One line with the numbers, lower case, without a full stop.
    pub message: String,
    /// The change to make, one line.
    pub help: String,
}

impl PlanRequest {
    /// A plain request for this number of GPUs.
    pub fn gpus(gpus: u64) -> PlanRequest {
        PlanRequest {
            gpus,
            ..PlanRequest::default()
        }
    }

    /// A plain request for this number of processes on this machine's CPU.
    pub fn processes(processes: u64) -> PlanRequest {
        PlanRequest {
            devices: Devices::Processes,
            on_cpu: true,
            ..PlanRequest::gpus(processes)
        }
    }

    /// The same request for a run that has reached this state.
    pub fn after(self, reached: Reached) -> PlanRequest {
        PlanRequest {
            global_batch_size: reached.global_batch_size,
            per_device_batch_size_limit: reached.per_device_batch_size_limit,
            current_batch: reached.batch,
            ..self
        }
    }

    /// The trainer that will run a plan of this recipe.
    pub fn trainer_of(&self, spec: &Spec) -> Trainer {
        if spec.trainer.is_external() {
            Trainer::External
        } else {
            self.trainer
        }
    }

    /// Whether the request is for a started run, which keeps its global batch.
    pub fn is_of_a_run(&self) -> bool {
        self.global_batch_size.is_some()
    }
}

impl Devices {
    /// The count with its unit: `1 GPU`, `8 GPUs`, `2 processes`.
    pub fn count(self, count: u64) -> String {
        format::count(count, self.one())
    }

    /// The unit in singular or plural.
    pub fn name(self, count: u64) -> String {
        format::noun(count, self.one())
    }

    fn one(self) -> &'static str {
        match self {
            Devices::Gpus => "GPU",
            Devices::Processes => "process",
        }
    }
}
