//! From `config.json`. Settings that the engines do not compute (other architectures, other biases, another activation)
//! are refused by name; keys that do not change the computation are ignored.

use serde_json::{Map, Value};

use super::{
    Activation, ConfigError, Family, ModelConfig, RopeScaling, TOKEN_IDS, flaw, uncomputed,
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
        let keys = Keys(keys);
        let defaults = keys.family()?.defaults();
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
            // Null means one key-value head per head, whatever the default.
            (Some(Value::Null), _) | (None, 0) => heads,
            (_, default) => keys.size_or("num_key_value_heads", default)?,
        };
        let head_dim = match defaults.head_dim {
            0 => hidden_size / heads.max(1),
            fixed => fixed,
        };
        let unrotated_layers = keys.unrotated_layers(defaults.family, layers)?;
        let (sliding_window, windowed_layers) =
            keys.windows(&defaults, layers, &unrotated_layers)?;
        Ok(ModelConfig {
            hidden_size,
            intermediate_size: keys.size_or("intermediate_size", defaults.intermediate_size)?,
            activation: keys.activation(&defaults)?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: key_value_heads,
            head_dim: keys.size_or("head_dim", head_dim)?,
            vocab_size: keys.size_or("vocab_size", defaults.vocab_size)?,
            max_position_embeddings: positions,
            rms_norm_eps: keys
                .number("rms_norm_eps")?
                .unwrap_or(defaults.rms_norm_eps),
            rope_theta: keys.rope_theta(defaults.rope_theta)?,
            rope_scaling: keys.rope_scaling(positions)?,
            unrotated_layers,
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
type Settings<'a> = (&'static str, &'a Map<String, Value>);

/// Typed access to the keys of a `config.json`.
struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// The value of a key that is present and not null.
    fn given(&self, key: &str) -> Option<&Value> {
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
        let taken = take(value).ok_or_else(|| wrong(key, value, expected))?;
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

    fn flag(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn token_ids(&self) -> Map<String, Value> {
        let stated = TOKEN_IDS.into_iter();
        let stated = stated.filter_map(|key| Some((key.to_owned(), self.get(key)?.clone())));
        stated.collect()
    }

    /// The family, from `model_type` or else the architecture. Without both it is a Llama.
    fn family(&self) -> Result<Family, ConfigError> {
        let named = self
            .given("model_type")
            .or_else(|| self.given("architectures").and_then(|list| list.get(0)));
        let Some(named) = named else {
            return Ok(Family::Llama);
        };
        named.as_str().and_then(Family::named).ok_or_else(|| {
            let all = Family::ALL.map(Family::model_type).join(", ");
            let message =
                format!("config.json: model type {named} is not supported; these are: {all}");
            uncomputed(&["model_type", "architectures"], message)
        })
    }

    fn refuse_what_is_not_computed(&self) -> Result<(), ConfigError> {
        let refuse = |key: &'static str, what: String| {
            let message = format!("config.json: {what} not supported");
            Err(uncomputed(&[key], message))
        };
        for key in ["attention_bias", "mlp_bias", "use_bidirectional_attention"] {
            if self.flag(key)? == Some(true) {
                return refuse(key, format!("{key} is"));
            }
        }
        if self.number("attention_dropout")?.unwrap_or(0.0) != 0.0 {
            let what = "attention_dropout other than 0 is".to_owned();
            return refuse("attention_dropout", what);
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
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
            Some("gelu") if defaults.family == Family::Gemma => Ok(Activation::GeluTanh),
            _ => {
                let message = format!(
                    "config.json: hidden_act {activation} is not supported; silu and gelu_pytorch_tanh are"
                );
                Err(uncomputed(&["hidden_act"], message))
            }
        }
    }

    /// The key and object of the RoPE settings: `rope_scaling` (transformers 4), else `rope_parameters`
    /// (transformers 5). As in transformers, an empty object counts as absent.
    fn rope(&self) -> Result<Option<Settings<'_>>, ConfigError> {
        for key in ["rope_scaling", "rope_parameters"] {
            match self.given(key) {
                None => {}
                Some(Value::Object(rope)) if rope.is_empty() => {}
                Some(Value::Object(rope)) => return Ok(Some((key, rope))),
                Some(other) => return Err(wrong(key, other, "an object or null")),
            }
        }
        Ok(None)
    }

    /// `rope_theta` of the RoPE settings, else that of the model.
    fn rope_theta(&self, default: f32) -> Result<f32, ConfigError> {
        if let Some((_, rope)) = self.rope()?
            && let Some(theta) = Keys(rope).number("rope_theta")?
        {
            return Ok(theta);
        }
        Ok(self.number("rope_theta")?.unwrap_or(default))
    }

    fn rope_scaling(&self, positions: usize) -> Result<RopeScaling, ConfigError> {
        let Some((key, rope)) = self.rope()? else {
            return Ok(RopeScaling::Default);
        };
        let rope = Keys(rope);
        if rope.get("partial_rotary_factor").is_some_and(|f| f != 1.0) {
            let message = "config.json: partial_rotary_factor other than 1 is not supported";
            return Err(uncomputed(&[key], message));
        }
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

    /// Layers without rotation: `no_rope_layers` has a 0 for each.
    fn unrotated_layers(&self, family: Family, layers: usize) -> Result<Vec<usize>, ConfigError> {
        if family != Family::SmolLm3 {
            return Ok(Vec::new());
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
        let family = defaults.family;
        if matches!(family, Family::Llama | Family::Gemma) {
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
            (Family::Mistral, _) => true,
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
