//! Every rule's examples, planned by the binary: the wrong one triggers the rule; the right one
//! triggers neither it nor any other problem.

mod corpus;

use std::process::Command;

use evenkeel::plan::rules::{Check, Example, RULES};
use evenkeel::recipe::Severity;
use serde_json::Value;

/// The exit code and the ids and severities of all diagnostics of an example.
fn plan(example: &Example) -> (Option<i32>, Vec<(String, String)>) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("recipe.yaml"), example.recipe()).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .current_dir(folder.path())
        .args(["plan", "recipe.yaml", "-o", "json"])
        .args(example.flags.split_whitespace())
        .output()
        .unwrap();
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        let message = String::from_utf8_lossy(&output.stderr);
        panic!("{error}: {message}\n{}", example.recipe())
    });
    let diagnostics = document["diagnostics"].as_array().unwrap();
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    let found = diagnostics
        .iter()
        .map(|d| (word(&d["rule"]), word(&d["severity"])));
    (output.status.code(), found.collect())
}

#[test]
fn every_rule_is_triggered_only_by_its_wrong_example() {
    for rule in RULES.iter() {
        // `launch` rules are tested beside each rule, since here they would start a run.
        if matches!(rule.check, Check::Trainer(_)) {
            continue;
        }
        let severity = match rule.check {
            // A problem that stops only a launch.
            Check::PlanWarning(_) => Severity::Warning,
            _ => rule.severity,
        };
        let severity = severity.to_string();
        let (code, found) = plan(&rule.wrong);
        assert!(
            found.contains(&(rule.id.to_owned(), severity.clone())),
            "{} is not triggered by its wrong example: {found:?}",
            rule.id
        );
        let expected = match (severity.as_str(), &rule.check) {
            // A file that cannot be read at all.
            ("error", _) if rule.id == "unreadable-file" => 2,
            ("error", _) => 1,
            _ => 0,
        };
        assert_eq!(code, Some(expected), "{}: {found:?}", rule.id);
        let (code, found) = plan(&rule.right);
        assert_eq!(code, Some(0), "the right example of {}: {found:?}", rule.id);
        let again = found.iter().any(|(id, _)| id == rule.id);
        assert!(!again, "{} is triggered by its right example", rule.id);
    }
}

#[test]
fn one_call_checks_many_recipes_and_writes_sarif() {
    let Some(root) = corpus::root() else { return };
    let manifest = std::fs::read_to_string(root.join("manifest.csv")).unwrap();
    let paths: Vec<&str> = manifest
        .lines()
        .skip(1)
        .map(|line| line.split(',').nth(3).unwrap())
        .collect();
    let check = |format: &str| -> (Option<i32>, Value) {
        let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .current_dir(&root)
            .args(["check", "--recipe-gpus", "8", "-o", format])
            .args(&paths)
            .output()
            .unwrap();
        let document = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), document)
    };
    // Some upstream recipes have errors as published.
    let (code, checked) = check("json");
    assert_eq!(code, Some(1));
    let checked = checked.as_array().unwrap();
    assert_eq!(checked.len(), paths.len());
    let found: usize = checked
        .iter()
        .map(|recipe| recipe["diagnostics"].as_array().unwrap().len())
        .sum();
    let (code, sarif) = check("sarif");
    assert_eq!(code, Some(1));
    assert_eq!(sarif["version"], "2.1.0");
    let results = sarif["runs"][0]["results"].as_array().unwrap();
    assert_eq!(results.len(), found);
    for result in results {
        let uri = &result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"];
        assert!(root.join(uri.as_str().unwrap()).is_file(), "{result}");
    }
}

/// Upstream files that trigger a rule, the flags of that plan, and flags that avoid it.
const TRIPPED: &[(&str, &str, &str, &str)] = &[
    (
        "global-batch-constant",
        "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml",
        "--recipe-gpus 8 --gpus 4",
        "--recipe-gpus 8 --gpus 8",
    ),
    (
        "kto-batch-min",
        "ContextualAI__HALOs/4831988636/config",
        "--gpus 32 loss=kto model=llama exp_name=a train_datasets=[ultrabin] test_datasets=[ultrabin]",
        "--gpus 16 loss=kto model=llama exp_name=a train_datasets=[ultrabin] test_datasets=[ultrabin]",
    ),
    (
        "model-needs-sharding",
        "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml",
        "--recipe-gpus 8 --gpus 8 --device-memory 60GB",
        "--recipe-gpus 8 --gpus 8 --device-memory 60GB evenkeel.parallel.strategy=fsdp",
    ),
    (
        "parallelism-product",
        "huggingface__accelerate/16cb6eb80d/examples/torch_native_parallelism/configs/tp_hsdp.yaml",
        "--gpus 8 num_processes=6",
        "--gpus 8",
    ),
    (
        "deepspeed-unread",
        "huggingface__accelerate/16cb6eb80d/examples/config_yaml_templates/deepspeed.yaml",
        "--gpus 2",
        "--gpus 2 deepspeed_config.deepspeed_config_file=null",
    ),
    (
        "start-batch-estimate",
        "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml",
        "--recipe-gpus 8 --gpus 8 --device-memory 40GB evenkeel.parallel.strategy=fsdp",
        "--recipe-gpus 8 --gpus 8 --device-memory 141GB evenkeel.parallel.strategy=fsdp",
    ),
    (
        "trainer-numerics",
        "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml",
        "--recipe-gpus 8 --gpus 8 optim=adamw_bnb_8bit",
        "--recipe-gpus 8 --gpus 8",
    ),
];

#[test]
fn upstream_files_trigger_rules() {
    let Some(root) = corpus::root() else { return };
    for (rule, file, wrong, right) in TRIPPED {
        for (flags, expected) in [(wrong, true), (right, false)] {
            let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
                .current_dir(&root)
                .args(["plan", file, "-o", "json"])
                .args(flags.split_whitespace())
                .output()
                .unwrap();
            let message = String::from_utf8_lossy(&output.stderr);
            let document: Value = serde_json::from_slice(&output.stdout)
                .unwrap_or_else(|error| panic!("{rule}: {error}: {message}"));
            let found = document["diagnostics"].as_array().unwrap();
            let trips = found.iter().any(|d| d["rule"] == *rule);
            assert_eq!(trips, expected, "{rule} of {file} {flags}: {found:?}");
        }
    }
}
