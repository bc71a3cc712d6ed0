//! The native recipe, into which every reader translates its dialect.
//!
//! These are plain values. Their places in the user's files are in [`crate::recipe::Recipe::value_sources`], under
//! the same dotted path (`batch.per_device_batch_size`). Progress is counted in samples. A reader puts steps into
//! the `_steps` fields, and the planner converts them to samples with the global batch.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::objective::{Kl, KlCompletions, PairLoss};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::util::suggest::{UnknownName, by_name};

/// A whole training run, independent of dialect and of hardware.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
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
    /// What may change the last bits of the training.
    pub determinism: Determinism,
    /// An external trainer, in place of the built-in trainer.
    pub trainer: Trainer,
    /// The loss of tokens; language-modelling and sft only.
    pub likelihood: Likelihood,
    /// The loss over preferences; dpo, kto, orpo, cpo and simpo only.
    pub preference: Preference,
    /// Settings of upstream's generation-based trainers that rules check.
    pub generation: Generation,
    /// Write steps and evaluations as event files for TensorBoard, into `tensorboard/` of the run's directory.
    pub tensorboard: bool,
    /// The run's directory; default: `runs/NAME`. `--out` overrides it.
    pub output: Option<String>,
}

impl Spec {
    /// The recipe with the first world of a run as the one that it was written for, where that is needed.
    pub fn of_world(&self, gpus: u64) -> Spec {
        let mut spec = self.clone();
        if spec.batch.needs_a_world() {
            spec.batch.gpus = Some(gpus);
        }
        spec
    }

    /// Whether the loss is the cross-entropy of tokens, which has a perplexity and is no less than the data's entropy.
    pub fn is_cross_entropy(&self) -> bool {
        let Likelihood {
            loss,
            label_smoothing,
            ..
        } = self.likelihood;
        self.is_mean_over_tokens() && loss == LikelihoodLoss::Nll && label_smoothing == 0.0
    }

    /// Whether the loss is a mean over target tokens, above whose value for uniform guessing training has diverged.
    pub fn is_mean_over_tokens(&self) -> bool {
        self.objective.is_likelihood() && self.likelihood.mean == LikelihoodMean::Tokens
    }
}

/// The training objective, which selects the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// Next-token prediction on every token.
    #[default]
    LanguageModelling,
    /// Supervised fine-tuning on conversations, loss on the answers.
    Sft,
    /// DPO: direct preference optimisation.
    Dpo,
    /// KTO: preference optimisation after Kahneman and Tversky.
    Kto,
    /// ORPO: odds-ratio preference optimisation.
    Orpo,
    /// CPO: contrastive preference optimisation.
    Cpo,
    /// SimPO: simple preference optimisation.
    Simpo,
    /// GRPO: group-relative policy optimisation.
    Grpo,
    /// RLOO: REINFORCE with a leave-one-out baseline.
    Rloo,
    /// PPO: proximal policy optimisation.
    Ppo,
    /// A reward model from preference pairs.
    Reward,
}

/// The objective's name in recipes.
impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl Objective {
    /// Whether the loss is that of target tokens.
    pub fn is_likelihood(self) -> bool {
        matches!(self, Objective::LanguageModelling | Objective::Sft)
    }

    /// Whether the loss is over preferences: pairs of completions, or completions with a label.
    pub fn is_over_preferences(self) -> bool {
        use Objective::{Cpo, Dpo, Kto, Orpo, Simpo};
        matches!(self, Dpo | Kto | Orpo | Cpo | Simpo)
    }

    /// The default number of completions per prompt that are compared with each other (TRL f2cd577,
    /// `num_generations`); `None` for objectives that compare none.
    pub fn default_generations(self) -> Option<u64> {
        match self {
            Objective::Grpo => Some(8),
            Objective::Rloo => Some(2),
            _ => None,
        }
    }
}

/// The loss of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Likelihood {
    /// What each token adds to the loss.
    pub loss: LikelihoodLoss,
    /// What the loss of a step or an evaluation is a mean over.
    pub mean: LikelihoodMean,
    /// Share of each target that is spread evenly over the vocabulary, below 1; with nll only.
    pub label_smoothing: f64,
    /// α of NEFTune: uniform noise on the embeddings in training, of at most α / √(tokens · width); 0: none.
    pub neftune_alpha: f64,
}

impl Likelihood {
    /// The keys that are set and that an objective does not have.
    pub fn without_effect(&self, objective: Objective) -> Vec<&'static str> {
        let (has_it, is_nll) = (objective.is_likelihood(), self.loss == LikelihoodLoss::Nll);
        let is_smoothed = self.label_smoothing != 0.0;
        let mut keys = Vec::new();
        keys.extend((!has_it && !is_nll).then_some("likelihood.loss"));
        let is_of_tokens = self.mean == LikelihoodMean::Tokens;
        keys.extend((!has_it && !is_of_tokens).then_some("likelihood.mean"));
        keys.extend((is_smoothed && !(has_it && is_nll)).then_some("likelihood.label_smoothing"));
        keys.extend((!has_it && self.neftune_alpha != 0.0).then_some("likelihood.neftune_alpha"));
        keys
    }
}

/// What a token adds to the loss, with p as its probability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LikelihoodLoss {
    /// −ln p.
    #[default]
    Nll,
    /// −p ln p, in which the factor p has no gradient (dynamic fine-tuning, arXiv 2508.05629).
    Dft,
}

/// What a loss of tokens is a mean over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LikelihoodMean {
    /// The target tokens of the global batch.
    #[default]
    Tokens,
    /// The samples of the global batch, of which each adds the sum over its tokens (HALOs up to 2024-09).
    Samples,
}

impl LikelihoodMean {
    /// What a sum over these target tokens and samples is divided by.
    pub fn count(self, tokens: u64, samples: u64) -> u64 {
        match self {
            LikelihoodMean::Tokens => tokens,
            LikelihoodMean::Samples => samples,
        }
    }
}

/// The loss over preferences.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Preference {
    /// The loss of the margin of dpo, cpo and simpo.
    pub loss: PairLoss,
    /// β, the factor of the log-ratio or of the margin; orpo's λ. Default: 0.1, for simpo 2.
    pub beta: Option<f64>,
    /// Share of pairs whose preference is wrong, below 0.5.
    pub label_smoothing: f64,
    /// dpo without its reference model.
    pub reference_free: bool,
    /// Scores are means over the tokens of each completion. Default: simpo only.
    pub by_token: Option<bool>,
    /// γ/β, the margin that simpo wants. Default: 0.25.
    pub target_margin: Option<f64>,
    /// Weight of the chosen completion's negative log-likelihood; orpo's covers the prompt too. Default: 0, for orpo and cpo 1.
    pub likelihood_weight: Option<f64>,
    /// This likelihood is a mean over each chosen completion, without its prompt, and not over the tokens of the global batch
    /// (HALOs' ORPO).
    pub likelihood_by_completion: bool,
    /// kto's λ of desirable completions. Default: 1.
    pub desirable_weight: Option<f64>,
    /// kto's λ of the others. Default: 1.
    pub undesirable_weight: Option<f64>,
    /// Which samples kto's estimate of the KL covers.
    pub kl: Kl,
    /// Whose completion each prompt has in this estimate.
    pub kl_completions: KlCompletions,
}

impl Preference {
    /// The keys that are set and that an objective does not have.
    pub fn without_effect(&self, objective: Objective) -> Vec<&'static str> {
        let is_smoothed = matches!(self.loss, PairLoss::Sigmoid | PairLoss::Robust);
        let (dpo, simpo) = (objective == Objective::Dpo, objective == Objective::Simpo);
        let pairs = dpo || simpo || objective == Objective::Cpo;
        let (orpo, kto) = (objective == Objective::Orpo, objective == Objective::Kto);
        [
            ("preference.loss", self.loss != PairLoss::Sigmoid, pairs),
            ("preference.beta", self.beta.is_some(), pairs || orpo || kto),
            (
                "preference.label_smoothing",
                self.label_smoothing != 0.0,
                pairs && is_smoothed,
            ),
            ("preference.reference_free", self.reference_free, dpo),
            ("preference.by_token", self.by_token.is_some(), pairs),
            (
                "preference.target_margin",
                self.target_margin.is_some(),
                simpo,
            ),
            (
                "preference.likelihood_weight",
                self.likelihood_weight.is_some(),
                pairs || orpo,
            ),
            (
                "preference.likelihood_by_completion",
                self.likelihood_by_completion,
                pairs || orpo,
            ),
            (
                "preference.desirable_weight",
                self.desirable_weight.is_some(),
                kto,
            ),
            (
                "preference.undesirable_weight",
                self.undesirable_weight.is_some(),
                kto,
            ),
            ("preference.kl", self.kl != Kl::Global, kto),
            (
                "preference.kl_completions",
                self.kl_completions != KlCompletions::Previous,
                kto,
            ),
        ]
        .into_iter()
        .filter_map(|(key, is_set, has_it)| (is_set && !has_it).then_some(key))
        .collect()
    }
}

/// Settings of generation-based trainers (GRPO, RLOO, PPO, KTO) that rules check.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Generation {
    /// TRL GRPO and RLOO `num_generations`.
    pub num_generations: Option<u64>,
    /// TRL GRPO and RLOO `num_generations_eval`; default: `num_generations`.
    pub num_generations_eval: Option<u64>,
    /// TRL GRPO and RLOO `generation_batch_size`.
    pub generation_batch_size: Option<u64>,
    /// TRL GRPO and RLOO `steps_per_generation`.
    pub steps_per_generation: Option<u64>,
    /// TRL PPO `num_mini_batches`.
    pub num_mini_batches: Option<u64>,
    /// TRL PPO `whiten_rewards`: needs 8 samples per device in a mini-batch.
    pub whiten_rewards: bool,
    /// The batch counts prompts, as GRPO's of TRL before 0.15, and no completions.
    pub counts_prompts: bool,
    /// A frozen reference model is in memory: GRPO and RLOO have one if `beta` is not 0.
    pub reference: bool,
    /// Whole groups must fit into one pass of all devices, as in GRPO of TRL 0.15 and 0.16; later versions count the
    /// accumulated passes too.
    pub group_in_pass: bool,
    /// The KTO loss takes no KL term from the other samples of a micro-batch: TRL's `apo_zero_unpaired` has none, and
    /// LLaMA-Factory makes the pairs when it prepares the data.
    pub without_kl: bool,
}

/// The batch of a recipe. A recipe states `global`, or `per_device_batch_size` × `accumulation` × the data-parallel
/// size at `gpus` yields it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Batch {
    /// Global batch: samples per optimiser step over all devices.
    pub global: Option<u64>,
    /// Samples per device and forward pass in the recipe. The planner exceeds it only with `prefer:
    /// per_device_batch_size`.
    pub per_device_batch_size: Option<u64>,
    /// Forward passes per optimiser step at `gpus` devices.
    pub accumulation: Option<u64>,
    /// GPUs that the recipe was written for.
    pub gpus: Option<u64>,
    /// Without an exact split at a world size: `exact` refuses it and names the sizes that have
    /// one; `uneven` gives ranks different numbers of micro-batches.
    pub remainder: Remainder,
    /// What a larger world changes first: `accumulation` keeps the micro-batch and lowers
    /// accumulation; `per_device_batch_size` raises the micro-batch, within memory.
    pub prefer: Prefer,
    /// Samples that do not fill the last batch of an epoch: `wrap` fills the batch up from the next
    /// epoch; `drop` leaves them out.
    pub last_batch: LastBatch,
    /// Upstream's automatic batch finder is on (`auto_find_batch_size`).
    pub auto_find: bool,
    /// How the micro-batch follows from the recipe: `stated` in `per_device_batch_size`; `exact` or `floored`
    /// division of `global`.
    pub division: Division,
    /// The bounds of DeepSpeed's `elasticity`, which computes the batch.
    pub elastic: Option<Elastic>,
}

impl Batch {
    /// Whether the micro-batch or the global batch depends on the world that the recipe was written for, and the recipe
    /// does not state it.
    pub fn needs_a_world(&self) -> bool {
        self.gpus.is_none() && (self.division != Division::Stated || self.elastic.is_some())
    }
}

/// DeepSpeed's `elasticity` (edaa722, `elasticity/config.py`): bounds for a batch that many GPU
/// counts divide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Elastic {
    /// `max_train_batch_size`, samples; the computed batch may be smaller.
    pub max_batch: u64,
    /// `micro_batch_sizes`, samples per device and forward pass.
    pub micro_batches: Vec<u64>,
    /// `min_gpus`: the smallest number of GPUs.
    pub min_gpus: u64,
    /// `max_gpus`: the largest number of GPUs.
    pub max_gpus: u64,
    /// `version` of the algorithm.
    pub version: ElasticVersion,
    /// `num_gpus_per_node`; version 0.2 adds and removes whole nodes.
    pub gpus_per_node: u64,
    /// `model_parallel_size`, version 0.2 only.
    pub model_parallel: u64,
    /// `prefer_larger_batch`: of equally good batches take the larger.
    pub prefer_larger: bool,
}

impl Default for Elastic {
    fn default() -> Self {
        Elastic {
            max_batch: 2000,
            micro_batches: vec![2, 4, 6],
            min_gpus: 1,
            max_gpus: 10_000,
            version: ElasticVersion::V02,
            gpus_per_node: 1,
            model_parallel: 1,
            prefer_larger: true,
        }
    }
}

/// How the micro-batch follows from the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Division {
    /// The recipe states `per_device_batch_size`.
    #[default]
    Stated,
    /// `global` / (`accumulation` × data-parallel size), which must be whole (HALOs).
    Exact,
    /// ⌊⌊`global` / `accumulation`⌋ / data-parallel size⌋: upstream drops the rest of every batch
    /// (direct-preference-optimization, HALOs' legacy tree).
    Floored,
}

/// The version of DeepSpeed's elasticity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum ElasticVersion {
    /// One batch for every world.
    #[serde(rename = "0.1")]
    V01,
    /// Whole nodes; for worlds outside its list the batch depends on the world.
    #[default]
    #[serde(rename = "0.2")]
    V02,
}

/// The response to a world size without an exact split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Remainder {
    /// Refuse it, and name the counts that work.
    #[default]
    Exact,
    /// Give ranks different numbers of micro-batches, whose sum is the global batch.
    Uneven,
}

/// What a larger world changes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Prefer {
    /// Keeps the recipe's micro-batch and lowers accumulation.
    #[default]
    Accumulation,
    /// Raises the micro-batch, within memory.
    #[serde(rename = "per_device_batch_size")]
    PerDeviceBatchSize,
}

/// What happens to samples that do not fill the last batch of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LastBatch {
    /// Filled up from the next epoch (transformers with accelerate's `even_batches`; native).
    #[default]
    Wrap,
    /// Dropped: an epoch is ⌊n/B⌋·B samples (HALOs; `dataloader_drop_last: true`).
    Drop,
}

/// The schedule of the global batch. In a recipe: `kind: norm-test` beside the settings.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
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

impl BatchSchedule {
    /// The settings of the norm test, if it is the schedule.
    pub fn norm_test(&self) -> Option<&NormTest> {
        match self {
            BatchSchedule::NormTest(test) => Some(test),
            _ => None,
        }
    }
}

/// One stage of a stage-wise schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Share of the sample budget, 0 to 1.
    pub share: f64,
    /// Global batch in samples.
    pub batch: u64,
}

/// One run of equal batches of a replayed schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplayRun {
    /// Global batch in samples.
    pub batch: u64,
    /// Number of steps at this batch.
    pub steps: u64,
}

/// The norm test and the controller around it (arXiv 2412.21124; see `docs/norm-test.md`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
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

impl NormTest {
    /// The groups that the test measures; `estimator: paper` measures workers.
    pub fn measured_groups(&self) -> Groups {
        match self.estimator {
            Estimator::Paper => Groups::Workers,
            Estimator::Unbiased => self.groups,
        }
    }
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// Unbiased for any group sizes, smoothed, with every guard.
    #[default]
    Unbiased,
    /// As printed in the paper: no warm-up gate, no smoothing, no cap, workers as groups.
    Paper,
}

/// The groups of the norm test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Groups {
    /// Every micro-batch of every worker.
    #[default]
    MicroBatches,
    /// Every worker's accumulated gradient.
    Workers,
}

/// Effect of a larger batch on the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LearningRateOnGrowth {
    /// The learning rate stays, as in the paper.
    #[default]
    None,
    /// Multiplied by the square root of the growth.
    Sqrt,
}

/// Sizes of the parallel axes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Parallel {
    /// State that the data-parallel ranks shard: `ddp` none; `zero1` optimiser states; `zero2` gradients
    /// too; `fsdp` parameters too.
    pub strategy: Strategy,
    /// Tensor-parallel size, in devices.
    pub tensor: u64,
    /// Pipeline-parallel size, in devices.
    pub pipeline: u64,
    /// Context-parallel size, in devices.
    pub context: u64,
    /// Sequence-parallel size (Ulysses), in devices.
    pub sequence: u64,
    /// One process drives all devices, so the data-parallel size is always 1.
    pub one_process: bool,
    /// Data-parallel replicas of the recipe (hybrid sharding), for the check of the product of all sizes.
    pub data_replicate: Option<u64>,
    /// Data-parallel shards of the recipe, for the check of the product of all sizes.
    pub data_shard: Option<u64>,
    /// The optimiser's states are in the host's memory.
    pub offload_optimizer: bool,
    /// Parameters are in the host's memory while no layer computes with them.
    pub offload_parameters: bool,
}

impl Default for Parallel {
    fn default() -> Self {
        Parallel {
            strategy: Strategy::Ddp,
            tensor: 1,
            pipeline: 1,
            context: 1,
            sequence: 1,
            one_process: false,
            data_replicate: None,
            data_shard: None,
            offload_optimizer: false,
            offload_parameters: false,
        }
    }
}

/// The state that the data-parallel ranks shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Nothing: every rank holds everything.
    #[default]
    Ddp,
    /// Parameters, gradients and optimiser states (FSDP full shard, ZeRO-3).
    Fsdp,
    /// Only the optimiser states.
    Zero1,
    /// Optimiser states and gradients.
    Zero2,
}

/// What may change the last bits of the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Determinism {
    /// Another world, micro-batch or sharding rounds in another order.
    #[default]
    Run,
    /// Nothing of these, on processors of one kind: losses, weights and decisions are the same bits in every world. The
    /// built-in trainer computes every sample on its own; CPUs only.
    World,
}

/// World sizes that the run may have.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Elasticity {
    /// Minimum number of ranks.
    pub min: Option<u64>,
    /// Maximum number of ranks.
    pub max: Option<u64>,
    /// Processes of the built-in trainer that stand by on the launcher's machine and in each pod, to take the place of ranks
    /// that are lost there. Each takes the memory of a rank, and a GPU that is free.
    pub spares: u64,
}

/// The model. `path` names a directory with `config.json` or an upstream model id; `config` gives
/// or overrides keys of `config.json`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// A directory in Hugging Face layout, or a hub id such as `mistralai/Mistral-7B-v0.1`.
    pub path: Option<String>,
    /// The branch, tag or commit of a hub id; default: `main`.
    pub revision: Option<String>,
    /// The folder of the hub's repository, or of the directory, that has the model and its tokenizer.
    pub subfolder: Option<String>,
    /// Keys of Hugging Face's `config.json`; they override those of `path`.
    pub config: BTreeMap<String, serde_json::Value>,
    /// Source of the weights: `weights` reads `path`, `random` draws them, `auto` reads `path` if it is a
    /// directory with weights, or a hub id whose sizes `config` does not change.
    pub init: Init,
    /// Precision of the forward and backward pass.
    pub precision: Precision,
    /// Use TF32 in f32 matrix products, on GPUs that support it.
    pub tf32: bool,
    /// Upstream's name of the attention kernel (`flash_attention_2`, `sdpa`), for messages.
    pub attention: Option<String>,
    /// Recompute activations in the backward pass.
    pub activation_checkpointing: bool,
    /// Low-rank adapters (PEFT) are trained instead of the weights.
    pub adapters: bool,
    /// Rank of the adapters; without it the memory estimate assumes 64.
    pub lora_rank: Option<u64>,
    /// The adapters' output is multiplied by this over the rank; default: 8.
    pub lora_alpha: Option<f64>,
    /// The share of the adapters' inputs that is 0 in training.
    pub lora_dropout: f64,
    /// Divide `lora_alpha` by the root of the rank instead.
    pub use_rslora: bool,
    /// Linear layers with adapters, by the last part of their names; `all-linear`: every one; empty: those of PEFT for the
    /// model's family, and for the memory estimate of other programs every one.
    pub lora_target_modules: Vec<String>,
    /// Modules that are trained whole beside the adapters, by the last part of their names.
    pub lora_modules_to_save: Vec<String>,
    /// Base weights are loaded in 4 bits.
    pub load_in_4bit: bool,
    /// The scales of weights in 4 bits are in 8 bits (double quantisation).
    pub use_bnb_nested_quant: bool,
    /// Base weights are loaded in 8 bits.
    pub load_in_8bit: bool,
    /// The external trainer keeps the weights in half precision where nothing shards them (`torch_dtype: bfloat16`), for
    /// the memory estimate.
    pub half_weights: bool,
    /// The external trainer computes the loss without storing the logits (Liger's kernel), for the memory estimate.
    pub fused_loss: bool,
}

/// The source of the initial weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Init {
    /// From `path` when it is a directory with weights; else random if `config` gives the shape.
    #[default]
    Auto,
    /// From `path`; without weights there the recipe is refused.
    Weights,
    /// Random: seeded, normal with σ = `initializer_range`.
    Random,
}

/// Precision of the forward and backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats for all arithmetic.
    #[default]
    F32,
    /// 16-bit compute with 8 exponent bits (bfloat16).
    Bf16,
    /// 16-bit compute with 5 exponent bits (float16).
    F16,
}

/// The tokeniser and its chat template.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tokenizer {
    /// `byte`, a `tokenizer.json`, or a directory that holds one. Default: the model's tokeniser.
    pub path: Option<String>,
    /// A Jinja chat template; it overrides the tokeniser's.
    pub chat_template: Option<String>,
}

/// The training and evaluation data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// Sources of training samples.
    pub train: Vec<DataSource>,
    /// Evaluation sources; empty: `held_out` samples of the training data are held out.
    pub evaluation: Vec<DataSource>,
    /// Samples held out for evaluation without an evaluation source; below 1: a share of the data.
    pub held_out: Option<f64>,
    /// Maximum tokens per sample.
    pub sequence_length: u64,
    /// Tokens to which upstream cuts the prompt of a sample. The built-in trainer refuses data with a longer one.
    pub max_prompt_length: Option<u64>,
    /// A sample of a file has one token more than `sequence_length`, so that every input has a target. Upstream's samples
    /// do not.
    pub extra_token: bool,
    /// How prompts and completions of preferences become rows, and with `tokens: decoded` also those of other losses.
    pub rows: Rows,
    /// The texts around turns, in place of a chat template, with `rows.tokens: decoded`.
    pub marks: Marks,
    /// Pack several documents into one sample.
    pub packing: bool,
    /// How documents are packed.
    pub packing_strategy: PackingStrategy,
    /// Loss on the answers only; default: the objective's (`true` for SFT).
    pub answers_only: Option<bool>,
    /// Loss on the completions only, in data with prompts and completions; default: as `answers_only`.
    pub completions_only: Option<bool>,
    /// Shuffle the sample order, by `seed`.
    pub shuffle: bool,
}

impl Default for Data {
    fn default() -> Self {
        Data {
            train: Vec::new(),
            evaluation: Vec::new(),
            held_out: None,
            sequence_length: 1024,
            max_prompt_length: None,
            extra_token: true,
            rows: Rows::default(),
            marks: Marks::default(),
            packing: false,
            packing_strategy: PackingStrategy::default(),
            answers_only: None,
            completions_only: None,
            shuffle: true,
        }
    }
}

/// How documents are packed into samples. TRL's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PackingStrategy {
    /// They are concatenated and cut, and see each other.
    #[default]
    Wrapped,
    /// They stay whole and do not see each other; what is longer than a sample is cut (best fit decreasing).
    Bfd,
    /// As `bfd`, and what is longer than a sample becomes several documents.
    #[serde(alias = "bfd_split")]
    BfdSplit,
}

/// How a prompt and its completions become rows of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Rows {
    /// What becomes tokens together, and the special tokens around it.
    pub tokens: RowTokens,
    /// How a row of more tokens than `sequence_length` is cut.
    pub cut: RowCut,
    /// Most tokens of a prompt; with `cut: completion` only where the row is too long. Default: no limit.
    pub max_prompt_length: Option<u64>,
    /// Which tokens of a longer prompt are kept.
    pub prompt_keeps: Side,
    /// Most tokens of a completion, of which the first are kept. Default: no limit.
    pub max_completion_length: Option<u64>,
}

/// The texts before and after the turns of a conversation. A prompt ends with the text before an answer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Marks {
    /// Before a turn of the user.
    pub user: String,
    /// After a turn of the user.
    pub user_end: String,
    /// Before an answer.
    pub assistant: String,
    /// After an answer.
    pub assistant_end: String,
}

/// What of a row becomes tokens together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RowTokens {
    /// A prompt with each completion, and texts with the tokenizer's special tokens (TRL 0.29 and later).
    #[default]
    Together,
    /// As `together`, and conversations have the special tokens too, where the template did not write them (TRL before 0.12).
    TogetherEnded,
    /// Prompt and completion by themselves; completions that are texts are ended (TRL 0.27 and 0.28).
    Apart,
    /// As `apart`, and every completion is ended, whatever the template wrote (TRL 0.12 to 0.26,
    /// direct-preference-optimization).
    ApartEnded,
    /// Prompt and completion are cut by themselves and become text again, with a space and the end token after it, and then
    /// tokens together (HALOs up to 2024-09). Conversations are written with `data.marks`.
    Decoded,
}

/// How a row that is too long is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RowCut {
    /// Its first tokens are kept.
    #[default]
    End,
    /// Its last tokens are kept.
    Start,
    /// The prompt is cut to `max_prompt_length`, and then the completion to the rest, in both rows of a pair alike.
    Completion,
    /// The content of the turn that passes `max_prompt_length` or `sequence_length` is cut, and later turns are left out, so
    /// that the template ends each row (HALOs).
    Turns,
}

/// A side of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    #[default]
    End,
    Start,
}

/// The `path` of the synthetic language.
pub const SYNTHETIC: &str = "synthetic";

impl Data {
    /// The synthetic language, where it is the training data. It is always the only source.
    pub fn synthetic(&self) -> Option<Synthetic> {
        match self.train.as_slice() {
            [source] if source.path == SYNTHETIC => {
                Some(source.synthetic.clone().unwrap_or_default())
            }
            _ => None,
        }
    }

    /// Whether documents are concatenated and cut.
    pub fn wraps(&self) -> bool {
        self.packing && self.packing_strategy == PackingStrategy::Wrapped
    }

    /// Whether documents are packed whole, so that they do not see each other.
    pub fn packs_whole(&self) -> bool {
        self.packing && self.packing_strategy != PackingStrategy::Wrapped
    }

    /// All sources with their native paths, `data.train.0`.
    pub fn sources(&self) -> impl Iterator<Item = (String, &DataSource)> {
        let train = self.train.iter().enumerate();
        let evaluation = self.evaluation.iter().enumerate();
        let train = train.map(|(index, source)| (format!("data.train.{index}"), source));
        train.chain(evaluation.map(|(index, source)| (format!("data.evaluation.{index}"), source)))
    }

    /// As [`Data::sources`], to change them.
    pub fn sources_mut(&mut self) -> impl Iterator<Item = (String, &mut DataSource)> {
        let paths: Vec<String> = self.sources().map(|(path, _)| path).collect();
        paths
            .into_iter()
            .zip(self.train.iter_mut().chain(&mut self.evaluation))
    }
}

/// One source of samples.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataSource {
    /// A file, a directory, a glob, a hub id, or `synthetic`.
    pub path: String,
    /// The file format; default: by the file's extension.
    pub format: Option<DataFormat>,
    /// Upstream's split of the data set.
    pub split: Option<String>,
    /// Upstream's configuration of the data set on the hub.
    pub config: Option<String>,
    /// The branch, tag or commit of a hub id; default: `main`.
    pub revision: Option<String>,
    /// Upstream's columns of the data set.
    pub columns: Vec<String>,
    /// Share of the source's samples, 0 to 1; of a training source also their number, above 1.
    pub weight: Option<f64>,
    /// Of rows of HALOs' feedback, those of this split are read.
    pub feedback_split: Option<String>,
    /// How upstream makes prompts and completions of the rows of a data set that it knows by name.
    pub conversion: Option<Conversion>,
    /// The synthetic language, when `path` is `synthetic`.
    pub synthetic: Option<Synthetic>,
}

/// How a program makes prompts and completions of the rows of a data set that it knows by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Conversion {
    /// Dialogues in `chosen` and `rejected`, as texts (direct-preference-optimization's `hh`).
    DialogueText,
    /// Dialogues in `chosen` and `rejected`, as messages (HALOs' `hh`).
    DialogueMessages,
    /// Dialogues in `chosen` and `rejected`, whose marks of turns are replaced by `data.marks` (`hh` of HALOs up to 2024-09).
    DialogueMarked,
    /// Answers with scores, of which one has at least twice the other's, as texts (direct-preference-optimization's
    /// `shp`).
    ScoredText,
    /// A prompt, and the last messages of `chosen` and `rejected` (HALOs' `ultrabin`).
    LastMessages,
    /// A prompt, two responses, and the number of the better one (HALOs' `safe_rlhf`).
    NumberedResponses,
    /// Conversations, of which all messages after the first are trained on, also the user's (HALOs' `ultrachat`).
    Conversation,
    /// Answers with scores, as messages, of which one has at least twice the other's, and five pairs of a prompt (HALOs'
    /// `shp`).
    ScoredMessages,
    /// The same, with the pairs of all prompts drawn with one sequence of random numbers, of the recipe's `seed` (`shp` of HALOs
    /// up to 2024-09).
    SeededScoredMessages,
    /// The same with every pair (the test split of HALOs' `shp`).
    AllScoredMessages,
    /// Messages of trees, each with the next better one of its siblings, in English (HALOs' `oasst`).
    RankedReplies,
    /// In another way, so that the built-in trainer refuses the data set.
    Unknown,
}

/// The file format of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DataFormat {
    /// One JSON object a line, or one array of objects.
    Jsonl,
    /// Columnar files of Apache Parquet.
    Parquet,
    /// Plain text; blank lines separate documents.
    Text,
    /// Token ids, little endian u16 or u32.
    Bin,
}

/// The synthetic language: a seeded Markov source with a known entropy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Synthetic {
    /// Vocabulary size V of the language.
    pub vocabulary: u64,
    /// Successors of each state; fewer mean lower entropy.
    pub branching: u64,
    /// Samples in the data set.
    pub samples: u64,
    /// Seed of the language, separate from the run's.
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

/// The length of the run. The first limit that is set counts: samples, then steps, then epochs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Optimizer {
    /// β₁, the decay of the first moment.
    pub beta1: f64,
    /// β₂, the decay of the second moment.
    pub beta2: f64,
    /// ε, added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, as in AdamW.
    pub weight_decay: f64,
    /// What decays.
    pub weight_decay_on: DecayOn,
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
            weight_decay_on: DecayOn::Matrices,
            gradient_clip: Some(1.0),
            name: None,
        }
    }
}

impl Optimizer {
    /// The method of the built-in trainer that the name means; `None`: it has none. Names of transformers
    /// (`OptimizerNames`, 5.23.0 `training_args.py`) and classes of `torch.optim`.
    pub fn method(&self) -> Option<Method> {
        let name = self.name.as_deref().map(str::to_lowercase);
        match name
            .as_deref()
            .map(|name| name.strip_prefix("paged_").unwrap_or(name))
        {
            None => Some(Method::AdamW),
            Some(name) if name.starts_with("adamw") => Some(Method::AdamW),
            Some("rmsprop") => Some(Method::RmsProp),
            Some(_) => None,
        }
    }
}

/// An optimiser of the built-in trainer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    AdamW,
    /// Its α is 0.99, as PyTorch's default is.
    RmsProp,
}

/// The parameters that weight decay applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DecayOn {
    /// Matrices only, not norms and biases (transformers).
    #[default]
    Matrices,
    /// All parameters (HALOs, direct-preference-optimization).
    All,
}

/// The learning rate as a function of the samples consumed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LearningRate {
    /// Learning rate at the end of warm-up.
    pub peak: f64,
    /// Shape of the curve after warm-up.
    pub shape: LearningRateShape,
    /// Minimum, as a share of the peak.
    pub floor: f64,
    /// The rate of the first step of a warm-up, as a share of the peak.
    pub warmup_start: f64,
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
            warmup_start: 0.0,
            warmup_samples: None,
            warmup_steps: None,
            warmup_ratio: None,
        }
    }
}

/// The shape of the learning rate after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
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

/// An external trainer, in place of the built-in trainer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Trainer {
    /// Command line, started once per rank; empty: the built-in trainer.
    pub command: Vec<String>,
    /// Environment variables of every rank. Values may hold the placeholders of `command`. Default: those of the
    /// recipe's launcher.
    pub environment: BTreeMap<String, String>,
    /// Text of the DeepSpeed config that `{deepspeed_config}` names. Every generation gets a copy with the plan's
    /// numbers.
    pub deepspeed_config: Option<String>,
    /// Arguments that resume from `{checkpoint}`; empty: those of the recipe's dialect.
    pub resume: Vec<String>,
    /// Directory of its checkpoints, the same in every generation; default: a directory of the run.
    pub checkpoint_dir: Option<String>,
    /// Whether its checkpoints hold the optimiser's state.
    pub saves_optimizer: bool,
    /// Whether its own arguments choose FSDP 2 if they choose FSDP.
    pub chooses_fsdp_2: bool,
    /// Regular expression that finds its progress in the output of rank 0, by the named groups `step`,
    /// `total_steps`, `loss`, `learning_rate` and `tokens`. Only `step` is required.
    pub progress_pattern: Option<String>,
    /// Signal that asks it to save a checkpoint and exit.
    pub drain_signal: DrainSignal,
    /// Seconds from the drain signal until it is killed.
    pub drain_seconds: u64,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer {
            command: Vec::new(),
            environment: BTreeMap::new(),
            deepspeed_config: None,
            resume: Vec::new(),
            checkpoint_dir: None,
            saves_optimizer: true,
            chooses_fsdp_2: true,
            progress_pattern: None,
            drain_signal: DrainSignal::Term,
            drain_seconds: 60,
        }
    }
}

/// The variable of every rank with the port on which rank 0 listens. In a trainer's environment: the port to listen on,
/// on one machine.
pub const MASTER_PORT: &str = "MASTER_PORT";

impl Trainer {
    /// Whether an external trainer is configured.
    pub fn is_external(&self) -> bool {
        !self.command.is_empty()
    }

    /// Whether accelerate shards with FSDP in every rank.
    pub fn uses_fsdp(&self) -> bool {
        let uses = self.environment.get("ACCELERATE_USE_FSDP");
        uses.is_some_and(|uses| ["true", "1"].contains(&&*uses.to_lowercase()))
    }

    /// Adds environment variables. Those already present win.
    pub fn add_environment(&mut self, mut more: BTreeMap<String, String>) {
        more.append(&mut self.environment);
        self.environment = more;
    }
}

/// A signal that asks an external trainer to save a checkpoint and exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum DrainSignal {
    /// Sent by schedulers such as Slurm and Kubernetes.
    #[default]
    #[serde(rename = "SIGTERM")]
    Term,
    /// Sent by Ctrl-C in a terminal.
    #[serde(rename = "SIGINT")]
    Int,
    /// Some programs save on it (Slurm's `--signal`).
    #[serde(rename = "SIGUSR1")]
    Usr1,
    /// Some programs save on it (Slurm's `--signal`).
    #[serde(rename = "SIGUSR2")]
    Usr2,
    /// Sent by a terminal when it closes.
    #[serde(rename = "SIGHUP")]
    Hup,
}

impl DrainSignal {
    const ALL: [DrainSignal; 5] = [
        DrainSignal::Term,
        DrainSignal::Int,
        DrainSignal::Usr1,
        DrainSignal::Usr2,
        DrainSignal::Hup,
    ];
}

impl fmt::Display for DrainSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for DrainSignal {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(name, DrainSignal::ALL)
    }
}
