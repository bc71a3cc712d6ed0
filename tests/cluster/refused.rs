//! What cannot be run is refused with words, and nothing is made for it.

use serde_json::json;

use super::support::{Job, kubectl, recipe, try_create, words};

#[test]
fn a_recipe_that_no_number_of_nodes_splits_makes_no_pod() {
    let mut recipe = recipe(4800);
    recipe["spec"]["batch"]["global"] = json!(97);
    let job = Job::apply("prime", &recipe, json!({}));
    let status = job.wait("a refusal", |status| status["state"] == "Pending");
    let planned = &status["conditions"][0];
    assert_eq!(planned["type"], "Planned");
    assert_eq!(planned["status"], "False");
    assert!(
        planned["message"].as_str().unwrap().contains("97"),
        "{planned}"
    );
    assert!(job.pods().is_empty());
    kubectl(&["get", "tj", "prime"]);
}

#[test]
fn a_command_that_would_train_on_another_batch_makes_no_pod() {
    let launcher = json!(["torchrun", "train.py", "{per_device_batch_size}"]);
    let job = Job::apply(
        "launcher",
        &recipe(4800),
        json!({"trainer": {"command": launcher}}),
    );
    let status = job.wait("a refusal", |status| status["state"] == "Pending");
    let why = status["conditions"][0]["message"].as_str().unwrap();
    assert!(
        why.contains("own-program") && why.contains("`torchrun` starts a process"),
        "{why}"
    );
    assert!(job.pods().is_empty());
}

#[test]
fn the_api_server_itself_refuses_what_contradicts_itself() {
    let refused = try_create(&json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": "both"},
        "spec": {
            "nodes": 1, "image": "x", "checkpoint": {"claim": "x"},
            "recipe": {"inline": "a: 1", "configMap": {"name": "x"}},
        },
    }));
    assert!(!refused.status.success());
    assert!(
        words(&refused).contains("either inline or as a configMap"),
        "{}",
        words(&refused)
    );
}
