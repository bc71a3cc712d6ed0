use serde_json::{Value, json};

use super::*;

fn read(config: Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(&config)
}

fn refusal(config: Value) -> String {
    read(config).unwrap_err().to_string()
}

#[test]
fn missing_keys_take_the_defaults_of_transformers() {
    assert_eq!(read(json!({})).unwrap(), ModelConfig::default());
    let mistral = read(json!({"model_type": "mistral"})).unwrap();
    assert_eq!(mistral.num_key_value_heads, 8);
    assert_eq!(mistral.sliding_window, Some(4096));
    let whole = json!({"architectures": ["MistralForCausalLM"], "sliding_window": null,
                   "num_key_value_heads": null});
    let whole = read(whole).unwrap();
    assert_eq!(whole.sliding_window, None);
    assert_eq!(whole.num_key_value_heads, 32);
    let qwen = read(json!({"model_type": "qwen3", "hidden_size": 1024})).unwrap();
    assert_eq!(
        (qwen.head_dim, qwen.vocab_size, qwen.query_key_norms),
        (128, 151_936, true)
    );
    assert_eq!((qwen.sliding_window, qwen.qkv_biases), (None, false));
    let smol = read(json!({"model_type": "smollm3", "num_hidden_layers": 9})).unwrap();
    assert_eq!(smol.unrotated_layers, [3, 7]);
    assert!(smol.tie_word_embeddings && smol.rope_theta == 2e6);
    // The published Gemmas say `gelu` and mean its approximation.
    let gemma = read(json!({"model_type": "gemma", "hidden_act": "gelu"})).unwrap();
    assert_eq!(gemma.activation, Activation::GeluTanh);
    assert!(
        gemma.norm == NormKind::RmsPlusOne && gemma.tie_word_embeddings && gemma.head_dim == 256
    );
    assert_eq!(gemma.embedding_scale(), 3072f32.sqrt());
    let neox = read(json!({"model_type": "gpt_neox", "num_attention_heads": 48})).unwrap();
    assert_eq!((neox.head_dim, neox.rotary_dim()), (128, 32));
    assert!(neox.parallel_residual && neox.qkv_biases && neox.output_bias && neox.mlp_biases);
    let starcoder = read(json!({"model_type": "starcoder2", "use_bias": false})).unwrap();
    assert_eq!(starcoder.num_key_value_heads, 2);
    assert!(!starcoder.qkv_biases && !starcoder.mlp_biases && !starcoder.gated);
    assert_eq!(
        (starcoder.norm, starcoder.norm.vectors()),
        (NormKind::Layer, 2)
    );
}

/// Without dropout, which the engines do not compute.
fn gpt2(keys: Value) -> Value {
    let mut config =
        json!({"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0});
    config
        .as_object_mut()
        .unwrap()
        .extend(keys.as_object().unwrap().clone());
    config
}

#[test]
fn gpt2_has_its_own_names_of_sizes_and_accepts_the_common_ones() {
    let plain = read(gpt2(json!({}))).unwrap();
    assert_eq!((plain.hidden_size, plain.intermediate_size), (768, 3072));
    assert_eq!(
        (plain.max_position_embeddings, plain.num_key_value_heads),
        (1024, 12)
    );
    assert!(!(0..12).any(|layer| plain.rotates(layer)));
    let medium =
        json!({"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 2048, "n_inner": null});
    let medium = read(gpt2(medium)).unwrap();
    assert_eq!((medium.hidden_size, medium.intermediate_size), (1024, 4096));
    assert_eq!(
        (medium.num_hidden_layers, medium.num_attention_heads),
        (24, 16)
    );
    let common = read(gpt2(
        json!({"hidden_size": 96, "num_hidden_layers": 1, "n_inner": 100}),
    ));
    let common = common.unwrap();
    assert_eq!((common.hidden_size, common.num_hidden_layers), (96, 1));
    assert_eq!(common.intermediate_size, 100);
    let refused = read(gpt2(json!({"n_embd": 100}))).unwrap_err();
    assert_eq!(refused.keys, ["n_head", "n_embd"]);
    assert_eq!(
        refused.to_string(),
        "n_embd is 100, not a multiple of n_head (12)"
    );
    let longer = plain.check_sequence(1025).unwrap_err();
    assert_eq!(longer.keys, ["n_positions"]);
}

/// `padding_idx` of the embedding in each of transformers' models.
#[test]
fn the_padding_token_is_that_of_config_json_or_of_the_family() {
    let padding = |config| read(config).unwrap().padding_token();
    assert_eq!(padding(json!({})), None);
    assert_eq!(padding(json!({"pad_token_id": 2})), Some(2));
    assert_eq!(padding(json!({"pad_token_id": -1})), None);
    assert_eq!(padding(json!({"model_type": "gemma"})), Some(0));
    assert_eq!(
        padding(json!({"model_type": "gemma", "pad_token_id": null})),
        None
    );
    let beyond = json!({"model_type": "smollm3", "vocab_size": 64});
    assert_eq!(padding(beyond), None);
}

/// `layer_types` of `Qwen2Config`.
#[test]
fn only_layers_of_a_family_that_asks_for_it_have_a_window() {
    let layers = json!({"model_type": "qwen2", "num_hidden_layers": 4, "max_window_layers": 2,
                        "use_sliding_window": true, "sliding_window": 16});
    let qwen = read(layers.clone()).unwrap();
    let windows = [0, 1, 2, 3].map(|layer| qwen.window(layer));
    assert_eq!(windows, [None, None, Some(16), Some(16)]);
    let mut off = layers;
    off["use_sliding_window"] = json!(false);
    assert_eq!(read(off).unwrap().sliding_window, None);
}

#[test]
fn a_written_config_reads_back_the_same() {
    let scalings = [
        json!({"rope_type": "default"}),
        json!({"rope_type": "linear", "factor": 2.5}),
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    ];
    for (family, scaling) in Family::ALL.into_iter().zip(scalings.iter().cycle()) {
        let config = read(json!({
            "model_type": family.model_type(), "rope_scaling": scaling, "use_sliding_window": true,
            "sliding_window": 300, "max_window_layers": 6,
            "bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": null, "hidden_size": 256, "intermediate_size": 688,
            "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": true,
            "initializer_range": 0.01, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "rotary_pct": 0.5,
            "use_parallel_residual": false, "use_bias": false, "attention_bias": true, "mlp_bias": true,
        }))
        .unwrap();
        let written = config.to_json();
        assert_eq!(written[family.key("rms_norm_eps")], json!(1e-5));
        assert_eq!(written["eos_token_id"], json!([2, 7]));
        assert_eq!(read(written).unwrap(), config);
    }
}

/// As `run.json` of 2026-11-27 has it.
#[test]
fn a_model_that_an_earlier_version_stored_is_read() {
    let stored = |adds_one: bool| {
        json!({
            "family": "gemma", "hidden_size": 64, "intermediate_size": 96, "activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
            "vocab_size": 64, "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "norms_add_one": adds_one,
            "rope_theta": 10000.0, "rope_scaling": {"rope_type": "default"}, "unrotated_layers": [],
            "qkv_biases": false, "query_key_norms": false, "scaled_embedding": true, "tie_word_embeddings": true,
            "initializer_range": 0.02, "sliding_window": null, "windowed_layers": [],
        })
    };
    for (adds_one, norm) in [(false, NormKind::Rms), (true, NormKind::RmsPlusOne)] {
        let model: ModelConfig = serde_json::from_value(stored(adds_one)).unwrap();
        assert_eq!((model.norm, model.norm_eps), (norm, 1e-6));
        assert!(model.gated && model.partial_rotary_factor == 1.0 && !model.parallel_residual);
        let again: ModelConfig =
            serde_json::from_value(serde_json::to_value(&model).unwrap()).unwrap();
        assert_eq!(again, model);
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
            json!({"model_type": "mixtral"}),
            json!({"architectures": ["BloomForCausalLM"]}),
            json!({"model_type": 3}),
            json!({"model_type": "gpt2"}),
            json!({"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0}),
            json!({"model_type": "gpt2", "scale_attn_weights": false}),
            json!({"model_type": "gpt2", "activation_function": "relu"}),
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            json!({"model_type": "gpt_neox", "hidden_dropout": 0.1, "attention_dropout": 0.2}),
            json!({"hidden_act": "relu"}),
            json!({"model_type": "gemma", "use_bidirectional_attention": true}),
            json!({"rope_scaling": {"type": "yarn", "factor": 2.0}}),
            json!({"rope_scaling": {"type": "linear", "factor": 0.0}}),
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
            json!({"model_type": "gpt_neox", "rotary_pct": 0.01}),
            json!({"model_type": "gpt_neox", "rotary_pct": 1.5}),
            json!({"model_type": "gpt_neox", "hidden_size": 65}),
            json!({"model_type": "gpt_neox", "layer_norm_eps": -1}),
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
    assert!(flaws.iter().all(|flaw| flaw.cause == Cause::Invalid));
    let other = read(json!({"model_type": "phi3"})).unwrap_err();
    assert_eq!(other.cause, Cause::Uncomputed);
    assert_eq!(ModelConfig::parse(&json!({})).unwrap().flaws(), []);
}

#[test]
fn sequences_beyond_the_model_are_refused() {
    let llama = read(json!({"max_position_embeddings": 128})).unwrap();
    assert!(llama.check_sequence(128).is_ok());
    insta::assert_snapshot!(llama.check_sequence(129).unwrap_err());
}
