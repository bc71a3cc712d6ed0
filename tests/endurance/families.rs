//! Models of each family, made by transformers, trained by the built-in trainer and by TRL on the same rows, and loaded by
//! transformers again.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use super::losses::{agree, launch_in, of_steps, run_in};
use super::support::{evenkeel, stderr};
use super::trainers::{own_file, python};

const STEPS: usize = 50;
/// The family whose weights are in `pytorch_model.bin` first.
const PICKLED: &str = "llama";

/// The last line that the script prints.
pub fn printed<T: serde::de::DeserializeOwned>(output: &Output) -> T {
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

/// Runs the command that a refused launch prints.
fn convert(folder: &Path, python: &Path) {
    let mut launch = evenkeel();
    let arguments = format!("launch {PICKLED}.yaml --recipe-gpus 1 --procs 1 --out {PICKLED}-run");
    launch.args(arguments.split(' '));
    let output = launch.current_dir(folder).output().unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    let command = message
        .lines()
        .find(|line| line.trim().starts_with("python -c"));
    let command = command.unwrap_or_else(|| panic!("{message}"));
    let path = python.parent().unwrap().display();
    let path = format!("{path}:{}", std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.env("PATH", path);
    run_in(folder, bash, &["-c", command]);
}

/// `PROMPT` of families.py.
const PROMPT: &str = "hello, Grüße and";

/// An element of `evenkeel generate -o json`.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    prompt_tokens: Vec<u32>,
    tokens: Vec<u32>,
}

/// The recipe NAME.yaml of a folder, trained into NAME-run, has the losses that TRL prints, with five digits.
pub fn same_losses_in(folder: &Path, name: &str, expected: &[f64], objective: &str) {
    let (recipe, run) = (format!("{name}.yaml"), format!("{name}-run"));
    launch_in(folder, &recipe, &run, &[objective]);
    let losses = of_steps(&folder.join(&run));
    let do_agree = agree(&losses, expected, 1e-4);
    assert!(do_agree, "{name}: {losses:?}, TRL {expected:?}");
}

/// The differences of logits that a script prints by name are small.
pub fn same_logits(output: &Output, count: usize) {
    let apart: BTreeMap<String, f64> = printed(output);
    assert_eq!(apart.len(), count);
    for (name, apart) in apart {
        assert!(apart < 1e-3, "{name}: logits {apart} apart");
    }
}

#[test]
fn models_of_every_family_are_trained_as_by_trl_and_load_again() {
    let Some(python) = python("torch, transformers, trl") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let script = own_file("tests/trainers/families.py");
    let steps = STEPS.to_string();
    let here = |command, arguments: &[&str]| run_in(folder.path(), command, arguments);
    let output = here(Command::new(&python), &[&script, "train", ".", &steps]);
    let expected: BTreeMap<String, Vec<f64>> = printed(&output);
    here(Command::new(&python), &[&script, "pickle", ".", PICKLED]);
    convert(folder.path(), Path::new(&python));
    for (name, expected) in &expected {
        same_losses_in(folder.path(), name, expected, "evenkeel.objective=sft");
    }
    let last = format!("gen-1/step-{STEPS:07}");
    let output = here(Command::new(&python), &[&script, "compare", ".", &last]);
    same_logits(&output, expected.len());
    for name in expected.keys() {
        let words = format!("export {name}-run --out {name}-run/exported");
        here(evenkeel(), &words.split(' ').collect::<Vec<_>>());
    }
    let exported = here(
        Command::new(&python),
        &[&script, "compare", ".", "exported"],
    );
    same_logits(&exported, expected.len());
    let output = here(Command::new(&python), &[&script, "generate", ".", &last]);
    let expected: BTreeMap<String, [Vec<u32>; 2]> = printed(&output);
    for (name, [prompt, tokens]) in expected {
        let run = format!("{name}-run");
        let words = ["generate", &run, "--text", "--prompt", PROMPT];
        let options = ["--max-tokens", "40", "--device", "cpu", "-o", "json"];
        let output = here(evenkeel(), &[&words[..], &options].concat());
        let answers: Vec<Answer> = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answers[0].prompt_tokens, prompt, "{name}");
        assert_eq!(answers[0].tokens, tokens, "{name}");
    }
}
