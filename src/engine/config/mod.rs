//! A model as data: what the engines need to compute a decoder. `read` and `write` convert it from and to Hugging Face's
//! `config.json`; `family` has what the configuration class of each family sets where that states nothing.

mod family;
mod read;
mod rotation;
mod write;

use serde::{Deserialize, Serialize};
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
    /// The model may be valid, but the engines do not compute it.
    pub uncomputed: bool,
}

/// A decoder whose blocks are RMSNorm, attention with grouped queries, RMSNorm and a gated linear unit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The family whose `config.json` it reads and writes.
    #[serde(default)]
    pub family: Family,
    pub hidden_size: usize,
    /// `intermediate_size` of the gated linear unit.
    pub intermediate_size: usize,
    /// Of its gates.
    #[serde(default)]
    pub activation: Activation,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// `num_key_value_heads`, a divisor of the heads.
    pub num_key_value_heads: usize,
    /// `head_dim`; `hidden_size / num_attention_heads` unless given.
    pub head_dim: usize,
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    /// Norms scale by 1 + their weights (Gemma).
    #[serde(default)]
    pub norms_add_one: bool,
    pub rope_theta: f32,
    /// Changes of the frequencies of the rotation.
    #[serde(default)]
    pub rope_scaling: RopeScaling,
    /// Layers without rotation (SmolLM3), ascending.
    #[serde(default)]
    pub unrotated_layers: Vec<usize>,
    /// Queries, keys and values have biases (Qwen 2).
    #[serde(default)]
    pub qkv_biases: bool,
    /// Each head's queries and keys pass an RMSNorm before their rotation (Qwen 3).
    #[serde(default)]
    pub query_key_norms: bool,
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

/// The activation of a gated linear unit: `hidden_act`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Activation {
    #[default]
    #[serde(rename = "silu")]
    Silu,
    /// GELU, approximated by tanh.
    #[serde(rename = "gelu_pytorch_tanh")]
    GeluTanh,
}

impl Activation {
    /// `hidden_act`.
    fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
        }
    }
}

/// Keys of `config.json` that do not change the computation, and without which it may not load again: a family's default is
/// perhaps no token of the vocabulary.
const TOKEN_IDS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

impl ModelConfig {
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
        // LlamaConfig refuses this even with an explicit head_dim.
        check(
            self.family != Family::Llama || divides(heads, hidden),
            &["num_attention_heads", "hidden_size"],
            format!("hidden_size is {hidden}, not a multiple of num_attention_heads ({heads})"),
        );
        check(
            self.head_dim.is_multiple_of(2),
            &["head_dim", "num_attention_heads", "hidden_size"],
            format!("head_dim is {}, RoPE needs an even one", self.head_dim),
        );
        // The condition is written so that it refuses NaN.
        check(
            self.rope_theta > 0.0 && self.rope_theta.is_finite(),
            &["rope_theta", "rope_parameters"],
            format!("rope_theta is {}, it must be above 0", self.rope_theta),
        );
        for (key, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
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
            let message = format!(
                "sequences of {seq_len} tokens are longer than the model's max_position_embeddings \
                 ({longest})"
            );
            return Err(ConfigError {
                help: Some("shorten them or raise it".to_owned()),
                ..flaw(&["max_position_embeddings"], message)
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
        uncomputed: false,
    }
}

/// An error about a model that the engines do not compute.
fn uncomputed(keys: &[&'static str], message: impl Into<String>) -> ConfigError {
    ConfigError {
        uncomputed: true,
        ..flaw(keys, message)
    }
}

#[cfg(test)]
mod tests;
