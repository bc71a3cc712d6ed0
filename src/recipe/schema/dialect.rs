//! The names of the dialects, and the reserved key that all upstream dialects share.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A recipe format: native or of an upstream project.
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
    /// A config of `accelerate launch` alone: it sets the world size but no batch.
    Accelerate,
    /// A DeepSpeed JSON config alone.
    Deepspeed,
}

impl Dialect {
    /// Whether its recipes are config trees that Hydra composes.
    pub fn is_hydra(self) -> bool {
        matches!(self, Dialect::Halos | Dialect::Dpo)
    }
}

/// The name in `--dialect` and in plans.
impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The key in upstream dialects for a partial native spec, which overrides the translated values.
pub const RESERVED: &str = "evenkeel";
