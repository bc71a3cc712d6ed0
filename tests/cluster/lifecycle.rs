//! Changes that users and the cluster make before and during a job.

use serde_json::{Value, json};

use super::refused::condition;
use super::support::{
    IMAGE, Job, create, kit, kubectl, output_text, recipe, restored, running, signal, try_kubectl,
};

/// The same image under another tag.
const OTHER_IMAGE: &str = "evenkeel.test/evenkeel:2";

#[test]
fn the_first_job_of_the_docs_runs_unchanged() {
    let example = include_str!("../../examples/kubernetes/trainingjob.yaml");
    // In the scenarios a job has the name of its volume, and the example's volume is `checkpoints`.
    let named = example.replacen("name: first", "name: checkpoints", 1);
    let text = named.replace("evenkeel/evenkeel:0.1.0", IMAGE);
    assert!(text.contains(IMAGE), "{text}");
    // A thousand steps would take minutes.
    let text = text.replace("samples: 96000", "samples: 9600");
    assert!(text.contains("samples: 9600\n"), "{text}");
    let job = Job::with_volume("checkpoints");
    let applied = try_kubectl(&["apply", "-f", "-"], &text);
    assert!(applied.status.success(), "{}", output_text(&applied));
    let status = job.wait_training_on(3);
    assert_eq!(status["plan"]["formula"], "6 × 4 × 4 = 96");
    job.finish(96);
}

#[test]
fn a_job_waits_for_a_feasible_pool_and_names_the_missing_nodes() {
    let _restored = restored("kubectl", &["uncordon", "node3"]);
    kubectl(&["cordon", "node3"]);
    let job = Job::apply(
        "waits",
        &recipe(4800),
        json!({"elasticity": {"minNodes": 3}}),
    );
    let status = job.wait("a pool", |status| status["phase"] == "Waiting");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.contains("2 of the pool's nodes") && message.contains("needs 3"),
        "{message}"
    );
    assert!(job.pods().is_empty());
    kubectl(&["uncordon", "node3"]);
    job.finish(96);
}

#[test]
fn a_job_waits_for_its_config_map_and_keeps_its_recipe_snapshot() {
    let job = Job::apply(
        "mapped",
        &Value::Null,
        json!({"recipe": {"inline": null, "configMap": {"name": "mapped"}}}),
    );
    let status = job.wait("a refusal", |status| {
        status["conditions"][0]["status"] == "False"
    });
    assert_eq!(status["conditions"][0]["reason"], "RecipeMissing");
    job.wait_event("RecipeMissing");
    let _gone = restored("kubectl", &["delete", "configmap", "mapped"]);
    let map = |recipe: Value| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mapped"},
               "data": {"recipe.yaml": recipe.to_string()}})
    };
    create(&map(recipe(9600)));
    job.wait_training_on(3);
    let mut other = recipe(9600);
    other["spec"]["batch"]["global"] = json!(48);
    let edited = try_kubectl(&["replace", "-f", "-"], &map(other).to_string());
    assert!(edited.status.success(), "{}", output_text(&edited));
    job.finish(96);
}

#[test]
fn a_missing_image_can_be_corrected() {
    let job = Job::apply(
        "image",
        &recipe(4800),
        json!({"image": "evenkeel.test/nothing:1"}),
    );
    job.wait("a message about the image", |status| {
        let message = status["message"].as_str().unwrap_or_default();
        status["phase"] == "Placing" && message.contains("evenkeel.test/nothing:1")
    });
    job.patch(json!({"image": IMAGE}));
    job.finish(96);
}

#[test]
fn pods_that_cannot_train_are_recreated_after_a_pause() {
    // An image without the agent.
    let image = "evenkeel.test/busybox:1";
    let job = Job::apply("lacking", &recipe(4800), json!({"image": image}));
    let status = job.wait("some tries", |status| {
        status["podFailures"]["count"].as_u64() >= Some(3)
    });
    let message = status["message"].as_str().unwrap();
    assert!(
        message.contains("after a pause") && message.contains("evenkeel"),
        "{message}"
    );
    assert!(status["attempts"].as_u64() <= Some(12), "{status:#}");
    job.wait_event("PodsEndedEarly");
    job.patch(json!({"image": IMAGE}));
    let status = job.finish(96);
    assert!(status.get("podFailures").is_none());
}

#[test]
fn a_failing_external_trainer_fails_the_job_after_its_budget_with_a_log_tail() {
    let job = Job::apply(
        "failing",
        &recipe(4800),
        json!({
            "image": "evenkeel.test/busybox:1",
            "budgets": {"restarts": 1},
            "trainer": {"command": ["/bin/busybox", "sh", "-c",
                "echo {per_device_batch_size} is a bad number; exit 3"]},
        }),
    );
    let status = job.wait_failure();
    assert_eq!(status["history"].as_array().unwrap().len(), 2, "{status:#}");
    let last = status["logTail"].as_str().unwrap();
    assert!(last.contains("4 is a bad number"), "{last}");
    assert!(
        status["message"].as_str().unwrap().contains('3'),
        "{status:#}"
    );
    assert_eq!(status["disruptions"], 0);
}

#[test]
fn a_finished_job_is_deleted_after_its_ttl() {
    let more = json!({"nodes": 1, "ttlSecondsAfterFinished": 20});
    let job = Job::apply("brief", &recipe(960), more);
    job.finish(96);
    job.wait_gone();
    job.delete_whole();
}

#[test]
fn an_edited_image_takes_effect_after_a_checkpoint() {
    let job = Job::apply("edited", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let old = job.pods();
    job.patch(json!({"image": OTHER_IMAGE}));
    let status = job.wait("a second generation", |status| {
        status["jobGeneration"]["record"]["number"] == 2 && status["phase"] == "Running"
    });
    assert!(status["checkpoint"]["samples"].as_u64().unwrap() > 0);
    assert!(job.pods_left(3).keys().all(|pod| !old.contains_key(pod)));
    let status = job.settle(96);
    assert_eq!(status["restarts"], 0);
    assert_eq!(status["attempts"], 6, "pods were made twice: {status:#}");
}

#[test]
fn a_drained_node_costs_no_step() {
    let job = Job::apply("drained", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let _restored = restored("kubectl", &["uncordon", "node2"]);
    kubectl(&[
        "drain",
        "node2",
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--force",
        "--timeout=100s",
    ]);
    job.wait_training_on(2);
    job.settle(96);
}

#[test]
fn a_move_to_another_node_of_the_pool_names_the_cordoned_one() {
    let job = Job::apply("moves", &recipe(2_000_000), json!({"nodes": 2}));
    let status = job.wait_training_on(2);
    let member = &status["jobGeneration"]["record"]["members"][1];
    let node = member["pod"]["node"].as_str().unwrap().to_owned();
    let _restored = restored("kubectl", &["uncordon", &node]);
    kubectl(&["cordon", &node]);
    let moved = |status: &Value| {
        let members = status["jobGeneration"]["record"]["members"].as_array();
        let members = members.filter(|members| members.len() == 2);
        members.is_some_and(|members| members.iter().all(|member| member["pod"]["node"] != *node))
    };
    job.wait("a world without the node", moved);
    let status = job.wait_training_on(2);
    let last = status["history"].as_array().unwrap().last().unwrap();
    let message = last["message"].as_str().unwrap();
    assert!(
        message.contains(&format!("node {node} is cordoned")),
        "{message}"
    );
    job.settle(96);
}

#[test]
fn a_setup_command_that_hangs_is_killed_at_its_deadline_and_repeated() {
    let setup = "test -e /tmp/tried && exit; : > /tmp/tried; echo waits; /bin/busybox sleep 86427";
    let mut recipe = recipe(4800);
    recipe["spec"]["trainer"] = json!({"resume": []});
    let job = Job::apply(
        "setup",
        &recipe,
        json!({
            "nodes": 1, "image": "evenkeel.test/busybox:1",
            "trainer": {
                "setup": setup, "setupSeconds": 5,
                "command": ["/bin/busybox", "true"],
            },
        }),
    );
    let status = job.wait("the deadline", |status| {
        let ready = condition(status, "PodsReady")["message"].to_string();
        ready.contains("did not end within 5 s (spec.trainer.setupSeconds)")
    });
    assert_ne!(status["phase"], "Running");
    assert_eq!(running("sleep 86427"), [""; 0]);
    job.wait("its end", |status| status["phase"] == "Complete");
}

#[test]
fn training_continues_while_the_api_server_restarts() {
    let job = Job::apply("api", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    kit(&["restart", "apiserver", "3"]);
    let status = job.settle(96);
    assert_eq!(status["history"].as_array().unwrap().len(), 1, "{status:#}");
}

#[test]
fn an_upgraded_controller_continues_from_the_status() {
    let job = Job::apply("upgrade", &recipe(2_000_000), json!({}));
    let pods = job.wait_training_on(3);
    let system = ["-n", "evenkeel-system"];
    let image = |image: &str| {
        let set = format!("*={image}");
        kubectl(&[&["set", "image", "deployment", "--all", &set][..], &system].concat());
        kubectl(
            &[
                &["rollout", "status", "deployment", "--timeout=90s"][..],
                &system,
            ]
            .concat(),
        );
    };
    image(OTHER_IMAGE);
    let kept = job.wait_training_on(3);
    let status = job.settle(96);
    image(IMAGE);
    assert_eq!(pods["slots"], kept["slots"]);
    assert_eq!(status["history"].as_array().unwrap().len(), 1, "{status:#}");
}

#[test]
fn a_killed_rank_is_restarted_in_the_same_pods() {
    let job = Job::apply("rank", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let before = job.pods();
    signal("KILL", &job.processes("rank")[3]);
    job.wait("a second generation", |status| {
        status["jobGeneration"]["record"]["number"] == 2 && status["phase"] == "Running"
    });
    let after = job.pods();
    assert_eq!(before, after);
    let status = job.settle(96);
    assert_eq!(status["restarts"], 0, "{status:#}");
}

#[test]
fn a_killed_container_is_replaced() {
    let job = Job::apply("container", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    signal("KILL", &job.processes("agent")[1]);
    job.wait("a second generation", |status| {
        status["jobGeneration"]["record"]["number"].as_u64() > Some(1)
            && status["phase"] == "Running"
    });
    job.settle(96);
}

#[test]
fn a_job_can_be_suspended_during_a_rescale() {
    let job = Job::apply("halfway", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let _restored = restored("kubectl", &["uncordon", "node1"]);
    kubectl(&["cordon", "node1"]);
    job.wait_rescale();
    job.patch(json!({"suspend": true}));
    job.wait("its suspension", |status| status["phase"] == "Suspended");
    job.pods_left(0);
    kubectl(&["uncordon", "node1"]);
    job.patch(json!({"suspend": false}));
    job.settle(96);
}

#[test]
fn a_job_can_be_deleted_during_a_rescale() {
    let job = Job::apply("cutshort", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let _restored = restored("kubectl", &["uncordon", "node1"]);
    kubectl(&["cordon", "node1"]);
    job.wait_rescale();
    job.delete_whole();
}

#[test]
fn two_jobs_never_reserve_the_same_devices() {
    let first = Job::apply("first", &recipe(2_000_000), json!({}));
    first.wait_training_on(3);
    let second = Job::apply("second", &recipe(2_000_000), json!({"nodes": 2}));
    let status = second.wait("a pool", |status| status["phase"] == "Waiting");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("0 of the pool's nodes"), "{message}");
    first.patch(json!({"nodes": 2}));
    second.wait_training_on(1);
    first.wait_training_on(2);
    second.settle(96);
    first.settle(96);
}

#[test]
fn a_batch_raised_by_the_norm_test_survives_a_scale_down() {
    let mut growing = recipe(2_000_000);
    growing["spec"]["schedule"] = json!({
        "kind": "norm-test", "eta": 0.3, "interval": 2, "max_batch": 384,
    });
    let job = Job::apply("grows", &growing, json!({}));
    job.wait("a larger batch", |status| {
        status["progress"]["batch"].as_u64().unwrap_or(0) > 96
    });
    let _restored = restored("kubectl", &["uncordon", "node3"]);
    kubectl(&["cordon", "node3"]);
    let status = job.wait_training_on(2);
    assert!(
        status["checkpoint"]["batch"].as_u64().unwrap() > 96,
        "{status:#}"
    );
    job.settle(96);
}

#[test]
fn an_external_trainer_gets_the_environment_of_torchrun() {
    let job = Job::apply(
        "external",
        &recipe(4800),
        json!({"image": "evenkeel.test/busybox:1", "trainer": {"command": [
            "/bin/busybox", "sh", "-c",
            "env; echo micro {per_device_batch_size}; /bin/busybox sleep 3",
        ]}}),
    );
    job.wait("its end", |status| status["phase"] == "Complete");
    let mut ranks = Vec::new();
    for rank in 0..6 {
        let log = job.run().join(format!("gen-1/logs/rank-{rank}.log"));
        let text = std::fs::read_to_string(log).unwrap();
        let value = |name: &str| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(&format!("{name}=")));
            line.unwrap_or_else(|| panic!("{name} is not in {text}"))
                .to_string()
        };
        assert_eq!(value("WORLD_SIZE"), "6");
        assert_eq!(value("PET_NNODES"), "3");
        assert_eq!(value("PET_NPROC_PER_NODE"), "2");
        assert_eq!(value("LOCAL_RANK"), (rank % 2).to_string());
        assert_eq!(value("PET_NODE_RANK"), (rank / 2).to_string());
        assert_eq!(value("EVENKEEL_GRADIENT_ACCUMULATION_STEPS"), "4");
        assert!(text.contains("micro 4"), "{text}");
        ranks.push((value("RANK"), value("MASTER_ADDR"), value("MASTER_PORT")));
    }
    let masters: std::collections::BTreeSet<_> = ranks.iter().map(|r| (&r.1, &r.2)).collect();
    assert_eq!(masters.len(), 1);
    let numbers: Vec<_> = ranks.iter().map(|rank| rank.0.as_str()).collect();
    assert_eq!(numbers, ["0", "1", "2", "3", "4", "5"]);
}

#[test]
fn the_launcher_of_a_jobs_command_is_replaced() {
    let config = "distributed_type: FSDP\nnum_processes: 6\nfsdp_config: {fsdp_version: 2}\n";
    let more = json!({
        "image": "evenkeel.test/busybox:1",
        "recipe": {"files": {"fsdp.yaml": config}},
        "trainer": {"command": [
            "accelerate", "launch", "--config_file", "fsdp.yaml", "--no_python", "/bin/busybox", "env",
        ]},
    });
    let job = Job::apply("launched-by", &recipe(4800), more);
    job.wait("its end", |status| status["phase"] == "Complete");
    for rank in 0..6 {
        let log = job.run().join(format!("gen-1/logs/rank-{rank}.log"));
        let text = std::fs::read_to_string(log).unwrap();
        for line in [
            "WORLD_SIZE=6",
            "ACCELERATE_USE_FSDP=true",
            "FSDP_VERSION=2",
            "EVENKEEL_PER_DEVICE_BATCH_SIZE=4",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line} is not in {text}"
            );
        }
    }
}

#[test]
fn an_external_trainer_resumes_from_its_checkpoint_after_a_scale_down() {
    let program = r#"trap '[ "$RANK" = 0 ] && : > "$EVENKEEL_CHECKPOINT_DIR/step-$EVENKEEL_GENERATION"; exit 143' TERM
echo "$RANK/$WORLD_SIZE $*"
while [ ! -e "$EVENKEEL_RUN_DIR/stop" ]; do /bin/busybox sleep 0.1; done"#;
    let mut recipe = recipe(4800);
    recipe["spec"]["trainer"] = json!({"resume": ["--from", "{checkpoint}"]});
    let job = Job::apply(
        "mover",
        &recipe,
        json!({"image": "evenkeel.test/busybox:1", "trainer": {"command": [
            "/bin/busybox", "sh", "-c", program, "train",
            "{per_device_batch_size}x{gradient_accumulation_steps}", "{resume_args}",
        ]}}),
    );
    let log = |generation: u64, rank: u64| {
        let log = format!("gen-{generation}/logs/rank-{rank}.log");
        let read = |run: std::path::PathBuf| std::fs::read_to_string(run.join(log)).ok();
        job.begun_run().and_then(read).unwrap_or_default()
    };
    let runs_on = |nodes: u64| {
        job.wait("its world", |status| {
            let current = status["jobGeneration"]["record"]["number"].as_u64();
            let began = |rank| !log(current.unwrap_or(0), rank).is_empty();
            status["phase"] == "Running" && status["nodes"] == nodes && (0..2 * nodes).all(began)
        })
    };
    runs_on(3);
    let _restored = restored("kubectl", &["uncordon", "node3"]);
    kubectl(&["cordon", "node3"]);
    let status = runs_on(2);
    let second = &status["jobGeneration"]["record"];
    assert_eq!(second["number"], 2, "{second}");
    for rank in 0..4 {
        // The path of the volume differs between this machine and the pods.
        let text = log(2, rank);
        let (numbers, checkpoint) = text.trim().split_once(" --from ").unwrap();
        assert_eq!(numbers, format!("{rank}/4 4x6"));
        assert!(checkpoint.ends_with("/checkpoints/step-1"), "{text}");
    }
    job.wait("its checkpoint in the status", |status| {
        let path = status["externalCheckpoint"]["path"].as_str();
        path.is_some_and(|path| path.ends_with("/step-1"))
    });
    std::fs::write(job.run().join("stop"), "").unwrap();
    job.wait("its end", |status| status["phase"] == "Complete");
}
