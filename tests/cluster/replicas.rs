//! Two controller replicas, one of which leads.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::support::{Job, kit, kubectl, recipe, restored};

const SYSTEM: [&str; 2] = ["-n", "evenkeel-system"];

/// Sets the number of controllers and waits for them.
pub fn scale(replicas: u32) {
    let replicas = format!("--replicas={replicas}");
    kubectl(&[&["scale", "deployment", "--all", &replicas][..], &SYSTEM].concat());
    kubectl(
        &[
            &["rollout", "status", "deployment", "--timeout=90s"][..],
            &SYSTEM,
        ]
        .concat(),
    );
}

/// Restores one replica when dropped.
pub struct OneReplica;

impl Drop for OneReplica {
    fn drop(&mut self) {
        scale(1);
    }
}

/// Name of the pod that holds the Lease.
fn leader() -> String {
    let holder = "jsonpath={.spec.holderIdentity}";
    kubectl(
        &[
            &["get", "lease", "evenkeel-controller", "-o", holder][..],
            &SYSTEM,
        ]
        .concat(),
    )
}

#[test]
fn the_other_replica_takes_over_from_an_isolated_leader() {
    let _one_replica = OneReplica;
    scale(2);
    let job = Job::apply("leaders", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let first = leader();
    let pods = kubectl(&[&["get", "pods", "-o", "json"][..], &SYSTEM].concat());
    let pods: Value = serde_json::from_str(&pods).unwrap();
    let pods = pods["items"].as_array().unwrap();
    // A rollout may still end an older pod.
    let living = pods
        .iter()
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    let nodes: BTreeSet<String> = living
        .map(|pod| pod["spec"]["nodeName"].to_string())
        .collect();
    assert_eq!(nodes.len(), 2, "the replicas share no node");
    let mut pods = pods.iter();
    let pod = pods.find(|pod| pod["metadata"]["name"] == first.as_str());
    let node = pod.expect("the holder is a pod")["spec"]["nodeName"].clone();
    let node = node.as_str().unwrap();
    {
        let _restored = restored("kit", &["reconnect", node]);
        kit(&["cut", node]);
        job.wait_training_on(2);
        assert_ne!(leader(), first);
    }
    // The old leader learns only now that it has lost the Lease, and the job returns to its node.
    job.settle(96);
}
