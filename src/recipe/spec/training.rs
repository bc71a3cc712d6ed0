//! How long to train and how: the optimiser, the learning rate over the samples, and what
//! happens at intervals.

use serde::{Deserialize, Serialize};

/// How long to train. The first limit that is set counts: samples, then steps, then epochs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Budget {
    /// Samples; training ends after the first step that reaches it.
    pub samples: Option<u64>,
    /// Optimiser steps at the recipe's global batch.
    pub steps: Option<u64>,
    /// Passes over the data.
    pub epochs: Option<f64>,
    /// The limit that is reached first counts, not the first that is set.
    pub shortest: bool,
}

/// AdamW and clipping.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optimizer {
    /// β₁.
    pub beta1: f64,
    /// β₂.
    pub beta2: f64,
    /// ε.
    pub epsilon: f64,
    /// Decoupled weight decay, on matrices only (not on norms).
    pub weight_decay: f64,
    /// Clip the global gradient norm to this; `None` or 0: never.
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
    /// The peak.
    pub peak: f64,
    /// The shape after warm-up.
    pub shape: LearningRateShape,
    /// The floor, as a share of the peak.
    pub floor: f64,
    /// Linear warm-up over so many samples.
    pub warmup_samples: Option<u64>,
    /// Linear warm-up over so many steps of the recipe's global batch.
    pub warmup_steps: Option<u64>,
    /// Linear warm-up over this share of the budget.
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
    /// Half a cosine down to the floor.
    Cosine,
    /// A straight line down to the floor.
    #[default]
    Linear,
    /// The peak throughout.
    Constant,
    /// Peak × √(warm-up / samples), upstream's `inverse_sqrt`.
    InverseSqrt,
}

/// Evaluation during training.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Evaluation {
    /// Every so many samples.
    pub every_samples: Option<u64>,
    /// Every so many steps of the recipe's global batch.
    pub every_steps: Option<u64>,
    /// Every such share of the budget, 0 to 1 (upstream's `eval_steps` below 1).
    pub every_share: Option<f64>,
    /// At every epoch's end.
    pub every_epoch: bool,
    /// Samples per device and forward pass.
    pub micro: Option<u64>,
    /// Samples of one evaluation batch over all devices, in place of `micro`.
    pub batch: Option<u64>,
    /// How `batch` is divided.
    pub division: EvaluationDivision,
    /// Where an interval falls that is no multiple of the batch.
    pub rounding: IntervalRounding,
    /// At most so many samples per evaluation.
    pub samples: Option<u64>,
}

impl Evaluation {
    /// The keys that ask for evaluations and are given, as native paths.
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
    /// By data-parallel size, which has to be exact.
    #[default]
    Ranks,
    /// By data-parallel size × accumulation, which has to be exact.
    Passes,
    /// By data-parallel size, rounded down.
    Floored,
}

/// Where an interval falls that is no multiple of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IntervalRounding {
    /// At the first step that reaches it.
    #[default]
    Reached,
    /// Rounded down to a multiple of the global batch.
    Batch,
    /// Rounded down to a multiple of the samples of one accumulation step.
    Pass,
}

/// Checkpoints.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Checkpoint {
    /// Every so many samples.
    pub every_samples: Option<u64>,
    /// Every so many steps of the recipe's global batch.
    pub every_steps: Option<u64>,
    /// Every such share of the budget, 0 to 1 (upstream's `save_steps` below 1).
    pub every_share: Option<f64>,
    /// At every epoch's end.
    pub every_epoch: bool,
    /// How many to keep; `None`: all. The newest and the pinned one always stay.
    pub keep: Option<u64>,
}
