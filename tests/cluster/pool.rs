//! Pools that lose and regain devices in other ways than by a cordon.

use serde_json::json;

use super::support::{Job, create, kit, kubectl, node_without_controller, recipe, restored};

/// Creates a pod of higher priority that takes all devices of a node.
fn important() {
    create(&json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
         "metadata": {"name": "important"}, "value": 1_000_000},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "important"}, "spec": {
            "priorityClassName": "important", "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "sleep", "image": "evenkeel.test/busybox:1",
                "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                "command": ["/bin/busybox", "sleep", "3600"],
                "resources": {"limits": {"nvidia.com/gpu": "2"}}}]}},
    ]}));
}

#[test]
fn every_loss_of_devices_causes_one_scale_down() {
    let job = Job::apply("pool", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);

    let taint = "autoscaler.example/going=soon:NoSchedule";
    {
        let _restored = restored("kubectl", &["taint", "node", "node3", &format!("{taint}-")]);
        kubectl(&["taint", "node", "node3", taint]);
        job.wait_training_on(2);
    }
    job.wait_training_on(3);
    {
        let _restored = restored("kit", &["gpus", "node3", "2"]);
        kit(&["gpus", "node3", "1"]);
        job.wait_training_on(2);
    }
    job.wait_training_on(3);
    {
        let _gone = restored(
            "kubectl",
            &["delete", "pod/important", "priorityclass/important"],
        );
        important();
        job.wait_training_on(2);
    }
    job.wait_training_on(3);

    let status = job.settle(96);
    assert_eq!(status["restarts"], 0, "{status:#}");
    let worlds = status["history"].as_array().unwrap().iter();
    let worlds: Vec<_> = worlds
        .map(|change| change["toNodes"].as_u64().unwrap())
        .collect();
    assert_eq!(worlds, [3, 2, 3, 2, 3, 2, 3]);
}

#[test]
fn a_deleted_node_is_left_at_once_and_reused() {
    let job = Job::apply("removed", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let node = node_without_controller();
    kubectl(&["delete", "node", &node]);
    job.wait_training_on(2);
    // A kubelet registers its node when it starts.
    kit(&["lose", &node]);
    kit(&["return", &node]);
    kubectl(&[
        "wait",
        "--for=create",
        &format!("node/{node}"),
        "--timeout=60s",
    ]);
    kit(&["gpus", &node, "2"]);
    job.wait_training_on(3);
    let status = job.settle(96);
    assert_eq!(status["restarts"], 0, "{status:#}");
}

#[test]
fn policies_ignore_a_cordon_and_keep_a_pending_pod_for_the_autoscaler() {
    let elasticity = json!({"onCordon": "Wait", "capacity": "Request"});
    let job = Job::apply(
        "policy",
        &recipe(2_000_000),
        json!({"elasticity": elasticity}),
    );
    job.wait_training_on(3);
    let _restored = restored("kubectl", &["uncordon", "node3"]);
    kubectl(&["cordon", "node3"]);
    let samples = |status: &serde_json::Value| status["progress"]["samples"].as_u64().unwrap_or(0);
    let at = samples(&job.status());
    job.wait("progress under the cordon", |status| {
        samples(status) > at + 960
    });
    assert_eq!(job.status()["history"].as_array().unwrap().len(), 1);
    let pods = ["-l", "evenkeel.dev/job=policy", "--field-selector"];
    let of_node = [&["delete", "pods"][..], &pods, &["spec.nodeName=node3"]].concat();
    kubectl(&of_node);
    let status = job.wait_training_on(2);
    let published = status["history"][1]["stages"]["publishedSeconds"]
        .as_f64()
        .unwrap();
    assert!(
        published < 20.0,
        "it waited for the deleted node: {status:#}"
    );
    // After scaleUpDelaySeconds a pending pod for the third node is visible to an autoscaler.
    job.wait("a pending pod", |status| {
        status["slots"].as_array().map(Vec::len) == Some(3)
    });
    let pending = [
        &["get", "pods", "-o", "name"][..],
        &pods,
        &["status.phase=Pending"],
    ]
    .concat();
    assert_eq!(kubectl(&pending).lines().count(), 1);
    kubectl(&["uncordon", "node3"]);
    job.wait_training_on(3);
    job.settle(96);
}

#[test]
#[ignore = "takes a minute: scripts/nightly.sh"]
fn mig_slices_are_devices_of_their_resource_name() {
    let slice = "nvidia.com/mig-1g.10gb";
    let _none = [
        restored("kit", &["gpus", "node1", "0", slice]),
        restored("kit", &["gpus", "node2", "0", slice]),
    ];
    kit(&["gpus", "node1", "3", slice]);
    kit(&["gpus", "node2", "4", slice]);
    let more = json!({"nodes": 2, "gpusPerNode": 3, "resourceName": slice});
    let job = Job::apply("slices", &recipe(2_000_000), more);
    let status = job.wait_training_on(2);
    assert_eq!(status["plan"]["formula"], "6 × 4 × 4 = 96");
    let nodes = kubectl(&[
        "get",
        "pods",
        "-l",
        "evenkeel.dev/job=slices",
        "-o",
        "jsonpath={.items[*].spec.nodeName}",
    ]);
    assert!(!nodes.contains("node3"), "{nodes}");
    kit(&["gpus", "node2", "2", slice]);
    job.wait_training_on(1);
    job.settle(96);
}
