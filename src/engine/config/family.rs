//! The families, and the defaults of their configuration classes in transformers 5.24.0 (`LlamaConfig` and so on).

use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::{Activation, ModelConfig, NormKind, RopeScaling};
use crate::util::model_keys::spelled;

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
    /// Pythia.
    GptNeoX,
    Gpt2,
    StarCoder2,
}

impl Family {
    pub const ALL: [Family; 9] = [
        Family::Llama,
        Family::Mistral,
        Family::Qwen2,
        Family::Qwen3,
        Family::SmolLm3,
        Family::Gemma,
        Family::GptNeoX,
        Family::Gpt2,
        Family::StarCoder2,
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
            Family::GptNeoX => "gpt_neox",
            Family::Gpt2 => "gpt2",
            Family::StarCoder2 => "starcoder2",
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
            Family::GptNeoX => "GPTNeoXForCausalLM",
            Family::Gpt2 => "GPT2LMHeadModel",
            Family::StarCoder2 => "Starcoder2ForCausalLM",
        }
    }

    /// Its spelling of a key of `config.json`.
    pub(super) fn key(self, key: &'static str) -> &'static str {
        spelled(self.model_type(), key)
    }

    /// Whether the sizes of its heads follow from the hidden size: no key states key-value heads or a head size.
    pub(super) fn derives_heads(self) -> bool {
        matches!(self, Family::GptNeoX | Family::Gpt2)
    }

    /// The keys of its dropout, and the probability of each where `config.json` does not state it.
    pub(super) fn dropouts(self) -> (&'static [&'static str], f32) {
        match self {
            Family::GptNeoX => (&["hidden_dropout", "attention_dropout"], 0.0),
            Family::Gpt2 => (&["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.1),
            Family::StarCoder2 => (
                &["residual_dropout", "embedding_dropout", "attention_dropout"],
                0.0,
            ),
            _ => (&["attention_dropout"], 0.0),
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
        let plain = ModelConfig {
            gated: false,
            mlp_biases: true,
            norm: NormKind::Layer,
            norm_eps: 1e-5,
            ..llama.clone()
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
                norm: NormKind::RmsPlusOne,
                scaled_embedding: true,
                tie_word_embeddings: true,
                ..llama
            },
            Family::GptNeoX => ModelConfig {
                hidden_size: 6144,
                intermediate_size: 24576,
                activation: Activation::Gelu,
                num_hidden_layers: 44,
                num_attention_heads: 64,
                vocab_size: 50432,
                parallel_residual: true,
                partial_rotary_factor: 0.25,
                qkv_biases: true,
                output_bias: true,
                ..plain
            },
            Family::Gpt2 => ModelConfig {
                hidden_size: 768,
                activation: Activation::GeluTanh,
                num_hidden_layers: 12,
                num_attention_heads: 12,
                vocab_size: 50257,
                max_position_embeddings: 1024,
                qkv_biases: true,
                output_bias: true,
                position_embeddings: true,
                tie_word_embeddings: true,
                ..plain
            },
            Family::StarCoder2 => ModelConfig {
                hidden_size: 3072,
                intermediate_size: 12288,
                activation: Activation::GeluTanh,
                num_hidden_layers: 30,
                num_attention_heads: 24,
                num_key_value_heads: 2,
                vocab_size: 49152,
                max_position_embeddings: 4096,
                tie_word_embeddings: true,
                initializer_range: 0.018042,
                ..plain
            },
        }
    }

    /// `pad_token_id` where `config.json` does not state it.
    pub(super) fn default_padding(self) -> Option<u32> {
        match self {
            Family::SmolLm3 => Some(128_004),
            Family::Gemma => Some(0),
            _ => None,
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
            gated: true,
            mlp_biases: false,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            vocab_size: 32000,
            max_position_embeddings: 2048,
            norm: NormKind::Rms,
            norm_eps: 1e-6,
            parallel_residual: false,
            rope_theta: 10000.0,
            partial_rotary_factor: 1.0,
            rope_scaling: RopeScaling::Default,
            unrotated_layers: Vec::new(),
            qkv_biases: false,
            output_bias: false,
            query_key_norms: false,
            position_embeddings: false,
            scaled_embedding: false,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            sliding_window: None,
            windowed_layers: Vec::new(),
            token_ids: Map::new(),
        }
    }
}
