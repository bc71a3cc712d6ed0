//! The schedule of the global batch during training.

use serde::{Deserialize, Serialize};

/// The schedule of the global batch. In a recipe: `kind: norm-test` beside the settings.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum BatchSchedule {
    /// The recipe's global batch for the whole run.
    #[default]
    Constant,
    /// The norm test grows the batch and, with `shrink`, shrinks it.
    NormTest(NormTest),
    /// Fixed stages: shares of the sample budget at given batches.
    Stages {
        /// The stages in order; their shares add up to 1.
        stages: Vec<Stage>,
    },
    /// A recorded schedule, step by step.
    Replay {
        /// The runs in order; the last one's batch applies to the rest of training.
        runs: Vec<ReplayRun>,
    },
}

/// One stage of a stage-wise schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Share of the sample budget, 0 to 1.
    pub share: f64,
    /// Global batch in samples.
    pub batch: u64,
}

/// One run of equal batches of a replayed schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplayRun {
    /// Global batch in samples.
    pub batch: u64,
    /// Number of steps at this batch.
    pub steps: u64,
}

/// The norm test and the controller around it (arXiv 2412.21124; see `docs/norm-test.md`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NormTest {
    /// Estimator of the gradient's variance: `unbiased`, or `paper` as printed there.
    pub estimator: Estimator,
    /// Threshold η of the test; the batch can grow only if it is in (0, 1).
    pub eta: f64,
    /// Steps between tests, 1 to 100.
    pub interval: u64,
    /// Maximum global batch in samples, rounded down to the quantum.
    pub max_batch: u64,
    /// Maximum growth factor of one decision; null: no limit.
    pub growth_cap: Option<f64>,
    /// Let the batch shrink, with hysteresis.
    pub shrink: bool,
    /// The batch shrinks only if the target is below this share of it.
    pub hysteresis: f64,
    /// Decay of the moving averages of V and |grad|², 0 (no smoothing) to below 1.
    pub ema: f64,
    /// Groups of the test: `micro-batches`, or the `workers`' accumulated gradients.
    pub groups: Groups,
    /// Delay the first growth until the learning rate's warm-up ends.
    pub after_warmup: bool,
    /// Effect of growth on the learning rate: `none`, or `sqrt` of the growth as a factor.
    pub learning_rate: LearningRateOnGrowth,
    /// Steps between measurements of the coordinate-wise test, a diagnostic. 0: off.
    pub coordinate_interval: u64,
    /// Under FSDP with accumulation, keep the unsharded accumulated gradient, which `estimator:
    /// paper` needs. It takes O(parameters) memory on every rank.
    pub unsharded_accumulation: bool,
}

impl Default for NormTest {
    fn default() -> Self {
        NormTest {
            estimator: Estimator::Unbiased,
            eta: 0.2,
            interval: 1,
            max_batch: 8192,
            growth_cap: Some(2.0),
            shrink: false,
            hysteresis: 0.5,
            ema: 0.9,
            groups: Groups::MicroBatches,
            after_warmup: true,
            learning_rate: LearningRateOnGrowth::None,
            coordinate_interval: 0,
            unsharded_accumulation: false,
        }
    }
}

/// The estimator of the gradient's variance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// Unbiased for any group sizes, smoothed, with every guard.
    #[default]
    Unbiased,
    /// As printed in the paper: no warm-up gate, no smoothing, no cap, workers as groups.
    Paper,
}

/// The groups of the norm test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Groups {
    /// Every micro-batch of every worker.
    #[default]
    MicroBatches,
    /// Every worker's accumulated gradient.
    Workers,
}

/// Effect of a larger batch on the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LearningRateOnGrowth {
    /// The learning rate stays, as in the paper.
    #[default]
    None,
    /// Multiplied by the square root of the growth.
    Sqrt,
}
