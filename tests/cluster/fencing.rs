//! Nodes behind a network partition: ranks there stop by themselves and commit nothing that counts.

use serde_json::{Value, json};

use super::support::{Job, kit, node_without_controller, poll, recipe, restored, running};

#[test]
fn a_node_behind_a_network_partition_commits_nothing_and_is_reused() {
    is_cut_off(Job::with_volume("cut"));
}

pub fn is_cut_off(job: Job) {
    let job = job.start(&recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let node = node_without_controller();
    {
        let _restored = restored("kit", &["reconnect", &node]);
        kit(&["cut", &node]);
        job.wait_training_on(2);
    }
    job.wait_training_on(3);
    let status = job.settle(96);
    job.one_lineage(&status);
}

/// Number of processes on a node whose command lines match a pattern.
fn on_node(node: &str, pattern: &str) -> usize {
    let group = |process: &String| std::fs::read_to_string(format!("/proc/{process}/cgroup"));
    let folder = format!("/evenkeel/{node}/");
    let there = |process: &&String| group(process).is_ok_and(|group| group.contains(&folder));
    running(pattern).iter().filter(there).count()
}

#[test]
#[ignore = "takes a minute: scripts/nightly.sh"]
fn an_isolated_external_trainer_stops_before_it_is_replaced() {
    let mut recipe = recipe(4800);
    recipe["spec"]["trainer"] = json!({"resume": []});
    let program = ["/bin/busybox", "sleep", "86423"];
    let job = Job::apply(
        "fenced",
        &recipe,
        json!({
            "image": "evenkeel.test/busybox:1",
            "elasticity": {"fenceAfterSeconds": 10},
            "trainer": {"command": program},
        }),
    );
    let trains =
        |status: &Value, nodes: u64| status["phase"] == "Running" && status["nodes"] == nodes;
    job.wait("three nodes", |status| trains(status, 3));
    let node = node_without_controller();
    let ranks = || on_node(&node, "sleep 86423");
    let two = || Some(ranks()).filter(|ranks| *ranks == 2);
    poll("two ranks", two, || ranks().to_string());
    {
        let _restored = restored("kit", &["reconnect", &node]);
        kit(&["cut", &node]);
        job.wait("a world without it", |status| trains(status, 2));
        assert_eq!(
            ranks(),
            0,
            "the external trainer still runs behind the partition"
        );
    }
    job.wait("its node", |status| trains(status, 3));
    poll("two ranks again", two, || ranks().to_string());
    job.delete_whole();
}
