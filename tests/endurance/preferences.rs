//! Losses over preferences: those of TRL step by step, and the same in any world.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::disturbed::proved;
use super::losses::run_in;
use super::support::{Run, evenkeel, same_losses, small};
use super::trainers::{own_file, python};

/// The native spelling of the cases of preference_losses.py.
const CASES: [(&str, &str); 9] = [
    ("sigmoid", "objective: dpo, preference: {beta: 0.3}"),
    (
        "robust",
        "objective: dpo, preference: {loss: robust, label_smoothing: 0.2}",
    ),
    (
        "hinge",
        "objective: dpo, preference: {loss: hinge, beta: 0.5}",
    ),
    (
        "ipo",
        "objective: dpo, preference: {loss: ipo, by_token: true}",
    ),
    ("orpo", "objective: orpo, preference: {beta: 0.2}"),
    ("simpo", "objective: simpo"),
    (
        "cpo",
        "objective: simpo, preference: {by_token: false, target_margin: 0, beta: 0.1, likelihood_weight: 0.7}",
    ),
    (
        "kto",
        "objective: kto, preference: {beta: 0.3, desirable_weight: 0.7, undesirable_weight: 1.4}",
    ),
    (
        "kto_accumulated",
        "objective: kto, preference: {beta: 0.3, kl: micro-batch}",
    ),
];

/// What all cases have.
const COMMON: &str = "\
model: {path: model, precision: f32}, \
budget: {steps: 20}, learning_rate: {peak: 1.0e-3, shape: constant}";

#[test]
fn losses_and_rewards_over_preferences_are_those_of_trl() {
    let Some(python) = python("torch, transformers, trl") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let here = |command, arguments: &[&str]| run_in(folder.path(), command, arguments);
    here(
        Command::new(&python),
        &[&own_file("tests/trainers/tiny_model.py"), "."],
    );
    let script = own_file("tests/trainers/preference_losses.py");
    let output = here(
        Command::new(&python),
        &[
            &script,
            "model",
            "preferences/train.jsonl",
            "labelled/train.jsonl",
        ],
    );
    let printed = String::from_utf8(output.stdout).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, Vec<f64>>> =
        serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    assert_eq!(expected.len(), CASES.len());
    for (name, lines) in CASES {
        let is_kto = name.starts_with("kto");
        let rows = if is_kto { "labelled" } else { "preferences" };
        let micro_batch = if name == "kto_accumulated" { 4 } else { 8 };
        let recipe = format!(
            "{{apiVersion: evenkeel.dev/v1alpha1, kind: Recipe, spec: {{{lines}, {COMMON}, \
             batch: {{global: 8, per_device_batch_size: {micro_batch}}}, \
             data: {{train: [{{path: {rows}/train.jsonl}}], shuffle: false, extra_token: false}}}}}}\n"
        );
        std::fs::write(folder.path().join(format!("{name}.yaml")), recipe).unwrap();
        let file = format!("{name}.yaml");
        let words = [
            "launch", &file, "--out", name, "--procs", "1", "--device", "cpu", "--quiet",
        ];
        here(evenkeel(), &words);
        let metrics = folder.path().join(name).join("gen-1/metrics.jsonl");
        let metrics = std::fs::read_to_string(metrics).unwrap();
        let steps: Vec<Value> = metrics
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        for (key, pointer) in [
            ("loss", "/loss"),
            ("rewards/chosen", "/preferences/reward_chosen"),
            ("rewards/rejected", "/preferences/reward_rejected"),
            ("kl", "/preferences/kl"),
        ] {
            // TRL's rewards are means of micro-batches' means, which have different numbers of chosen rows.
            let is_other_mean = name == "kto_accumulated" && key.starts_with("rewards");
            if key == "kl" && !is_kto || is_other_mean {
                continue;
            }
            let trls = &expected[name][key];
            assert_eq!(steps.len(), trls.len(), "{name}");
            let ours = steps
                .iter()
                .map(|step| step.pointer(pointer).unwrap().as_f64().unwrap());
            let typical = trls
                .iter()
                .fold(0.0f64, |most, value| most.max(value.abs()));
            for (step, (ours, trls)) in (1..).zip(ours.zip(trls)) {
                let apart = (ours - trls).abs() / typical;
                assert!(
                    apart < 1e-4,
                    "{name}: {key} of step {step}: {ours}, TRL {trls}"
                );
            }
        }
    }
}

/// Pairs, or completions with a label, as JSONL.
fn rows(objective: &str) -> String {
    let mut rows = String::new();
    for i in 0..240 {
        let (prompt, right, wrong) = (
            format!("{i}+1="),
            format!("{}", i + 1),
            format!("{}", i * 7),
        );
        let row = match objective {
            "kto" => {
                let is_right = i % 3 != 1;
                let completion = if is_right { right } else { wrong };
                json!({"prompt": prompt, "completion": completion, "label": is_right})
            }
            _ => json!({"prompt": prompt, "chosen": right, "rejected": wrong}),
        };
        writeln!(rows, "{row}").unwrap();
    }
    rows
}

/// A run over preferences that is resized and loses a rank.
fn disturbed(objective: &str, strategy: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::fs::write(&path, rows(objective)).unwrap();
    let spec = || {
        small(json!({
            "objective": objective,
            "parallel": {"strategy": strategy},
            "model": {"config": {"vocab_size": 259}},
            "tokenizer": {"path": "byte"},
            "data": {"train": [{"path": path}], "held_out": 24},
            "learning_rate": {"peak": 1e-4},
            "evaluation": {"every_samples": 600},
        }))
    };
    let run = Run::of(spec());
    let launched = run.start(&["--procs", "1"]);
    run.wait_for_steps(1, 5);
    let resized = run.call("resize", &["3"]);
    assert!(resized.status.success(), "{resized:?}");
    run.wait_for_steps(2, 5);
    let files = match objective {
        "dpo" => ["train.bin", "evaluation.bin"].as_slice(),
        "kto" => &[
            "train.bin",
            "train-mismatched.bin",
            "evaluation.bin",
            "evaluation-mismatched.bin",
        ],
        _ => &[],
    };
    let references = |run: &Run| -> Vec<Vec<u8>> {
        let of = |name: &&str| std::fs::read(run.out().join("data/reference").join(name));
        files.iter().map(of).collect::<Result<_, _>>().unwrap()
    };
    let first = references(&run);
    run.signal_rank(2, 1, Signal::KILL);
    run.wait_for_steps(3, 5);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [1, 3, 2]);
    proved(&run, 2400);

    let undisturbed = Run::of(spec());
    let output = undisturbed.launch(&["--quiet"]);
    assert!(output.status.success(), "{output:?}");
    same_losses(&run, &undisturbed);
    // Computed once, by one rank or by three.
    assert_eq!(first, references(&run));
    assert_eq!(first, references(&undisturbed));
    let first = &undisturbed.generation_steps(1)[0];
    if objective == "dpo" {
        let apart = first["loss"].as_f64().unwrap() - std::f64::consts::LN_2;
        assert!(apart.abs() < 1e-12, "{first}");
        assert_eq!(first["preferences"]["reward_chosen"], 0.0);
    }
    if objective == "kto" {
        // A row's log-probability is rounded differently beside rows of other lengths.
        let apart = first["loss"].as_f64().unwrap() - 0.5;
        assert!(apart.abs() < 1e-8, "{first}");
        let last = run.generation_steps(3).pop().unwrap();
        assert!(last["preferences"]["kl"].as_f64().unwrap() > 0.0, "{last}");
    }
}

#[test]
fn dpo_is_the_same_in_any_world() {
    disturbed("dpo", "ddp");
}

#[test]
fn dpo_is_the_same_in_any_world_under_sharding() {
    disturbed("dpo", "fsdp");
}

#[test]
fn kto_is_the_same_in_any_world() {
    disturbed("kto", "ddp");
}

#[test]
fn kto_is_the_same_in_any_world_under_sharding() {
    disturbed("kto", "fsdp");
}

#[test]
fn orpo_is_the_same_in_any_world() {
    disturbed("orpo", "ddp");
}
