//! Reads and writes Hugging Face's `config.json`.
//!
//! Missing keys take the defaults of transformers 5.23 (`LlamaConfig`, `MistralConfig`). Settings that the
//! engines do not compute (other architectures, biases, scaled RoPE, another activation) are refused by name;
//! keys that do not change the computation are ignored.

use serde_json::{Map, Value, json};

use super::ModelConfig;

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

/// Defaults of a family's configuration class.
struct Defaults {
    intermediate_size: usize,
    key_value_heads: Option<usize>,
    max_position_embeddings: usize,
    /// `None`: the family has no sliding window, and transformers ignores the key.
    sliding_window: Option<usize>,
}

/// `LlamaConfig`.
const LLAMA: Defaults = Defaults {
    intermediate_size: 11008,
    key_value_heads: None,
    max_position_embeddings: 2048,
    sliding_window: None,
};

/// `MistralConfig`.
const MISTRAL: Defaults = Defaults {
    intermediate_size: 14336,
    key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    sliding_window: Some(4096),
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
        let defaults = keys.family()?;
        keys.refuse_what_is_not_computed()?;

        let hidden_size = keys.size_or("hidden_size", 4096)?;
        let num_attention_heads = keys.size_or("num_attention_heads", 32)?;
        let key_value_heads = match keys.get("num_key_value_heads") {
            // Null means one key-value head per head, also for Mistral.
            Some(Value::Null) => None,
            _ => keys
                .size("num_key_value_heads")?
                .or(defaults.key_value_heads),
        };
        let sliding_window = match (defaults.sliding_window, keys.get("sliding_window")) {
            (Some(_), Some(_)) => keys.size("sliding_window")?,
            (default, _) => default,
        };
        Ok(ModelConfig {
            hidden_size,
            intermediate_size: keys.size_or("intermediate_size", defaults.intermediate_size)?,
            num_hidden_layers: keys.size_or("num_hidden_layers", 32)?,
            num_attention_heads,
            num_key_value_heads: key_value_heads.unwrap_or(num_attention_heads),
            head_dim: keys.size_or("head_dim", hidden_size / num_attention_heads.max(1))?,
            vocab_size: keys.size_or("vocab_size", 32000)?,
            max_position_embeddings: keys
                .size_or("max_position_embeddings", defaults.max_position_embeddings)?,
            rms_norm_eps: keys.number("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta: keys.rope_theta()?,
            tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            initializer_range: keys.number("initializer_range")?.unwrap_or(0.02),
            sliding_window,
        })
    }

    /// A `config.json` that transformers loads.
    pub fn to_json(&self) -> Value {
        let (architecture, model_type) = match self.sliding_window {
            None => ("LlamaForCausalLM", "llama"),
            Some(_) => ("MistralForCausalLM", "mistral"),
        };
        let theta = shortest(self.rope_theta);
        let mut config = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": shortest(self.rms_norm_eps),
            // transformers 4 reads the first name, transformers 5 the second.
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": shortest(self.initializer_range),
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "torch_dtype": "float32",
        });
        match self.sliding_window {
            None => {
                config["attention_bias"] = json!(false);
                config["mlp_bias"] = json!(false);
            }
            Some(window) => config["sliding_window"] = json!(window),
        }
        config
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
        // transformers refuses this too, even with an explicit head_dim.
        check(
            divides(heads, hidden),
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
        if let Some(window) = self.sliding_window
            && seq_len > window
        {
            let message = format!(
                "sequences of {seq_len} tokens are longer than the model's sliding_window ({window}), \
                 which the engines do not support"
            );
            return Err(ConfigError {
                help: Some("shorten them or set sliding_window to null".to_owned()),
                ..uncomputed(&["sliding_window"], message)
            });
        }
        Ok(())
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

    /// The family, from `model_type` or else the architecture.
    fn family(&self) -> Result<Defaults, ConfigError> {
        let named = self
            .given("model_type")
            .or_else(|| self.given("architectures").and_then(|list| list.get(0)));
        match named.map(Value::as_str) {
            None => Ok(LLAMA),
            Some(Some("llama" | "LlamaForCausalLM")) => Ok(LLAMA),
            Some(Some("mistral" | "MistralForCausalLM")) => Ok(MISTRAL),
            _ => Err(uncomputed(
                &["model_type", "architectures"],
                format!(
                    "config.json: model type {} is not supported; llama and mistral are",
                    named.unwrap_or(&Value::Null)
                ),
            )),
        }
    }

    fn refuse_what_is_not_computed(&self) -> Result<(), ConfigError> {
        let refuse = |key: &'static str, what: String| {
            let message = format!("config.json: {what} not supported");
            Err(uncomputed(&[key], message))
        };
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? == Some(true) {
                return refuse(key, format!("{key} is"));
            }
        }
        if let Some(activation) = self.given("hidden_act")
            && !matches!(activation.as_str(), Some("silu" | "swish"))
        {
            let message = format!("config.json: hidden_act {activation} is not supported; silu is");
            return Err(uncomputed(&["hidden_act"], message));
        }
        if self.number("attention_dropout")?.unwrap_or(0.0) != 0.0 {
            let what = "attention_dropout other than 0 is".to_owned();
            return refuse("attention_dropout", what);
        }
        if self.given("quantization_config").is_some() {
            let what = "quantised weights (quantization_config) are".to_owned();
            return refuse("quantization_config", what);
        }
        if let Some((key, rope)) = self.rope()? {
            // `type` is the older spelling.
            let kind = rope.get("rope_type").or_else(|| rope.get("type"));
            if let Some(kind) = kind.filter(|&kind| kind != "default") {
                let message =
                    format!("config.json: {key} of type {kind} is not supported; default is");
                return Err(uncomputed(&[key], message));
            }
            if rope.get("partial_rotary_factor").is_some_and(|f| f != 1.0) {
                return refuse(key, "partial_rotary_factor other than 1 is".to_owned());
            }
        }
        Ok(())
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
    fn rope_theta(&self) -> Result<f32, ConfigError> {
        if let Some((_, rope)) = self.rope()?
            && let Some(theta) = Keys(rope).number("rope_theta")?
        {
            return Ok(theta);
        }
        Ok(self.number("rope_theta")?.unwrap_or(10000.0))
    }
}

/// The shortest decimal of the number: 1e-5, not 9.999999747378752e-6.
fn shortest(value: f32) -> Value {
    let number: f64 = value.to_string().parse().unwrap_or(f64::from(value));
    json!(number)
}

fn wrong(key: &'static str, value: &Value, expected: &str) -> ConfigError {
    flaw(
        &[key],
        format!("config.json: {key} is {value}, expected {expected}"),
    )
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
mod tests {
    use super::*;

    fn read(config: Value) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_json(&config)
    }

    fn refusal(config: Value) -> String {
        read(config).unwrap_err().to_string()
    }

    #[test]
    fn missing_keys_take_the_defaults_of_transformers() {
        let llama = read(json!({})).unwrap();
        assert_eq!(
            llama,
            ModelConfig {
                hidden_size: 4096,
                intermediate_size: 11008,
                num_hidden_layers: 32,
                num_attention_heads: 32,
                num_key_value_heads: 32,
                head_dim: 128,
                vocab_size: 32000,
                max_position_embeddings: 2048,
                rms_norm_eps: 1e-6,
                rope_theta: 10000.0,
                tie_word_embeddings: false,
                initializer_range: 0.02,
                sliding_window: None,
            }
        );
        let mistral = read(json!({"model_type": "mistral"})).unwrap();
        assert_eq!(mistral.num_key_value_heads, 8);
        assert_eq!(mistral.sliding_window, Some(4096));
        let whole = json!({"architectures": ["MistralForCausalLM"], "sliding_window": null,
                       "num_key_value_heads": null});
        let whole = read(whole).unwrap();
        assert_eq!(whole.sliding_window, None);
        assert_eq!(whole.num_key_value_heads, 32);
    }

    #[test]
    fn a_written_config_reads_back_the_same() {
        for family in ["llama", "mistral"] {
            let config = read(json!({
                "model_type": family, "hidden_size": 256, "intermediate_size": 688,
                "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
                "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": true,
                "initializer_range": 0.01,
            }))
            .unwrap();
            let written = config.to_json();
            assert_eq!(written["rms_norm_eps"], json!(1e-5));
            assert_eq!(read(written).unwrap(), config);
        }
    }

    /// Results of `LlamaConfig` of transformers 5.23.
    #[test]
    fn rope_theta_is_the_one_that_transformers_uses() {
        let theta = |config: Value| read(config).unwrap().rope_theta;
        let settings = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        assert_eq!(theta(json!({"rope_parameters": settings(5e5)})), 5e5);
        let older = json!({"rope_scaling": {"type": "default", "rope_theta": 5e5}});
        assert_eq!(theta(older), 5e5);
        let inner = json!({"rope_scaling": settings(5e5), "rope_theta": 2e4});
        assert_eq!(theta(inner), 5e5);
        let both = json!({"rope_scaling": settings(5e5), "rope_parameters": settings(3e5)});
        assert_eq!(theta(both), 5e5);
        let empty = json!({"rope_scaling": {}, "rope_parameters": settings(3e5)});
        assert_eq!(theta(empty), 3e5);
        let outer = json!({"rope_scaling": {"type": "default"}, "rope_theta": 2e4});
        assert_eq!(theta(outer), 2e4);
        assert_eq!(theta(json!({"rope_scaling": null, "rope_theta": 2e4})), 2e4);
    }

    #[test]
    fn a_llama_ignores_a_sliding_window() {
        for window in [json!(64), json!(0), json!("none")] {
            let llama = read(json!({"model_type": "llama", "sliding_window": window})).unwrap();
            assert_eq!(llama.sliding_window, None);
            assert!(llama.check_sequence(2048).is_ok());
            assert_eq!(llama.to_json()["model_type"], "llama");
        }
    }

    #[test]
    fn unsupported_settings_are_refused_by_name() {
        insta::assert_snapshot!(
            [
                json!({"model_type": "qwen2"}),
                json!({"architectures": ["GPT2LMHeadModel"]}),
                json!({"model_type": 3}),
                json!({"attention_bias": true}),
                json!({"hidden_act": "gelu"}),
                json!({"rope_scaling": {"type": "linear", "factor": 2.0}}),
                json!({"rope_parameters": {"rope_type": "llama3"}}),
                json!({"rope_scaling": "linear"}),
                json!({"rope_parameters": "default"}),
                json!({"attention_dropout": 0.1}),
                json!({"quantization_config": {"bits": 4}}),
            ]
            .map(refusal)
            .join("\n")
        );
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused_with_the_value() {
        insta::assert_snapshot!(
            [
                json!([]),
                json!({"hidden_size": "wide"}),
                json!({"hidden_size": -1}),
                json!({"vocab_size": 0}),
                json!({"hidden_size": 1e30}),
                json!({"num_hidden_layers": 1_000_000_000}),
                json!({"num_attention_heads": 0}),
                json!({"num_attention_heads": 12, "hidden_size": 768, "num_key_value_heads": 5}),
                json!({"num_attention_heads": 3, "hidden_size": 256}),
                json!({"num_attention_heads": 4, "hidden_size": 12}),
                json!({"rope_theta": 0}),
                json!({"rms_norm_eps": "tiny"}),
                json!({"tie_word_embeddings": "yes"}),
                json!({"model_type": "mistral", "sliding_window": 0}),
            ]
            .map(refusal)
            .join("\n")
        );
    }

    #[test]
    fn every_size_that_does_not_fit_is_named_with_its_keys() {
        let config = json!({"hidden_size": 0, "vocab_size": 0, "num_attention_heads": 6,
                        "num_key_value_heads": 4, "head_dim": 7});
        let flaws = ModelConfig::parse(&config).unwrap().flaws();
        let first: Vec<&str> = flaws.iter().map(|flaw| flaw.keys[0]).collect();
        assert_eq!(
            first,
            [
                "hidden_size",
                "vocab_size",
                "num_key_value_heads",
                "head_dim"
            ]
        );
        assert!(flaws.iter().all(|flaw| !flaw.uncomputed));
        let other = read(json!({"model_type": "qwen2"})).unwrap_err();
        assert!(other.uncomputed);
        assert_eq!(ModelConfig::parse(&json!({})).unwrap().flaws(), []);
    }

    #[test]
    fn sequences_beyond_the_model_are_refused() {
        let llama = read(json!({"max_position_embeddings": 128})).unwrap();
        assert!(llama.check_sequence(128).is_ok());
        insta::assert_snapshot!(llama.check_sequence(129).unwrap_err());
        let mistral = json!({"model_type": "mistral", "sliding_window": 64});
        let mistral = read(mistral).unwrap();
        assert!(mistral.check_sequence(64).is_ok());
        insta::assert_snapshot!(mistral.check_sequence(65).unwrap_err());
    }
}
