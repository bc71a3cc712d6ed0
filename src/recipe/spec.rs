//! The native recipe: what every reader translates its dialect into.
//!
//! These are plain values. Where each one stood in the user's files is kept beside them, in
//! [`super::Recipe::places`], under the same dotted path (`batch.micro`). Everything that advances
//! is counted in samples; a reader that finds steps leaves them in the `_steps` fields, and the
//! planner turns them into samples once the global batch is known.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

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
    /// Settings of upstream generation-based trainers that rules look at.
    pub generation: Generation,
    /// Where the run's directory goes, unless `--out` says otherwise.
    pub output: Option<String>,
}

/// What is being optimised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// Next-token prediction on every token.
    #[default]
    LanguageModelling,
    /// Supervised fine-tuning on conversations, loss on the answers.
    Sft,
    /// Direct preference optimisation.
    Dpo,
    /// Kahneman–Tversky optimisation.
    Kto,
    /// Odds-ratio preference optimisation.
    Orpo,
    /// Simple preference optimisation.
    Simpo,
    /// Group-relative policy optimisation.
    Grpo,
    /// Proximal policy optimisation.
    Ppo,
    /// Reward modelling.
    Reward,
}

impl Objective {
    /// Its name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Objective::LanguageModelling => "language-modelling",
            Objective::Sft => "sft",
            Objective::Dpo => "dpo",
            Objective::Kto => "kto",
            Objective::Orpo => "orpo",
            Objective::Simpo => "simpo",
            Objective::Grpo => "grpo",
            Objective::Ppo => "ppo",
            Objective::Reward => "reward",
        }
    }
}

/// What the recipe says about its batch. Either `global` is given, or
/// `micro` × `accumulation` × the data-parallel size at `gpus` makes it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Batch {
    /// Samples per optimiser step over all devices.
    pub global: Option<u64>,
    /// Samples per device and forward pass that the author chose; the planner never goes above it
    /// unless `prefer: micro` lets it.
    pub micro: Option<u64>,
    /// Forward passes per optimiser step at `gpus` devices.
    pub accumulation: Option<u64>,
    /// The number of GPUs the recipe was written for.
    pub gpus: Option<u64>,
    /// What to do when no exact split exists at the world size asked for.
    pub remainder: Remainder,
    /// What growing the world should change first.
    pub prefer: Prefer,
    /// What the dialect does with samples that do not fill the last batch of an epoch.
    pub last_batch: LastBatch,
    /// Upstream's automatic batch finder is on (`auto_find_batch_size`).
    pub auto_find: bool,
}

/// What to do when no exact split exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remainder {
    /// Refuse, and name the counts that work.
    #[default]
    Exact,
    /// Deal whole micro-batches unevenly; their sum stays the global batch.
    Uneven,
}

/// What growing the world changes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prefer {
    /// Keep the recipe's micro-batch, lower accumulation.
    #[default]
    Accumulation,
    /// Raise the micro-batch, within memory.
    Micro,
}

/// What happens to samples that do not fill the last batch of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LastBatch {
    /// Filled up from the next epoch (transformers with accelerate's `even_batches`; native).
    #[default]
    Wrap,
    /// Dropped: an epoch is ⌊n/B⌋·B samples (HALOs; `dataloader_drop_last: true`).
    Drop,
}

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

/// How the work is spread over devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parallel {
    /// What the data-parallel ranks hold.
    pub strategy: Strategy,
    /// Tensor-parallel size.
    pub tensor: u64,
    /// Pipeline-parallel size.
    pub pipeline: u64,
    /// Context-parallel size.
    pub context: u64,
    /// Sequence-parallel size (Ulysses).
    pub sequence: u64,
    /// Data-parallel replicas that a recipe states (hybrid sharding), for the product rule.
    pub data_replicate: Option<u64>,
    /// Data-parallel shards that a recipe states, for the product rule.
    pub data_shard: Option<u64>,
    /// Machines that a recipe states.
    pub machines: Option<u64>,
}

impl Default for Parallel {
    fn default() -> Self {
        Parallel {
            strategy: Strategy::Ddp,
            tensor: 1,
            pipeline: 1,
            context: 1,
            sequence: 1,
            data_replicate: None,
            data_shard: None,
            machines: None,
        }
    }
}

/// What the data-parallel ranks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Everything on every rank.
    #[default]
    Ddp,
    /// Parameters, gradients and optimiser states sharded (FSDP full shard, ZeRO-3).
    Fsdp,
    /// Optimiser states sharded.
    Zero1,
    /// Optimiser states and gradients sharded.
    Zero2,
}

/// The model. `path` names a directory with `config.json` or an upstream model id; `config` gives
/// or overrides keys of `config.json`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// A directory in Hugging Face layout, or a hub id such as `mistralai/Mistral-7B-v0.1`.
    pub path: Option<String>,
    /// Keys of Hugging Face's `config.json`, over those of `path`.
    pub config: BTreeMap<String, serde_json::Value>,
    /// Where the weights come from.
    pub init: Init,
    /// Precision that the recipe trains in.
    pub precision: Precision,
    /// Recompute activations in the backward pass.
    pub activation_checkpointing: bool,
    /// Low-rank adapters (PEFT) are trained instead of the weights.
    pub adapters: bool,
    /// Base weights are loaded in 4 bits.
    pub load_in_4bit: bool,
    /// Base weights are loaded in 8 bits.
    pub load_in_8bit: bool,
}

/// Where the initial weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Init {
    /// From `path` when it is a directory with weights; else random if `config` gives the shape.
    #[default]
    Auto,
    /// From `path`, or refuse.
    Weights,
    /// Seeded, normal with σ = `initializer_range`.
    Random,
}

/// Precision of compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats throughout.
    #[default]
    F32,
    /// bfloat16 compute.
    Bf16,
    /// float16 compute.
    F16,
}

/// How text becomes tokens.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tokenizer {
    /// `byte`, a `tokenizer.json`, or a directory that holds one. `None`: the model's own.
    pub path: Option<String>,
    /// A Jinja chat template, over the tokenizer's own.
    pub chat_template: Option<String>,
}

/// What is trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// Training sources.
    pub train: Vec<DataSource>,
    /// Evaluation sources; empty: `held_out` samples are taken off the training data.
    pub evaluation: Vec<DataSource>,
    /// Samples held out for evaluation when there is no evaluation source; below 1: a share.
    pub held_out: Option<f64>,
    /// Tokens per sample at most.
    pub sequence_length: u64,
    /// Put several documents into one sample.
    pub packing: bool,
    /// Loss on the answers only; `None`: as the objective has it (yes for SFT).
    pub answers_only: Option<bool>,
    /// Shuffle the order.
    pub shuffle: bool,
}

impl Default for Data {
    fn default() -> Self {
        Data {
            train: Vec::new(),
            evaluation: Vec::new(),
            held_out: None,
            sequence_length: 1024,
            packing: false,
            answers_only: None,
            shuffle: true,
        }
    }
}

/// One source of samples.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSource {
    /// A file, a directory, a glob, a hub id, or `synthetic`.
    pub path: String,
    /// `None`: by the file's ending.
    pub format: Option<DataFormat>,
    /// The split that a recipe names.
    pub split: Option<String>,
    /// The hub configuration that a recipe names.
    pub config: Option<String>,
    /// Columns to read.
    pub columns: Vec<String>,
    /// Share of the source's samples to take, 0 to 1.
    pub weight: Option<f64>,
    /// The synthetic language, when `path` is `synthetic`.
    pub synthetic: Option<Synthetic>,
}

/// How a source is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataFormat {
    /// One JSON object a line.
    Jsonl,
    /// Apache Parquet.
    Parquet,
    /// Plain text: a document per blank-line-separated block.
    Text,
    /// Token ids, little endian u16 or u32.
    Bin,
}

/// The synthetic language: a seeded Markov source with a known entropy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Synthetic {
    /// Words of the language, V.
    pub vocabulary: u64,
    /// Successors that each state may have; smaller means lower entropy.
    pub branching: u64,
    /// Samples in the data set.
    pub samples: u64,
    /// Seed of the language itself, apart from the run's.
    pub seed: u64,
}

impl Default for Synthetic {
    fn default() -> Self {
        Synthetic {
            vocabulary: 256,
            branching: 8,
            samples: 100_000,
            seed: 0,
        }
    }
}

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
    /// At most so many samples per evaluation.
    pub samples: Option<u64>,
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

/// Which worlds the run may move to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Elasticity {
    /// Fewest ranks.
    pub min: Option<u64>,
    /// Most ranks.
    pub max: Option<u64>,
}

/// Settings of generation-based trainers (GRPO, PPO, KTO) that rules look at.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Generation {
    /// TRL GRPO `num_generations`.
    pub num_generations: Option<u64>,
    /// TRL GRPO `generation_batch_size`.
    pub generation_batch_size: Option<u64>,
    /// TRL GRPO `steps_per_generation`.
    pub steps_per_generation: Option<u64>,
    /// TRL PPO `num_mini_batches`.
    pub num_mini_batches: Option<u64>,
}
