//! Refused launches: no process starts, no file stays, and the message names a remedy. Also
//! launches that look invalid and are accepted.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use super::support::{Run, evenkeel, small, stderr};

/// A model directory with only its `config.json`.
fn config_only(directory: &Path) -> Value {
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 64,
    });
    std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
    json!({"path": directory, "config": null})
}

#[test]
fn a_refused_launch_leaves_no_files() {
    let place = tempfile::tempdir().unwrap();
    let broken = place.path().join("broken.jsonl");
    std::fs::write(&broken, "{\"text\": \"abc\"}\n{\"text\": 7}\n").unwrap();
    let short = place.path().join("short.jsonl");
    std::fs::write(&short, "{\"text\": \"abc\"}\n").unwrap();
    let model = place.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let with_data = |path: &Path| {
        json!({
            "tokenizer": {"path": "byte"},
            "model": {"config": {"vocab_size": 512}},
            "data": {"train": [{"path": path}]},
        })
    };
    let mut wrong_weights = config_only(&model);
    std::fs::write(model.join("model.safetensors"), "half of it").unwrap();
    wrong_weights = json!({"model": wrong_weights});
    // This problem is detected only after the data are prepared.
    let mut whole_batches = with_data(&short);
    // The recipe also has a warning.
    whole_batches["batch"] = json!({"last_batch": "drop"});
    whole_batches["optimizer"] = json!({"name": "adamw_8bit"});
    for (changes, code, expected) in [
        (
            json!({"model": {"path": "./nowhere", "config": null}}),
            1,
            "nowhere",
        ),
        (wrong_weights, 2, "model.safetensors"),
        (
            with_data(&place.path().join("absent.jsonl")),
            1,
            "absent.jsonl",
        ),
        (with_data(&broken), 2, "broken.jsonl"),
        (whole_batches, 1, "one global batch takes 12"),
        (json!({"batch": {"global": 13}}), 1, "13"),
    ] {
        let run = Run::of(small(changes.clone()));
        let output = run.launch(&["--procs", "2"]);
        assert_eq!(output.status.code(), Some(code), "{changes}: {output:?}");
        let message = stderr(&output);
        assert!(message.contains(expected), "{changes}: {message}");
        // A rule points at the line.
        assert_eq!(
            message.contains("recipe.yaml:1:"),
            code == 1,
            "{changes}: {message}"
        );
        // Diagnostics printed before the data were counted are not repeated.
        let problems = message.lines().filter(|line| {
            ["error[", "warning["]
                .iter()
                .any(|start| line.starts_with(start))
        });
        let problems: Vec<&str> = problems.collect();
        let distinct: BTreeSet<&&str> = problems.iter().collect();
        assert_eq!(distinct.len(), problems.len(), "{message}");
        assert!(!run.out().exists(), "{changes}: {message}");
    }
}

#[test]
fn a_refused_resume_leaves_the_run_unchanged() {
    let place = tempfile::tempdir().unwrap();
    let corpus = place.path().join("corpus.jsonl");
    std::fs::write(&corpus, "{\"text\": \"abcdefgh\"}\n".repeat(100)).unwrap();
    let run = Run::of(small(json!({
        "tokenizer": {"path": "byte"},
        "model": {"config": {"vocab_size": 512}},
        "data": {"train": [{"path": corpus, "synthetic": null}]},
    })));
    let launched = run.start(&[]);
    run.wait_for_steps(1, 1);
    run.drain(launched);

    let before = std::fs::read(run.out().join("run.json")).unwrap();
    std::fs::write(&corpus, "{\"text\": \"other\"}\n".repeat(100)).unwrap();
    let output = run.launch(&["--resume", "--rank-memory", "1GiB"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = stderr(&output);
    assert!(message.contains("changed: training data"), "{message}");
    assert_eq!(std::fs::read(run.out().join("run.json")).unwrap(), before);

    // Without the data, the run record still knows the original data.
    std::fs::remove_dir_all(run.out().join("data")).unwrap();
    let output = run.launch(&["--resume"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = stderr(&output);
    assert!(
        message.contains("the run began with other data"),
        "{message}"
    );
    assert!(!run.out().join("data").exists());
    assert_eq!(std::fs::read(run.out().join("run.json")).unwrap(), before);
}

#[test]
fn a_global_batch_from_the_command_line_applies_to_every_plan_of_the_run() {
    let run = Run::of(small(json!({
        "batch": {"global": null, "per_device_batch_size": 2, "accumulation": 3, "gpus": 2},
        "budget": {"samples": 96},
    })));
    let output = run.launch(&["--procs", "2", "batch.global=24"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("24 counts; remove it to keep 12"));
    assert_eq!(run.proofs(), ["2 × 2 × 6 = 24"]);
    assert_eq!(run.prove()["proved"], true);
}

#[test]
fn a_directory_with_unrelated_files_stays_unchanged() {
    let run = Run::of(small(json!({})));
    std::fs::write(run.out(), "mine").unwrap();
    let output = run.launch(&[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = stderr(&output);
    assert!(
        message.contains("set another directory with --out"),
        "{message}"
    );
    assert_eq!(std::fs::read(run.out()).unwrap(), b"mine");

    std::fs::remove_file(run.out()).unwrap();
    std::fs::create_dir_all(run.out().join("data")).unwrap();
    let corpus = run.out().join("data/corpus.txt");
    std::fs::write(&corpus, "mine").unwrap();
    let output = run.launch(&[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(stderr(&output).contains("files that are not part of a run (data)"));
    assert_eq!(std::fs::read(corpus).unwrap(), b"mine");
    assert_eq!(std::fs::read_dir(run.out()).unwrap().count(), 1);
}

#[test]
fn a_model_with_only_a_config_starts_from_random_weights() {
    let model = tempfile::tempdir().unwrap();
    let run = Run::of(small(json!({
        "model": config_only(model.path()), "budget": {"samples": 24},
    })));
    let output = run.launch(&["--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let message = stderr(&output);
    assert!(
        message.contains("contains no weights: the run starts from random"),
        "{message}"
    );
    assert_eq!(run.prove()["proved"], true);
}

#[test]
fn a_path_that_is_not_utf_8_is_refused_before_any_file_is_written() {
    let run = Run::of(small(json!({"budget": {"samples": 24}})));
    let name = std::ffi::OsStr::from_bytes(b"caf\xe9");
    let run = run.beside(name);
    let output = run.launch(&["--quiet"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        stderr(&output).contains("is not UTF-8"),
        "{}",
        stderr(&output)
    );
    assert!(!run.out().exists());
}

#[test]
fn states_beyond_a_ranks_memory_are_refused_before_any_file_is_written() {
    let run = Run::of(small(json!({"budget": {"samples": 24}})));
    let output = run.launch(&["--quiet", "--rank-memory", "64KiB"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = stderr(&output);
    assert!(message.contains("error[rank-memory]"), "{message}");
    assert!(message.contains("a rank may use 64.0 KiB"), "{message}");
    assert!(!run.out().exists());
}

#[test]
fn concurrent_launches_get_separate_directories() {
    let run = Run::of(small(json!({"budget": {"samples": 24}})));
    let launch = || {
        let mut launch = evenkeel();
        launch
            .current_dir(run.scratch())
            .args(["launch", "recipe.yaml", "--quiet"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        launch.spawn().unwrap()
    };
    let launched: Vec<_> = (0..4).map(|_| launch()).collect();
    for launch in launched {
        let output = launch.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let runs = std::fs::read_dir(run.scratch().join("runs")).unwrap();
    let names = runs.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let expected = ["run", "run-2", "run-3", "run-4"].map(str::to_owned);
    assert_eq!(names.collect::<BTreeSet<_>>(), BTreeSet::from(expected));
}

#[test]
fn flags_for_different_worlds_are_refused() {
    let run = Run::of(small(json!({"budget": {"samples": 24}})));
    let output = run.launch(&["--procs", "2", "--gpus", "3"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!run.out().exists());
    let output = run.launch(&["--gpus", "2"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let log = String::from_utf8_lossy(&output.stdout);
    assert!(log.contains("2 processes on the CPU"), "{log}");
    assert_eq!(run.worlds(), [2]);
}

#[test]
fn weights_that_are_not_finite_end_the_run_at_once() {
    let place = tempfile::tempdir().unwrap();
    let source = Run::of(small(json!({"budget": {"samples": 12}})));
    assert!(source.launch(&["--procs", "1"]).status.success());
    let checkpoint = source.out().join("gen-1/step-0000001");
    // A copy that is no checkpoint of Evenkeel, with a NaN at the end of the first block.
    for entry in std::fs::read_dir(&checkpoint).unwrap() {
        let path = entry.unwrap().path();
        if !path.ends_with("manifest.json") {
            std::fs::copy(&path, place.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let shard = place.path().join("model-00002-of-00004.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let end = bytes.len() - 4;
    bytes[end..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&shard, bytes).unwrap();
    let run = Run::of(small(
        json!({"model": {"path": place.path(), "config": null}}),
    ));
    let output = run.launch(&["--procs", "2"]);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains("model-00002-of-00004.safetensors: 1 of the "),
        "{message}"
    );
    assert!(!run.out().join("gen-2").exists(), "{message}");
}
