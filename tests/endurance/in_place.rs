//! Ranks that continue in the next generation with their processes: after a loss, and when the world is to change.

use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

use super::disturbed::{proved, undisturbed};
use super::support::{Run, same_losses, small, wait_for};

/// No checkpoint is due before the end.
fn recipe(changes: Value) -> Value {
    let mut spec = small(json!({"checkpoint": {"every_samples": 1_000_000}}));
    super::support::merge(&mut spec, changes);
    spec
}

/// The record of a generation.
pub fn record(run: &Run, generation: u64) -> Value {
    let path = run.out().join(format!("gen-{generation}/record.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The processes of the ranks of a generation.
pub fn ranks(run: &Run, generation: u64, count: u64) -> Vec<Pid> {
    (0..count).map(|rank| run.rank(generation, rank)).collect()
}

/// How many processes have stood by in a generation.
pub fn spares(run: &Run, generation: u64) -> usize {
    let logs = run.out().join(format!("gen-{generation}/logs"));
    let names = std::fs::read_dir(logs).unwrap();
    let mut names: Vec<_> = names.map(|it| it.unwrap().file_name()).collect();
    names.retain(|name| name.to_string_lossy().starts_with("spare-"));
    names.len()
}

fn has_checkpoints(run: &Run, generation: u64) -> bool {
    let entries = std::fs::read_dir(run.out().join(format!("gen-{generation}"))).unwrap();
    let mut names = entries.map(|entry| entry.unwrap().file_name());
    names.any(|name| name.to_string_lossy().starts_with("step-"))
}

#[test]
fn survivors_of_a_loss_keep_their_processes_and_states() {
    let spec = recipe(json!({}));
    let run = Run::of(spec.clone());
    let launched = run.start(&["--procs", "4"]);
    run.wait_for_steps(1, 5);
    let before = ranks(&run, 1, 4);
    run.signal_rank(1, 1, Signal::KILL);
    run.wait_for_steps(2, 5);
    assert_eq!(ranks(&run, 2, 3), [before[0], before[2], before[3]]);
    // The first rank is lost too, so that another one carries the state.
    run.signal_rank(2, 0, Signal::KILL);
    run.wait_for_steps(3, 5);
    assert_eq!(ranks(&run, 3, 2), [before[2], before[3]]);
    assert!(launched.wait().success(), "{}", run.log());

    assert_eq!(run.worlds(), [4, 3, 2]);
    proved(&run, 2400);
    same_losses(&run, &undisturbed(spec.clone()));
    // Every step is there once, also the last one of each lost rank 0.
    let steps: Vec<u64> = run.steps().into_keys().collect();
    assert_eq!(steps, (1..=200).collect::<Vec<u64>>());
    for (generation, carries) in [(2, json!([0, 2, 3])), (3, json!([1, 2]))] {
        let record = record(&run, generation);
        assert_eq!(record["members"][0]["carries"], carries);
        let carried = &record["carried"];
        assert_eq!(carried["from"], generation - 1);
        let state = run.state().unwrap();
        let row = &state["generations"][generation as usize - 1];
        assert_eq!(carried["samples"], row["start_samples"]);
    }
    // What was in memory only is on disk soon.
    assert!(!has_checkpoints(&run, 1));
    let committed = run.log().matches("Checkpoint at").count();
    assert!(committed >= 2, "{}", run.log());
}

#[test]
fn a_world_that_is_to_change_pauses_and_needs_no_checkpoint() {
    let spec = recipe(json!({}));
    let run = Run::of(spec.clone());
    let launched = run.start(&["--procs", "2"]);
    run.wait_for_steps(1, 5);
    let before = ranks(&run, 1, 2);
    assert!(run.call("resize", &["4"]).status.success());
    run.wait_for_steps(2, 5);
    let larger = ranks(&run, 2, 4);
    assert_eq!(larger[..2], before);
    // Those that were added stood by before the others paused.
    assert_eq!(spares(&run, 1), 2);
    assert!(run.call("resize", &["3"]).status.success());
    run.wait_for_steps(3, 5);
    assert_eq!(ranks(&run, 3, 3), larger[..3]);
    wait_for("the rank that is left out to be gone", || {
        rustix::process::test_kill_process(larger[3]).err()
    });
    assert!(launched.wait().success(), "{}", run.log());

    assert_eq!(run.worlds(), [2, 4, 3]);
    assert!(!has_checkpoints(&run, 1));
    proved(&run, 2400);
    same_losses(&run, &undisturbed(spec.clone()));
}

/// The state that a rank has only in memory is committed if the run stops before it continues.
#[test]
fn a_stop_while_a_world_changes_keeps_every_step() {
    let spec = recipe(json!({}));
    for wait in 0..4 {
        let run = Run::of(spec.clone());
        let launched = run.start(&["--procs", "3"]);
        run.wait_for_steps(1, 5);
        run.signal_rank(1, 2, Signal::KILL);
        std::thread::sleep(std::time::Duration::from_millis(40 * wait));
        launched.signal(Signal::TERM);
        assert_eq!(launched.wait().code(), Some(143), "{}", run.log());
        let state = run.state().unwrap();
        let committed = state["checkpoint_ref"]["samples"].as_u64().unwrap();
        let steps = run.generation_steps(state["generations"].as_array().unwrap().len() as u64);
        let newest = steps.last().and_then(|step| step["samples"].as_u64());
        assert!(
            newest.is_none_or(|newest| newest <= committed),
            "{}",
            run.log()
        );
        let output = run.launch(&["--procs", "2", "--resume", "--quiet"]);
        assert!(output.status.success(), "{output:?}");
        proved(&run, 2400);
        same_losses(&run, &undisturbed(spec.clone()));
    }
}

/// A second rank is lost while the others continue, connect, or are about to. Whatever each of them held, no sample is missing
/// and none counts twice.
#[test]
fn losses_in_quick_succession_lose_no_sample() {
    let spec = recipe(json!({"checkpoint": {"every_samples": 120}}));
    let undisturbed = undisturbed(spec.clone());
    for apart in [0, 5, 20, 40, 80, 160] {
        let run = Run::of(spec.clone());
        let launched = run.start(&["--procs", "4"]);
        run.wait_for_steps(1, 20);
        let [_, _, second, first] = ranks(&run, 1, 4)[..] else {
            panic!("four ranks")
        };
        rustix::process::kill_process(first, Signal::KILL).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(apart));
        rustix::process::kill_process(second, Signal::KILL).unwrap();
        assert!(launched.wait().success(), "{apart} ms: {}", run.log());
        proved(&run, 2400);
        same_losses(&run, &undisturbed);
    }
}

/// The ranks of a generation wait for one that does not come, and their launcher is lost: its state goes to a checkpoint of
/// this generation, since those of earlier ones do not count any more.
#[test]
fn a_launcher_that_is_lost_before_the_ranks_have_met_loses_no_step() {
    let spec = recipe(json!({}));
    let run = Run::of(spec.clone());
    let launched = run.start(&["--procs", "4"]);
    run.wait_for_steps(1, 5);
    let before = ranks(&run, 1, 4);
    run.signal_rank(1, 3, Signal::KILL);
    let appears = |file: &str| {
        let since = std::time::Instant::now();
        while !run.out().join("gen-2").join(file).exists() {
            assert!(since.elapsed().as_secs() < 60, "{file}: {}", run.log());
            std::thread::yield_now();
        }
    };
    appears("record.json");
    rustix::process::kill_process(before[2], Signal::STOP).unwrap();
    appears("logs/rank-0.log");
    appears("logs/rank-1.log");
    launched.signal(Signal::KILL);
    launched.wait();
    wait_for("the ranks to end", || {
        let ended = |rank: &Pid| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", rank.as_raw_nonzero()));
            stat.map_or(true, |stat| stat.contains(") Z "))
        };
        before[..2].iter().all(ended).then_some(())
    });
    rustix::process::kill_process(before[2], Signal::KILL).unwrap();
    let trained = run.generation_steps(1).len() as u64;
    // The ranks may have met all the same.
    let met = !run.generation_steps(2).is_empty();
    let output = run.launch(&["--procs", "3", "--resume", "--quiet"]);
    assert!(output.status.success(), "{output:?}");
    if !met {
        assert!(has_checkpoints(&run, 2));
        assert_eq!(record(&run, 3)["start"]["step"], trained);
    }
    proved(&run, 2400);
    same_losses(&run, &undisturbed(spec));
}

#[test]
fn a_process_that_stands_by_takes_the_place_of_a_killed_rank() {
    let changes = json!({"elasticity": {"spares": 1}, "budget": {"samples": 12_000}});
    let spec = recipe(changes);
    let run = Run::of(spec.clone());
    let launched = run.start(&["--procs", "3"]);
    for (generation, lost, spare) in [(1, 1, 0), (2, 0, 1)] {
        let log = format!("gen-{generation}/logs/spare-{spare}.log");
        let log = run.out().join(log);
        wait_for("a process that stands by", || {
            let log = std::fs::read_to_string(&log).ok()?;
            log.contains("stands by").then_some(())
        });
        let trained = run.generation_steps(generation).len();
        run.wait_for_steps(generation, trained + 10);
        let mut kept = ranks(&run, generation, 3);
        kept.remove(lost);
        run.signal_rank(generation, lost as u64, Signal::KILL);
        run.wait_for_steps(generation + 1, 5);
        let after = ranks(&run, generation + 1, 3);
        assert_eq!(after[..2], kept);
        let path = format!("/proc/{}/cmdline", after[2].as_raw_nonzero());
        let command = std::fs::read_to_string(path).unwrap();
        assert!(command.contains("--stand-by"), "{command}");
    }
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [3, 3, 3]);
    proved(&run, 12_000);
    same_losses(&run, &undisturbed(spec));
}

/// Each rank of a sharded model has a part of it only.
#[test]
fn what_does_not_fit_starts_new_processes() {
    let spec = recipe(json!({"parallel": {"strategy": "fsdp"}}));
    let run = Run::of(spec.clone());
    let launched = run.start(&["--procs", "2"]);
    run.wait_for_steps(1, 5);
    let before = ranks(&run, 1, 2);
    assert!(run.call("resize", &["3"]).status.success());
    run.wait_for_steps(2, 5);
    let after = ranks(&run, 2, 3);
    assert!(before.iter().all(|rank| !after.contains(rank)));
    assert!(launched.wait().success(), "{}", run.log());
    assert!(record(&run, 2).get("carried").is_none());
    proved(&run, 2400);
}
