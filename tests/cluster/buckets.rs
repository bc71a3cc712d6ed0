//! Jobs whose pods share nothing but a bucket: losses, fences and rescales as on a volume, and a bucket that is
//! missing, refuses, empties or is away for a while.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use evenkeel::bucket::Bucket;
use serde_json::{Value, json};

use super::support::{
    Job, kit, kubectl, node_without_controller, output_text, poll, recipe, restored, s3_environment,
};
use super::{elastic, fencing};

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_job_completes_on_a_bucket() {
    elastic::completes(Job::with_bucket("bucket-whole"));
}

#[test]
#[ignore = "takes a minute: scripts/nightly.sh"]
fn a_node_without_power_is_left_on_a_bucket() {
    elastic::loses_power(Job::with_bucket("bucket-power"));
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn three_two_one_three_nodes_keep_the_batch_on_a_bucket() {
    elastic::moves_over_the_pool(Job::with_bucket("bucket-steps"));
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_suspended_job_resumes_from_a_bucket() {
    elastic::is_suspended(Job::with_bucket("bucket-suspend"));
}

#[test]
#[ignore = "takes a minute: scripts/nightly.sh"]
fn a_node_behind_a_network_partition_commits_nothing_to_a_bucket() {
    fencing::is_cut_off(Job::with_bucket("bucket-cut"));
}

/// Waits until a pod reports this problem.
fn wait_for_message(job: &Job, problem: &str) {
    let says = |status: &Value| {
        status["message"]
            .as_str()
            .is_some_and(|text| text.contains(problem))
    };
    job.wait(problem, says);
}

#[test]
fn a_missing_bucket_is_reported_and_the_job_starts_with_data_from_another_once_it_exists() {
    let job = Job::with_bucket("bucket-missing");
    let place = job.volume().to_owned();
    std::fs::remove_dir(&place).unwrap();
    let data = Job::with_bucket("bucket-data");
    let bucket = Bucket::open_with("s3://bucket-data", s3_environment()).unwrap();
    let text: String = (0..20_000).map(|i| format!("{} ", i * i % 97)).collect();
    bucket.put("numbers.txt", text.into_bytes()).unwrap();
    let mut own = recipe(4800);
    own["spec"]["tokenizer"] = json!({"path": "byte"});
    own["spec"]["model"]["config"]["vocab_size"] = json!(259);
    own["spec"]["data"] = json!({"sequence_length": 32, "held_out": 96, "packing": true,
        "train": [{"path": "s3://bucket-data/*.txt"}]});
    let job = job.start(&own, json!({}));
    wait_for_message(&job, "there is no such bucket");
    std::fs::create_dir(&place).unwrap();
    job.finish(96);
    drop(data);
}

#[test]
fn a_server_that_is_away_for_a_while_costs_no_sample() {
    let job = Job::with_bucket("bucket-away").start(&recipe(2_000_000), json!({}));
    let before = job.wait("a checkpoint", |status| status["checkpoint"].is_object());
    kit(&["restart", "s3", "15"]);
    let step = |status: &Value| status["checkpoint"]["step"].as_u64().unwrap_or(0);
    let after = job.wait("a later checkpoint", |status| {
        step(status) > step(&before) + 100
    });
    assert_eq!(after["restarts"], 0, "{after:#}");
    assert_eq!(after["history"].as_array().unwrap().len(), 1);
    job.settle(96);
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_bucket_emptied_under_a_running_job_is_reported() {
    let job = Job::with_bucket("bucket-emptied").start(&recipe(2_000_000), json!({}));
    job.wait("a checkpoint", |status| status["checkpoint"].is_object());
    job.patch(json!({"suspend": true}));
    job.wait("its suspension", |status| status["phase"] == "Suspended");
    let run = job.run();
    let kept = run.with_extension("kept");
    std::fs::rename(&run, &kept).unwrap();
    job.patch(json!({"suspend": false}));
    wait_for_message(&job, "the object does not exist");
    // What its pods wrote since is not the run.
    let _ = std::fs::remove_dir_all(&run);
    std::fs::rename(&kept, &run).unwrap();
    job.wait_training_on(3);
    job.settle(96);
}

/// A trainer whose ranks each save a part of every checkpoint, on the disks of their pods. It resumes only from a
/// checkpoint with all parts, and needs what the setup command has made.
const TRAINER: &str = r#"
[ -e made-by-setup ] && [ "$GREETING" = "from --env" ] && [ -n "$AWS_REGION" ] || exit 1
step=0
if [ "$1" = --from ]; then
  step=${2##*/step-}
  world=$(/bin/busybox cat "$2/world")
  while [ "${rank:=0}" -lt "$world" ]; do
    [ -e "$2/rank-$rank" ] || { echo "rank $rank is missing in $2"; exit 1; }
    rank=$((rank + 1))
  done
fi
trap 'exit 143' TERM
while [ "$step" -lt 400 ]; do
  step=$((step + 1))
  /bin/busybox sleep 0.1
  if [ $((step % 40)) = 0 ]; then
    /bin/busybox mkdir -p "$EVENKEEL_CHECKPOINT_DIR/step-$step"
    echo "$step" > "$EVENKEEL_CHECKPOINT_DIR/step-$step/rank-$RANK"
    [ "$RANK" != 0 ] || echo "$WORLD_SIZE" > "$EVENKEEL_CHECKPOINT_DIR/step-$step/world"
  fi
done
[ "$RANK" != 0 ] || echo trained > "$EVENKEEL_CHECKPOINT_DIR/model.safetensors"
"#;

#[test]
fn a_folder_of_scripts_trains_on_a_bucket_from_one_command() {
    let job = Job::with_bucket("scripts");
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.sh"), TRAINER).unwrap();
    let mut own = recipe(40_000);
    own["spec"]["trainer"] = json!({"resume": ["--from", "{checkpoint}"]});
    std::fs::write(folder.path().join("recipe.yaml"), own.to_string()).unwrap();
    let launched = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .current_dir(folder.path())
        .args("launch recipe.yaml --nodes 3 --gpus-per-node 2 --name scripts --bucket s3://scripts/runs".split(' '))
        .args("--image evenkeel.test/busybox:1 --env-from secret/s3 --detach -n default".split(' '))
        .args(["--setup", "echo done > made-by-setup", "--env", "GREETING=from --env"])
        .args("-- /bin/busybox sh train.sh {resume_args}".split(' '))
        .output()
        .unwrap();
    let text = output_text(&launched);
    assert!(launched.status.success(), "{text}");
    assert!(text.contains("code: 2 files of ., "), "{text}");
    job.wait("its ranks", |status| {
        status["phase"] == "Running" && status["nodes"] == 3
    });
    let whole = |generation: u64| -> Option<PathBuf> {
        let parts = job
            .begun_run()?
            .join(format!("gen-{generation}/external-000001"));
        let all = (0..3).all(|part| parts.join(format!("part-{part}-of-3.json")).is_file());
        all.then_some(parts)
    };
    let show = || output_text(&Command::new("find").arg(job.volume()).output().unwrap());
    poll("a checkpoint of all pods", || whole(1), show);
    let (pod, _) = job.pods().pop_last().unwrap();
    kubectl(&["delete", "pod", &pod, "--wait=false"]);
    let status = job.wait("its end", |status| status["phase"] == "Complete");
    let call = std::fs::read_to_string(job.run().join("gen-2/call.json")).unwrap();
    assert!(call.contains("gen-1/external-00"), "{call}");
    assert_eq!(status["restarts"], 0, "{status:#}");
    let last = status["history"].as_array().unwrap().len();
    let model = job
        .run()
        .join(format!("gen-{last}/output/model.safetensors"));
    let kept = || std::fs::read_to_string(&model).ok();
    assert_eq!(poll("the model", kept, show), "trained\n");
}

/// A trainer whose rank 0 alone saves.
const FIRST_SAVES: &str = r#"
step=0
[ "$1" != --from ] || step=${2##*/step-}
trap 'exit 143' TERM
while true; do
  step=$((step + 1))
  /bin/busybox sleep 0.1
  if [ "$RANK" = 0 ] && [ $((step % 40)) = 0 ]; then
    /bin/busybox mkdir -p "$EVENKEEL_CHECKPOINT_DIR/step-$step"
    echo "$step" > "$EVENKEEL_CHECKPOINT_DIR/step-$step/weights"
  fi
done
"#;

#[test]
fn a_lost_node_costs_no_checkpoint_that_the_first_pod_has_saved() {
    let mut own = recipe(4800);
    own["spec"]["trainer"] = json!({"resume": ["--from", "{checkpoint}"]});
    let command = [
        "/bin/busybox",
        "sh",
        "-c",
        FIRST_SAVES,
        "sh",
        "{resume_args}",
    ];
    let more = json!({"image": "evenkeel.test/busybox:1", "trainer": {"command": command}});
    let job = Job::with_bucket("first-saves").start(&own, more);
    let trains =
        |status: &Value, nodes: u64| status["phase"] == "Running" && status["nodes"] == nodes;
    let before = job.wait("three nodes", |status| trains(status, 3));
    let whole = || {
        let parts = job.begun_run()?.join("gen-1/external-000002");
        let all = (0..3).all(|part| parts.join(format!("part-{part}-of-3.json")).is_file());
        all.then_some(())
    };
    let show = || output_text(&Command::new("find").arg(job.volume()).output().unwrap());
    poll("a second checkpoint of all pods", whole, show);
    // The first pod stays.
    let members = before["jobGeneration"]["record"]["members"]
        .as_array()
        .unwrap();
    let first = members[0]["pod"]["node"].as_str().unwrap();
    let node = Some(node_without_controller()).filter(|node| node != first);
    let mut others = members[1..].iter().map(|member| &member["pod"]["node"]);
    let node = node.unwrap_or_else(|| others.next_back().unwrap().as_str().unwrap().to_owned());
    let lost = Instant::now();
    {
        let _restored = restored("kit", &["return", &node]);
        kit(&["lose", &node]);
        let call = job.run().join("gen-2/call.json");
        let record = job.run().join("gen-2/record.json");
        let begun = || Some(std::fs::read(&call).ok()?).filter(|_| record.is_file());
        let call = poll("the next generation", begun, show);
        let seconds = lost.elapsed().as_secs_f64();
        let chosen: Value = serde_json::from_slice(&call).unwrap();
        let prefix = chosen["prefix"].as_str().unwrap();
        let number: u64 = prefix.rsplit('-').next().unwrap().parse().unwrap();
        println!("{seconds:.1} s after the loss of {node} a generation resumes from {chosen}");
        assert!(prefix.starts_with("gen-1/") && number > 2, "{chosen}");
        assert_eq!(
            chosen["without"].as_array().map(Vec::len),
            Some(1),
            "{chosen}"
        );
        job.wait("two nodes", |status| trains(status, 2));
    }
    job.delete_whole();
}
