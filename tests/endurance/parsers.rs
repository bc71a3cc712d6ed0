//! Evenkeel's readers against upstream's own parsers on every file of the corpus: the same numbers, or a stated
//! refusal. `tests/trainers/upstream_parsers.py` reads the files with transformers, accelerate, torch and bash.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

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

/// What upstream reads in each file.
fn upstream(python: &Path, files: &[PathBuf]) -> Vec<Value> {
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
    let lines = String::from_utf8(output.stdout).unwrap();
    lines
        .lines()
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

#[test]
fn every_file_has_upstreams_numbers_or_is_refused() {
    let roots = corpora();
    let mut found = Vec::new();
    roots.iter().for_each(|root| files(root, &mut found));
    if found.is_empty() {
        println!("skipped: no corpus at {}", roots[0].display());
        return;
    }
    let Some(python) = python("torch, transformers, accelerate") else {
        return;
    };
    let (mut same, mut refused) = (0, 0);
    for read in upstream(&python, &found) {
        let number = |key: &str| read[key].as_u64();
        let stated = ["per_device_batch_size", "gradient_accumulation_steps"].map(number);
        let expected = match (stated, number("processes")) {
            ([Some(_), Some(_)], _) => stated,
            (_, Some(1..)) => [Some(16), Some(1)],
            _ => continue,
        };
        match planned(&read, &roots[0]) {
            Some(numbers) => {
                assert_eq!(numbers, expected, "{read}");
                same += 1;
            }
            None => refused += 1,
        }
    }
    println!("{same} files with upstream's numbers, {refused} refused");
    assert!(
        same > 2 * refused,
        "{same} files agree, {refused} are refused"
    );
}
