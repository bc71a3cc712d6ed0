//! The native recipe: what every reader translates its dialect into.
//!
//! These are plain values. Where each one stood in the user's files is kept beside them, in
//! [`super::Recipe::places`], under the same dotted path (`batch.micro`). Everything that advances
//! is counted in samples; a reader that finds steps leaves them in the `_steps` fields, and the
//! planner turns them into samples once the global batch is known.

mod batch;
mod data;
mod model;
mod objective;
#[cfg(test)]
mod page;
mod schedule;
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
    /// The run's name; also the default name of its directory.
    pub name: String,
    /// What is being optimised.
    pub objective: Objective,
    /// Seed of the sample order, of the initial weights and of everything else random.
    pub seed: u64,
    /// What the recipe says about its batch.
    pub batch: Batch,
    /// How the batch may change while training.
    pub schedule: BatchSchedule,
    /// How the work is spread over devices.
    pub parallel: Parallel,
    /// The model.
    pub model: Model,
    /// How text becomes tokens.
    pub tokenizer: Tokenizer,
    /// What is trained on.
    pub data: Data,
    /// How long to train.
    pub budget: Budget,
    /// AdamW and clipping.
    pub optimizer: Optimizer,
    /// The learning rate over the samples.
    pub learning_rate: LearningRate,
    /// Evaluation during training.
    pub evaluation: Evaluation,
    /// Checkpoints.
    pub checkpoint: Checkpoint,
    /// Which worlds the run may move to.
    pub elasticity: Elasticity,
    /// The user's own program, in the place of the built-in trainer.
    pub trainer: Trainer,
    /// Settings of upstream generation-based trainers that rules look at.
    pub generation: Generation,
    /// Where the run's directory goes, unless `--out` says otherwise.
    pub output: Option<String>,
}
