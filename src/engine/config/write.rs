//! To `config.json`.

use serde_json::{Value, json};

use super::{Family, ModelConfig, RopeScaling};

impl ModelConfig {
    /// A `config.json` that transformers loads.
    pub fn to_json(&self) -> Value {
        let mut config = json!({
            "architectures": [self.family.architecture()],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": shortest(self.initializer_range),
            "torch_dtype": "float32",
        });
        for (key, value) in [
            ("hidden_size", json!(self.hidden_size)),
            ("intermediate_size", json!(self.intermediate_size)),
            ("num_hidden_layers", json!(self.num_hidden_layers)),
            ("num_attention_heads", json!(self.num_attention_heads)),
            (
                "max_position_embeddings",
                json!(self.max_position_embeddings),
            ),
            ("hidden_act", json!(self.activation.name())),
            ("rms_norm_eps", shortest(self.norm_eps)),
        ] {
            config[self.family.key(key)] = value;
        }
        if !self.family.derives_heads() {
            config["num_key_value_heads"] = json!(self.num_key_value_heads);
            config["head_dim"] = json!(self.head_dim);
        }
        for key in self.family.dropouts().0 {
            config[*key] = json!(0.0);
        }
        if self.family != Family::Gpt2 {
            // transformers 4 reads the first name, transformers 5 the second.
            config[self.family.key("rope_theta")] = shortest(self.rope_theta);
            config["rope_parameters"] = self.rope_parameters();
        }
        for (key, id) in &self.token_ids {
            config[key] = id.clone();
        }
        if self.rope_scaling != RopeScaling::Default {
            config["rope_scaling"] = self.rope_parameters();
        }
        let layers = 0..self.num_hidden_layers;
        match self.family {
            Family::Llama | Family::Gemma => {}
            // llama.cpp reads it, as in the published configs.
            Family::Gpt2 => config["n_ctx"] = json!(self.max_position_embeddings),
            Family::Mistral => config["sliding_window"] = json!(self.sliding_window),
            Family::StarCoder2 => {
                config["sliding_window"] = json!(self.sliding_window);
                config["use_bias"] = json!(self.qkv_biases);
            }
            Family::GptNeoX => {
                config["rotary_pct"] = json!(self.partial_rotary_factor);
                config["use_parallel_residual"] = json!(self.parallel_residual);
            }
            Family::Qwen2 | Family::Qwen3 | Family::SmolLm3 => {
                config["use_sliding_window"] = json!(self.sliding_window.is_some());
                config["sliding_window"] = json!(self.sliding_window);
                let kind = |layer| match self.windowed_layers.contains(&layer) {
                    true => "sliding_attention",
                    false => "full_attention",
                };
                config["layer_types"] = layers.clone().map(kind).collect();
            }
        }
        if matches!(
            self.family,
            Family::Llama | Family::Qwen3 | Family::SmolLm3 | Family::Gemma | Family::GptNeoX
        ) {
            config["attention_bias"] = json!(self.output_bias);
        }
        if matches!(self.family, Family::Llama | Family::SmolLm3) {
            config["mlp_bias"] = json!(self.mlp_biases);
        }
        if self.family == Family::SmolLm3 {
            let rotates = layers.map(|layer| u8::from(self.rotates(layer)));
            config["no_rope_layers"] = rotates.collect();
        }
        config
    }

    fn rope_parameters(&self) -> Value {
        let mut rope = match self.rope_scaling {
            RopeScaling::Default => json!({"rope_type": "default"}),
            RopeScaling::Linear { factor } => {
                json!({"rope_type": "linear", "factor": shortest(factor)})
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => json!({
                "rope_type": "llama3",
                "factor": shortest(factor),
                "low_freq_factor": shortest(low_freq_factor),
                "high_freq_factor": shortest(high_freq_factor),
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
        };
        rope["rope_theta"] = shortest(self.rope_theta);
        if self.family == Family::GptNeoX {
            rope["partial_rotary_factor"] = json!(self.partial_rotary_factor);
        }
        rope
    }
}

/// The shortest decimal of the number: 1e-5, not 9.999999747378752e-6.
fn shortest(value: f32) -> Value {
    let number: f64 = value.to_string().parse().unwrap_or(f64::from(value));
    json!(number)
}
