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
    /// Keys of Hugging Face's `config.json`, over those of `path`.
    pub config: BTreeMap<String, serde_json::Value>,
    /// Where the weights come from.
    pub init: Init,
    /// Precision that the recipe trains in.
    pub precision: Precision,
    /// TF32 in matrix products of f32, on GPUs that have it.
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
