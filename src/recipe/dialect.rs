//! The names of the dialects, and the one key that all of them share.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which upstream (or our own) way of writing recipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// `evenkeel.dev/v1alpha1`, kind `Recipe`.
    Native,
    /// alignment-handbook and TRL YAML.
    HandbookTrl,
    /// The Hydra tree of HALOs.
    Halos,
    /// The Hydra tree of direct-preference-optimization.
    Dpo,
    /// transformers' `TrainingArguments`: YAML, JSON or a command line.
    Transformers,
    /// A config of `accelerate launch` by itself: a world without a batch.
    Accelerate,
    /// A DeepSpeed JSON config by itself.
    Deepspeed,
}

impl Dialect {
    /// The name that `--dialect` takes and that plans carry.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Native => "native",
            Dialect::HandbookTrl => "handbook-trl",
            Dialect::Halos => "halos",
            Dialect::Dpo => "dpo",
            Dialect::Transformers => "transformers",
            Dialect::Accelerate => "accelerate",
            Dialect::Deepspeed => "deepspeed",
        }
    }

    /// Whether its recipes are trees of configs, composed by Hydra.
    pub fn is_hydra(self) -> bool {
        matches!(self, Dialect::Halos | Dialect::Dpo)
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The key of upstream dialects that holds a partial native spec, laid over the translation.
pub const RESERVED: &str = "evenkeel";
