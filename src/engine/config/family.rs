//! The families, and the defaults of their configuration classes in transformers 5.24.0 (`LlamaConfig` and so on).

use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::{Activation, ModelConfig, RopeScaling};

/// A family of models: the value of `model_type` in its `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 1 to 3, TinyLlama, SmolLM 1 and 2.
    #[default]
    Llama,
    Mistral,
    /// Qwen 2 and 2.5.
    Qwen2,
    Qwen3,
    SmolLm3,
    /// The first Gemma.
    Gemma,
}

impl Family {
    pub const ALL: [Family; 6] = [
        Family::Llama,
        Family::Mistral,
        Family::Qwen2,
        Family::Qwen3,
        Family::SmolLm3,
        Family::Gemma,
    ];

    /// `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::SmolLm3 => "smollm3",
            Family::Gemma => "gemma",
        }
    }

    /// The one of `architectures`.
    pub(super) fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Mistral => "MistralForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
            Family::SmolLm3 => "SmolLM3ForCausalLM",
            Family::Gemma => "GemmaForCausalLM",
        }
    }

    /// The family of this `model_type` or architecture.
    pub fn named(name: &str) -> Option<Family> {
        let mut all = Family::ALL.into_iter();
        all.find(|family| family.model_type() == name || family.architecture() == name)
    }

    /// The model of a `config.json` that states nothing. `head_dim` is 0 where it follows from the hidden size, and so are
    /// the key-value heads where they are as many as the heads.
    pub(super) fn defaults(self) -> ModelConfig {
        let llama = ModelConfig {
            family: self,
            num_key_value_heads: 0,
            head_dim: 0,
            ..ModelConfig::default()
        };
        match self {
            Family::Llama => llama,
            Family::Mistral => ModelConfig {
                intermediate_size: 14336,
                num_key_value_heads: 8,
                max_position_embeddings: 131_072,
                sliding_window: Some(4096),
                ..llama
            },
            Family::Qwen2 | Family::Qwen3 => ModelConfig {
                intermediate_size: 22016,
                num_key_value_heads: 32,
                head_dim: if self == Family::Qwen3 { 128 } else { 0 },
                vocab_size: 151_936,
                max_position_embeddings: 32_768,
                qkv_biases: self == Family::Qwen2,
                query_key_norms: self == Family::Qwen3,
                sliding_window: Some(4096),
                ..llama
            },
            Family::SmolLm3 => ModelConfig {
                hidden_size: 2048,
                num_hidden_layers: 36,
                num_attention_heads: 16,
                num_key_value_heads: 4,
                vocab_size: 128_256,
                max_position_embeddings: 32_768,
                rope_theta: 2_000_000.0,
                tie_word_embeddings: true,
                ..llama
            },
            Family::Gemma => ModelConfig {
                hidden_size: 3072,
                intermediate_size: 24576,
                activation: Activation::GeluTanh,
                num_hidden_layers: 28,
                num_attention_heads: 16,
                num_key_value_heads: 16,
                head_dim: 256,
                vocab_size: 256_000,
                max_position_embeddings: 8192,
                norms_add_one: true,
                scaled_embedding: true,
                tie_word_embeddings: true,
                ..llama
            },
        }
    }

    /// `pad_token_id` where `config.json` does not state it.
    pub(super) fn default_padding(self) -> Option<u32> {
        match self {
            Family::SmolLm3 => Some(128_004),
            Family::Gemma => Some(0),
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => None,
        }
    }

    /// Whether `sliding_window` counts only with `use_sliding_window`.
    pub(super) fn asks_for_window(self) -> bool {
        matches!(self, Family::Qwen2 | Family::Qwen3 | Family::SmolLm3)
    }
}

/// Llama 7B.
impl Default for ModelConfig {
    fn default() -> ModelConfig {
        ModelConfig {
            family: Family::Llama,
            hidden_size: 4096,
            intermediate_size: 11008,
            activation: Activation::Silu,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            vocab_size: 32000,
            max_position_embeddings: 2048,
            rms_norm_eps: 1e-6,
            norms_add_one: false,
            rope_theta: 10000.0,
            rope_scaling: RopeScaling::Default,
            unrotated_layers: Vec::new(),
            qkv_biases: false,
            query_key_norms: false,
            scaled_embedding: false,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            sliding_window: None,
            windowed_layers: Vec::new(),
            token_ids: Map::new(),
        }
    }
}
