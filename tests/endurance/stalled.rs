//! Ranks that live and send heartbeats, but make no progress.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::disturbed::proved;
use super::support::{Run, small};

/// Time for a report of a stopped rank.
const PATIENCE: Duration = Duration::from_secs(60);

/// Enough to train for some seconds.
const SAMPLES: u64 = 12_000;

/// Stops the main thread of a rank; returns the tracer, whose end would let the thread go on.
pub fn stop_main_thread(run: &Run, rank: u64) -> Child {
    let process = run.rank(1, rank).as_raw_nonzero().to_string();
    let mut tracer = Command::new("python3")
        .args(["-c", include_str!("../stop_main_thread.py"), &process])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut said = BufReader::new(tracer.stdout.take().unwrap());
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "stopped\n");
    tracer
}

/// The stacks of a rank in the first generation.
fn stacks_of(run: &Run, rank: u64) -> PathBuf {
    run.out().join(format!("gen-1/stacks/rank-{rank}.txt"))
}

/// Stops the main thread of a rank while it computes: it may also be stopped while it waits for other ranks, outside of a
/// system call. `None`: it was stopped while it held a lock that the report of its stacks needs; it runs again.
fn stop_computation(run: &Run, rank: u64) -> Option<Child> {
    loop {
        let mut tracer = stop_main_thread(run, rank);
        let stopped = Instant::now();
        let stacks = loop {
            let text = std::fs::read_to_string(stacks_of(run, rank)).ok();
            let whole = text.filter(|text| text.contains("stack of the main thread"));
            if whole.is_some() || stopped.elapsed() > PATIENCE {
                break whole;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        if stacks
            .as_ref()
            .is_some_and(|it| it.starts_with("computing"))
        {
            return Some(tracer);
        }
        tracer.kill().unwrap();
        tracer.wait().unwrap();
        stacks?;
        std::fs::remove_file(stacks_of(run, rank)).unwrap();
        run.wait_for_steps(1, run.generation_steps(1).len() + 1);
    }
}

#[test]
fn a_rank_whose_computation_hangs_is_lost_and_leaves_the_stacks_of_all() {
    let (run, launched, mut tracer) = loop {
        let run = Run::of(small(json!({"budget": {"samples": SAMPLES}})));
        let launched = run.start(&["--procs", "3", "--progress-deadline", "3"]);
        run.wait_for_steps(1, 5);
        if let Some(tracer) = stop_computation(&run, 1) {
            break (run, launched, tracer);
        }
        launched.wait();
    };
    assert!(launched.wait().success(), "{}", run.log());
    tracer.wait().unwrap();
    assert_eq!(run.worlds(), [3, 2], "{}", run.log());
    let log = run.log();
    let lost = log.lines().find(|line| line.contains("so it was killed"));
    let lost = lost.unwrap_or_else(|| panic!("{log}"));
    assert!(lost.contains("rank 1: no progress for "), "{lost}");
    assert!(lost.contains(" s while computing"), "{lost}");
    proved(&run, SAMPLES);
    let stacks = |rank: u64| std::fs::read_to_string(stacks_of(&run, rank)).unwrap();
    assert!(stacks(1).contains(": t "), "{}", stacks(1));
    let waiting = [0, 2].map(|rank| {
        let stacks = stacks(rank);
        assert!(stacks.starts_with("waiting for other ranks ("), "{stacks}");
        let (_, main) = stacks.split_once("stack of the main thread:").unwrap();
        main.to_owned()
    });
    // On a busy machine one of them may find its symbols too late.
    let shown = |main: &&String| main.contains("train/trainer.rs");
    let late = |main: &&String| main.contains("it does not answer");
    let count = |of: &dyn Fn(&&String) -> bool| waiting.iter().filter(of).count();
    assert!(
        count(&shown) >= 1 && count(&shown) + count(&late) == 2,
        "{waiting:?}"
    );
}

#[test]
fn a_stall_that_is_only_reported_ends_nothing() {
    let run = Run::of(small(json!({"budget": {"samples": SAMPLES}})));
    let more = ["--progress-deadline", "1", "--on-stall", "report"];
    let launched = run.start(&[&["--procs", "2"][..], &more].concat());
    run.wait_for_steps(1, 5);
    // A thread that was stopped while it held the lock of its output lets no other thread report: it is stopped again.
    let mut tracer = loop {
        let Some(mut tracer) = stop_computation(&run, 0) else {
            continue;
        };
        let stopped = Instant::now();
        let is_reported = || run.log().contains("rank 0: no progress for ");
        while !is_reported() && stopped.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(50));
        }
        if is_reported() {
            break tracer;
        }
        tracer.kill().unwrap();
        tracer.wait().unwrap();
        std::fs::remove_file(stacks_of(&run, 0)).unwrap();
    };
    // Without its tracer the thread continues.
    tracer.kill().unwrap();
    tracer.wait().unwrap();
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [2]);
    assert!(
        run.log().contains("rank 0 makes progress again"),
        "{}",
        run.log()
    );
    proved(&run, SAMPLES);
}

/// Reports steps to the file, and hangs in the first generation.
const PROGRAM: &str = "
import json, os, time

def hang_in_a_collective():
    while os.environ['EVENKEEL_GENERATION'] == '1':
        time.sleep(0.1)

print('begins', flush=True)
for step in range(1, 4):
    time.sleep(1.2)
    print(step, flush=True)
    if os.environ['RANK'] == '0':
        with open(os.environ['EVENKEEL_PROGRESS'] + '.new', 'w') as file:
            json.dump({'step': step, 'total_steps': 3}, file)
        os.replace(file.name, os.environ['EVENKEEL_PROGRESS'])
hang_in_a_collective()
";

#[test]
fn an_external_trainer_that_hangs_writes_its_stacks_and_is_restarted() {
    let run = Run::of(json!({
        "batch": {"global": 12, "per_device_batch_size": 6}, "budget": {"samples": 36},
    }));
    let program = run.scratch().join("train.py");
    std::fs::write(&program, PROGRAM).unwrap();
    let program = program.display().to_string();
    let words = [
        "--procs",
        "2",
        "--progress-deadline",
        "10",
        "--",
        "python3",
        &program,
    ];
    let launched = run.start(&words);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [2, 2]);
    let reason = "no progress for ";
    assert!(run.log().contains(reason), "{}", run.log());
    for rank in [0, 1] {
        let log = run.out().join(format!("gen-1/logs/rank-{rank}.log"));
        let log = std::fs::read_to_string(log).unwrap();
        assert!(log.contains("in hang_in_a_collective"), "{log}");
    }
}
