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

/// Recipes of TRL by name, which begins with the trainer's, and what differs from [`RECIPE`].
const CASES: [(&str, &str); 14] = [
    ("dpo_sigmoid", "beta: 0.3\n"),
    (
        "dpo_ignored",
        "label_smoothing: 0.2\nwarmup_steps: 4\nmax_grad_norm: 0.1\n",
    ),
    ("dpo_robust", "loss_type: [robust]\nlabel_smoothing: 0.2\n"),
    ("dpo_hinge", "loss_type: hinge\nbeta: 0.5\n"),
    ("dpo_ipo", "loss_type: ipo\n"),
    (
        "dpo_accumulated",
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n",
    ),
    ("dpo_cut", "max_length: 56\n"),
    (
        "dpo_cut_start",
        "max_length: 50\ntruncation_mode: keep_end\n",
    ),
    ("orpo", "beta: 0.2\n"),
    ("orpo_cut", "max_length: 56\n"),
    (
        "cpo_simpo",
        "loss_type: simpo\ncpo_alpha: 0.0\nbeta: 2.0\nsimpo_gamma: 0.5\n",
    ),
    ("cpo", "cpo_alpha: 0.7\nlabel_smoothing: 0.1\n"),
    (
        "kto",
        "beta: 0.3\ndesirable_weight: 0.7\nundesirable_weight: 1.4\n",
    ),
    (
        "kto_accumulated",
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n",
    ),
];

/// What all have. The learning rate is large, so that a wrong gradient shows in the next loss.
const RECIPE: &str = "\
model_name_or_path: model
per_device_train_batch_size: 8
max_steps: 20
learning_rate: 1.0e-3
lr_scheduler_type: constant_with_warmup
train_sampling_strategy: sequential
bf16: false
gradient_checkpointing: false
weight_decay: 0.0
output_dir: out
";

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
    let file = |name: &str| format!("{name}.yaml");
    for (name, lines) in CASES {
        let is_kto = name.starts_with("kto");
        let rows = if is_kto { "labelled" } else { "preferences" };
        let common = RECIPE.lines().filter(|line| {
            let key = line.split_inclusive(':').next().unwrap();
            !lines.lines().any(|own| own.starts_with(key))
        });
        let common: String = common.map(|line| format!("{line}\n")).collect();
        let recipe = format!("dataset_name: {rows}\n{common}{lines}");
        std::fs::write(folder.path().join(file(name)), recipe).unwrap();
    }
    let script = own_file("tests/trainers/preference_losses.py");
    let mut arguments = vec![script];
    arguments.extend(CASES.map(|(name, _)| file(name)));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = here(Command::new(&python), &arguments);
    let printed = String::from_utf8(output.stdout).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, Vec<f64>>> =
        serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    assert_eq!(expected.len(), CASES.len());
    for (name, _) in CASES {
        let is_kto = name.starts_with("kto");
        let kl = if name == "kto_accumulated" {
            "micro-batch"
        } else {
            "global"
        };
        let (file, kl) = (file(name), format!("evenkeel.preference.kl={kl}"));
        let mut words = vec![
            "launch",
            &file,
            "--out",
            name,
            "--recipe-gpus",
            "1",
            "--procs",
            "1",
            "--device",
            "cpu",
            "--quiet",
            "--dialect-version",
            "trl-1.16",
        ];
        if is_kto {
            words.push(&kl);
        }
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
