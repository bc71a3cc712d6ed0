//! For tests: an API server in memory, and a cluster whose controller talks to it.

mod api_server;
mod cluster;

use serde_json::{Value, json};

pub use self::api_server::ApiServer;
pub use self::cluster::Cluster;
use crate::api::TrainingJob;

/// Namespace of all objects.
pub const NAMESPACE: &str = "n";

/// A controller reference to a TrainingJob.
pub fn owner(name: &str, uid: &str) -> Value {
    json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob", "name": name, "uid": uid,
        "controller": true, "blockOwnerDeletion": true,
    })
}

/// A job with a small recipe that requests pods for two nodes even if the pool has none.
pub fn job(name: &str, uid: &str) -> TrainingJob {
    let recipe = json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "small"},
        "spec": {
            "batch": {"global": 8, "per_device_batch_size": 4},
            "model": {"init": "random", "config": {
                "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
                "max_position_embeddings": 32, "tie_word_embeddings": true}},
            "data": {"sequence_length": 32, "train": [{"path": "synthetic",
                "synthetic": {"vocabulary": 64, "branching": 4, "samples": 200}}]},
            "budget": {"samples": 80},
            "learning_rate": {"peak": 3.0e-3, "shape": "constant"},
        },
    });
    serde_json::from_value(json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid, "generation": 1},
        "spec": {
            "nodes": 2, "image": "i", "recipe": {"inline": recipe.to_string()},
            "checkpoint": {"claim": "c"}, "elasticity": {"capacity": "Request"},
        },
    }))
    .unwrap()
}
