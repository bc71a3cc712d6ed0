//! A model as data: what the engines need to compute a decoder. `read` and `write` convert it from and to Hugging Face's
//! `config.json`; `family` has what the configuration class of each family sets where that states nothing.

mod family;
mod read;
mod rotation;
mod write;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

pub use family::Family;
pub use rotation::RopeScaling;

/// The largest width, vocabulary or context; it keeps every product of two within 64 bits.
const MAX_DIMENSION: usize = 1 << 22;
/// The largest number of layers.
const MAX_LAYERS: usize = 1 << 14;

/// Why a `config.json` cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}", help.as_ref().map(|help| format!("; {help}")).unwrap_or_default())]
pub struct ConfigError {
    /// The keys concerned, the likeliest cause first; empty when the whole file is concerned.
    pub keys: Vec<&'static str>,
    /// The wrong values and the allowed ones.
    pub message: String,
    /// The remedies, where there is more than one.
    pub help: Option<String>,
    pub cause: Cause,
}

/// What is wrong with a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// It is not valid.
    Invalid,
    /// It may be valid, but the engines do not compute it.
    Uncomputed,
    /// The same, and they do where each of the keys is 0.
    UncomputedUnlessZero,
}

/// A decoder whose blocks are norm, attention with grouped queries, norm and MLP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The family whose `config.json` it reads and writes.
    #[serde(default)]
    pub family: Family,
    pub hidden_size: usize,
    /// `intermediate_size` of the MLP.
    pub intermediate_size: usize,
    /// Of the MLP.
    #[serde(default)]
    pub activation: Activation,
    /// The MLP is a gated linear unit; without gates it is two linear layers (GPT-2, GPT-NeoX, StarCoder2).
    #[serde(default = "yes")]
    pub gated: bool,
    /// The linear layers of the MLP have biases.
    #[serde(default)]
    pub mlp_biases: bool,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// `num_key_value_heads`, a divisor of the heads.
    pub num_key_value_heads: usize,
    /// `head_dim`; `hidden_size / num_attention_heads` unless given.
    pub head_dim: usize,
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
    /// Runs of earlier versions state only whether 1 is added to the weights.
    #[serde(default, alias = "norms_add_one", deserialize_with = "norm_kind")]
    pub norm: NormKind,
    /// `rms_norm_eps`, or the family's name for it.
    #[serde(alias = "rms_norm_eps")]
    pub norm_eps: f32,
    /// Attention and MLP of a block have the same input, and both are added to it (GPT-NeoX).
    #[serde(default)]
    pub parallel_residual: bool,
    pub rope_theta: f32,
    /// The share of a head that rotates, its first elements (GPT-NeoX).
    #[serde(default = "whole")]
    pub partial_rotary_factor: f64,
    /// Changes of the frequencies of the rotation.
    #[serde(default)]
    pub rope_scaling: RopeScaling,
    /// Layers without rotation (SmolLM3, all of GPT-2), ascending.
    #[serde(default)]
    pub unrotated_layers: Vec<usize>,
    /// Queries, keys and values have biases (Qwen 2).
    #[serde(default)]
    pub qkv_biases: bool,
    /// Attention's output projection has a bias.
    #[serde(default)]
    pub output_bias: bool,
    /// Each head's queries and keys pass an RMSNorm before their rotation (Qwen 3).
    #[serde(default)]
    pub query_key_norms: bool,
    /// Positions have embeddings, which are added to the tokens' (GPT-2).
    #[serde(default)]
    pub position_embeddings: bool,
    /// Embeddings are multiplied by √`hidden_size` (Gemma).
    #[serde(default)]
    pub scaled_embedding: bool,
    pub tie_word_embeddings: bool,
    /// `initializer_range`, σ of the random weights.
    pub initializer_range: f32,
    /// Keys that a query of a windowed layer sees, itself included.
    #[serde(default)]
    pub sliding_window: Option<usize>,
    /// Layers with the window, ascending.
    #[serde(default)]
    pub windowed_layers: Vec<usize>,
    /// The special tokens of `config.json` ([`TOKEN_IDS`]), as it states them.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub token_ids: Map<String, Value>,
}

fn yes() -> bool {
    true
}

fn whole() -> f64 {
    1.0
}

fn norm_kind<'d, D: Deserializer<'d>>(stored: D) -> Result<NormKind, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Stored {
        AddsOne(bool),
        Kind(NormKind),
    }
    Ok(match Stored::deserialize(stored)? {
        Stored::AddsOne(false) => NormKind::Rms,
        Stored::AddsOne(true) => NormKind::RmsPlusOne,
        Stored::Kind(kind) => kind,
    })
}

/// The activation of an MLP: `hidden_act`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Activation {
    #[default]
    #[serde(rename = "silu")]
    Silu,
    /// GELU, approximated by tanh.
    #[serde(rename = "gelu_pytorch_tanh")]
    GeluTanh,
    #[serde(rename = "gelu")]
    Gelu,
}

impl Activation {
    /// `hidden_act`.
    fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
            Activation::Gelu => "gelu",
        }
    }
}

/// The norms before attention, before the MLP and before the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// RMSNorm: x / √(mean x² + ε) · w.
    #[default]
    Rms,
    /// RMSNorm that scales by 1 + w (Gemma).
    RmsPlusOne,
    /// LayerNorm: (x − mean x) / √(variance of x + ε) · w + b.
    Layer,
}

impl NormKind {
    /// Numbers that forward keeps of each row: 1 / rms, or 1 / σ and the mean.
    pub(super) fn statistics(self) -> usize {
        match self {
            NormKind::Rms | NormKind::RmsPlusOne => 1,
            NormKind::Layer => 2,
        }
    }

    /// Vectors of its parameters: weights, and in a LayerNorm a bias.
    pub(super) fn vectors(self) -> usize {
        self.statistics()
    }
}

/// Keys of `config.json` that do not change the computation, and without which it may not load again: a family's default is
/// perhaps no token of the vocabulary.
const TOKEN_IDS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

impl ModelConfig {
    /// Width of a row of the MLP before its activation.
    pub(super) fn inner(&self) -> usize {
        self.intermediate_size * if self.gated { 2 } else { 1 }
    }

    /// Width of the widest vectors whose gradients are summed over the tokens together.
    pub(super) fn widest_vectors(&self) -> usize {
        let if_any = |there: bool, width: usize| if there { width } else { 0 };
        [
            self.norm.vectors() * self.hidden_size,
            if_any(self.qkv_biases, self.qkv()),
            if_any(self.query_key_norms, 2 * self.head_dim),
            if_any(self.mlp_biases, self.inner()),
        ]
        .into_iter()
        .fold(0, usize::max)
    }

    /// Elements of a head that rotate.
    pub(super) fn rotary_dim(&self) -> usize {
        (self.head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// Width of a row of queries.
    pub(super) fn queries(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of a row of queries and keys that are kept as they are before their norms; 0 without these norms.
    pub(super) fn unnormed(&self) -> usize {
        match self.query_key_norms {
            true => (self.num_attention_heads + self.num_key_value_heads) * self.head_dim,
            false => 0,
        }
    }

    /// Width of a row of queries, keys and values.
    pub(super) fn qkv(&self) -> usize {
        (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
    }

    /// The factor of the embeddings.
    pub(super) fn embedding_scale(&self) -> f32 {
        match self.scaled_embedding {
            true => (self.hidden_size as f64).sqrt() as f32,
            false => 1.0,
        }
    }

    /// The token whose embedding has no gradient as an input (`padding_idx` of PyTorch's `Embedding`).
    pub(super) fn padding_token(&self) -> Option<u32> {
        if matches!(self.family, Family::GptNeoX | Family::Gpt2) {
            return None;
        }
        let id = match self.token_ids.get("pad_token_id") {
            Some(stated) => stated.as_u64().and_then(|id| u32::try_from(id).ok()),
            None => self.family.default_padding(),
        };
        id.filter(|id| (*id as usize) < self.vocab_size)
    }

    /// Whether a layer rotates queries and keys.
    pub(super) fn rotates(&self, layer: usize) -> bool {
        !self.unrotated_layers.contains(&layer)
    }

    /// Keys that a query of the layer sees, itself included; `None`: all up to itself.
    pub(super) fn window(&self, layer: usize) -> Option<usize> {
        let windowed = self.windowed_layers.contains(&layer);
        self.sliding_window.filter(|_| windowed)
    }

    /// Checks that the shapes fit together and that the engines can compute them.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.flaws().into_iter().next().map_or(Ok(()), Err)
    }

    /// All faults of the shapes.
    pub fn flaws(&self) -> Vec<ConfigError> {
        let mut flaws = self.sizes_out_of_range();
        let (hidden, heads, key_value_heads) = (
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
        );
        // Sizes of 0 have already been reported.
        let divides = |part: usize, whole: usize| part == 0 || whole.is_multiple_of(part);
        let mut check = |holds: bool, keys: &[&'static str], message: String| {
            if !holds {
                flaws.push(flaw(keys, message));
            }
        };
        check(
            divides(key_value_heads, heads),
            &["num_key_value_heads", "num_attention_heads"],
            format!(
                "num_attention_heads is {heads}, not a multiple of num_key_value_heads ({key_value_heads})"
            ),
        );
        // LlamaConfig refuses this even with an explicit head_dim, and two families have no such key.
        let fits = self.family == Family::Llama || self.family.derives_heads();
        let keys = ["num_attention_heads", "hidden_size"].map(|key| self.family.key(key));
        check(
            !fits || divides(heads, hidden),
            &keys,
            format!(
                "{} is {hidden}, not a multiple of {} ({heads})",
                keys[1], keys[0]
            ),
        );
        let rotary = self.rotary_dim();
        let rotates = (0..self.num_hidden_layers).any(|layer| self.rotates(layer));
        check(
            !rotates || rotary == self.head_dim || (2..self.head_dim).contains(&rotary),
            &["rotary_pct", "rope_parameters"],
            format!(
                "{rotary} elements of a head of {} rotate, it must be at least 2 and at most all",
                self.head_dim
            ),
        );
        check(
            !rotates || rotary.is_multiple_of(2),
            &["head_dim", "num_attention_heads", "hidden_size"],
            match rotary == self.head_dim {
                true => format!("head_dim is {rotary}, RoPE needs an even one"),
                false => format!("{rotary} elements of a head rotate, RoPE needs an even number"),
            },
        );
        // The condition is written so that it refuses NaN.
        check(
            self.rope_theta > 0.0 && self.rope_theta.is_finite(),
            &["rope_theta", "rope_parameters"],
            format!("rope_theta is {}, it must be above 0", self.rope_theta),
        );
        for (key, value) in [
            (self.family.key("rms_norm_eps"), self.norm_eps),
            ("initializer_range", self.initializer_range),
        ] {
            let message = format!("{key} is {value}, it must be between 0 and 1");
            check((0.0..=1.0).contains(&value), &[key], message);
        }
        if let Some(message) = self.rope_scaling.flaw() {
            check(false, &["rope_scaling", "rope_parameters"], message);
        }
        let message = "sliding_window is 0; null means none".to_owned();
        check(self.sliding_window != Some(0), &["sliding_window"], message);
        flaws
    }

    /// Sizes that are 0 or above the limits.
    fn sizes_out_of_range(&self) -> Vec<ConfigError> {
        let heads = self.num_attention_heads;
        // A size of 0 is reported separately.
        let width = heads.saturating_mul(self.head_dim).max(1);
        let mut flaws = Vec::new();
        for (name, size) in [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_attention_heads × head_dim", width),
        ] {
            let limit = if name == "num_hidden_layers" {
                MAX_LAYERS
            } else {
                MAX_DIMENSION
            };
            let name = self.family.key(name);
            // Without a hidden size the head's width is unknown too.
            let is_known = name != "head_dim" || self.hidden_size > 0;
            if is_known && !(1..=limit).contains(&size) {
                let keys: Vec<&'static str> = name.split(" × ").collect();
                let message = format!("{name} is {size}, it must be between 1 and {limit}");
                flaws.push(flaw(&keys, message));
            }
        }
        flaws
    }

    /// Checks that the model accepts sequences of `seq_len` tokens.
    pub fn check_sequence(&self, seq_len: usize) -> Result<(), ConfigError> {
        let longest = self.max_position_embeddings;
        if seq_len > longest {
            let key = self.family.key("max_position_embeddings");
            let message = format!(
                "sequences of {seq_len} tokens are longer than the model's {key} ({longest})"
            );
            return Err(ConfigError {
                help: Some(match self.position_embeddings {
                    true => "shorten them".to_owned(),
                    false => "shorten them or raise it".to_owned(),
                }),
                ..flaw(&[key], message)
            });
        }
        Ok(())
    }
}

/// An error about an invalid shape.
fn flaw(keys: &[&'static str], message: impl Into<String>) -> ConfigError {
    ConfigError {
        keys: keys.to_vec(),
        message: message.into(),
        help: None,
        cause: Cause::Invalid,
    }
}

/// An error about a model that the engines do not compute.
fn uncomputed(keys: &[&'static str], message: impl Into<String>) -> ConfigError {
    ConfigError {
        cause: Cause::Uncomputed,
        ..flaw(keys, message)
    }
}

#[cfg(test)]
mod tests;
