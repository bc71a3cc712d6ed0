use serde_json::json;

use super::*;
use crate::recipe::spec::Spec;

/// A recipe whose model has a path and custom keys.
fn spec(path: Option<&str>, config: Value) -> Spec {
    let mut spec = Spec::default();
    spec.model.path = path.map(str::to_owned);
    spec.model.config = serde_json::from_value(config).unwrap();
    spec.data.sequence_length = 64;
    spec
}

/// Rule, first path and message of every problem.
fn flaws(spec: &Spec, trainer: Trainer) -> Vec<(&'static str, String, String)> {
    let flaws = find(spec, trainer, &str::to_owned).flaws.into_iter();
    flaws
        .map(|flaw| (flaw.rule, flaw.paths[0].clone(), flaw.message))
        .collect()
}

fn rules(spec: &Spec, trainer: Trainer) -> Vec<&'static str> {
    flaws(spec, trainer)
        .into_iter()
        .map(|flaw| flaw.0)
        .collect()
}

fn sizes() -> Value {
    json!({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256,
           "max_position_embeddings": 128})
}

#[test]
fn a_complete_shape_starts_from_random_weights() {
    for trainer in [Trainer::Any, Trainer::BuiltIn] {
        let found = find(&spec(None, sizes()), trainer, &str::to_owned);
        assert_eq!(found.flaws, []);
        assert_eq!(found.shape.unwrap().hidden_size, 64);
        assert_eq!(found.weights, None);
    }
}

#[test]
fn every_impossible_size_is_reported_at_its_key() {
    let mut config = sizes();
    config["hidden_size"] = json!(0);
    config["num_attention_heads"] = json!(6);
    config["num_key_value_heads"] = json!(4);
    let found = flaws(&spec(None, config), Trainer::Any);
    let paths: Vec<&str> = found.iter().map(|flaw| flaw.1.as_str()).collect();
    assert_eq!(
        paths,
        [
            "model.config.hidden_size",
            "model.config.num_key_value_heads"
        ]
    );
    assert!(found.iter().all(|flaw| flaw.0 == "model-shape"));
    let wide = spec(
        None,
        json!({"hidden_size": "wide", "num_hidden_layers": 2, "vocab_size": 9}),
    );
    assert_eq!(rules(&wide, Trainer::Any), ["model-shape"]);
}

#[test]
fn an_incomplete_shape_is_refused_and_an_absent_hub_model_only_at_launch() {
    let holes = spec(None, json!({"hidden_size": 64}));
    assert_eq!(rules(&holes, Trainer::Any), ["model-shape"]);
    let hub = spec(Some("acme/new-model"), json!({}));
    assert_eq!(rules(&hub, Trainer::Any), Vec::<&str>::new());
    assert_eq!(rules(&hub, Trainer::BuiltIn), ["model-missing"]);
    let known = spec(Some("mistralai/Mistral-7B-v0.1"), json!({}));
    assert_eq!(rules(&known, Trainer::Any), Vec::<&str>::new());
    assert_eq!(rules(&known, Trainer::BuiltIn), ["model-missing"]);
    let nowhere = spec(Some("./models/absent"), json!({}));
    assert_eq!(rules(&nowhere, Trainer::Any), ["model-missing"]);
    assert_eq!(
        rules(&spec(None, json!({})), Trainer::Any),
        ["model-missing"]
    );
}

#[test]
fn a_sample_longer_than_the_known_positions_is_refused() {
    let mut long = spec(None, sizes());
    long.data.sequence_length = 129;
    assert_eq!(rules(&long, Trainer::Any), ["sequence-too-long"]);
    long.data.sequence_length = 128;
    assert_eq!(rules(&long, Trainer::Any), Vec::<&str>::new());
    // Only the hub knows this model's positions; `launch` uses transformers' default.
    let mut hub = spec(
        Some("mistralai/Mistral-7B-v0.1"),
        json!({"vocab_size": 32_064}),
    );
    hub.data.sequence_length = 4096;
    assert_eq!(rules(&hub, Trainer::Any), Vec::<&str>::new());
    assert_eq!(rules(&hub, Trainer::BuiltIn), ["sequence-too-long"]);
}

#[test]
fn the_config_of_a_directory_defines_the_shape() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let spec = spec(Some(path), json!({}));
    assert_eq!(rules(&spec, Trainer::Any), ["model-shape"]);
    let write = |config: &Value| {
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    };
    write(&sizes());
    let found = find(&spec, Trainer::Any, &str::to_owned);
    assert_eq!(found.flaws, []);
    assert_eq!(found.stored.unwrap()["hidden_size"], 64);
    let mut odd = sizes();
    odd["num_attention_heads"] = json!(6);
    write(&odd);
    assert_eq!(flaws(&spec, Trainer::Any)[0].1, "model.path");
    odd["num_attention_heads"] = json!(4);
    odd["model_type"] = json!("gpt2");
    write(&odd);
    assert_eq!(rules(&spec, Trainer::Any), ["trainer-model"]);
}
