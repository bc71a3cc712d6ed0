//! The length of the run, the optimiser, the learning rate, and the intervals of evaluation and
//! checkpoints.

use serde::{Deserialize, Serialize};

/// The length of the run. The first limit that is set counts: samples, then steps, then epochs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Budget {
    /// Samples; training ends after the first step that reaches this number.
    pub samples: Option<u64>,
    /// Optimiser steps at the recipe's global batch.
    pub steps: Option<u64>,
    /// Passes over the data.
    pub epochs: Option<f64>,
    /// Whichever limit comes first ends the run, not the first that is set.
    pub shortest: bool,
}

/// AdamW and gradient clipping.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optimizer {
    /// β₁, the decay of the first moment.
    pub beta1: f64,
    /// β₂, the decay of the second moment.
    pub beta2: f64,
    /// ε, added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, on matrices only (not on norms).
    pub weight_decay: f64,
    /// Maximum global gradient norm; null or 0 turns clipping off.
    pub gradient_clip: Option<f64>,
    /// Upstream's name of the optimiser, for memory estimates and messages.
    pub name: Option<String>,
}

impl Default for Optimizer {
    fn default() -> Self {
        Optimizer {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            gradient_clip: Some(1.0),
            name: None,
        }
    }
}

/// The learning rate as a function of the samples consumed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearningRate {
    /// Learning rate at the end of warm-up.
    pub peak: f64,
    /// Shape of the curve after warm-up.
    pub shape: LearningRateShape,
    /// Minimum, as a share of the peak.
    pub floor: f64,
    /// Length of linear warm-up, in samples.
    pub warmup_samples: Option<u64>,
    /// Length of linear warm-up, in steps of the recipe's global batch.
    pub warmup_steps: Option<u64>,
    /// Length of linear warm-up, as a share of the budget.
    pub warmup_ratio: Option<f64>,
}

impl Default for LearningRate {
    fn default() -> Self {
        LearningRate {
            peak: 5e-5,
            shape: LearningRateShape::Linear,
            floor: 0.0,
            warmup_samples: None,
            warmup_steps: None,
            warmup_ratio: None,
        }
    }
}

/// The shape of the learning rate after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LearningRateShape {
    /// Half a cosine from the peak to the floor.
    Cosine,
    /// A straight line from the peak to the floor.
    #[default]
    Linear,
    /// The peak for the whole run.
    Constant,
    /// Peak × √(warm-up / samples), upstream's `inverse_sqrt`.
    InverseSqrt,
}

/// Interval and batch of evaluations during training.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Evaluation {
    /// Interval, in consumed samples.
    pub every_samples: Option<u64>,
    /// Interval in steps of the recipe's global batch.
    pub every_steps: Option<u64>,
    /// Interval as a share of the budget, 0 to 1 (upstream's `eval_steps` below 1).
    pub every_share: Option<f64>,
    /// Evaluate at the end of every epoch.
    pub every_epoch: bool,
    /// Samples per device and forward pass.
    pub per_device_batch_size: Option<u64>,
    /// Samples of one evaluation batch over all devices, instead of `per_device_batch_size`.
    pub batch: Option<u64>,
    /// How `batch` is divided over the data-parallel ranks: `ranks` by their number; `passes` by
    /// their number × accumulation; `floored` by their number, rounded down.
    pub division: EvaluationDivision,
    /// Which step an interval means that is no multiple of the batch: `reached` the first step at
    /// or after it; `batch` and `pass` round it down to a multiple of the global batch, or of one
    /// accumulation step's samples.
    pub rounding: IntervalRounding,
    /// Maximum samples per evaluation.
    pub samples: Option<u64>,
}

impl Evaluation {
    /// The native paths of the intervals that are set.
    pub fn intervals(&self) -> Vec<&'static str> {
        [
            (self.every_samples.is_some(), "evaluation.every_samples"),
            (self.every_steps.is_some(), "evaluation.every_steps"),
            (self.every_share.is_some(), "evaluation.every_share"),
            (self.every_epoch, "evaluation.every_epoch"),
        ]
        .into_iter()
        .filter_map(|(given, path)| given.then_some(path))
        .collect()
    }
}

/// How an evaluation batch over all devices is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvaluationDivision {
    /// By data-parallel size, without remainder.
    #[default]
    Ranks,
    /// By data-parallel size × accumulation, without remainder.
    Passes,
    /// By data-parallel size, rounded down.
    Floored,
}

/// Which step an interval means that is no multiple of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IntervalRounding {
    /// The first step at or after the interval.
    #[default]
    Reached,
    /// The interval, rounded down to a multiple of the global batch.
    Batch,
    /// The interval, rounded down to a multiple of one accumulation step's samples.
    Pass,
}

/// When to write checkpoints, and how many to keep.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Checkpoint {
    /// Interval, in consumed samples.
    pub every_samples: Option<u64>,
    /// Interval in steps of the recipe's global batch.
    pub every_steps: Option<u64>,
    /// Interval as a share of the budget, 0 to 1 (upstream's `save_steps` below 1).
    pub every_share: Option<f64>,
    /// Write a checkpoint at the end of every epoch.
    pub every_epoch: bool,
    /// How many checkpoints to keep; default: all. The newest one and that of the job's
    /// checkpoint reference always stay.
    pub keep: Option<u64>,
}
