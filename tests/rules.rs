//! Every rule's own examples, planned by the binary: the wrong one trips the rule, the right one
//! does not. Nothing else may be wrong with the right one.

use std::process::Command;

use evenkeel::batch::rules::{Check, Example, RULES};
use evenkeel::recipe::Severity;
use serde_json::Value;

/// The exit code and the ids and severities of everything said about an example.
fn plan(example: &Example) -> (Option<i32>, Vec<(String, String)>) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("recipe.yaml"), example.recipe).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .current_dir(folder.path())
        .args(["plan", "recipe.yaml", "-o", "json"])
        .args(example.flags.split_whitespace())
        .output()
        .unwrap();
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        let said = String::from_utf8_lossy(&output.stderr);
        panic!("{error}: {said}\n{}", example.recipe)
    });
    let diagnostics = document["diagnostics"].as_array().unwrap();
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    let found = diagnostics
        .iter()
        .map(|d| (word(&d["rule"]), word(&d["severity"])));
    (output.status.code(), found.collect())
}

#[test]
fn every_rule_is_tripped_by_its_wrong_example_and_not_by_its_right_one() {
    for rule in RULES.iter() {
        // What `launch` asks is tested beside each rule: it would start a run here.
        if matches!(rule.check, Check::Trainer(_)) {
            continue;
        }
        let severity = match rule.check {
            // What stops a launch only.
            Check::Foreseen(_) => Severity::Warning,
            _ => rule.severity,
        };
        let severity = severity.to_string();
        let (code, found) = plan(&rule.wrong);
        assert!(
            found.contains(&(rule.id.to_owned(), severity.clone())),
            "{} is not tripped by its wrong example: {found:?}",
            rule.id
        );
        let expected = match (severity.as_str(), &rule.check) {
            ("error", Check::Reader) => 2,
            ("error", _) => 1,
            _ => 0,
        };
        assert_eq!(code, Some(expected), "{}: {found:?}", rule.id);
        let (code, found) = plan(&rule.right);
        assert_eq!(code, Some(0), "the right example of {}: {found:?}", rule.id);
        let again = found.iter().any(|(id, _)| id == rule.id);
        assert!(!again, "{} is tripped by its right example", rule.id);
    }
}
