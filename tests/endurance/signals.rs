//! Signals at every stage of a launch: during data preparation, waiting and training.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::support::{Launched, Run, small, wait_for};

/// A corpus that takes some seconds to prepare.
fn corpus(place: &Path) -> PathBuf {
    let path = place.join("corpus.jsonl");
    let line = format!("{{\"text\": \"{}\"}}\n", "abcdefgh".repeat(12));
    std::fs::write(&path, line.repeat(1_000_000)).unwrap();
    path
}

fn with_data(path: &Path) -> Value {
    small(json!({
        "tokenizer": {"path": "byte"},
        "model": {"config": {"vocab_size": 512}},
        "data": {"train": [{"path": path, "synthetic": null}]},
    }))
}

fn ended(run: &Run, launched: Launched, signal: Signal) -> Option<i32> {
    launched.signal(signal);
    let code = launched.wait().code();
    assert!(
        run.log().contains("no process was started"),
        "{}",
        run.log()
    );
    code
}

#[test]
fn a_signal_during_data_preparation_leaves_no_files() {
    let place = tempfile::tempdir().unwrap();
    let corpus = corpus(place.path());
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let run = Run::of(with_data(&corpus));
        let launched = run.start_with_hangups(&[]);
        wait_for("the data to be written", || {
            run.out().join(".data.partial/train").exists().then_some(())
        });
        assert_eq!(ended(&run, launched, signal), Some(code), "{}", run.log());
        assert!(!run.out().exists());
    }
}

#[test]
fn a_signal_before_a_resumed_run_trains_leaves_it_unchanged() {
    let run = Run::of(small(json!({})));
    run.drained(&["--procs", "2"]);
    // The lock of a running old rank makes a resume wait.
    let rank = std::fs::File::open(run.out().join("gen-1/ranks.lock")).unwrap();
    rank.lock_shared().unwrap();
    let files = || ["run.json", "state.json"].map(|name| std::fs::read(run.out().join(name)).ok());
    let before = files();
    let resumed = run.start(&["--procs", "2", "--resume"]);
    wait_for("the resume to hold the run", || {
        let holder = std::fs::read_to_string(run.out().join("lock")).ok()?;
        (holder.trim() == resumed.id().to_string()).then_some(())
    });
    assert_eq!(
        ended(&run, resumed, Signal::INT),
        Some(143),
        "{}",
        run.log()
    );
    assert_eq!(files(), before);
    drop(rank);
    let output = run.launch(&["--procs", "2", "--resume", "--quiet"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(run.prove()["samples"], 2400);
}

#[test]
fn a_closed_terminal_drains_unless_hangups_are_ignored() {
    let run = Run::of(small(json!({})));
    let launched = run.start_with_hangups(&["--procs", "2"]);
    run.wait_for_steps(1, 5);
    launched.signal(Signal::HUP);
    assert_eq!(launched.wait().code(), Some(143), "{}", run.log());
    assert_eq!(run.state().unwrap()["phase"]["phase"], "drained");

    let run = Run::of(small(json!({})));
    let launched = run.start_without_hangups(&["--procs", "2"]);
    run.wait_for_steps(1, 5);
    launched.signal(Signal::HUP);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [2]);
}

/// A busy machine may leave the launcher no time to read its ranks' reports.
#[test]
fn an_interrupt_drains_ranks_whose_reports_were_not_read() {
    let run = Run::of(small(json!({"budget": {"samples": 120_000}})));
    let launched = run.start(&["--procs", "1"]);
    run.rank(1, 0);
    launched.signal(Signal::STOP);
    run.wait_for_steps(1, 5);
    launched.signal(Signal::INT);
    launched.signal(Signal::CONT);
    assert_eq!(launched.wait().code(), Some(143), "{}", run.log());
    let state = run.state().unwrap();
    assert!(
        state["checkpoint_ref"].is_object(),
        "{state:#}\n{}",
        run.log()
    );
}
