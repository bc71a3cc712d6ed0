//! The model, its weights and its tokenizer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The model. `path` names a directory with `config.json` or an upstream model id; `config` gives
/// or overrides keys of `config.json`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// A directory in Hugging Face layout, or a hub id such as `mistralai/Mistral-7B-v0.1`.
    pub path: Option<String>,
    /// Keys of Hugging Face's `config.json`; they override those of `path`.
    pub config: BTreeMap<String, serde_json::Value>,
    /// Source of the weights: `weights` reads `path`, `random` draws them, `auto` reads `path` if it is a
    /// directory with weights.
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
    /// Base weights are loaded in 4 bits.
    pub load_in_4bit: bool,
    /// Base weights are loaded in 8 bits.
    pub load_in_8bit: bool,
}

/// The source of the initial weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tokenizer {
    /// `byte`, a `tokenizer.json`, or a directory that holds one. Default: the model's tokeniser.
    pub path: Option<String>,
    /// A Jinja chat template; it overrides the tokeniser's.
    pub chat_template: Option<String>,
}
