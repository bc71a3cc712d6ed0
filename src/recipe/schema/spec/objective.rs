//! The training objective, and settings of generation-based trainers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The training objective, which selects the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
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

/// Settings of generation-based trainers (GRPO, RLOO, PPO, KTO) that rules check.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
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
    /// The KTO loss of TRL has no KL term (`loss_type: apo_zero_unpaired`).
    pub without_kl: bool,
}
