//! Runs that are disturbed during training: resized, killed, stopped, limited in memory. Afterwards
//! the global batch is unchanged, every sample was consumed exactly once, and the losses equal
//! those of the undisturbed run.

use rustix::process::Signal;
use serde_json::json;

use super::stalled::stop_main_thread;
use super::support::{Run, same_losses, small, stderr, wait_for};

pub(super) fn undisturbed(spec: serde_json::Value) -> Run {
    let run = Run::of(spec);
    let output = run.launch(&["--quiet"]);
    assert!(output.status.success(), "{output:?}");
    run
}

pub(super) fn proved(run: &Run, samples: u64) {
    let formula = run.prove();
    assert_eq!(formula["proved"], true, "{formula}");
    assert_eq!(formula["samples"], samples);
}

/// Every step of the committed history has the same global batch.
fn constant_batch(run: &Run, batch: u64) {
    assert!(run.steps().values().all(|step| step["batch"] == batch));
}

/// A run that moves from a number of ranks to three and loses one of them, and the same without: every sample is consumed
/// once, in the same batches, with the same losses.
pub(super) fn moved_and_killed(spec: &serde_json::Value, procs: u64) -> (Run, Run) {
    let run = Run::of(spec.clone());
    let launched = run.start(&["--procs", &procs.to_string()]);
    run.wait_for_steps(1, 5);
    let resized = run.call("resize", &["3"]);
    assert!(resized.status.success(), "{resized:?}");
    run.wait_for_steps(2, 5);
    run.signal_rank(2, 1, Signal::KILL);
    run.wait_for_steps(3, 5);
    assert!(launched.wait().success(), "{}", run.log());

    assert_eq!(run.worlds(), [procs, 3, 2]);
    constant_batch(&run, 12);
    proved(&run, 2400);
    let undisturbed = undisturbed(spec.clone());
    same_losses(&run, &undisturbed);
    (run, undisturbed)
}

fn disturbed_by_kill_and_resize(strategy: &str) {
    // Every drain coincides with an evaluation.
    let spec = small(json!({
        "parallel": {"strategy": strategy},
        "data": {"held_out": 6},
        "evaluation": {"every_samples": 12},
    }));
    moved_and_killed(&spec, 2);
}

#[test]
fn a_resize_and_a_kill_change_neither_batch_nor_samples_nor_losses() {
    disturbed_by_kill_and_resize("ddp");
}

#[test]
fn a_resize_and_a_kill_change_nothing_under_sharding() {
    disturbed_by_kill_and_resize("fsdp");
}

#[test]
fn under_ddp_a_kill_loses_no_step() {
    let run = Run::of(small(json!({"checkpoint": {"every_samples": 1_000_000}})));
    let launched = run.start(&["--procs", "3"]);
    run.wait_for_steps(1, 10);
    run.signal_rank(1, 0, Signal::KILL);
    run.wait_for_steps(2, 1);
    assert!(launched.wait().success(), "{}", run.log());
    // Rank 0 reported its steps until it was killed; the survivors have at least these.
    let reported = run.generation_steps(1).last().unwrap()["samples"].as_u64();
    let state = run.state().unwrap();
    assert!(state["generations"][1]["start_samples"].as_u64() >= reported);
    proved(&run, 2400);
}

#[test]
fn uneven_dealing_keeps_the_batch_on_any_number_of_ranks() {
    let run = Run::of(small(
        json!({"batch": {"global": 16, "per_device_batch_size": 4}}),
    ));
    let launched = run.start(&["--procs", "4", "--remainder", "uneven"]);
    run.wait_for_steps(1, 5);
    run.signal_rank(1, 3, Signal::KILL);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [4, 3]);
    constant_batch(&run, 16);
    proved(&run, 2400);
}

#[test]
fn an_interrupt_drains_and_a_resume_continues() {
    let run = Run::of(small(json!({})));
    run.drained(&["--procs", "2"]);
    let drained = run.state().unwrap()["checkpoint_ref"]["samples"]
        .as_u64()
        .unwrap();
    assert!(drained > 0 && drained < 2400);
    let output = run.launch(&["--procs", "1", "--resume", "--quiet"]);
    assert!(output.status.success(), "{output:?}");
    proved(&run, 2400);
    same_losses(&run, &undisturbed(small(json!({}))));
}

#[test]
fn ranks_outlive_a_killed_launcher_only_to_commit() {
    let run = Run::of(small(json!({})));
    let launched = run.start(&["--procs", "2"]);
    run.wait_for_steps(1, 5);
    let rank = run.rank(1, 0);
    launched.signal(Signal::KILL);
    drop(launched);
    let output = run.launch(&["--procs", "2", "--resume", "--quiet"]);
    assert!(output.status.success(), "{output:?}");
    wait_for("the old rank to be gone", || {
        rustix::process::test_kill_process(rank).err()
    });
    proved(&run, 2400);
    // The reports of the ranks' last steps had no reader.
    let steps: Vec<u64> = run.steps().into_keys().collect();
    assert_eq!(steps, (1..=200).collect::<Vec<u64>>());

    // A line truncated by a crash hides no other line.
    let metrics = run.out().join("gen-2/metrics.jsonl");
    let whole = std::fs::read_to_string(&metrics).unwrap();
    std::fs::write(&metrics, format!("{whole}{}", &whole[..40])).unwrap();
    let shown = run.call("status", &[]);
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(text.contains("2400 of 2400 samples, step 200"), "{text}");
    assert!(run.call("report", &[]).status.success());
}

#[test]
fn a_frozen_rank_counts_as_lost() {
    let run = Run::of(small(json!({})));
    let launched = run.start(&["--procs", "3"]);
    run.wait_for_steps(1, 5);
    run.signal_rank(1, 2, Signal::STOP);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [3, 2]);
    // The message names the missing heartbeat, not the launcher's kill.
    let shown = run.call("status", &[]).stdout;
    for text in [run.log(), String::from_utf8_lossy(&shown).into_owned()] {
        assert!(text.contains("rank 2: no heartbeat for "), "{text}");
        assert!(!text.contains("signal 9"), "{text}");
    }
    proved(&run, 2400);
}

#[test]
fn a_frozen_rank_without_peers_is_restarted_from_its_checkpoint() {
    let run = Run::of(small(json!({"checkpoint": {"every_samples": 120}})));
    let launched = run.start(&["--procs", "1"]);
    wait_for("a checkpoint", || {
        let state = run.state()?;
        state["checkpoint_ref"]["samples"].as_u64()
    });
    run.signal_rank(1, 0, Signal::STOP);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [1, 1]);
    let log = run.log();
    let lost = "rank 0: no heartbeat for 10 s, so it was killed";
    assert!(log.contains(lost), "{log}");
    proved(&run, 2400);
}

/// A finished run of three ranks, one of which was stopped before the ranks had connected.
fn frozen_at_birth(frozen: u64) -> Run {
    // On a busy machine the ranks may connect first.
    for _ in 0..5 {
        let run = Run::of(small(json!({"budget": {"samples": 600}})));
        let launched = run.start(&["--procs", "3"]);
        run.freeze_at_birth(frozen);
        assert!(launched.wait().success(), "{}", run.log());
        if run.log().contains("before the ranks had connected") {
            return run;
        }
    }
    panic!("rank {frozen} always connects before it is stopped");
}

#[test]
fn a_rank_that_freezes_before_the_ranks_connect_is_the_lost_one() {
    for frozen in [0, 1] {
        let run = frozen_at_birth(frozen);
        assert_eq!(run.worlds(), [3, 2]);
        let lost = format!("rank {frozen}: no heartbeat for 10 s before the ranks had connected");
        assert!(run.log().contains(&lost), "{}", run.log());
        // The waiting ranks are neither lost nor blamed.
        assert_eq!(run.log().matches("so it was killed").count(), 2);
        proved(&run, 600);
    }
}

#[test]
fn unconnected_ranks_exit_when_their_launcher_dies() {
    let run = Run::of(small(json!({"budget": {"samples": 600}})));
    let launched = run.start(&["--procs", "3"]);
    let frozen = run.freeze_at_birth(1);
    // The other ranks have started and wait for it.
    for rank in [0, 2] {
        run.rank(1, rank);
    }
    launched.signal(Signal::KILL);
    launched.wait();
    // A stopped process that becomes an orphan gets SIGHUP, unless its group has a parent elsewhere in the session.
    let _ = rustix::process::kill_process(frozen, Signal::KILL);
    let output = run.launch(&["--quiet", "--procs", "2", "--resume"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(run.worlds(), [3, 2]);
    proved(&run, 600);
}

#[test]
fn a_rank_out_of_memory_gets_a_smaller_micro_batch() {
    let spec = || {
        small(
            json!({"batch": {"global": 64, "per_device_batch_size": 64}, "budget": {"samples": 640}}),
        )
    };
    let run = Run::of(spec());
    let output = run.launch(&["--procs", "1", "--quiet", "--rank-memory", "12MiB"]);
    assert!(output.status.success(), "{output:?}");
    let proofs = run.proofs();
    assert!(proofs.len() > 1, "{proofs:?}");
    assert!(
        proofs.iter().all(|formula| formula.ends_with("= 64")),
        "{proofs:?}"
    );
    constant_batch(&run, 64);
    proved(&run, 640);
    same_losses(&run, &undisturbed(spec()));
}

#[test]
fn upstreams_back_off_shrinks_the_batch_of_an_untrained_run() {
    let run = Run::of(small(
        json!({"batch": {"global": 64, "per_device_batch_size": 64}, "budget": {"samples": 640}}),
    ));
    let limits = ["--procs", "1", "--rank-memory", "12MiB"];
    let output = run.launch(&[&limits[..], &["--oom-policy", "transformers"]].concat());
    assert!(output.status.success(), "{output:?}");
    let proofs = run.proofs();
    let golden = [
        64, 57, 51, 45, 40, 36, 32, 28, 25, 22, 19, 17, 15, 13, 11, 9, 8,
    ];
    assert!(proofs.len() > 1, "{proofs:?}");
    for (formula, per_device_batch_size) in proofs.iter().zip(golden) {
        assert_eq!(
            formula,
            &format!("1 × {per_device_batch_size} × 1 = {per_device_batch_size}")
        );
    }
    constant_batch(&run, golden[proofs.len() - 1]);
    let text = stderr(&output) + &String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("shrinks the global batch: 64 → 57"), "{text}");
}

#[test]
fn a_descent_after_the_batch_has_grown_keeps_the_grown_batch() {
    // A micro-batch has 6 samples. 4 divides the base batch of 12, but not the grown batch of 18.
    // The memory limit below fits 4 samples, but not 6.
    let spec = small(json!({
        "batch": {"global": 12, "per_device_batch_size": 6},
        "budget": {"samples": 12_000},
        "elasticity": {"min": 1, "max": 1},
        "schedule": {"kind": "norm-test", "eta": 0.05, "interval": 1, "max_batch": 18, "after_warmup": false},
    }));
    let run = Run::of(spec);
    let launched = run.start(&[]);
    wait_for("a grown batch", || {
        let steps = run.generation_steps(1);
        (steps.last()?["batch"] == 18).then_some(())
    });
    let asked = run.call("resize", &["1"]).stdout;
    let text = String::from_utf8_lossy(&asked);
    assert!(
        text.contains("requested 1 process: 1 × 6 × 3 = 18 (base 12)"),
        "{text}"
    );
    run.drain(launched);
    assert_eq!(run.state().unwrap()["checkpoint_ref"]["batch"], 18);

    let output = run.launch(&["--resume", "--rank-memory", "2400KiB"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let log = String::from_utf8_lossy(&output.stdout);
    let first = log.lines().next().unwrap();
    assert!(first.contains("1 × 6 × 3 = 18 (base 12)"), "{log}");
    let shown = run.call("status", &[]).stdout;
    let text = String::from_utf8_lossy(&shown);
    assert!(text.contains("18 samples, grown from 12"), "{text}");
    assert!(
        text.contains("plan        1 × 3 × 6 = 18 (base 12)"),
        "{text}"
    );
    assert_eq!(
        run.proofs(),
        [
            "1 × 6 × 2 = 12",
            "1 × 6 × 3 = 18 (base 12)",
            "1 × 3 × 6 = 18 (base 12)"
        ]
    );
    let batches: Vec<u64> = run
        .steps()
        .values()
        .map(|s| s["batch"].as_u64().unwrap())
        .collect();
    assert!(batches.iter().all(|batch| [12, 18].contains(batch)));
    assert_eq!(batches.last(), Some(&18));
    proved(&run, batches.iter().sum());
}

#[test]
fn a_higher_memory_limit_retries_a_failed_micro_batch() {
    let run = Run::of(small(
        json!({"batch": {"global": 12, "per_device_batch_size": 6}}),
    ));
    let launched = run.start(&["--rank-memory", "2400KiB"]);
    run.wait_for_steps(2, 3);
    run.drain(launched);
    let limit = run.state().unwrap()["per_device_batch_size_limit"]
        .as_u64()
        .unwrap();
    assert!(limit < 6);
    let shown = run.call("status", &[]).stdout;
    let shown = String::from_utf8_lossy(&shown);
    assert!(
        shown.contains(&format!("micro-batches above {limit}")),
        "{shown}"
    );

    // With the same limit, the failed micro-batch is not retried.
    let launched = run.start(&["--resume", "--rank-memory", "2400KiB"]);
    run.wait_for_steps(3, 3);
    run.drain(launched);
    assert_eq!(run.state().unwrap()["per_device_batch_size_limit"], limit);

    let output = run.launch(&["--resume", "--quiet", "--rank-memory", "1GiB"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let state = run.state().unwrap();
    assert_eq!(
        state["per_device_batch_size_limit"],
        serde_json::Value::Null
    );
    assert_eq!(run.proofs().last().unwrap(), "1 × 6 × 2 = 12");
    proved(&run, 2400);
}

#[test]
fn a_revoked_resize_changes_no_generation() {
    let run = Run::of(small(json!({})));
    let launched = run.start(&["--procs", "2"]);
    run.wait_for_steps(1, 5);
    let phase = |wanted: &str| {
        wait_for(wanted, || {
            (run.state()?["phase"]["phase"] == wanted).then_some(())
        });
    };
    // A stopped rank keeps the others from agreeing on a step for the drain.
    let mut tracer = stop_main_thread(&run, 1);
    let first = run.calling("resize", &["3"]);
    phase("draining");
    let back = run.call("resize", &["2"]);
    tracer.kill().unwrap();
    tracer.wait().unwrap();
    let first = first.wait_with_output().unwrap();
    assert_eq!(first.status.code(), Some(1), "{first:?}");
    let text = stderr(&first);
    assert!(
        text.contains("request 1 for 3 processes was replaced by request 2 for 2 processes"),
        "{text}"
    );
    assert!(back.status.success(), "{back:?}");
    let text = String::from_utf8_lossy(&back.stdout);
    assert!(
        text.contains("generation 1 trains: 2 × 2 × 3 = 12, as before"),
        "{text}"
    );
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [2]);
    proved(&run, 2400);
}

#[test]
fn a_diverged_loss_is_shown_in_the_log_and_the_report() {
    let run = Run::of(small(json!({
        "learning_rate": {"peak": 10.0, "shape": "constant", "warmup_samples": 0},
    })));
    let output = run.launch(&["--log", "json", "--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let log = String::from_utf8_lossy(&output.stdout);
    let events: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let kinds: Vec<&str> = events
        .iter()
        .map(|e| e["event"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["warning", "finished"], "{log}");
    let warning = events[0]["message"].as_str().unwrap();
    assert!(warning.contains("the training has diverged"), "{warning}");
    let page = std::fs::read_to_string(run.out().join("report.html")).unwrap();
    assert!(page.contains("the training has diverged"));
}

#[test]
fn a_report_can_prove_the_ledger() {
    let run = undisturbed(small(json!({"budget": {"samples": 120}})));
    let output = run.call("report", &["--ledger"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = std::fs::read_to_string(run.out().join("report.html")).unwrap();
    assert!(page.contains("10 steps consumed samples 0..120"));

    // The texts of a report need the checkpoint, and the rest does not.
    let state = run.state().unwrap();
    let newest = state["checkpoint_ref"]["path"].as_str().unwrap();
    std::fs::write(run.out().join(newest).join("config.json"), "{").unwrap();
    let output = run.call("report", &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = std::fs::read_to_string(run.out().join("report.html")).unwrap();
    assert!(page.contains("not continued: "), "{page}");
}

#[test]
fn memory_for_less_than_one_sample_is_reported_as_out_of_memory() {
    let run = Run::of(small(json!({})));
    // Enough for weights, gradients and optimiser states.
    let output = run.launch(&["--quiet", "--rank-memory", "1450KiB"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("out of memory"), "{message}");
}

#[test]
fn a_nan_loss_ends_the_run_with_its_last_checkpoint() {
    let run = Run::of(small(json!({
        "learning_rate": {"peak": 1000.0, "warmup_samples": 600},
        // Scales the weights by 1 − rate × decay every step.
        "optimizer": {"gradient_clip": 0.0, "weight_decay": 1.0},
        "checkpoint": {"every_samples": 12},
    })));
    let output = run.launch(&["--quiet"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("at step"), "{message}");
    assert_eq!(run.worlds().len(), 1, "a NaN is not retried");
}

#[test]
fn the_norm_test_grows_the_batch_and_the_ledger_follows() {
    let run = Run::of(small(json!({
        "schedule": {"kind": "norm-test", "eta": 0.3, "interval": 1, "max_batch": 96, "after_warmup": true},
    })));
    let launched = run.start(&["--procs", "2"]);
    run.wait_for_steps(1, 20);
    run.signal_rank(1, 1, Signal::KILL);
    assert!(launched.wait().success(), "{}", run.log());
    let batches: Vec<u64> = run
        .steps()
        .values()
        .map(|s| s["batch"].as_u64().unwrap())
        .collect();
    assert!(
        batches.windows(2).all(|pair| pair[0] <= pair[1]),
        "{batches:?}"
    );
    assert!(batches.last() > batches.first(), "{batches:?}");
    let samples = batches.iter().sum();
    assert!(samples >= 2400);
    proved(&run, samples);
}

#[test]
fn a_run_directory_in_use_is_refused() {
    let run = Run::of(small(json!({"budget": {"samples": 120_000}})));
    let launched = run.start(&[]);
    run.wait_for_steps(1, 1);
    let output = run.launch(&["--resume"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("in use by process"), "{message}");
    launched.signal(Signal::TERM);
    assert_eq!(launched.wait().code(), Some(143));
}

#[test]
fn an_edited_checkpoint_is_not_resumed() {
    let run = Run::of(small(json!({})));
    run.drained(&[]);
    let state = run.state().unwrap();
    let checkpoint_ref = state["checkpoint_ref"]["path"]
        .as_str()
        .unwrap_or_else(|| panic!("{state:#}\n{}", run.log()))
        .to_string();
    let victim = run
        .out()
        .join(checkpoint_ref)
        .join("model-00001-of-00004.safetensors");
    let mut bytes = std::fs::read(&victim).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&victim, bytes).unwrap();
    let output = run.launch(&["--resume"]);
    assert_ne!(output.status.code(), Some(0));
    let message = stderr(&output);
    assert!(
        message.contains("model-00001-of-00004.safetensors"),
        "{message}"
    );
    assert!(
        message.contains("this run has no other checkpoint"),
        "{message}"
    );
}

/// Changes a byte of a checkpoint's weights.
fn damage(run: &Run, checkpoint: &str) {
    let victim = run.out().join(checkpoint);
    let victim = victim.join("model-00001-of-00004.safetensors");
    let mut bytes = std::fs::read(&victim).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&victim, bytes).unwrap();
}

/// Path of the checkpoint that the run's state references, once it has this many samples.
fn checkpoint_after(run: &Run, samples: u64) -> String {
    wait_for(&format!("a checkpoint after {samples} samples"), || {
        let checkpoint_ref = run.state()?["checkpoint_ref"].clone();
        let path = checkpoint_ref["path"].as_str()?.to_owned();
        (checkpoint_ref["samples"].as_u64()? >= samples).then_some(path)
    })
}

#[test]
fn a_run_falls_back_from_a_damaged_checkpoint_to_the_last_good_one() {
    let spec = json!({
        "parallel": {"strategy": "fsdp"},
        "budget": {"samples": 6000},
        "checkpoint": {"every_samples": 1200, "keep": 10},
    });
    // The survivors of a loss, and a resume, start from the damaged checkpoint.
    for resumed in [false, true] {
        let run = Run::of(small(spec.clone()));
        let mut launched = run.start(&["--procs", "3"]);
        let newest = match resumed {
            false => {
                let newest = checkpoint_after(&run, 2400);
                damage(&run, &newest);
                run.signal_rank(1, 1, Signal::KILL);
                newest
            }
            true => {
                checkpoint_after(&run, 2400);
                run.drain(launched);
                let newest = checkpoint_after(&run, 2400);
                damage(&run, &newest);
                launched = run.start(&["--procs", "3", "--resume"]);
                newest
            }
        };
        assert!(launched.wait().success(), "{}", run.log());
        let log = run.log();
        let note = format!("checkpoint {newest} cannot be used: ");
        assert!(
            log.contains(&note) && log.contains("the last good one"),
            "{log}"
        );
        proved(&run, 6000);
        constant_batch(&run, 12);
    }
}

#[test]
fn ranks_killed_during_a_checkpoint_count_as_lost() {
    for delay in [0, 3] {
        // Every step writes a checkpoint, and several kills hit one.
        let run = Run::of(small(
            json!({"checkpoint": {"every_samples": 12, "keep": 2}}),
        ));
        let launched = run.start(&["--procs", "4", "--remainder", "uneven"]);
        for (generation, world) in [(1, 4), (2, 3), (3, 2)] {
            run.wait_for_steps(generation, 2 + delay);
            run.signal_rank(generation, world - 1, Signal::KILL);
        }
        assert!(launched.wait().success(), "{}", run.log());
        assert_eq!(run.worlds(), [4, 3, 2, 1], "{}", run.log());
        proved(&run, 2400);
        let steps: Vec<u64> = run.steps().into_keys().collect();
        assert_eq!(steps, (1..=200).collect::<Vec<u64>>(), "each is recorded");
    }
}

#[test]
fn checkpoints_without_a_state_are_neither_resumed_nor_deleted() {
    let run = Run::of(small(json!({})));
    run.drained(&["--procs", "2"]);
    let checkpoint_ref = run.state().unwrap()["checkpoint_ref"]["path"]
        .as_str()
        .unwrap()
        .to_string();
    std::fs::remove_file(run.out().join("state.json")).unwrap();
    let output = run.launch(&["--resume"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("no state.json"),
        "{}",
        stderr(&output)
    );
    assert!(run.out().join(checkpoint_ref).exists());
}
