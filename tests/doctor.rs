//! `evenkeel doctor` on this machine. tests/hub, tests/cuda_launch.rs, tests/endurance/disk.rs and tests/cluster have
//! what it says of a hub, of GPUs, of a full disk and of a cluster.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// The command on a machine without GPUs, kubeconfig and network.
fn doctor(home: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
    command.current_dir(home).arg("doctor").args(words);
    for name in [
        "EVENKEEL_CUDA_LIBRARIES",
        "VIRTUAL_ENV",
        "KUBECONFIG",
        "KUBERNETES_SERVICE_HOST",
    ] {
        command.env_remove(name);
    }
    command.env("HOME", home).env("HF_HUB_OFFLINE", "1");
    command
}

/// The checks by their names, with the exit code.
fn checks(output: &Output) -> (Option<i32>, Value) {
    let text = String::from_utf8_lossy(&output.stdout);
    let problems = String::from_utf8_lossy(&output.stderr);
    let all: Vec<Value> =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}{problems}"));
    let named = all
        .into_iter()
        .map(|check| (check["name"].as_str().unwrap().to_owned(), check));
    (output.status.code(), Value::Object(named.collect()))
}

#[test]
fn training_on_a_machine_without_gpus_works() {
    let home = tempfile::tempdir().unwrap();
    let output = doctor(home.path(), &["-o", "json"]).output().unwrap();
    let (code, checks) = checks(&output);
    assert_eq!(code, Some(0), "{checks:#}");
    let state = |name: &str| checks[name]["state"].clone();
    for name in ["evenkeel", "memory", "disk", "training"] {
        assert_eq!(state(name), "works", "{checks:#}");
    }
    for name in ["GPUs", "CUDA", "hub", "cluster"] {
        assert_eq!(state(name), "absent", "{checks:#}");
    }
    let trained = checks["training"]["found"].as_str().unwrap();
    assert!(
        trained.starts_with("2 processes on the CPU took two steps"),
        "{trained}"
    );
    // Nothing is left behind.
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn what_an_option_asks_for_must_work() {
    let home = tempfile::tempdir().unwrap();
    for (words, name, next) in [
        (&["--gpus"][..], "GPUs", "NVIDIA"),
        (&["--hub"], "hub", "unset HF_HUB_OFFLINE"),
        (
            &["--cluster", "--kubeconfig", "none.yaml"],
            "cluster",
            "`kubectl config get-contexts`",
        ),
        (
            &["--bucket", "file:///tmp"],
            "bucket",
            "docs/checkpoints.md",
        ),
    ] {
        let asked = [words, &["-o", "json"]].concat();
        let (code, checks) = checks(&doctor(home.path(), &asked).output().unwrap());
        assert_eq!(code, Some(1), "{words:?}: {checks:#}");
        assert_eq!(checks[name]["state"], "fails", "{words:?}: {checks:#}");
        let said = checks[name]["next"].as_str().unwrap();
        assert!(said.contains(next), "{words:?}: {said}");
    }
    let output = doctor(home.path(), &["-n", "team-a"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("`--namespace` needs `--cluster`"), "{said}");
}

#[test]
fn the_text_ends_with_what_does_not_work() {
    let home = tempfile::tempdir().unwrap();
    let output = doctor(home.path(), &["--gpus"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        text.lines().last(),
        Some("training on this machine works; what was asked for does not: GPUs, CUDA")
    );
}
