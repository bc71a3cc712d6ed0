//! From `config.json`. Settings that the engines do not compute (other architectures, other biases, another activation)
//! are refused by name; keys that do not change the computation are ignored.

use serde_json::{Map, Value};

use super::{
    Activation, Cause, ConfigError, Family, ModelConfig, RopeScaling, TOKEN_IDS, flaw, uncomputed,
};

impl ModelConfig {
    /// Reads the object of a `config.json` and checks that the shapes fit.
    ///
    /// An object without `model_type` and `architectures` is a Llama.
    pub fn from_json(config: &Value) -> Result<ModelConfig, ConfigError> {
        let config = ModelConfig::parse(config)?;
        config.validate()?;
        Ok(config)
    }

    /// Reads the object of a `config.json` without checking that the shapes fit.
    pub fn parse(config: &Value) -> Result<ModelConfig, ConfigError> {
        let Value::Object(keys) = config else {
            return Err(flaw(&[], "config.json: not an object"));
        };
        let family = family(keys)?;
        let keys = Keys { keys, family };
        let defaults = family.defaults();
        keys.refuse_what_is_not_computed()?;

        let hidden_size = keys.size_or("hidden_size", defaults.hidden_size)?;
        let heads = keys.size_or("num_attention_heads", defaults.num_attention_heads)?;
        let layers = keys.size_or("num_hidden_layers", defaults.num_hidden_layers)?;
        let positions =
            keys.size_or("max_position_embeddings", defaults.max_position_embeddings)?;
        let key_value_heads = match (
            keys.get("num_key_value_heads"),
            defaults.num_key_value_heads,
        ) {
            _ if family.derives_heads() => heads,
            // Null means one key-value head per head, whatever the default.
            (Some(Value::Null), _) | (None, 0) => heads,
            (_, default) => keys.size_or("num_key_value_heads", default)?,
        };
        let head_dim = match defaults.head_dim {
            0 => hidden_size / heads.max(1),
            fixed => fixed,
        };
        // GPT-2 has as many inner values as four times its hidden size, unless its config states a number.
        let inner = match family {
            Family::Gpt2 => hidden_size.saturating_mul(4),
            _ => defaults.intermediate_size,
        };
        let unrotated_layers = keys.unrotated_layers(layers)?;
        let biases = keys.biases(&defaults)?;
        let (sliding_window, windowed_layers) =
            keys.windows(&defaults, layers, &unrotated_layers)?;
        Ok(ModelConfig {
            hidden_size,
            intermediate_size: keys.size_or("intermediate_size", inner)?,
            activation: keys.activation(&defaults)?,
            mlp_biases: biases.mlp,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: key_value_heads,
            head_dim: match family.derives_heads() {
                true => head_dim,
                false => keys.size_or("head_dim", head_dim)?,
            },
            vocab_size: keys.size_or("vocab_size", defaults.vocab_size)?,
            max_position_embeddings: positions,
            norm_eps: keys.number("rms_norm_eps")?.unwrap_or(defaults.norm_eps),
            parallel_residual: match family {
                Family::GptNeoX => keys.flag("use_parallel_residual")?.unwrap_or(true),
                _ => false,
            },
            rope_theta: match family {
                Family::Gpt2 => defaults.rope_theta,
                _ => keys.rope_theta(defaults.rope_theta)?,
            },
            partial_rotary_factor: keys.partial_rotary_factor(defaults.partial_rotary_factor)?,
            rope_scaling: match family {
                Family::Gpt2 => RopeScaling::Default,
                _ => keys.rope_scaling(positions)?,
            },
            unrotated_layers,
            qkv_biases: biases.qkv,
            output_bias: biases.output,
            tie_word_embeddings: keys
                .flag("tie_word_embeddings")?
                .unwrap_or(defaults.tie_word_embeddings),
            initializer_range: keys
                .number("initializer_range")?
                .unwrap_or(defaults.initializer_range),
            sliding_window,
            windowed_layers,
            token_ids: keys.token_ids(),
            ..defaults
        })
    }
}

/// The key of an object in a `config.json`, and the object.
type Settings<'a> = (&'static str, Keys<'a>);

/// The family, from `model_type` or else the architecture. Without both it is a Llama.
fn family(keys: &Map<String, Value>) -> Result<Family, ConfigError> {
    let given = |key: &str| keys.get(key).filter(|value| !value.is_null());
    let named = given("model_type").or_else(|| given("architectures").and_then(|list| list.get(0)));
    let Some(named) = named else {
        return Ok(Family::Llama);
    };
    named.as_str().and_then(Family::named).ok_or_else(|| {
        let all = Family::ALL.map(Family::model_type).join(", ");
        let message = format!("config.json: model type {named} is not supported; these are: {all}");
        uncomputed(&["model_type", "architectures"], message)
    })
}

/// Which linear layers have biases.
struct Biases {
    qkv: bool,
    output: bool,
    mlp: bool,
}

/// Typed access to the keys of a `config.json`, in the family's spelling.
struct Keys<'a> {
    keys: &'a Map<String, Value>,
    family: Family,
}

impl Keys<'_> {
    /// The value of a key, also under its common name.
    fn get(&self, key: &'static str) -> Option<&Value> {
        let spelled = self.keys.get(self.family.key(key));
        spelled.or_else(|| self.keys.get(key))
    }

    /// The value of a key that is present and not null.
    fn given(&self, key: &'static str) -> Option<&Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    /// What `take` makes of a given value, which is `expected`.
    fn typed<T>(
        &self,
        key: &'static str,
        expected: &str,
        take: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.given(key) else {
            return Ok(None);
        };
        let taken = take(value).ok_or_else(|| wrong(self.family.key(key), value, expected))?;
        Ok(Some(taken))
    }

    fn size(&self, key: &'static str) -> Result<Option<usize>, ConfigError> {
        self.typed(key, "a whole number", |value| {
            usize::try_from(value.as_u64()?).ok()
        })
    }

    fn size_or(&self, key: &'static str, default: usize) -> Result<usize, ConfigError> {
        Ok(self.size(key)?.unwrap_or(default))
    }

    fn number(&self, key: &'static str) -> Result<Option<f32>, ConfigError> {
        self.typed(key, "a number", |value| Some(value.as_f64()? as f32))
    }

    fn fraction(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn flag(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn token_ids(&self) -> Map<String, Value> {
        let stated = TOKEN_IDS.into_iter();
        let stated = stated.filter_map(|key| Some((key.to_owned(), self.get(key)?.clone())));
        stated.collect()
    }

    fn refuse_what_is_not_computed(&self) -> Result<(), ConfigError> {
        let refuse = |key: &'static str, what: String| {
            let message = format!("config.json: {what} not supported");
            Err(uncomputed(&[key], message))
        };
        let zero: &[(&str, bool)] = match self.family {
            Family::Gemma => &[("use_bidirectional_attention", false)],
            Family::Gpt2 => &[
                ("scale_attn_weights", true),
                ("scale_attn_by_inverse_layer_idx", false),
                ("add_cross_attention", false),
            ],
            _ => &[],
        };
        for (key, computed) in zero {
            if self.flag(key)?.is_some_and(|flag| flag != *computed) {
                return refuse(key, format!("{key}={} is", !computed));
            }
        }
        let (dropouts, default) = self.family.dropouts();
        let mut stated = Vec::new();
        for key in dropouts {
            if self.number(key)?.unwrap_or(default) != 0.0 {
                stated.push(*key);
            }
        }
        if !stated.is_empty() {
            let message = format!(
                "config.json: the model trains with dropout ({}), which the engines do not compute",
                stated.join(", ")
            );
            return Err(ConfigError {
                cause: Cause::UncomputedUnlessZero,
                ..uncomputed(&stated, message)
            });
        }
        if self.given("quantization_config").is_some() {
            let what = "quantised weights (quantization_config) are".to_owned();
            return refuse("quantization_config", what);
        }
        Ok(())
    }

    /// `gelu` means the approximation in the published Gemmas (transformers 5.24.0 `GemmaConfig`).
    fn activation(&self, defaults: &ModelConfig) -> Result<Activation, ConfigError> {
        let Some(activation) = self.given("hidden_act") else {
            return Ok(defaults.activation);
        };
        match activation.as_str() {
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_python_tanh") => Ok(Activation::GeluTanh),
            Some("gelu") if self.family == Family::Gemma => Ok(Activation::GeluTanh),
            Some("gelu" | "gelu_python") => Ok(Activation::Gelu),
            _ => {
                let key = self.family.key("hidden_act");
                let message = format!(
                    "config.json: {key} {activation} is not supported; silu, gelu and gelu_pytorch_tanh are"
                );
                Err(uncomputed(&[key], message))
            }
        }
    }

    /// As the families' attention and MLP read them.
    fn biases(&self, defaults: &ModelConfig) -> Result<Biases, ConfigError> {
        let flag = |key| Ok::<_, ConfigError>(self.flag(key)?.unwrap_or(false));
        let of_attention = match self.family {
            Family::Llama | Family::Qwen3 | Family::SmolLm3 | Family::Gemma => {
                flag("attention_bias")?
            }
            Family::GptNeoX => self.flag("attention_bias")?.unwrap_or(true),
            Family::StarCoder2 => self.flag("use_bias")?.unwrap_or(true),
            Family::Mistral | Family::Qwen2 | Family::Gpt2 => defaults.output_bias,
        };
        Ok(Biases {
            qkv: of_attention || self.family == Family::Qwen2,
            output: of_attention,
            mlp: match self.family {
                Family::Llama | Family::SmolLm3 => flag("mlp_bias")?,
                Family::StarCoder2 => of_attention,
                _ => defaults.mlp_biases,
            },
        })
    }

    /// The key and object of the RoPE settings: `rope_scaling` (transformers 4), else `rope_parameters`
    /// (transformers 5). As in transformers, an empty object counts as absent.
    fn rope(&self) -> Result<Option<Settings<'_>>, ConfigError> {
        for key in ["rope_scaling", "rope_parameters"] {
            match self.given(key) {
                None => {}
                Some(Value::Object(rope)) if rope.is_empty() => {}
                Some(Value::Object(rope)) => return Ok(Some((key, self.of(rope)))),
                Some(other) => return Err(wrong(key, other, "an object or null")),
            }
        }
        Ok(None)
    }

    /// `rope_theta` of the RoPE settings, else that of the model.
    fn rope_theta(&self, default: f32) -> Result<f32, ConfigError> {
        if let Some((_, rope)) = self.rope()?
            && let Some(theta) = rope.number("rope_theta")?
        {
            return Ok(theta);
        }
        Ok(self.number("rope_theta")?.unwrap_or(default))
    }

    /// The share of a head that rotates.
    fn partial_rotary_factor(&self, default: f64) -> Result<f64, ConfigError> {
        let rope = self.rope()?;
        let of_rope = rope.as_ref();
        let of_rope = of_rope.map(|(_, rope)| rope.fraction("partial_rotary_factor"));
        let stated = of_rope.transpose()?.flatten();
        if self.family == Family::GptNeoX {
            let older = self.fraction("rotary_pct")?;
            return Ok(stated.or(older).unwrap_or(default));
        }
        match (stated, rope) {
            (Some(stated), Some((key, _))) if stated != 1.0 => {
                let message = "config.json: partial_rotary_factor other than 1 is not supported";
                Err(uncomputed(&[key], message))
            }
            _ => Ok(default),
        }
    }

    fn rope_scaling(&self, positions: usize) -> Result<RopeScaling, ConfigError> {
        let Some((key, rope)) = self.rope()? else {
            return Ok(RopeScaling::Default);
        };
        let needed = |name: &'static str| {
            rope.number(name)?.ok_or_else(|| {
                let message = format!("config.json: {key} has no {name}");
                flaw(&[key], message)
            })
        };
        // `type` is the older spelling.
        let kind = rope.get("rope_type").or_else(|| rope.get("type"));
        match kind.map(Value::as_str) {
            None | Some(Some("default")) => Ok(RopeScaling::Default),
            Some(Some("linear")) => Ok(RopeScaling::Linear {
                factor: needed("factor")?,
            }),
            Some(Some("llama3")) => Ok(RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: needed("low_freq_factor")?,
                high_freq_factor: needed("high_freq_factor")?,
                original_max_position_embeddings: rope
                    .size_or("original_max_position_embeddings", positions)?,
            }),
            _ => {
                let kind = kind.unwrap_or(&Value::Null);
                let message = format!(
                    "config.json: {key} of type {kind} is not supported; default, linear and llama3 are"
                );
                Err(uncomputed(&[key], message))
            }
        }
    }

    /// The same access to an object in the `config.json`.
    fn of<'b>(&self, keys: &'b Map<String, Value>) -> Keys<'b> {
        Keys {
            keys,
            family: self.family,
        }
    }

    /// Layers without rotation: `no_rope_layers` has a 0 for each.
    fn unrotated_layers(&self, layers: usize) -> Result<Vec<usize>, ConfigError> {
        match self.family {
            Family::SmolLm3 => {}
            Family::Gpt2 => return Ok((0..layers).collect()),
            _ => return Ok(Vec::new()),
        }
        let flags = self.typed("no_rope_layers", "a list of 0 and 1", |value| {
            let flags = value.as_array()?.iter().map(Value::as_u64);
            flags.collect::<Option<Vec<u64>>>()
        })?;
        let interval = self.size_or("no_rope_layer_interval", 4)?.max(1);
        match flags {
            Some(flags) if flags.len() < layers => Err(flaw(
                &["no_rope_layers", "num_hidden_layers"],
                format!(
                    "no_rope_layers has {} entries for {layers} layers",
                    flags.len()
                ),
            )),
            Some(flags) => Ok((0..layers).filter(|layer| flags[*layer] == 0).collect()),
            None => Ok((0..layers)
                .filter(|layer| (layer + 1) % interval == 0)
                .collect()),
        }
    }

    /// The window, and the layers that have it.
    fn windows(
        &self,
        defaults: &ModelConfig,
        layers: usize,
        unrotated: &[usize],
    ) -> Result<(Option<usize>, Vec<usize>), ConfigError> {
        let family = self.family;
        let ignored = [Family::Llama, Family::Gemma, Family::GptNeoX, Family::Gpt2];
        if ignored.contains(&family) {
            // transformers ignores the key.
            return Ok((None, Vec::new()));
        }
        let asked = !family.asks_for_window() || self.flag("use_sliding_window")? == Some(true);
        let window = match self.get("sliding_window") {
            None => defaults.sliding_window,
            Some(_) => self.size("sliding_window")?,
        };
        let Some(window) = window.filter(|_| asked) else {
            return Ok((None, Vec::new()));
        };
        let kinds = self.typed("layer_types", "a list of texts", |value| {
            let kinds = value.as_array()?.iter();
            let is_sliding = |kind: &Value| Some(kind.as_str()? == "sliding_attention");
            kinds.map(is_sliding).collect::<Option<Vec<bool>>>()
        })?;
        let first = self.size_or("max_window_layers", 28)?;
        let is_windowed = |layer: &usize| match (family, &kinds) {
            (Family::Mistral | Family::StarCoder2, _) => true,
            (_, Some(kinds)) => kinds.get(*layer).copied().unwrap_or(false),
            (Family::SmolLm3, None) => unrotated.contains(layer),
            (_, None) => *layer >= first,
        };
        let windowed: Vec<usize> = (0..layers).filter(is_windowed).collect();
        Ok(((!windowed.is_empty()).then_some(window), windowed))
    }
}

fn wrong(key: &'static str, value: &Value, expected: &str) -> ConfigError {
    flaw(
        &[key],
        format!("config.json: {key} is {value}, expected {expected}"),
    )
}
