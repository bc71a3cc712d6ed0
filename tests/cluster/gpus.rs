//! A TrainingJob on emulated GPUs. Pods, kubelets, ranks and their kernels are those of real GPUs.

use std::process::Command;

use serde_json::{Value, json};

use crate::losses;
use crate::support::{Job, kubectl};

/// The program with emulated GPUs and NVRTC; `scripts/cluster-images.sh` makes it.
const IMAGE: &str = "evenkeel.test/gpu:1";

/// A model of which an emulated GPU trains a step in a second.
fn recipe() -> Value {
    json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "gpus"},
        "spec": {
            "batch": {"global": 16, "per_device_batch_size": 2},
            "model": {"init": "random", "config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
                "max_position_embeddings": 16, "tie_word_embeddings": true}},
            "data": {"sequence_length": 16, "train": [{"path": "synthetic",
                "synthetic": {"vocabulary": 64, "branching": 4, "samples": 2000}}]},
            "budget": {"samples": 400},
            "learning_rate": {"peak": 3.0e-3},
            "checkpoint": {"every_samples": 80, "keep": 3},
        },
    })
}

/// Fields of a job on emulated GPUs, two on each node; `None`, after printing the reason, without NVRTC.
fn on_gpus() -> Option<Value> {
    let given = std::env::var("EVENKEEL_CUDA_LIBRARIES").unwrap_or_default();
    if given.is_empty() {
        // In CI, scripts/test.sh has installed NVRTC.
        assert!(
            std::env::var_os("CI").is_none(),
            "set EVENKEEL_CUDA_LIBRARIES"
        );
        eprintln!("skipped: no job runs on emulated GPUs (set EVENKEEL_CUDA_LIBRARIES to NVRTC's)");
        return None;
    }
    let variable = |name: &str, value: &str| json!({"name": name, "value": value});
    Some(json!({
        "image": IMAGE, "nodes": 2,
        "trainer": {"device": "Cuda", "env": [
            variable("LD_LIBRARY_PATH", "/cuda"),
            variable("EVENKEEL_CUDA_LIBRARIES", "/cuda"),
            variable("XDG_CACHE_HOME", "/tmp"),
            variable("EMULATED_GPU_DEVICES", "2"),
            variable("EMULATED_NCCL_ADDRESS", "$(POD_IP)"),
        ]},
    }))
}

/// Asserts that a finished job has the losses of an undisturbed run on the CPU.
fn assert_losses_of_a_cpu(job: &Job) {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("recipe.yaml"), recipe().to_string()).unwrap();
    let run = place.path().join("run");
    let launched = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .current_dir(place.path())
        .args(["launch", "recipe.yaml", "--device", "cpu", "--quiet"])
        .arg("--out")
        .arg(&run)
        .status();
    assert!(launched.unwrap().success());
    let (gpus, cpu) = (losses::of(&job.run()), losses::of(&run));
    assert_eq!(gpus.len(), 25);
    for (gpu, cpu) in gpus.iter().zip(&cpu) {
        assert_eq!(gpu.0, cpu.0);
        assert!((gpu.1 - cpu.1).abs() <= 1e-5 * cpu.1, "{gpu:?} {cpu:?}");
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_job_on_gpus_shrinks_with_the_losses_of_a_cpu() {
    let Some(more) = on_gpus() else {
        return;
    };
    let job = Job::apply("gpus", &recipe(), more);
    let status = job.wait_training_on(2);
    assert_eq!(status["plan"]["warnings"], Value::Null, "{status:#}");
    kubectl(&["scale", "tj", "gpus", "--replicas=1"]);
    job.wait_training_on(1);
    job.finish(16);
    assert_losses_of_a_cpu(&job);
}

#[test]
fn a_sharded_job_leaves_the_node_of_a_lost_gpu() {
    let Some(mut more) = on_gpus() else {
        return;
    };
    // The faults of a node's GPUs.
    let field = json!({"fieldRef": {"fieldPath": "spec.nodeName"}});
    let faults = "/checkpoints/faults/$(NODE).json";
    more["podTemplate"] = json!({"spec": {"containers": [{"name": "trainer", "env": [
        {"name": "NODE", "valueFrom": field},
        {"name": "EMULATED_GPU_FAULTS", "value": faults},
    ]}]}});
    more["overrides"] = json!(["parallel.strategy=fsdp"]);
    let job = Job::apply("lost-gpu", &recipe(), more);
    job.wait_training_on(2);
    let nodes = || {
        let selector = "evenkeel.dev/job=lost-gpu";
        let path = "jsonpath={.items[*].spec.nodeName}";
        let nodes = kubectl(&["get", "pods", "-l", selector, "-o", path]);
        nodes.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    let node = nodes().remove(0);
    let faults = job.volume().join("faults");
    std::fs::create_dir(&faults).unwrap();
    let lost = r#"{"1": {"lost": true, "xid": 79}}"#;
    std::fs::write(faults.join(format!("{node}.json")), lost).unwrap();
    let left = |status: &Value| status["phase"] == "Running" && !nodes().contains(&node);
    let status = job.wait("another world without the node", left);
    let lost = status["history"][1]["message"].as_str().unwrap();
    assert!(lost.contains("its GPU GPU-"), "{lost}");
    job.finish(16);
    assert_losses_of_a_cpu(&job);
}
