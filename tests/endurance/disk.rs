//! Full disks under the real binary: a file system of a few megabytes in a private mount namespace.
//! Where the machine forbids mounts, the tests report that they are skipped.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::preferences::rows;
use super::support::{Run, small, stderr};

const DISK: &str = "EVENKEEL_TEST_DISK";

/// Mount point of a disk. The first process of a test runs the test again in a child with a private
/// mount namespace, and gets `None`.
fn disk(test: &str) -> Option<PathBuf> {
    if let Some(disk) = std::env::var_os(DISK) {
        return Some(disk.into());
    }
    let place = tempfile::tempdir().unwrap();
    let private = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["--map-root-user", "--mount"]);
        unshare
    };
    let possible = private()
        .args(["mount", "-t", "tmpfs", "tmpfs"])
        .arg(place.path())
        .output();
    if !possible.is_ok_and(|output| output.status.success()) {
        // Bypasses the test harness's capture.
        let _ = writeln!(
            std::io::stderr(),
            "skipped {test}: this machine does not let us mount a file system"
        );
        return None;
    }
    let output = private()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(DISK, place.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        stderr(&output)
    );
    None
}

fn mount(disk: &Path, options: &str) {
    let status = Command::new("mount")
        .args(["-t", "tmpfs", "-o", options, "tmpfs"])
        .arg(disk)
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn data_that_do_not_fit_are_refused_and_leave_no_files() {
    let Some(disk) = disk("disk::data_that_do_not_fit_are_refused_and_leave_no_files") else {
        return;
    };
    mount(&disk, "size=1m");
    let corpus = tempfile::tempdir().unwrap();
    let path = corpus.path().join("corpus.jsonl");
    let line = format!("{{\"text\": \"{}\"}}\n", "abcdefgh".repeat(4));
    std::fs::write(&path, line.repeat(40_000)).unwrap();
    let run = Run::of(small(json!({
        "tokenizer": {"path": "byte"},
        "model": {"config": {"vocab_size": 512}},
        "data": {"train": [{"path": path, "synthetic": null}]},
        "budget": {"samples": 24},
    })))
    .placed(disk.join("runs/run"));

    let output = run.launch(&["--quiet"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = stderr(&output);
    assert!(
        message.contains("no space left on the disk of"),
        "{message}"
    );
    assert!(message.contains(" needed"), "{message}");
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0, "{message}");

    mount(&disk, "remount,size=64m");
    let output = run.launch(&["--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(run.prove()["proved"], true);
}

#[test]
fn a_disk_full_of_checkpoints_ends_the_run_and_a_resume_continues_it() {
    let Some(disk) =
        disk("disk::a_disk_full_of_checkpoints_ends_the_run_and_a_resume_continues_it")
    else {
        return;
    };
    // A checkpoint takes about a megabyte, and all are kept.
    mount(&disk, "size=3500k");
    let run = Run::of(small(
        json!({"checkpoint": {"every_samples": 240, "keep": null}}),
    ))
    .placed(disk.join("run"));
    let output = run.launch(&["--quiet", "--procs", "2"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = stderr(&output);
    assert!(
        message.contains("no space left on the disk of"),
        "{message}"
    );
    assert!(message.contains("the last good checkpoint is"), "{message}");
    let pinned = run.state().unwrap()["checkpoint_ref"]["samples"]
        .as_u64()
        .unwrap();
    assert!(pinned >= 240);
    assert_eq!(run.worlds().len(), 1, "a full disk is not retried");

    // The disk is still full: an error, and no checkpoint is lost.
    let output = run.launch(&["--quiet", "--procs", "2", "--resume"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(stderr(&output).contains("no space left on the disk of"));
    assert!(
        run.state().unwrap()["checkpoint_ref"]["samples"]
            .as_u64()
            .unwrap()
            >= pinned
    );

    mount(&disk, "remount,size=64m");
    let output = run.launch(&["--quiet", "--procs", "2", "--resume"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let formula = run.prove();
    assert_eq!(
        (&formula["proved"], &formula["samples"]),
        (&json!(true), &json!(2400))
    );
}

/// A resume whose reference log-probabilities are lost computes them again.
#[test]
fn references_that_do_not_fit_are_removed_and_a_resume_computes_them() {
    let Some(_) = disk("disk::references_that_do_not_fit_are_removed_and_a_resume_computes_them")
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pairs.jsonl");
    std::fs::write(&path, rows("dpo", 2000)).unwrap();
    let run = Run::of(small(json!({
        "objective": "dpo",
        "model": {"config": {"vocab_size": 259}},
        "tokenizer": {"path": "byte"},
        "data": {"train": [{"path": path, "synthetic": null}]},
    })));
    run.drained(&["--procs", "2"]);
    let directory = run.out().join("data/reference");
    let file = directory.join("train.bin");
    let whole = std::fs::read(&file).unwrap();
    assert!(whole.len() > 32_000);
    std::fs::remove_file(&file).unwrap();
    mount(&directory, "size=16k");

    let again = ["--quiet", "--procs", "2", "--resume"];
    let output = run.launch(&again);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = stderr(&output);
    for expected in [
        format!(
            "the reference log-probabilities are computed again: {} is missing or incomplete",
            file.display()
        ),
        format!(
            "no space left on the disk of {} while writing {}: {} needed",
            directory.display(),
            file.display(),
            evenkeel::util::format::bytes(whole.len() as u64)
        ),
    ] {
        assert!(message.contains(&expected), "{expected}: {message}");
    }
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
    assert_eq!(run.worlds().len(), 2, "a full disk is not retried");

    mount(&directory, "remount,size=64k");
    let output = run.launch(&again);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(run.prove()["proved"], true);
    assert_eq!(std::fs::read(&file).unwrap(), whole);
}

#[test]
fn a_file_size_limit_is_reported_as_an_error() {
    let run = Run::of(small(json!({})));
    // In blocks of 512 bytes; every large file of a checkpoint exceeds the limit.
    let launched = run.start_in_shell("ulimit -f 100", &["--quiet", "--procs", "2"]);
    assert_eq!(launched.wait().code(), Some(1), "{}", run.log());
    let log = run.log();
    assert!(log.contains("(ulimit -f, or the largest file"), "{log}");
    assert!(!log.contains("signal"), "{log}");

    let output = run.launch(&["--quiet", "--procs", "2", "--resume"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(run.prove()["proved"], true);
}

#[test]
fn a_disk_filled_by_another_process_loses_no_checkpoint() {
    let Some(disk) = disk("disk::a_disk_filled_by_another_process_loses_no_checkpoint") else {
        return;
    };
    mount(&disk, "size=16m");
    let run =
        Run::of(small(json!({"checkpoint": {"every_samples": 120}}))).placed(disk.join("run"));
    let launched = run.start(&["--procs", "2"]);
    run.wait_for_steps(1, 15);
    let filler = disk.join("filler");
    let full = std::fs::write(&filler, vec![1; 16 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(launched.wait().code(), Some(1), "{}", run.log());
    let log = run.log();
    assert!(
        log.contains("no space left") || log.contains("No space left"),
        "{log}"
    );

    std::fs::remove_file(filler).unwrap();
    let output = run.launch(&["--quiet", "--procs", "2", "--resume"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let formula = run.prove();
    assert_eq!(
        (&formula["proved"], &formula["samples"]),
        (&json!(true), &json!(2400))
    );
}

#[test]
fn the_doctor_finds_a_full_disk() {
    let Some(disk) = disk("disk::the_doctor_finds_a_full_disk") else {
        return;
    };
    mount(&disk, "size=64k");
    let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .arg("doctor")
        .current_dir(&disk)
        .env("HF_HUB_OFFLINE", "1")
        .env_remove("KUBECONFIG")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("NO  disk          this directory cannot be written"),
        "{text}"
    );
    assert!(text.contains("No space left on device"), "{text}");
    assert!(
        text.ends_with("training on this machine does not work: disk, training\n"),
        "{text}"
    );
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0);
}
