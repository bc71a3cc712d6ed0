//! The native recipe, into which every reader translates its dialect.
//!
//! These are plain values. Their places in the user's files are in [`crate::recipe::Recipe::places`], under
//! the same dotted path (`batch.per_device_batch_size`). Progress is counted in samples. A reader puts steps into
//! the `_steps` fields, and the planner converts them to samples with the global batch.

mod batch;
mod data;
mod model;
mod objective;
mod schedule;
#[cfg(test)]
mod tests;
mod trainer;
mod training;
mod world;

use serde::{Deserialize, Serialize};

pub use batch::{Batch, Division, Elastic, ElasticVersion, LastBatch, Prefer, Remainder};
pub use data::{Data, DataFormat, DataSource, SYNTHETIC, Synthetic};
pub use model::{Init, Model, Precision, Tokenizer};
pub use objective::{Generation, Objective};
pub use schedule::{
    BatchSchedule, Estimator, Groups, LearningRateOnGrowth, NormTest, ReplayRun, Stage,
};
pub use trainer::{DrainSignal, Trainer};
pub use training::{
    Budget, Checkpoint, Evaluation, EvaluationDivision, IntervalRounding, LearningRate,
    LearningRateShape, Optimizer,
};
pub use world::{Elasticity, Parallel, Strategy};

/// A whole training run, independent of dialect and of hardware.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Spec {
    /// The run's name, instead of `metadata.name`; also the default name of its directory.
    pub name: String,
    /// The training objective, which selects the loss.
    pub objective: Objective,
    /// Seed of everything random, such as the sample order and the initial weights.
    pub seed: u64,
    /// The batch, and its split over devices.
    pub batch: Batch,
    /// The schedule of the global batch.
    pub schedule: BatchSchedule,
    /// Sizes of the parallel axes, and sharding.
    pub parallel: Parallel,
    /// The model, its weights and its precision.
    pub model: Model,
    /// The tokeniser and its chat template.
    pub tokenizer: Tokenizer,
    /// The training and evaluation data.
    pub data: Data,
    /// The length of the run.
    pub budget: Budget,
    /// AdamW and gradient clipping.
    pub optimizer: Optimizer,
    /// The learning rate as a function of the samples consumed.
    pub learning_rate: LearningRate,
    /// Interval and batch of evaluations during training.
    pub evaluation: Evaluation,
    /// When to write checkpoints, and how many to keep.
    pub checkpoint: Checkpoint,
    /// World sizes that the run may have.
    pub elasticity: Elasticity,
    /// An external trainer, in place of the built-in trainer.
    pub trainer: Trainer,
    /// Settings of upstream's generation-based trainers that rules check.
    pub generation: Generation,
    /// The run's directory; default: `runs/NAME`. `--out` overrides it.
    pub output: Option<String>,
}
