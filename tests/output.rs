//! Output errors of commands: a full disk gives an error message, a reader that has closed the pipe
//! does not. Also the notes beside a result.

use std::fs::OpenOptions;
use std::process::{Command, Stdio};

const CALLS: &[&[&str]] = &[
    &["--help"],
    &["--version"],
    &["plan", "examples/quickstart.yaml"],
    &["plan", "examples/quickstart.yaml", "-o", "json"],
    &["plan", "examples/quickstart.yaml", "-o", "yaml"],
    &["check", "examples/quickstart.yaml"],
    &["check", "examples/quickstart.yaml", "-o", "yaml"],
    &["check", "examples/quickstart.yaml", "-o", "sarif"],
    &[
        "plan",
        "examples/quickstart.yaml",
        "--gpus",
        "1",
        "--emit",
        "env",
    ],
    &[
        "plan",
        "--estimate",
        "--model",
        "7B",
        "--gpus",
        "1",
        "--device-memory",
        "24GB",
    ],
    &[
        "plan",
        "--estimate",
        "--model",
        "7B",
        "--gpus",
        "1",
        "--device-memory",
        "24GB",
        "model.precision=bf16",
        "parallel.strategy=fsdp",
    ],
    &["explain"],
    &["explain", "batch-divisible"],
    &["gpus"],
    &["gpus", "-o", "json"],
    &["status"],
    &["status", "-o", "json"],
];

fn evenkeel(call: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
    command.args(call).stderr(Stdio::piped());
    command
}

#[test]
fn a_full_standard_output_is_an_error_with_a_message() {
    for call in CALLS {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ended = evenkeel(call).stdout(full).output().unwrap();
        let message = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(2), "{call:?}: {message}");
        assert!(
            message.starts_with("error: cannot write to standard output: No space left"),
            "{call:?}: {message}"
        );
        assert_eq!(message.lines().count(), 1, "{call:?}: {message}");
        assert_eq!(
            message.matches("No space left").count(),
            1,
            "{call:?}: {message}"
        );
    }
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    for call in CALLS {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ended = evenkeel(call).stdout(writer).output().unwrap();
        let message = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(
            (ended.status.code(), message.as_str()),
            (Some(0), ""),
            "{call:?}"
        );
    }
}

#[test]
fn a_full_standard_error_does_not_change_how_a_command_ends() {
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    for (call, code) in [
        (&["explain", "nope"][..], 2),
        (&["plan", "nowhere.yaml"], 2),
        (&["plan", "--nonsense"], 2),
    ] {
        let status = evenkeel(call).stderr(full()).stdout(full()).status();
        assert_eq!(status.unwrap().code(), Some(code), "{call:?}");
    }
}

#[test]
fn a_dry_run_prints_the_job_and_the_notes_about_its_command() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("own.yaml");
    let text = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  \
                batch: {global: 64, per_device_batch_size: 8}\n  \
                trainer: {command: [python, train.py, --batch, '{per_device_batch_size}'], checkpoint_dir: /volume/out}\n";
    std::fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    let call = [
        "launch",
        path.as_str(),
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--dry-run",
    ];
    let ended = evenkeel(&call).output().unwrap();
    let message = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(0), "{message}");
    assert!(
        message.contains("the command does not use {resume_args}"),
        "{message}"
    );
    let job = String::from_utf8(ended.stdout).unwrap();
    assert!(job.contains("kind: TrainingJob"), "{job}");
}
