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

#[test]
fn rope_theta_is_found_where_transformers_5_puts_it() {
    let config = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}});
    assert_eq!(read(config).unwrap().rope_theta, 5e5);
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
            json!({"sliding_window": 0}),
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
