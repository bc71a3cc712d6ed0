//! Losses over preferences: those of TRL step by step, and the same in any world.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::disturbed::moved_and_killed;
use super::families::printed;
use super::losses::{first_gradients_agree, launch_in, metrics_of, run_in, steps_of, tiny};
use super::support::{Run, evenkeel, small};
use super::trainers::{own_file, python};
use super::upstream::corpus;

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
    let folder = tiny(&python);
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
    let output = run_in(folder.path(), Command::new(&python), &arguments);
    let expected: BTreeMap<String, BTreeMap<String, Vec<f64>>> = printed(&output);
    assert_eq!(expected.len(), CASES.len());
    for (name, _) in CASES {
        let is_kto = name.starts_with("kto");
        let kl = if name == "kto_accumulated" {
            "micro-batch"
        } else {
            "global"
        };
        let (file, kl) = (file(name), format!("evenkeel.preference.kl={kl}"));
        let mut more = vec!["--dialect-version", "trl-1.16"];
        if is_kto {
            more.push(&kl);
        }
        launch_in(folder.path(), &file, name, &more);
        let steps = steps_of(&folder.path().join(name));
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
            compare(&format!("{name}: {key}"), &steps, pointer, trls);
        }
        first_gradients_agree(folder.path(), name, &more);
    }
}

/// Compares a number of every step with upstream's, relative to the largest. The weights of the first step are the same.
fn compare(what: &str, steps: &[Value], pointer: &str, theirs: &[f64]) {
    assert_eq!(steps.len(), theirs.len(), "{what}");
    let largest = theirs
        .iter()
        .fold(0.0f64, |most, value| most.max(value.abs()));
    for (index, (step, theirs)) in steps.iter().zip(theirs).enumerate() {
        let bound = if index == 0 { 1e-5 } else { 1e-4 };
        let ours = step.pointer(pointer).unwrap().as_f64().unwrap();
        let apart = (ours - theirs).abs() / largest.max(1e-6);
        assert!(apart < bound, "{what}: {ours}, upstream {theirs}: {step}");
    }
}

/// Overrides of the trees of direct-preference-optimization and HALOs, by the case of tree_losses.py. `legacy`: HALOs up to
/// 2024-09.
const TREES: [(&str, &str); 14] = [
    ("dpo/dpo", "loss=dpo loss.beta=0.3 loss.label_smoothing=0.1"),
    (
        "dpo/dpo_cut",
        "loss=dpo loss.beta=0.3 max_length=40 max_prompt_length=20",
    ),
    ("dpo/ipo", "loss=dpo loss.name=ipo loss.beta=0.05"),
    ("halos/dpo", "loss=dpo loss.beta=0.3"),
    (
        "halos/dpo_cut",
        "loss=dpo loss.beta=0.3 model.max_length=68 model.max_prompt_length=36",
    ),
    (
        "halos/cdpo",
        "loss=dpo loss.trainer=CDPOTrainer loss.beta=0.3 ++loss.epsilon=0.2",
    ),
    ("halos/simpo", "loss=simpo loss.beta=2.0"),
    (
        "halos/kto",
        "loss=kto loss.beta=0.3 loss.desirable_weight=0.7 loss.undesirable_weight=1.4",
    ),
    ("legacy/sft", "loss=sft model.batch_size=8"),
    (
        "legacy/sft_cut",
        "loss=sft model.batch_size=8 model.max_length=40 model.max_prompt_length=20",
    ),
    (
        "legacy/sft_accumulated",
        "loss=sft model.batch_size=4 model.gradient_accumulation_steps=2",
    ),
    (
        "legacy/dpo_cut",
        "loss=dpo loss.beta=0.3 model.batch_size=8 model.max_length=40 model.max_prompt_length=20",
    ),
    (
        "legacy/kto",
        "loss=kto loss.beta=0.3 loss.desirable_weight=1.4 loss.undesirable_weight=0.1 model.batch_size=8",
    ),
    (
        "legacy/kto_cut",
        "loss=kto loss.beta=0.3 loss.desirable_weight=1.4 loss.undesirable_weight=0.1 model.batch_size=8 \
         model.max_length=40 model.max_prompt_length=20",
    ),
];

/// What the cases of a tree have in common: a warm-up of 4 steps, and 20 steps of 8 samples.
const DPOS: &str = "model=blank_model model.name_or_path=model datasets=[texts.jsonl] lr=1e-4 warmup_steps=4 batch_size=8";
const HALOS: &str = "model=llama model.name_or_path=model train_datasets=[feedback.json] test_datasets=[feedback.json] \
                     lr=1e-3 warmup=0.2 ++model.batch_size=8 model.policy_dtype=float32";
const LEGACY: &str = "mode=train model=base_model model.name_or_path=model datasets=[texts.jsonl] lr=3e-4 warmup_steps=4 \
                      model.policy_dtype=float32";

/// The losses of HALOs 61b9ee6 (`config/loss`), which the corpus lacks.
const LEGACY_LOSSES: [(&str, &str); 3] = [
    (
        "sft",
        "{name: sft, trainer: SFTTrainer, dataloader: SFTDataLoader}",
    ),
    (
        "dpo",
        "{name: dpo, beta: 0.1, trainer: DPOTrainer, dataloader: PairedPreferenceDataLoader}",
    ),
    (
        "kto",
        "{name: kto, beta: 0.1, trainer: KTOTrainer, dataloader: UnpairedPreferenceDataLoader, desirable_weight: 1.0, \
         undesirable_weight: 1.0}",
    ),
];

/// Copies the tree of HALOs 61b9ee6 with its losses into a directory.
fn legacy_tree(corpus: &Path, copy: &Path) {
    let config = corpus.join("ContextualAI__HALOs/61b9ee6787/config");
    for group in ["model", "loss"] {
        std::fs::create_dir_all(copy.join(group)).unwrap();
    }
    for file in ["config.yaml", "model/base_model.yaml"] {
        std::fs::copy(config.join(file), copy.join(file)).unwrap();
    }
    for (name, loss) in LEGACY_LOSSES {
        std::fs::write(copy.join(format!("loss/{name}.yaml")), loss).unwrap();
    }
}

/// A template that ends with the beginning of an answer, as in tree_losses.py.
const TEMPLATE: &str = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}\
                        {% if add_generation_prompt %}<s>assistant: {% endif %}";

/// The numbers of upstream's own code, which tree_losses.py computed once.
#[test]
fn losses_over_preferences_are_those_of_the_trees() {
    let Some(corpus) = corpus() else { return };
    let Some(python) = python("torch, transformers") else {
        return;
    };
    let folder = tiny(&python);
    std::fs::write(folder.path().join("model/chat_template.jinja"), TEMPLATE).unwrap();
    head(folder.path(), "texts.jsonl", "evaluated.jsonl", 8);
    let numbers = std::fs::read(own_file("tests/trainers/tree_losses.json")).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, Vec<f64>>> =
        serde_json::from_slice(&numbers).unwrap();
    assert_eq!(expected.len(), TREES.len());
    let legacy = folder.path().join("legacy");
    legacy_tree(&corpus, &legacy);
    for (name, own) in TREES {
        let (kind, _) = name.split_once('/').unwrap();
        let (tree, usual) = match kind {
            "dpo" => (
                corpus.join("eric-mitchell__direct-preference-optimization/f8b8c0f49d/config"),
                DPOS,
            ),
            "halos" => (corpus.join("ContextualAI__HALOs/4831988636/config"), HALOS),
            _ => (legacy.clone(), LEGACY),
        };
        let tree = tree.display().to_string();
        let out = name.replace('/', "-");
        let mut more: Vec<&str> = usual.split(' ').chain(own.split(' ')).collect();
        more.extend(["exp_name=x", "n_epochs=null", "n_examples=160"]);
        more.push("evenkeel.data.shuffle=false");
        if name.contains("sft") {
            more.extend([
                "evenkeel.data.train=[{path: texts.jsonl, columns: [prompt, chosen]}]",
                "evenkeel.data.evaluation=[{path: evaluated.jsonl, columns: [prompt, chosen]}]",
            ]);
        } else if kind != "halos" {
            more.push("evenkeel.data.evaluation=[{path: evaluated.jsonl}]");
        }
        launch_in(folder.path(), &tree, &out, &more);
        let steps = steps_of(&folder.path().join(out));
        for (key, theirs) in &expected[name] {
            let pointer = match key.as_str() {
                "loss" => "/loss",
                "rewards_train/chosen" => "/preferences/reward_chosen",
                "rewards_train/rejected" => "/preferences/reward_rejected",
                "rewards_train/KL_estimate" => "/preferences/kl",
                other => panic!("{other}"),
            };
            // HALOs' rewards of these do not have the factor β.
            let beta = match (
                name,
                key.starts_with("rewards") && !key.ends_with("estimate"),
            ) {
                ("halos/simpo", true) => 2.0,
                ("halos/kto", true) => 0.3,
                _ => 1.0,
            };
            let theirs: Vec<f64> = theirs.iter().map(|value| beta * value).collect();
            compare(&format!("{name}: {key}"), &steps, pointer, &theirs);
        }
    }
    let (folder, python) = (folder.path(), python.as_path());
    same_rewards(
        python,
        folder,
        "dpo-dpo",
        ["evaluated.jsonl", "0.3", "ended"],
    );
    head(folder, "preferences/train.jsonl", "evaluated.jsonl", 24);
    same_rewards(python, folder, "halos-kto", ["evaluated.jsonl", "0.3", ""]);
}

/// Writes the first lines of a file into another one.
fn head(folder: &Path, from: &str, to: &str, count: usize) {
    let all = std::fs::read_to_string(folder.join(from)).unwrap();
    let lines: Vec<&str> = all.lines().take(count).collect();
    std::fs::write(folder.join(to), lines.join("\n")).unwrap();
}

/// The rewards of a run's evaluation are those that transformers computes with its last checkpoint. `words` are the rows,
/// β and whether rows are ended, as rewards.py takes them.
fn same_rewards(python: &Path, folder: &Path, run: &str, words: [&str; 3]) {
    let generation = folder.join(run).join("gen-1");
    let evaluation = metrics_of(&folder.join(run)).pop().unwrap();
    assert_eq!(evaluation["kind"], "evaluation");
    let mut checkpoints = std::fs::read_dir(&generation).unwrap().flatten();
    let checkpoint = checkpoints.find(|entry| entry.path().join("config.json").is_file());
    let checkpoint = checkpoint.unwrap().path().display().to_string();
    let script = own_file("tests/trainers/rewards.py");
    let mut arguments = vec![script.as_str(), "model", &checkpoint];
    arguments.extend(words.into_iter().filter(|word| !word.is_empty()));
    let output = run_in(folder, Command::new(python), &arguments);
    let printed: Value = printed(&output);
    for key in ["reward_chosen", "reward_rejected", "accuracy"] {
        // KTO has no pairs.
        let Some(ours) = evaluation["preferences"][key].as_f64() else {
            assert!(run == "halos-kto" && key == "accuracy");
            continue;
        };
        let theirs = printed[key].as_f64().unwrap();
        assert!(
            (ours - theirs).abs() < 1e-4 * theirs.abs().max(0.1),
            "{run}: {evaluation}, {printed}"
        );
    }
    let margin = evaluation["preferences"]["reward_chosen"].as_f64().unwrap()
        - evaluation["preferences"]["reward_rejected"]
            .as_f64()
            .unwrap();
    assert!(margin > 0.0, "{run}: {evaluation}");
}

/// The handbook's Zephyr, as written, with a small model and local rows of the same columns.
#[test]
fn zephyrs_preferences_train_a_model_that_transformers_loads() {
    let Some(corpus) = corpus() else { return };
    let Some(python) = python("torch, transformers") else {
        return;
    };
    let place = tiny(&python);
    let folder = place.path();
    let all = std::fs::read_to_string(folder.join("preferences/train.jsonl")).unwrap();
    let rows = all.lines().enumerate().map(|(i, line)| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        row["prompt"] = row["chosen"][0]["content"].clone();
        row["prompt_id"] = json!(i.to_string());
        row["messages"] = row["chosen"].clone();
        row["score_chosen"] = json!(8.5);
        format!("{row}\n")
    });
    let rows: String = rows.collect();
    std::fs::create_dir(folder.join("binarized")).unwrap();
    for split in ["train_prefs", "test_prefs"] {
        std::fs::write(folder.join(format!("binarized/{split}.jsonl")), &rows).unwrap();
    }
    head(folder, "preferences/train.jsonl", "evaluated.jsonl", 16);
    let recipe =
        "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/dpo/config_full.yaml";
    let recipe = corpus.join(recipe).display().to_string();
    let mut words = vec!["launch", &recipe, "--out", "zephyr"];
    words.extend("--recipe-gpus 8 --procs 2 --device cpu --quiet".split(' '));
    words.extend([
        "model_name_or_path=model",
        "dataset_mixture.datasets.0.id=binarized",
        "dataset_mixture.datasets.1.id=binarized",
        "dataset_mixture.test_split_size=8",
        "evenkeel.data.evaluation=[{path: evaluated.jsonl}]",
        "num_train_epochs=4",
        "learning_rate=1e-3",
    ]);
    run_in(folder, evenkeel(), &words);
    same_rewards(
        &python,
        folder,
        "zephyr",
        ["evaluated.jsonl", "0.01", "ended"],
    );
}

/// The batches that the norm test chooses for pairs are those of an independent computation.
#[test]
fn the_norm_test_of_pairs_is_that_of_pytorch() {
    let Some(python) = python("torch, transformers") else {
        return;
    };
    let place = tiny(&python);
    let folder = place.path();
    let recipe = "{apiVersion: evenkeel.dev/v1alpha1, kind: Recipe, spec: {objective: dpo, preference: {beta: 0.3}, \
                  model: {path: model, precision: f32}, batch: {global: 8, per_device_batch_size: 4}, \
                  data: {train: [{path: texts.jsonl}], shuffle: false}, budget: {samples: 400}, \
                  learning_rate: {peak: 2.0e-4, shape: constant}, \
                  schedule: {kind: norm-test, eta: 0.15, max_batch: 64, ema: 0}}}";
    std::fs::write(folder.join("pairs.yaml"), recipe).unwrap();
    let words = "launch pairs.yaml --out run --procs 1 --device cpu --quiet";
    run_in(folder, evenkeel(), &words.split(' ').collect::<Vec<_>>());
    let steps = steps_of(&folder.join("run"));
    let script = own_file("tests/trainers/norm_replay.py");
    let (count, path) = (steps.len().to_string(), "texts.jsonl");
    let numbers = ["0.3", "2e-4", "0.15", "8", "4", "8", "64", &count];
    let arguments = [&[script.as_str(), "model", path], &numbers[..]].concat();
    let output = run_in(folder, Command::new(&python), &arguments);
    let expected: Vec<Value> = printed(&output);
    let mut grew = 0;
    for (ours, theirs) in steps.iter().zip(&expected) {
        let test = &ours["norm_test"];
        assert_eq!(ours["batch"], theirs["batch"], "{ours} {theirs}");
        let (r, expected) = (test["ratio"].as_f64(), theirs["ratio"].as_f64());
        assert!(
            (r.unwrap() - expected.unwrap()).abs() < 2e-3,
            "{ours} {theirs}"
        );
        assert_eq!(test["next_batch"], theirs["next_batch"], "{ours} {theirs}");
        grew += u64::from(test["next_batch"] != ours["batch"]);
    }
    assert!(grew > 1 && steps.len() > 8, "{expected:?}");
}

/// Pairs, or completions with a label, as JSONL.
pub(super) fn rows(objective: &str, count: u64) -> String {
    let mut rows = String::new();
    for i in 0..count {
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
            "sft" => json!({"prompt": prompt, "completion": right}),
            _ => json!({"prompt": prompt, "chosen": right, "rejected": wrong}),
        };
        writeln!(rows, "{row}").unwrap();
    }
    rows
}

/// A run over preferences that is resized and loses a rank.
fn disturbed(objective: &str, strategy: &str) {
    disturbed_with_rows(objective, strategy, "together");
}

/// The same with rows of this kind, and for sft with a mean over samples.
fn disturbed_with_rows(objective: &str, strategy: &str, tokens: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::fs::write(&path, rows(objective, 240)).unwrap();
    let spec = small(json!({
        "objective": objective,
        "parallel": {"strategy": strategy},
        "model": {"config": {"vocab_size": 259}},
        "tokenizer": {"path": "byte"},
        "likelihood": {"mean": if objective == "sft" { "samples" } else { "tokens" }},
        "data": {"train": [{"path": path}], "held_out": 24, "rows": {"tokens": tokens}},
        "learning_rate": {"peak": 1e-4},
        "evaluation": {"every_samples": 600},
    }));
    let (run, undisturbed) = moved_and_killed(&spec, 1);
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
    for name in files {
        let of = |run: &Run| std::fs::read(run.out().join("data/reference").join(name)).unwrap();
        assert_eq!(of(&run), of(&undisturbed), "{name}");
    }
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

/// Ranks make its mismatched rows of texts.
#[test]
fn kto_of_decoded_rows_is_the_same_in_any_world() {
    disturbed_with_rows("kto", "ddp", "decoded");
}

#[test]
fn a_mean_over_samples_is_the_same_in_any_world() {
    disturbed_with_rows("sft", "fsdp", "decoded");
}

#[test]
fn orpo_is_the_same_in_any_world() {
    disturbed("orpo", "ddp");
}
