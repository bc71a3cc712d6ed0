//! Compares the training losses of disturbed jobs with those of an undisturbed run.

use std::collections::BTreeMap;
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
const TOLERANCE: f64 = 1e-5;

/// Losses that the generations of a run recorded. A later generation repeats uncommitted steps.
pub fn of(run: &Path) -> Losses {
    let mut losses = Losses::new();
    for number in 1.. {
        let generation = run.join(format!("gen-{number}"));
        if !generation.exists() {
            break;
        }
        // A generation that took no step may have none.
        let text = std::fs::read_to_string(generation.join("metrics.jsonl")).unwrap_or_default();
        let metrics = text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        for metric in metrics.filter(|metric| metric["kind"] == "step") {
            let (step, loss) = (metric["step"].as_u64(), metric["loss"].as_f64());
            losses.insert(step.unwrap(), loss.unwrap());
        }
    }
    losses
}

/// Losses of a single process on this machine with the same recipe.
fn undisturbed() -> &'static Losses {
    static LOSSES: OnceLock<Losses> = OnceLock::new();
    LOSSES.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let (file, run) = (
            directory.path().join("recipe.json"),
            directory.path().join("run"),
        );
        std::fs::write(&file, recipe(SAMPLES).to_string()).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .args(["launch", "--procs", "1", "--out"])
            .args([&run, &file])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        of(&run)
    })
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
