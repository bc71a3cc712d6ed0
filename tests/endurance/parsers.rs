//! Evenkeel's readers against upstream's own parsers on every file of the corpus: the same values, or a stated
//! refusal. `tests/trainers/upstream_parsers.py` reads the files with transformers, TRL, accelerate, torch and bash.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use evenkeel::recipe::{self, Dialect, Recipe, Request};
use serde_json::{Value, json};

use super::support::evenkeel;
use super::trainers::python;

/// The recipe that accelerate configs are planned with: 16 samples a device, no accumulation.
const RECIPE: &str =
    "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml";

/// The corpora of upstream recipes and scripts.
fn corpora() -> [PathBuf; 2] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let recipes = std::env::var_os("EVENKEEL_RECIPES").map(PathBuf::from);
    [
        recipes.unwrap_or_else(|| root.join("recipes")),
        root.join("scripts"),
    ]
}

/// Every YAML file and shell script below a directory.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            files(&path, found);
        } else if matches!(extension, Some("yaml" | "yml" | "sh")) {
            found.push(path);
        }
    }
}

/// The recipe in a file; `None`: Evenkeel refuses the file.
fn read(file: &Path) -> Option<Recipe> {
    let request = Request {
        path: file.to_owned(),
        ..Request::default()
    };
    recipe::read(&request).ok()
}

/// The objective of one of TRL's trainers. `None`: another program trains.
fn of_trl(recipe: &Recipe) -> Option<Value> {
    (recipe.dialect == Dialect::HandbookTrl).then(|| json!(recipe.spec.objective))
}

/// The values of a recipe besides its batch, by the names that `upstream_parsers.py` gives them.
fn values(recipe: &Recipe) -> Vec<(&'static str, f64)> {
    let spec = &recipe.spec;
    let rate = &spec.learning_rate;
    let warmup = rate.warmup_steps.map(|steps| steps as f64);
    let steps = spec.budget.steps.unwrap_or(0) as f64;
    let epochs = spec.budget.epochs.filter(|_| steps == 0.0);
    let mut values = vec![
        ("learning_rate", rate.peak),
        ("warmup", warmup.or(rate.warmup_ratio).unwrap_or(0.0)),
        ("steps", steps),
        ("epochs", epochs.unwrap_or(0.0)),
        ("seed", spec.seed as f64),
    ];
    if recipe.dialect == Dialect::HandbookTrl {
        values.push(("sequence_length", spec.data.sequence_length as f64));
    }
    values
}

/// What upstream reads in each file, which `null` or the objective of one of TRL's trainers follows.
fn upstream(python: &Path, files: &[(PathBuf, Option<Value>)]) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trainers/upstream_parsers.py");
    let mut child = Command::new(python)
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input
        .write_all(&serde_json::to_vec(files).unwrap())
        .unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    // DeepSpeed prints lines when it is imported.
    let lines = String::from_utf8(output.stdout).unwrap();
    lines
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The plan for the world in which upstream reads the file. `None`: it is refused with an error.
fn planned(read: &Value, recipes: &Path) -> Option<[Option<u64>; 2]> {
    let file = read["file"].as_str().unwrap();
    let gpus = read["processes"].as_u64();
    let world = gpus.unwrap_or(8).to_string();
    let mut command = evenkeel();
    command.args(["plan", "-o", "json", "--gpus", &world]);
    match read["per_device_batch_size"].is_u64() {
        true => command.arg(file),
        false => command
            .arg(recipes.join(RECIPE))
            .args(["--accelerate", file]),
    };
    if gpus.is_none() {
        command.args(["--recipe-gpus", &world]);
    }
    let output = command.stdin(Stdio::null()).output().unwrap();
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    if output.status.success() {
        let number = |key: &str| plan[key].as_u64();
        return Some(["per_device_batch_size", "gradient_accumulation_steps"].map(number));
    }
    let problems = plan["diagnostics"].as_array().unwrap();
    assert!(
        problems.iter().any(|d| d["severity"] == "error"),
        "{file}: {plan}"
    );
    None
}

/// Prints the fields of the configs of the trainers that the built-in trainer replaces.
const FIELDS: &str = "\
import dataclasses, transformers, trl
from trl.experimental.cpo import CPOConfig
from trl.experimental.orpo import ORPOConfig
for config in (transformers.TrainingArguments, trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig,
               trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, ORPOConfig, CPOConfig):
    for field in dataclasses.fields(config):
        if field.init:
            print(field.name)
";

#[test]
fn the_page_of_keys_has_every_field_of_the_installed_trl_and_transformers() {
    let Some(python) = python("trl, transformers") else {
        return;
    };
    let output = Command::new(python).args(["-c", FIELDS]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let fields = String::from_utf8(output.stdout).unwrap();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/keys.md");
    let page = std::fs::read_to_string(page).unwrap();
    let of_key = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let listed: BTreeSet<&str> = page.split(|c| !of_key(c)).collect();
    let missing: Vec<&str> = fields.lines().filter(|key| !listed.contains(key)).collect();
    assert_eq!(missing, [""; 0], "docs/keys.md lacks these keys");
    assert!(fields.lines().count() > 500, "{fields}");
}

#[test]
fn every_file_has_upstreams_values_or_is_refused() {
    let roots = corpora();
    let mut found = Vec::new();
    roots.iter().for_each(|root| files(root, &mut found));
    if found.is_empty() {
        println!("skipped: no corpus at {}", roots[0].display());
        return;
    }
    let Some(python) = python("torch, transformers, accelerate, trl") else {
        return;
    };
    let recipes: Vec<Option<Recipe>> = found.iter().map(|file| read(file)).collect();
    let trainers = recipes.iter().map(|recipe| of_trl(recipe.as_ref()?));
    let named: Vec<_> = found.into_iter().zip(trainers).collect();
    let (mut same, mut refused, mut compared, mut by_trl) = (0, 0, 0, 0);
    let mut different = Vec::new();
    let mut unread = Vec::new();
    for (read, recipe) in upstream(&python, &named).iter().zip(&recipes) {
        let number = |key: &str| read[key].as_u64();
        let stated = ["per_device_batch_size", "gradient_accumulation_steps"].map(number);
        let expected = match (stated, number("processes")) {
            ([Some(_), Some(_)], _) => stated,
            (_, Some(1..)) => [Some(16), Some(1)],
            _ => {
                if recipe
                    .as_ref()
                    .is_some_and(|recipe| of_trl(recipe).is_some())
                {
                    unread.push(format!("{}: {}", read["file"], read["error"]));
                }
                continue;
            }
        };
        match planned(read, &roots[0]) {
            Some(numbers) if numbers == expected => same += 1,
            Some(numbers) => different.push(format!("{numbers:?}, but upstream {read}")),
            None => refused += 1,
        }
        let Some(recipe) = recipe.as_ref().filter(|_| stated[0].is_some()) else {
            continue;
        };
        compared += 1;
        by_trl += u32::from(of_trl(recipe).is_some());
        for (name, value) in values(recipe) {
            if read[name].as_f64() != Some(value) {
                different.push(format!(
                    "{}: {name} is {value}, but upstream {}",
                    read["file"], read[name]
                ));
            }
        }
    }
    println!("{same} files with upstream's numbers, {refused} refused");
    println!("{compared} files with the other values compared, {by_trl} of them with TRL's parser");
    println!("TRL refuses {}: {unread:#?}", unread.len());
    assert!(different.is_empty(), "{different:#?}");
    assert!(
        same > 2 * refused,
        "{same} files agree, {refused} are refused"
    );
    assert!(
        by_trl > unread.len() as u32,
        "TRL reads only {by_trl} files"
    );
}
