//! How the batch may change while training.

use serde::{Deserialize, Serialize};

/// How the batch changes while training. In a recipe: `kind: norm-test` beside the settings.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum BatchSchedule {
    /// The global batch of the recipe, throughout.
    #[default]
    Constant,
    /// Grows (and with `shrink`, shrinks) by the norm test.
    NormTest(NormTest),
    /// Fixed stages: shares of the sample budget at given batches.
    Stages {
        /// In order; shares add up to 1.
        stages: Vec<Stage>,
    },
    /// A recorded schedule, step by step.
    Replay {
        /// In order; after the last one its batch stays.
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
    /// For how many steps.
    pub steps: u64,
}

/// The norm test and the controller around it (arXiv 2412.21124; see `docs/norm-test.md`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NormTest {
    /// Unbiased, or as the paper prints it.
    pub estimator: Estimator,
    /// The test's threshold η, in (0, 1) for growth to be possible.
    pub eta: f64,
    /// Test every so many steps, 1 to 100.
    pub interval: u64,
    /// Never above this many samples; rounded down to the quantum.
    pub max_batch: u64,
    /// Growth per decision is at most this factor. `None`: no cap.
    pub growth_cap: Option<f64>,
    /// Let the batch shrink again, with hysteresis.
    pub shrink: bool,
    /// A shrink needs the target to be below this share of the batch.
    pub hysteresis: f64,
    /// Smoothing of V and |grad|², 0 (none) to below 1.
    pub ema: f64,
    /// What counts as a group.
    pub groups: Groups,
    /// Wait for the learning rate's warm-up to end before the first growth.
    pub after_warmup: bool,
    /// What growth does to the learning rate.
    pub learning_rate: LearningRateOnGrowth,
    /// Every so many steps, measure the coordinate-wise test too (a diagnostic). 0: never.
    pub coordinate_interval: u64,
    /// Under FSDP with accumulation, keep the unsharded accumulated gradient that
    /// `estimator: paper` needs: O(parameters) memory on every rank.
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

/// Which estimator of the gradient's variance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// Unbiased for any group sizes, smoothed, with every guard.
    #[default]
    Unbiased,
    /// As printed in the paper: no warm-up gate, no smoothing, no cap, workers as groups.
    Paper,
}

/// What counts as a group of the norm test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Groups {
    /// Every micro-batch of every worker.
    #[default]
    MicroBatches,
    /// Every worker's accumulated gradient.
    Workers,
}

/// What a grown batch does to the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LearningRateOnGrowth {
    /// Nothing, as in the paper.
    #[default]
    None,
    /// Times the square root of the growth.
    Sqrt,
}
