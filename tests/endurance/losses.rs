//! The losses of TRL's SFT and of the built-in trainer, step by step, on the same recipe, model and rows.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::families::printed;
use super::support::{evenkeel, stderr};
use super::trainers::{own_file, python};

/// What both read. The learning rate is large, so that a wrong gradient shows in the next loss.
const RECIPE: &str = "\
per_device_train_batch_size: 8
max_steps: 6
learning_rate: 1.0e-2
lr_scheduler_type: constant
train_sampling_strategy: sequential
bf16: false
weight_decay: 0.0
output_dir: out
";

/// Recipes by name: whole conversations that are cut, completions only, packed conversations, and other losses of tokens.
const CASES: [(&str, &str); 7] = [
    ("cut", "dataset_name: sft/train.jsonl\nmax_length: 48\n"),
    (
        "completions",
        "dataset_name: completions.jsonl\nmax_length: 64\n",
    ),
    (
        "packed",
        "dataset_name: sft/train.jsonl\nmax_length: 48\npacking: true\npacking_strategy: wrapped\n",
    ),
    (
        "fitted",
        "dataset_name: completions.jsonl\nmax_length: 96\npacking: true\n",
    ),
    (
        "split",
        "dataset_name: sft/train.jsonl\nmax_length: 48\npacking: true\npacking_strategy: bfd_split\n",
    ),
    (
        "smoothed",
        "dataset_name: completions.jsonl\nmax_length: 64\nlabel_smoothing_factor: 0.1\n",
    ),
    (
        "dynamic",
        "dataset_name: completions.jsonl\nmax_length: 64\nloss_type: dft\n",
    ),
];

#[test]
fn losses_are_those_of_trl() {
    let Some(python) = python("torch, transformers, trl") else {
        return;
    };
    let folder = tiny(&python);
    let here = |command, arguments: &[&str]| run_in(folder.path(), command, arguments);
    let rows: Vec<String> = (0..480)
        .map(|i| {
            let completion = format!("it is {}. ", 2 * i).repeat(1 + i % 3);
            json!({"prompt": format!("what is {i} plus {i}? "), "completion": completion})
                .to_string()
        })
        .collect();
    std::fs::write(folder.path().join("completions.jsonl"), rows.join("\n")).unwrap();
    for (name, lines) in CASES {
        let recipe = format!("model_name_or_path: model\n{RECIPE}{lines}");
        std::fs::write(folder.path().join(format!("{name}.yaml")), recipe).unwrap();
    }
    let script = own_file("tests/trainers/sft_losses.py");
    let files = CASES.map(|(name, _)| format!("{name}.yaml"));
    let words: Vec<&str> = [&script]
        .into_iter()
        .chain(&files)
        .map(String::as_str)
        .collect();
    let output = here(Command::new(&python), &words);
    let expected: Vec<Vec<f64>> = printed(&output);
    for ((name, _), expected) in CASES.into_iter().zip(expected) {
        let file = format!("{name}.yaml");
        launch_in(folder.path(), &file, name, &["evenkeel.objective=sft"]);
        let losses = of_steps(&folder.path().join(name));
        let do_agree = agree(&losses, &expected, 2e-5);
        assert!(do_agree, "{name}: {losses:?}, TRL {expected:?}");
    }
}

/// NEFTune's noise is drawn by sample and position.
#[test]
fn noise_on_embeddings_does_not_depend_on_the_world_or_the_micro_batch() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |name: &str, procs: &str, more: &[&str]| {
        let words = [
            "launch",
            "recipe.yaml",
            "--procs",
            procs,
            "--quiet",
            "--out",
            name,
        ];
        let words: Vec<&str> = words.iter().chain(more).copied().collect();
        run_in(folder.path(), evenkeel(), &words);
        of_steps(&folder.path().join(name))
    };
    std::fs::write(folder.path().join("recipe.yaml"), NATIVE).unwrap();
    let noise = "likelihood.neftune_alpha=5";
    let one = losses("one", "1", &[noise]);
    assert_eq!(one.len(), 8 + 1);
    let two = losses("two", "2", &[noise, "batch.per_device_batch_size=1"]);
    let without = losses("without", "1", &[]);
    assert!(agree(&one, &two, 1e-5), "{one:?} {two:?}");
    assert!(!agree(&one, &without, 1e-3), "{one:?} {without:?}");
}

/// Eight steps, and an evaluation at the end.
const NATIVE: &str = "\
apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata: {name: noise}
spec:
  batch: {global: 8, per_device_batch_size: 4}
  budget: {samples: 64}
  model:
    precision: f32
    config:
      {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
       num_key_value_heads: 2, vocab_size: 64, max_position_embeddings: 32}
  learning_rate: {peak: 0.01}
  data:
    sequence_length: 24
    train: [{path: synthetic, synthetic: {vocabulary: 64, branching: 4, samples: 200}}]
    held_out: 8
";

/// Whether losses are as many as others, and each is less than a share of the other apart from it.
pub fn agree(losses: &[f64], others: &[f64], share: f64) -> bool {
    let mut pairs = losses.iter().zip(others);
    losses.len() == others.len() && pairs.all(|(a, b)| (a - b).abs() / b < share)
}

/// A folder with what tiny_model.py makes.
pub fn tiny(python: &Path) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let script = own_file("tests/trainers/tiny_model.py");
    run_in(folder.path(), Command::new(python), &[&script, "."]);
    folder
}

/// Trains a recipe for one device on this machine's CPU, in a folder.
pub fn launch_in(folder: &Path, recipe: &str, out: &str, more: &[&str]) {
    let options = "--recipe-gpus 1 --procs 1 --device cpu --quiet".split(' ');
    let words = ["launch", recipe, "--out", out].into_iter().chain(options);
    let words: Vec<&str> = words.chain(more.iter().copied()).collect();
    run_in(folder, evenkeel(), &words);
}

/// Trains one step of a recipe NAME.yaml in a folder, and compares the gradient of each tensor with that of the first step
/// in NAME.gradients.safetensors. AdamW's first moment after one step is 1 − beta1 times the clipped gradient.
pub fn first_gradients_agree(folder: &Path, name: &str, more: &[&str]) {
    let out = format!("{name}-first");
    let one_step = [more, &["max_steps=1"]].concat();
    launch_in(folder, &format!("{name}.yaml"), &out, &one_step);
    let mut ours = moments(&folder.join(out).join("gen-1/step-0000001"));
    let theirs = tensors(&folder.join(format!("{name}.gradients.safetensors")));
    assert!(theirs.len() > 4, "{name}: {}", theirs.len());
    for (tensor, expected) in &theirs {
        let got = ours.remove(tensor);
        let got = got.unwrap_or_else(|| panic!("{name}: no {tensor} in {:?}", ours.keys()));
        let norm =
            |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let pairs = got.iter().zip(expected);
        let apart = norm(&mut pairs.map(|(a, b)| f64::from(a - b)));
        let length = norm(&mut expected.iter().map(|&v| f64::from(v)));
        assert_eq!(got.len(), expected.len(), "{name}: {tensor}");
        assert!(
            apart <= 1e-5 * length,
            "{name}: {tensor} is {apart} of {length} apart"
        );
    }
    assert!(ours.is_empty(), "{name}: {:?}", ours.keys());
}

/// The first moments of a checkpoint.
fn moments(checkpoint: &Path) -> BTreeMap<String, Vec<f32>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(checkpoint).unwrap() {
        let path = entry.unwrap().path();
        if path
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("optimizer-")
        {
            found.extend(tensors(&path));
        }
    }
    found.retain(|name, _| name.starts_with("exp_avg."));
    found
}

/// The tensors of a file with f32.
fn tensors(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |data: &[u8]| {
        data.as_chunks()
            .0
            .iter()
            .map(|word| f32::from_le_bytes(*word))
            .collect()
    };
    tensors
        .iter()
        .map(|(name, tensor)| (name.to_owned(), floats(tensor.data())))
        .collect()
}

/// Runs a command that must succeed in a folder, without the hub.
pub fn run_in(folder: &Path, mut command: Command, arguments: &[&str]) -> Output {
    command.current_dir(folder).args(arguments);
    let output = command.env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        stderr(&output)
    );
    output
}

/// The metrics of a run's first generation.
pub fn metrics_of(run: &Path) -> Vec<Value> {
    let metrics = std::fs::read_to_string(run.join("gen-1/metrics.jsonl")).unwrap();
    let lines = metrics.lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The steps of a run's first generation.
pub fn steps_of(run: &Path) -> Vec<Value> {
    let mut metrics = metrics_of(run);
    metrics.retain(|metric| metric["kind"] == "step");
    metrics
}

/// The losses of a run's first generation.
pub fn of_steps(run: &Path) -> Vec<f64> {
    let metrics = metrics_of(run);
    let losses = metrics.iter().map(|metric| metric["loss"].as_f64());
    losses.flatten().collect()
}
