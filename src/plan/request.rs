//! The input of the planner: the world, the limits, and the caller's findings from sources that the planner
//! cannot read.

use std::collections::BTreeMap;

use serde_json::Value;

use super::oom_policy::OomPolicy;
use super::runner::{DeviceKind, Runner};

/// The world and the limits of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanRequest {
    /// Devices over all axes; ranks on the CPU count as devices.
    pub gpus: u64,
    /// Devices of each machine, if the world may have several.
    pub gpus_per_node: Option<u64>,
    /// What runs the plan, on which devices.
    pub runner: Runner,
    /// The global batch, samples; overrides the recipe (a run keeps its own).
    pub global_batch_size: Option<u64>,
    /// Bytes of every device, if known.
    pub device_memory: Option<u64>,
    /// Use the largest micro-batch that fits, whatever the recipe states.
    pub estimate: bool,
    /// Upper limit of the micro-batch, samples (set by the out-of-memory descent).
    pub per_device_batch_size_limit: Option<u64>,
    /// The batch that the run has reached, samples, if a schedule has changed it: the plan keeps that one
    /// exact too.
    pub current_batch: Option<u64>,
    /// Training samples of the data, if counted.
    pub data_samples: Option<u64>,
    /// Rows of the training files, if they are few. A program may make other samples of them.
    pub data_rows: Option<u64>,
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
    /// A plain request for this number of devices.
    pub fn of(runner: Runner, devices: u64) -> PlanRequest {
        PlanRequest {
            gpus: devices,
            gpus_per_node: None,
            runner,
            global_batch_size: None,
            device_memory: None,
            estimate: false,
            per_device_batch_size_limit: None,
            current_batch: None,
            data_samples: None,
            data_rows: None,
            model_config: None,
            oom_policy: OomPolicy::default(),
            flaws: Vec::new(),
        }
    }

    /// A plain request for this number of GPUs and any runner.
    pub fn gpus(gpus: u64) -> PlanRequest {
        let device = DeviceKind::Cuda;
        PlanRequest::of(Runner::Any { device }, gpus)
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

    /// Machines of the world, if known.
    pub fn nodes(&self) -> Option<u64> {
        let each = self.gpus_per_node.filter(|&each| each > 0)?;
        Some(self.gpus.div_ceil(each))
    }

    /// The count with the unit of the devices: `8 GPUs`.
    pub fn count(&self, count: u64) -> String {
        self.runner.device().count(count)
    }

    /// Whether the request is for a started run, which keeps its global batch.
    pub fn is_of_a_run(&self) -> bool {
        self.global_batch_size.is_some()
    }
}
