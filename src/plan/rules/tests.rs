use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::util::testing::is_kept;

#[test]
fn ids_are_unique_kebab_case_words_in_order() {
    let ids: Vec<&str> = RULES.iter().map(|rule| rule.id).collect();
    let mut sorted = ids.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(ids, sorted);
    for id in ids {
        let word = |w: &str| !w.is_empty() && w.chars().all(|c| c.is_ascii_lowercase());
        assert!(id.split('-').all(word), "{id}");
    }
}

#[test]
fn every_page_has_every_section() {
    for rule in RULES.iter() {
        for text in [rule.summary, &rule.why(), rule.upstream()] {
            assert!(!text.trim().is_empty(), "{}", rule.id);
        }
        assert!(!rule.summary.ends_with('.'), "{}", rule.id);
        let (wrong, right) = (&rule.wrong, &rule.right);
        let same = wrong.recipe() == right.recipe() && wrong.flags == right.flags;
        assert!(!same, "{}", rule.id);
    }
}

/// The list of all rules, Markdown.
fn index(rules: &[&Rule]) -> String {
    let mut index = "# Rules\n\n".to_owned();
    index += &page::wrap(
        "A recipe must satisfy these rules before Evenkeel starts a run. `evenkeel explain RULE` \
         prints the same pages. They name keys as native recipes do. In an upstream dialect, \
         put a key that upstream lacks below `evenkeel`: `evenkeel.batch.per_device_batch_size=4`. \
         The table shows the most severe finding of each rule: a rule that is an error may also \
         report warnings or notes. Tests generate the pages: change the rules in `src/plan/rules/` \
         and run `UPDATE=1 cargo test --lib`.",
    );
    index += "\n| rule | | |\n|---|---|---|\n";
    for rule in rules {
        let (id, severity, summary) = (rule.id, rule.severity, rule.summary);
        index += &format!("| [{id}]({id}.md) | {severity} | {summary} |\n");
    }
    index
}

#[test]
fn docs_pages_equal_the_output_of_explain() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/rules");
    let mut pages: Vec<(String, String)> = RULES
        .iter()
        .map(|rule| (format!("{}.md", rule.id), page(rule)))
        .collect();
    pages.push(("README.md".to_owned(), index(&RULES)));
    for (name, text) in &pages {
        is_kept(&format!("docs/rules/{name}"), text);
    }
    let names: BTreeSet<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let expected: BTreeSet<String> = pages.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(names, expected, "pages without a rule");
}

/// Every Rust source below a folder, without tests.
fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
            into.push(path);
        }
    }
}

#[test]
fn every_reader_rule_has_a_page_and_every_page_a_reader_rule() {
    let mut files = Vec::new();
    sources(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src/recipe"),
        &mut files,
    );
    let mut text = String::new();
    for file in files {
        let source = fs::read_to_string(file).unwrap();
        text += source.split("#[cfg(test)]\nmod tests {").next().unwrap();
    }
    let quoted = |id: &str| text.contains(&format!("\"{id}\""));
    for rule in RULES
        .iter()
        .filter(|rule| matches!(rule.check, Check::Reader))
    {
        assert!(quoted(rule.id), "no reader checks {}", rule.id);
    }
    // Every rule id passed to these functions must have a page.
    let calls = [
        "Diagnostic::error(",
        "Diagnostic::warning(",
        ".error(",
        ".warning(",
        ".report(",
    ];
    for call in calls {
        for (at, _) in text.match_indices(call) {
            let arguments = text[at + call.len()..].trim_start();
            let Some(first) = arguments.strip_prefix('"') else {
                continue;
            };
            let id = first.split('"').next().unwrap();
            assert!(find(id).is_some(), "{id} has no page");
        }
    }
}
