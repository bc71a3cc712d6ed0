//! Adapters that PEFT has made, trained by the built-in trainer and by TRL on the same rows, and loaded by PEFT again.

use std::collections::BTreeMap;
use std::process::Command;

use super::families::printed;
use super::losses::{agree, launch_in, of_steps, run_in};
use super::trainers::{own_file, python};

const STEPS: usize = 20;

#[test]
fn adapters_are_trained_as_by_trl_and_load_again() {
    let Some(python) = python("torch, transformers, trl, peft") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let script = own_file("tests/trainers/adapters.py");
    let steps = STEPS.to_string();
    let here = |command, arguments: &[&str]| run_in(folder.path(), command, arguments);
    let output = here(Command::new(&python), &[&script, "train", ".", &steps]);
    let expected: BTreeMap<String, Vec<f64>> = printed(&output);
    for (name, expected) in &expected {
        let objective = match name.ends_with("-sft") {
            true => "evenkeel.objective=sft",
            false => "evenkeel.objective=dpo",
        };
        let (recipe, run) = (format!("{name}.yaml"), format!("{name}-run"));
        launch_in(folder.path(), &recipe, &run, &[objective]);
        let losses = of_steps(&folder.path().join(&run));
        assert_eq!(losses.len(), STEPS, "{name}");
        // TRL prints five digits.
        let do_agree = agree(&losses, expected, 1e-4);
        assert!(do_agree, "{name}: {losses:?}, TRL {expected:?}");
    }
    let last = format!("gen-1/step-{STEPS:07}");
    let output = here(Command::new(&python), &[&script, "compare", ".", &last]);
    let apart: BTreeMap<String, f64> = printed(&output);
    assert_eq!(apart.len(), expected.len());
    for (name, apart) in apart {
        assert!(apart < 1e-3, "{name}: logits {apart} apart");
    }
}
