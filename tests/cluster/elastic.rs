//! The pool shrinks and grows; the global batch is kept and no sample is lost.

use serde_json::{Value, json};

use super::losses;
use super::support::{Job, kit, kubectl, node_without_controller, poll, recipe, restored, signal};

#[test]
fn a_job_completes_with_its_plan_and_formula_in_the_status() {
    completes(Job::with_volume("whole"));
}

pub fn completes(job: Job) {
    let job = job.start(&recipe(4800), json!({}));
    let status = job.finish(96);
    assert_eq!(status["plan"]["formula"], "6 × 4 × 4 = 96");
    assert_eq!(status["history"].as_array().unwrap().len(), 1);
    assert_eq!(status["progress"]["samples"], 4800);
    assert_eq!(losses::of(&job.run()).len(), 50);
}

#[test]
fn a_cordoned_node_is_left_with_a_checkpoint_and_reused() {
    let job = Job::apply("cordon", &recipe(2_000_000), json!({}));
    let before = job.wait_training_on(3);
    let pods = job.pods();
    let _restored = restored("kubectl", &["uncordon", "node3"]);
    kubectl(&["cordon", "node3"]);
    let status = job.wait_training_on(2);
    assert!(continues_in_place(&status), "{status}");
    let survivors = job.pods_left(2);
    assert!(
        survivors
            .iter()
            .all(|(pod, uid)| pods.get(pod) == Some(uid))
    );
    kubectl(&["uncordon", "node3"]);
    let after = job.wait_training_on(3);
    assert!(continues_in_place(&after), "{after}");
    assert_eq!(
        before["plan"]["globalBatchSize"],
        after["plan"]["globalBatchSize"]
    );
    job.settle(96);
}

#[test]
fn a_node_without_power_is_left_before_kubernetes_declares_it_lost() {
    loses_power(Job::with_volume("power"));
}

pub fn loses_power(job: Job) {
    let job = job.start(&recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let node = node_without_controller();
    let _restored = restored("kit", &["return", &node]);
    kit(&["lose", &node]);
    let status = job.wait_training_on(2);
    assert_eq!(status["disruptions"], 1);
    assert_eq!(status["restarts"], 0);
    assert!(continues_in_place(&status), "{status}");
    // Its peers reported the loss; Kubernetes had not detected it yet.
    let lost = status["history"][1]["message"].as_str().unwrap();
    assert!(lost.contains("unreachable for its peers"), "{lost}");
    job.settle(96);
}

#[test]
fn three_two_one_three_nodes_keep_the_batch() {
    moves_over_the_pool(Job::with_volume("steps"));
}

pub fn moves_over_the_pool(job: Job) {
    let job = job.start(&recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let _restored = [
        restored("kubectl", &["uncordon", "node1"]),
        restored("kubectl", &["uncordon", "node2"]),
    ];
    kubectl(&["cordon", "node1"]);
    job.wait_training_on(2);
    kubectl(&["cordon", "node2"]);
    job.wait_training_on(1);
    kubectl(&["uncordon", "node1", "node2"]);
    job.wait_training_on(3);
    let status = job.settle(96);
    let worlds: Vec<u64> = status["history"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| change["toNodes"].as_u64().unwrap())
        .collect();
    assert!(
        worlds.starts_with(&[3, 2, 1]) && worlds.ends_with(&[3]),
        "{worlds:?}"
    );
}

#[test]
fn a_suspended_job_releases_its_gpus_and_resumes_from_its_checkpoint() {
    is_suspended(Job::with_volume("suspend"));
}

pub fn is_suspended(job: Job) {
    let job = job.start(&recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    job.patch(json!({"suspend": true}));
    let status = job.wait("its suspension", |status| status["phase"] == "Suspended");
    let samples = status["checkpoint"]["samples"].as_u64().unwrap();
    assert!(samples > 0);
    job.pods_left(0);
    job.patch(json!({"suspend": false}));
    job.wait_training_on(3);
    let status = job.settle(96);
    let last = status["history"]
        .as_array()
        .unwrap()
        .last()
        .unwrap()
        .clone();
    assert_eq!(last["samples"].as_u64().unwrap(), samples);
}

#[test]
fn a_scaled_job_moves_to_the_requested_nodes() {
    let job = Job::apply("scaled", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    kubectl(&["scale", "tj", "scaled", "--replicas=1"]);
    let status = job.wait_training_on(1);
    assert!(continues_in_place(&status), "{status}");
    kubectl(&["scale", "tj", "scaled", "--replicas=3"]);
    let status = job.wait_training_on(3);
    assert!(continues_in_place(&status), "{status}");
    job.settle(96);
}

#[test]
fn a_process_that_stands_by_in_a_pod_takes_the_place_of_its_only_rank() {
    let mut recipe = recipe(2_000_000);
    recipe["spec"]["elasticity"] = json!({"spares": 1});
    let job = Job::with_volume("spares").start(&recipe, json!({"gpusPerNode": 1}));
    job.wait_training_on(3);
    let stand_by = |pids: &[String]| {
        let stands_by = |pid: &&String| {
            let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
            command.is_ok_and(|command| command.contains("--stand-by"))
        };
        pids.iter().filter(stands_by).cloned().collect::<Vec<_>>()
    };
    let logs = job.run().join("gen-1/logs");
    let stand = || {
        let entries = std::fs::read_dir(&logs).ok()?.flatten();
        let texts = entries.filter_map(|entry| std::fs::read_to_string(entry.path()).ok());
        (texts.filter(|text| text.contains("stands by")).count() == 3).then_some(())
    };
    let what = "a process that stands by in each pod";
    poll(what, stand, || format!("{:?}", job.processes("rank")));
    let before = job.processes("rank");
    let spares = stand_by(&before);
    let rank = before.iter().find(|pid| !spares.contains(pid)).unwrap();
    signal("KILL", rank);
    let status = job.wait("the next generation", |status| {
        status["jobGeneration"]["record"]["number"] == 2
    });
    assert!(continues_in_place(&status), "{status}");
    job.wait_training_on(3);
    // The process that took the place, and two of the others, have stood by in the first generation.
    let of_first = |pid: &&String| before.contains(pid);
    let after = job.processes("rank");
    assert_eq!(
        after.iter().filter(of_first).count(),
        5,
        "{before:?} {after:?}"
    );
    job.settle(96);
}

/// Whether processes continue in the newest generation.
fn continues_in_place(status: &Value) -> bool {
    let record = &status["jobGeneration"]["record"];
    let member = |member: &Value| member["carries"].is_array();
    record["carried"].is_object() && record["members"].as_array().unwrap().iter().any(member)
}

#[test]
fn a_deleted_job_leaves_nothing_behind() {
    let job = Job::apply("deleted", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    job.delete_whole();
}
