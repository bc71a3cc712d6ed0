//! Jobs of one tenant that must not change what another tenant's job holds or waits for.
//! `benches/tenants.py` runs every attack for an hour.

use serde_json::{Value, json};

use super::support::{IMAGE, Job, Restore, create, kubectl, poll, recipe, restored};

const STRANGER: &str = "stranger";

/// Creates the other tenant's namespace, which is deleted with its objects when dropped.
fn stranger() -> Restore {
    let gone = restored("kubectl", &["delete", "namespace", STRANGER]);
    create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": STRANGER}}));
    gone
}

/// Creates a job of the other tenant that asks for 2 nodes.
fn create_job(name: &str, pod: Value) {
    create(&json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": STRANGER},
        "spec": {
            "nodes": 2, "gpusPerNode": 2, "image": IMAGE, "trainer": {"device": "Cpu"},
            "recipe": {"inline": recipe(2_000_000).to_string()},
            "checkpoint": {"path": "/tmp"},
            "elasticity": {"capacity": "Request", "placementSeconds": 3600},
            "podTemplate": {"spec": pod},
        },
    }));
}

/// Waits until a job of the other tenant has this many pods.
fn wait_pods(name: &str, count: usize) {
    let label = format!("evenkeel.dev/job={name}");
    let pods = || kubectl(&["-n", STRANGER, "get", "pods", "-l", &label, "-o", "name"]);
    let all = || (pods().lines().count() == count).then_some(());
    poll("the other tenant's pods", all, pods);
}

#[test]
fn pods_that_are_never_placed_take_nothing_from_a_running_job() {
    let job = Job::apply("holder", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let _gone = stranger();
    create_job("unscheduled", json!({"schedulerName": "absent"}));
    create_job("selective", json!({"nodeSelector": {"pool": "absent"}}));
    create_job("bound", json!({"nodeName": "node1"}));
    wait_pods("unscheduled", 2);
    wait_pods("selective", 2);
    // Every node's change reconciles the running job beside those pods.
    let _label = restored("kubectl", &["label", "node", "node1", "changed-"]);
    for change in 0..5 {
        let label = format!("changed=n{change}");
        kubectl(&["label", "--overwrite", "node", "node1", &label]);
        let step = |status: &Value| status["progress"]["step"].as_u64().unwrap_or(0);
        let before = step(&job.status());
        let status = job.wait("its steps", |status| step(status) > before + 20);
        assert_eq!(status["jobGeneration"]["record"]["number"], 1, "{status:#}");
        assert_eq!(status["phase"], "Running", "{status:#}");
    }
    job.settle(96);
}

#[test]
fn a_job_without_quota_reserves_nothing() {
    let _gone = stranger();
    create(
        &json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {
        "name": "none", "namespace": STRANGER}, "spec": {"hard": {"pods": "0"}}}),
    );
    create_job("refused", json!({}));
    let conditions = || {
        let path = "-o=jsonpath={.status.conditions[?(@.type=='PodsReady')].reason}";
        kubectl(&["-n", STRANGER, "get", "tj", "refused", path])
    };
    let refused = || (conditions() == "Refused").then_some(());
    poll("the refusal", refused, conditions);
    let job = Job::apply("unhindered", &recipe(9600), json!({}));
    let status = job.finish(96);
    assert_eq!(status["history"].as_array().unwrap().len(), 1, "{status:#}");
}
