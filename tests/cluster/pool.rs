//! Other ways than a cordon in which a pool loses devices, and gives them back.

use serde_json::json;

use super::support::{Job, create, kit, kubectl, mended, recipe};

/// A pod of somebody more important, which takes a whole node's devices.
fn important() {
    create(&json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
         "metadata": {"name": "important"}, "value": 1_000_000},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "important"}, "spec": {
            "priorityClassName": "important", "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "sleep", "image": "evenkeel.test/busybox:1",
                "command": ["/bin/busybox", "sleep", "3600"],
                "resources": {"limits": {"nvidia.com/gpu": "2"}}}]}},
    ]}));
}

#[test]
fn whatever_takes_devices_away_makes_the_job_smaller_and_not_more() {
    let job = Job::apply("pool", &recipe(120_000), json!({}));
    job.wait_training_on(3);

    let taint = "autoscaler.example/going=soon:NoSchedule";
    {
        let _mended = mended("kubectl", &["taint", "node", "node3", &format!("{taint}-")]);
        kubectl(&["taint", "node", "node3", taint]);
        job.wait_training_on(2);
    }
    job.wait_training_on(3);
    {
        let _mended = mended("kit", &["gpus", "node3", "2"]);
        kit(&["gpus", "node3", "1"]);
        job.wait_training_on(2);
    }
    job.wait_training_on(3);
    {
        let _gone = mended(
            "kubectl",
            &["delete", "pod/important", "priorityclass/important"],
        );
        important();
        job.wait_training_on(2);
    }
    job.wait_training_on(3);

    let status = job.finish(96);
    assert_eq!(status["restarts"], 0, "{status:#}");
    let worlds = status["history"].as_array().unwrap().iter();
    let worlds: Vec<_> = worlds
        .map(|change| change["to"].as_u64().unwrap())
        .collect();
    assert_eq!(worlds, [3, 2, 3, 2, 3, 2, 3]);
}
