//! Runs in which the norm test measures more than its decision needs.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::support::{Run, small};

/// A run of 20 steps whose norm test runs every fourth step and may not raise the batch.
fn run(strategy: &str, procs: &str, coordinate_interval: u64) -> Run {
    let run = Run::of(small(json!({
        "parallel": {"strategy": strategy},
        "budget": {"samples": 240},
        "schedule": {
            "kind": "norm-test", "eta": 0.9, "max_batch": 12, "interval": 4,
            "coordinate_interval": coordinate_interval,
        },
    })));
    let output = run.launch(&["--quiet", "--procs", procs]);
    assert!(output.status.success(), "{output:?}");
    run
}

fn losses(run: &Run) -> Vec<f64> {
    let steps = run.steps();
    steps
        .values()
        .map(|step| step["loss"].as_f64().unwrap())
        .collect()
}

/// The shares of coordinates by step.
fn shares(run: &Run) -> BTreeMap<u64, f64> {
    let steps = run.steps().into_iter();
    steps
        .filter_map(|(nth, step)| {
            let test: &Value = step.get("coordinate_test")?;
            Some((nth, test["share"].as_f64().unwrap()))
        })
        .collect()
}

#[test]
fn coordinates_are_counted_at_their_own_interval_the_same_in_every_world() {
    let alone = shares(&run("ddp", "1", 3));
    assert_eq!(
        alone.keys().copied().collect::<Vec<_>>(),
        [3, 6, 9, 12, 15, 18]
    );
    assert!(
        alone.values().all(|share| (0.01..0.99).contains(share)),
        "{alone:?}"
    );
    for strategy in ["ddp", "fsdp"] {
        let together = shares(&run(strategy, "2", 3));
        for (step, share) in &alone {
            // Rounding moves the few coordinates on the edge.
            let difference = (together[step] - share).abs();
            assert!(difference < 1e-3, "{strategy}, step {step}: {difference}");
        }
    }
}

#[test]
fn counting_coordinates_changes_no_bit_of_the_losses() {
    for (strategy, procs) in [("ddp", "1"), ("ddp", "2"), ("fsdp", "2")] {
        let plain = run(strategy, procs, 0);
        assert!(shares(&plain).is_empty());
        assert_eq!(
            losses(&plain),
            losses(&run(strategy, procs, 1)),
            "{strategy}"
        );
    }
}
