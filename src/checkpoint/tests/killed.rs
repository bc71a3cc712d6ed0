//! `kill -9` during the write of a checkpoint.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::*;

const RUN: &str = "EVENKEEL_TEST_RUN";

/// Starts one of the child tests below; returns its output's lines.
fn start(test: &str, run: &Path) -> (Child, impl Iterator<Item = String>) {
    let command = this_test(&format!("killed::{test}"), RUN, run);
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output.lines().map(Result::unwrap))
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_kill_between_units_leaves_the_last_good_checkpoint_and_a_partial_one() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let good = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let (child, mut lines) = start("child_that_stops_between_units", run.path());
    assert!(lines.any(|line| line.contains("half of it is written")));
    kill(child);

    let unfinished = target(run.path(), 1, 2);
    let left = std::fs::read_dir(unfinished.partial()).unwrap().count();
    assert!(left >= 2, "{left} files");
    assert_eq!(
        list(run.path()).unwrap().committed,
        std::slice::from_ref(&good)
    );
    assert_whole(&good, &layout);

    // A sweep keeps its own generation; a later generation's launcher removes it.
    assert!(sweep(run.path(), 1).unwrap().is_empty());
    assert_eq!(sweep(run.path(), 2).unwrap(), [unfinished.partial()]);
    assert!(!unfinished.partial().exists());
    assert_whole(&good, &layout);
}

#[test]
fn a_kill_at_any_moment_leaves_only_complete_checkpoints() {
    let layout = default_layout();
    for round in 1..=4 {
        let run = tempfile::tempdir().unwrap();
        let (child, lines) = start("child_that_writes_on_and_on", run.path());
        let promised: Vec<Committed> = lines
            .filter_map(|line| {
                let (_, json) = line.split_once("committed: ")?;
                serde_json::from_str(json).ok()
            })
            .take(round)
            .collect();
        kill(child);
        let history = list(run.path()).unwrap();
        assert!(history.damaged.is_empty(), "{:?}", history.damaged);
        assert!(history.committed.len() >= round);
        for one in &history.committed {
            assert_whole(one, &layout);
        }
        for one in promised {
            assert!(history.committed.contains(&one), "{one:?}");
        }
    }
}

/// A child; does nothing when run as a test.
#[test]
fn child_that_stops_between_units() {
    let Some(run) = std::env::var_os(RUN) else {
        return;
    };
    let layout = default_layout();
    let target = target(Path::new(&run), 1, 2);
    let writer = Writer::begin(&target, &layout, 0, 1);
    for unit in 0..layout.units.len() / 2 {
        writer.write_unit(unit, unit_state(&layout, unit, 2));
    }
    // The queue is written in order, so the start of the second file means that the first is complete.
    let second = target.partial().join("model-00002-of-00005.safetensors");
    while !second.exists() {
        assert!(!writer.is_finished(), "it failed");
        std::thread::yield_now();
    }
    println!("half of it is written");
    // Ends when the parent kills this process, or when the parent's end closes its input.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// A child; does nothing when run as a test.
#[test]
fn child_that_writes_on_and_on() {
    let Some(run) = std::env::var_os(RUN) else {
        return;
    };
    let layout = default_layout();
    for step in 1.. {
        let committed = write(&target(Path::new(&run), 1, step), &layout, 2).unwrap();
        println!("committed: {}", serde_json::to_string(&committed).unwrap());
    }
}
