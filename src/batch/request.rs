//! What is to be planned: for which world, under which limits, and what the caller found out about
//! the recipe by means that the planner does not have.

use std::collections::BTreeMap;

use serde_json::Value;

use super::oom_policy::OomPolicy;
use crate::words;

/// For which world, and under which limits, to plan.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PlanRequest {
    /// Devices over all axes; ranks on the CPU count as devices.
    pub gpus: u64,
    /// Machines that they stand in, when somebody said so.
    pub nodes: Option<u64>,
    /// What to call them.
    pub devices: Devices,
    /// Who will run the plan.
    pub trainer: Trainer,
    /// The global batch, over what the recipe says (a run keeps its own), samples.
    pub global_batch_size: Option<u64>,
    /// Bytes of every device, when known.
    pub device_memory: Option<u64>,
    /// Bytes that a rank of the built-in trainer may use; `None`: no limit of its own.
    pub rank_memory: Option<u64>,
    /// The micro-batch is to be as large as fits, whatever the recipe says.
    pub estimate: bool,
    /// The micro-batch may not be above this (set by the out-of-memory descent).
    pub micro_limit: Option<u64>,
    /// The batch that the run has reached, when a schedule has moved it: the plan keeps that one
    /// exact too.
    pub current_batch: Option<u64>,
    /// Training samples of the data, when they have been counted.
    pub data_samples: Option<u64>,
    /// The keys of the `config.json` at the model's path, when the caller has read one.
    pub model_config: Option<BTreeMap<String, Value>>,
    /// What the trainer does when memory runs out.
    pub oom_policy: OomPolicy,
    /// What the caller found wrong with the model and the data; empty too when it has not looked.
    pub flaws: Vec<Flaw>,
}

/// What a run has come to, and every further plan has to respect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reached {
    /// The global batch that it began with and keeps, samples; `None` before it has begun.
    pub global_batch_size: Option<u64>,
    /// A larger micro-batch than this ran out of memory, samples.
    pub micro_limit: Option<u64>,
    /// The batch of the next step, samples; `None` before the first checkpoint.
    pub batch: Option<u64>,
}

/// What the ranks of a plan run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Devices {
    /// A GPU each.
    #[default]
    Gpus,
    /// A share of this machine's cores each.
    Processes,
}

/// Who will run a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trainer {
    /// Nobody knows yet: the plan is for any trainer, and perhaps for another machine.
    #[default]
    Any,
    /// The user's own, whatever the recipe says: what the built-in one lacks is of no interest.
    Own,
    /// The built-in one, now, on this machine.
    BuiltIn,
}

/// Something wrong with what a recipe names, found by a caller that opens files and knows the
/// engines. The rule that it belongs to reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// The rule's id.
    pub rule: &'static str,
    /// Native paths of what causes it; it is reported at the first that somebody wrote.
    pub paths: Vec<String>,
    /// One line with the numbers in it, lower case, without a full stop.
    pub message: String,
    /// What to change, one line.
    pub help: String,
}

impl PlanRequest {
    /// A plain request for so many GPUs.
    pub fn gpus(gpus: u64) -> PlanRequest {
        PlanRequest {
            gpus,
            ..PlanRequest::default()
        }
    }

    /// A plain request for so many processes on this machine's CPU.
    pub fn processes(processes: u64) -> PlanRequest {
        PlanRequest {
            devices: Devices::Processes,
            ..PlanRequest::gpus(processes)
        }
    }

    /// The same for a run that has come so far.
    pub fn after(self, reached: Reached) -> PlanRequest {
        PlanRequest {
            global_batch_size: reached.global_batch_size,
            micro_limit: reached.micro_limit,
            current_batch: reached.batch,
            ..self
        }
    }

    /// Whether it is for a run that has begun, which keeps what it began with.
    pub fn is_of_a_run(&self) -> bool {
        self.global_batch_size.is_some()
    }
}

impl Devices {
    /// `1 GPU`, `8 GPUs`, `2 processes`.
    pub fn count(self, count: u64) -> String {
        words::count(count, self.one())
    }

    /// What `count` of them are called.
    pub fn name(self, count: u64) -> String {
        words::noun(count, self.one())
    }

    fn one(self) -> &'static str {
        match self {
            Devices::Gpus => "GPU",
            Devices::Processes => "process",
        }
    }
}
