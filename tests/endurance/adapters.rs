//! Adapters that PEFT has made, trained by the built-in trainer and by TRL on the same rows, and loaded by PEFT again.

use std::collections::BTreeMap;
use std::process::Command;

use rustix::process::Signal;
use serde_json::json;

use super::disturbed::moved_and_killed;
use super::families::{printed, same_logits, same_losses_in};
use super::losses::{agree, first_gradients_agree, launch_in, of_steps, run_in, tiny};
use super::support::{Run, evenkeel, small};
use super::trainers::{own_file, python};
use super::upstream::corpus;

const STEPS: usize = 20;

#[test]
fn adapters_are_trained_as_by_trl_and_load_again() {
    let Some(python) = python("torch, transformers, trl, peft, bitsandbytes") else {
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
        same_losses_in(folder.path(), name, expected, objective);
        first_gradients_agree(folder.path(), name, &[objective]);
    }
    let last = format!("gen-1/step-{STEPS:07}");
    let output = here(Command::new(&python), &[&script, "compare", ".", &last]);
    same_logits(&output, expected.len());
    // Whole models with the adapters added to their weights.
    for name in expected.keys() {
        let words = format!("export {name}-run --merge --out {name}-merged");
        here(evenkeel(), &words.split(' ').collect::<Vec<_>>());
    }
    let output = here(Command::new(&python), &[&script, "merged", ".", &last]);
    let apart: BTreeMap<String, f64> = printed(&output);
    assert_eq!(apart.len(), expected.len());
    for (name, apart) in apart {
        assert!(apart < 1e-6, "{name}: weights {apart} apart");
    }
    // A new adapter begins as the one below it, which is merged into the model, before that is quantised.
    let new = "evenkeel.objective=sft use_peft=true lora_r=2 lora_target_modules=all-linear lora_dropout=0 max_steps=1";
    let new: Vec<&str> = new.split(' ').collect();
    let is_whole = |name: &&String| name.ends_with("-sft") && !name.contains("nf4");
    for name in expected.keys().filter(is_whole) {
        let (recipe, run) = (format!("{name}.yaml"), format!("{name}-stacked"));
        launch_in(folder.path(), &recipe, &run, &new);
        let losses = of_steps(&folder.path().join(&run));
        let do_agree = agree(&losses, &expected[name][..1], 1e-5);
        assert!(do_agree, "{name}: {losses:?}");
    }
}

/// Adapters with dropout, moved, killed and resumed, have the losses of an undisturbed run.
fn disturbed(strategy: &str) {
    let spec = small(json!({
        "parallel": {"strategy": strategy},
        "model": {"adapters": true, "lora_rank": 3, "lora_dropout": 0.2, "lora_target_modules": ["all-linear"]},
        "data": {"held_out": 6},
        "evaluation": {"every_samples": 12},
    }));
    moved_and_killed(&spec, 1);
}

#[test]
fn adapters_are_the_same_in_any_world() {
    disturbed("ddp");
}

#[test]
fn adapters_are_the_same_in_any_world_over_a_sharded_model() {
    disturbed("fsdp");
}

/// The handbook's Zephyr with adapters over 4 bits, as written, with a small model and local rows: SFT, and DPO with a new
/// adapter over that of SFT. Both are moved and lose a rank.
#[test]
fn zephyrs_qlora_trains_through_a_resize_and_a_lost_rank() {
    let Some(corpus) = corpus() else { return };
    let Some(python) = python("torch, transformers, peft") else {
        return;
    };
    let place = tiny(&python);
    let folder = place.path();
    let recipes = corpus.join("huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta");
    let rows = std::fs::read_to_string(folder.join("preferences/train.jsonl")).unwrap();
    std::fs::create_dir(folder.join("binarized")).unwrap();
    for split in ["train_prefs", "test_prefs"] {
        std::fs::write(folder.join(format!("binarized/{split}.jsonl")), &rows).unwrap();
    }
    let model = format!("model_name_or_path={}", folder.join("model").display());
    let adapter = format!("model_name_or_path={}", folder.join("sft-run").display());
    let splits = folder.join("splits").display().to_string();
    let sources = [0, 1].map(|i| format!("dataset_mixture.datasets.{i}.id={splits}"));
    let binarized = folder.join("binarized").display().to_string();
    let mixer = format!("dataset_mixer={{{binarized}: 1.0}}");
    let of_sft = [
        &model[..],
        &sources[0],
        &sources[1],
        "dataset_mixture.test_split_size=8",
    ];
    let of_dpo = [&adapter[..], &mixer, "learning_rate=1e-3"];
    for (kind, epochs, words) in [
        ("sft", "num_train_epochs=3", &of_sft[..]),
        ("dpo", "num_train_epochs=8", &of_dpo),
    ] {
        let run = Run::of_file(&recipes.join(format!("{kind}/config_qlora.yaml")));
        let options = ["--recipe-gpus=1", "--device=cpu", epochs];
        let launched = run.start(&[&["--procs=1"], &options[..], words].concat());
        run.wait_for_steps(1, 5);
        let resized = run.call("resize", &["2"]);
        assert!(resized.status.success(), "{resized:?}");
        run.wait_for_steps(2, 5);
        run.signal_rank(2, 1, Signal::KILL);
        assert!(launched.wait().success(), "{kind}: {}", run.log());
        assert_eq!(run.worlds(), [1, 2, 1], "{kind}");
        let formula = run.prove();
        assert_eq!(formula["proved"], true, "{formula}");
        let losses: Vec<f64> = run
            .steps()
            .values()
            .map(|step| step["loss"].as_f64().unwrap())
            .collect();
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let (first, last) = (mean(&losses[..5]), mean(&losses[losses.len() - 5..]));
        assert!(last < 0.95 * first, "{kind}: {first} {last}");
        if kind == "dpo" {
            assert!(
                (losses[0] - std::f64::consts::LN_2).abs() < 1e-6,
                "{}",
                losses[0]
            );
        }
        // What the next recipe names in place of a model, and PEFT loads.
        let state = run.state().unwrap();
        let newest = state["checkpoint_ref"]["path"].as_str().unwrap();
        let copied = folder.join(format!("{kind}-run"));
        let copy = Command::new("cp")
            .arg("-r")
            .arg(run.out().join(newest))
            .arg(&copied)
            .status();
        assert!(copy.unwrap().success());
        let load = "import sys; from peft import AutoPeftModelForCausalLM as M; print(M.from_pretrained(sys.argv[1]).peft_config)";
        run_in(
            folder,
            Command::new(&python),
            &["-c", load, &copied.display().to_string()],
        );
    }
}
