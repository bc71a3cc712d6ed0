//! Adapters that PEFT has made, trained by the built-in trainer and by TRL on the same rows, and loaded by PEFT again.

use std::collections::BTreeMap;
use std::process::Command;

use rustix::process::Signal;
use serde_json::json;

use super::disturbed::proved;
use super::families::printed;
use super::losses::{agree, launch_in, of_steps, run_in};
use super::support::{Run, same_losses, small};
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
    // A new adapter begins as the one below it, which is merged into the model.
    let new = "evenkeel.objective=sft use_peft=true lora_r=2 lora_target_modules=all-linear lora_dropout=0 max_steps=1";
    let new: Vec<&str> = new.split(' ').collect();
    for name in expected.keys().filter(|name| name.ends_with("-sft")) {
        let (recipe, run) = (format!("{name}.yaml"), format!("{name}-stacked"));
        launch_in(folder.path(), &recipe, &run, &new);
        let losses = of_steps(&folder.path().join(&run));
        let do_agree = agree(&losses, &expected[name][..1], 1e-5);
        assert!(do_agree, "{name}: {losses:?}");
    }
}

/// Adapters with dropout, moved, killed and resumed, have the losses of an undisturbed run.
fn disturbed(strategy: &str) {
    let spec = || {
        small(json!({
            "parallel": {"strategy": strategy},
            "model": {"adapters": true, "lora_rank": 3, "lora_dropout": 0.2, "lora_target_modules": ["all-linear"]},
            "data": {"held_out": 6},
            "evaluation": {"every_samples": 12},
        }))
    };
    let run = Run::of(spec());
    let launched = run.start(&["--procs", "1"]);
    run.wait_for_steps(1, 5);
    let resized = run.call("resize", &["3"]);
    assert!(resized.status.success(), "{resized:?}");
    run.wait_for_steps(2, 5);
    run.signal_rank(2, 1, Signal::KILL);
    run.wait_for_steps(3, 5);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [1, 3, 2]);
    proved(&run, 2400);
    let alone = Run::of(spec());
    let output = alone.launch(&["--quiet"]);
    assert!(output.status.success(), "{output:?}");
    same_losses(&run, &alone);
}

#[test]
fn adapters_are_the_same_in_any_world() {
    disturbed("ddp");
}

#[test]
fn adapters_are_the_same_in_any_world_over_a_sharded_model() {
    disturbed("fsdp");
}
