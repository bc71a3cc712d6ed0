//! Compares the training losses of disturbed jobs with those of an undisturbed run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use super::support::{output_text, recipe};

/// Losses by optimiser step, nats per token.
pub type Losses = BTreeMap<u64, f64>;

/// Samples of the undisturbed run: 400 steps. All disturbances happen earlier, and the learning rate
/// is constant, so the budget does not matter.
const SAMPLES: u64 = 38_400;
/// Maximum relative difference to the undisturbed run's loss.
pub const TOLERANCE: f64 = 1e-5;

/// Losses that the generations of a run recorded. A later generation repeats uncommitted steps.
pub fn of(run: &Path) -> Losses {
    let steps = metrics(run).filter(|metric| metric["kind"] == "step");
    let recorded = |metric: Value| {
        (
            metric["step"].as_u64().unwrap(),
            metric["loss"].as_f64().unwrap(),
        )
    };
    steps.map(recorded).collect()
}

/// Metrics of all generations of a run, in their order.
fn metrics(run: &Path) -> impl Iterator<Item = Value> {
    let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("gen-")?.parse::<u64>().ok();
    let numbers = entries.filter_map(|entry| number(entry.file_name().to_str()?));
    // One that was drained before its agents started has no directory.
    let numbers: BTreeSet<u64> = numbers.collect();
    let generations = numbers
        .into_iter()
        .map(|number| run.join(format!("gen-{number}")));
    generations.flat_map(|generation| {
        // A generation that took no step may have none.
        let text = std::fs::read_to_string(generation.join("metrics.jsonl")).unwrap_or_default();
        let metrics = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        metrics.collect::<Vec<Value>>()
    })
}

/// Loss of the last evaluation of a run, nats per token; `None` if it had none.
pub fn evaluation(run: &Path) -> Option<f64> {
    let kept = metrics(run).filter(|metric| metric["kind"] == "evaluation");
    kept.last()?["loss"].as_f64()
}

/// Trains a recipe undisturbed, by a single process on this machine. Returns its losses and its last evaluation.
pub fn alone(recipe: &Value) -> (Losses, Option<f64>) {
    let directory = tempfile::tempdir().unwrap();
    let (file, run) = (
        directory.path().join("recipe.json"),
        directory.path().join("run"),
    );
    std::fs::write(&file, recipe.to_string()).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .args(["launch", "--procs", "1", "--out"])
        .args([&run, &file])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    (of(&run), evaluation(&run))
}

/// Losses of the scenarios' recipe without a disturbance.
fn undisturbed() -> &'static Losses {
    static LOSSES: OnceLock<Losses> = OnceLock::new();
    LOSSES.get_or_init(|| alone(&recipe(SAMPLES)).0)
}

/// Checks the losses against the undisturbed run, for the steps that both have.
pub fn check(losses: &Losses) {
    let expected = undisturbed();
    assert!(
        losses.keys().copied().eq(1..=losses.len() as u64),
        "steps are missing"
    );
    for (step, loss) in losses {
        let Some(other) = expected.get(step) else {
            break;
        };
        assert!(
            (loss - other).abs() <= TOLERANCE * other.abs(),
            "step {step}: {loss}, not {other}"
        );
    }
}
