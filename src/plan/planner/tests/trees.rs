//! The Hydra trees of the corpus, with the outcomes in its manifest and its golden commands.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::plan::{Draft, PlanRequest, examine};
use crate::recipe::{Dialect, ReadError, Recipe, Request, Severity, corpus, read};

const HALOS: &str = "ContextualAI__HALOs/4831988636/config";
const LEGACY: &str = "ContextualAI__HALOs/61b9ee6787/config";
const DPO: &str = "eric-mitchell__direct-preference-optimization/f8b8c0f49d/config";

fn eval_every(draft: &Draft) -> Option<u64> {
    draft.horizon.as_ref()?.eval_every
}

/// The rows of a table of the corpus, by column.
fn table(root: &Path, name: &str) -> Vec<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(root.join(name)).unwrap();
    let mut rows = corpus::csv(&text);
    let header = rows.next().unwrap();
    let named = |row: Vec<String>| header.iter().cloned().zip(row).collect();
    rows.map(named).collect()
}

fn read_with(path: PathBuf, overrides: &[&str]) -> Result<Recipe, ReadError> {
    read(&Request {
        path,
        overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
        ..Request::default()
    })
}

pub(super) fn at(recipe: &Recipe, gpus: u64) -> Draft {
    examine(recipe, &PlanRequest::gpus(gpus))
}

/// Ids and severities of findings above a note that do not concern the built-in trainer.
pub(super) fn found(draft: &Draft) -> Vec<(&str, Severity)> {
    let all = draft.findings.iter();
    let serious = all.filter(|d| d.severity != Severity::Note && !d.rule.starts_with("trainer-"));
    serious.map(|d| (d.rule.as_str(), d.severity)).collect()
}

pub(super) fn per_device_batch_size(draft: &Draft) -> (Option<u64>, Option<u64>) {
    let split = draft.split;
    (
        split.map(|split| split.per_device_batch_size),
        split.map(|split| split.accumulation()),
    )
}

/// Overrides that the golden commands omit, because no batch number depends on them.
fn rest(dialect: &str, given: &[&str]) -> Vec<&'static str> {
    let all: &[&str] = match dialect {
        "halos-hydra" => &[
            "exp_name=run",
            "train_datasets=[ultrabin]",
            "test_datasets=[ultrabin]",
            "model=llama",
            "loss=dpo",
        ],
        _ => &["exp_name=run"],
    };
    let key = |text: &str| text.split('=').next().unwrap().to_owned();
    let given: Vec<String> = given.iter().map(|g| key(g)).collect();
    all.iter()
        .copied()
        .filter(|o| !given.contains(&key(o)))
        .collect()
}

#[test]
fn golden_commands_give_upstreams_batches() {
    let Some(root) = corpus::root() else { return };
    let mut checked = 0;
    for row in table(&root, "golden/cli_recipes.csv") {
        let (dialect, source) = (row["dialect"].as_str(), row["source"].as_str());
        let config = match dialect {
            "halos-hydra" => root.join(HALOS),
            "dpo-hydra" => root.join(DPO),
            _ => continue,
        };
        checked += 1;
        let argv: Vec<&str> = row["batch_relevant_argv"].split(' ').collect();
        let overrides = [rest(dialect, &argv), argv].concat();
        let recipe = read_with(config, &overrides);
        let gpus = row["stated_gpus"].split(' ').next().unwrap().parse().ok();
        let expected = row["expected"].as_str();
        let silent = |draft: &Draft| assert_eq!(found(draft), [], "{source}");
        match source {
            "scripts/launch_llama_dpo.sh:63-72" => {
                assert_eq!(expected, "OK micro=8");
                let draft = at(&recipe.unwrap(), gpus.unwrap());
                assert_eq!(per_device_batch_size(&draft), (Some(8), Some(1)));
                silent(&draft);
            }
            "scripts/launch_llama_instruct_kto_online.sh:102-110" => {
                assert_eq!(expected, "OK micro=8 eval_micro=8");
                let draft = at(&recipe.unwrap(), gpus.unwrap());
                assert_eq!(per_device_batch_size(&draft), (Some(8), Some(2)));
                assert_eq!(draft.facts.eval_batch_size, Some(8));
                silent(&draft);
            }
            "scripts/launch_llama_ppo.sh:83-113"
            | "scripts/launch_llama_ppo_online.sh:6,130-160" => {
                assert!(expected.starts_with("ERROR"));
                let recipe = recipe.unwrap();
                let draft = at(&recipe, gpus.unwrap());
                let divisible = draft.findings.iter().find(|d| d.rule == "batch-divisible");
                let divisible = divisible.unwrap_or_else(|| panic!("{source}"));
                assert_eq!(divisible.severity, Severity::Error);
                assert!(
                    divisible.message.ends_with("8 % (4 × 8) = 8"),
                    "{}",
                    divisible.message
                );
                assert!(divisible.help.contains("meant 64"), "{}", divisible.help);
                if source.contains("ppo.sh") {
                    assert_eq!(recipe.spec.evaluation.every_samples, Some(256));
                }
            }
            "scripts/launch_multinode_interactive.sh:3,38-46" => {
                let recipe = recipe.unwrap();
                assert_eq!(per_device_batch_size(&at(&recipe, 4)), (Some(2), Some(2)));
                assert_eq!(per_device_batch_size(&at(&recipe, 8)), (Some(1), Some(2)));
                silent(&at(&recipe, 4));
            }
            "README.md:134" => {
                let recipe = recipe.unwrap();
                let warned = recipe
                    .diagnostics
                    .iter()
                    .find(|d| d.rule == "unknown-override");
                let warned = warned.unwrap();
                assert_eq!(warned.severity, Severity::Warning);
                assert_eq!(warned.help, "did you mean `intermediate_checkpoints`?");
                assert_eq!(recipe.spec.checkpoint.every_samples, None);
            }
            "README.md:52" => {
                let recipe = recipe.unwrap();
                assert_eq!(recipe.spec.batch.global, Some(32));
                assert_eq!(per_device_batch_size(&at(&recipe, 8)), (Some(2), Some(2)));
                assert_eq!(per_device_batch_size(&at(&recipe, 4)), (Some(4), Some(2)));
                assert_eq!(eval_every(&at(&recipe, 8)), Some(20_000));
                silent(&at(&recipe, 8));
            }
            "README.md:85-87" => {
                let draft = at(&recipe.unwrap(), gpus.unwrap());
                assert_eq!(per_device_batch_size(&draft), (Some(8), Some(2)));
                assert_eq!(eval_every(&draft), Some(19_968));
                // 20000 is no multiple of 64; upstream rounds it too.
                let rounded = ("eval-interval-multiple", Severity::Warning);
                assert_eq!(found(&draft), [rounded]);
            }
            "README.md:44" => {
                let refused = recipe.unwrap_err().to_string();
                assert!(
                    refused.contains("there is no key `model.block`"),
                    "{refused}"
                );
            }
            other => panic!("a command of {other}, an unknown tool"),
        }
    }
    assert_eq!(checked, 9);
}

#[test]
fn every_file_of_the_trees_reads_with_the_outcome_of_the_manifest() {
    let Some(root) = corpus::root() else { return };
    let mut checked = 0;
    for row in table(&root, "manifest.csv") {
        let dialect = match row["dialect"].as_str() {
            "halos-hydra" | "halos-legacy-hydra" => Dialect::Halos,
            "dpo-hydra" => Dialect::Dpo,
            _ => continue,
        };
        checked += 1;
        let path = root.join(&row["local_path"]);
        let name = row["path"].as_str();
        if name == "config/config.yaml" {
            // The roots lack mandatory values, and the error names all of them.
            let error = read_with(path, &[]).unwrap_err();
            let rules: Vec<&str> = error.diagnostics.iter().map(|d| d.rule.as_str()).collect();
            let expected: &[&str] = match row["dialect"].as_str() {
                "halos-hydra" => &["mandatory-missing"; 5],
                "halos-legacy-hydra" => &["mandatory-missing"; 5],
                _ => &["mandatory-missing", "config-missing"],
            };
            assert_eq!(rules, expected, "{}", row["local_path"]);
            continue;
        }
        let recipe = read_with(path, &[]).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(recipe.dialect, dialect, "{name}");
        assert!(recipe.part, "{name}");
        let word = match row["dialect"].as_str() {
            "halos-legacy-hydra" => "version legacy",
            "halos-hydra" => "version head",
            _ => "the option",
        };
        assert!(
            recipe.detected.contains(word),
            "{name}: {}",
            recipe.detected
        );
        let errors = |gpus| {
            let draft = at(&recipe, gpus);
            let all = draft.findings.iter();
            let errors = all.filter(|d| d.severity == Severity::Error);
            errors.map(|d| d.rule.clone()).collect::<Vec<_>>()
        };
        let batch = &recipe.spec.batch;
        match (row["dialect"].as_str(), name) {
            ("halos-hydra", "config/model/base_model.yaml") => {
                // The root's `eval_every` of 1024 rounds down to a multiple of the batch.
                let whole = |size: &str| {
                    let mut all = rest("halos-hydra", &[]);
                    all.push(size);
                    let recipe = read_with(root.join(HALOS), &all).unwrap();
                    eval_every(&at(&recipe, 4))
                };
                assert_eq!(whole("++model.batch_size=32"), Some(1024));
                assert_eq!(whole("++model.batch_size=24"), Some(1008));
                for gpus in [1, 2, 4, 8, 16, 32] {
                    assert_eq!(errors(gpus), [""; 0], "{gpus}");
                    assert_eq!(
                        per_device_batch_size(&at(&recipe, gpus)),
                        (Some(32 / gpus), Some(1))
                    );
                }
                for gpus in [3, 5, 6, 7, 12, 24, 64] {
                    let mut found = errors(gpus);
                    found.sort_unstable();
                    assert_eq!(found, ["batch-divisible", "eval-batch-divisible"], "{gpus}");
                }
            }
            ("halos-legacy-hydra", "config/model/base_model.yaml") => {
                assert_eq!((batch.global, batch.accumulation), (Some(32), Some(1)));
                let dropped = at(&recipe, 3);
                let floored = ("effective-batch-floored", Severity::Warning);
                assert!(found(&dropped).contains(&floored), "{:?}", found(&dropped));
                assert!(errors(64).contains(&"effective-batch-floored".to_owned()));
            }
            ("halos-legacy-hydra", _) => {
                assert_eq!((batch.global, batch.accumulation), (Some(64), Some(4)));
                assert_eq!(per_device_batch_size(&at(&recipe, 8)), (Some(2), Some(4)));
            }
            ("halos-hydra", name) if name.starts_with("config/model/") => {
                assert_eq!(batch.global, Some(32), "from base_model");
                assert_eq!(recipe.spec.model.path, None);
                let missing = recipe
                    .diagnostics
                    .iter()
                    .filter(|d| d.message.contains("name_or_path"));
                assert_eq!(missing.count(), 0, "null is a value");
            }
            (_, name) => {
                assert_eq!(batch.global, None, "{name}");
                assert_eq!(errors(8), [""; 0], "{name}");
            }
        }
    }
    assert_eq!(checked, 23);
}

#[test]
fn unpaired_losses_of_the_tree_need_two_samples() {
    let Some(root) = corpus::root() else { return };
    for (loss, unpaired) in [("kto", true), ("ppo", true), ("grpo", true), ("dpo", false)] {
        let choice = format!("loss={loss}");
        let overrides = [
            &[
                "exp_name=run",
                "train_datasets=[a]",
                "test_datasets=[a]",
                "model=qwen",
            ][..],
            &[
                &choice,
                "model.batch_size=4",
                "model.gradient_accumulation_steps=4",
            ],
            &["model.eval_batch_size=4"],
        ]
        .concat();
        let recipe = read_with(root.join(HALOS), &overrides).unwrap();
        let refused = |gpus| {
            let draft = at(&recipe, gpus);
            draft
                .findings
                .iter()
                .any(|d| d.rule == "unpaired-batch-min")
        };
        assert_eq!(refused(1), unpaired, "{loss}");
    }
}

#[test]
fn rounded_batches_of_dpo_are_reported_with_both_numbers() {
    let Some(root) = corpus::root() else { return };
    let recipe = read_with(
        root.join(DPO),
        &[
            "model=pythia28",
            "loss=dpo",
            "loss.beta=0.1",
            "exp_name=run",
            "gradient_accumulation_steps=2",
            "batch_size=64",
            "eval_batch_size=32",
            "trainer=FSDPTrainer",
        ],
    )
    .unwrap();
    let draft = at(&recipe, 6);
    let rules = found(&draft);
    for expected in [
        ("effective-batch-floored", Severity::Warning),
        ("batch-divisible", Severity::Error),
        ("eval-batch-divisible", Severity::Warning),
        ("eval-interval-multiple", Severity::Warning),
    ] {
        assert!(rules.contains(&expected), "{expected:?} in {rules:?}");
    }
    assert_eq!(draft.facts.feasible_gpu_counts, [1, 2, 4, 8, 16, 32, 64]);
    assert!(found(&at(&recipe, 32)).contains(&("fsdp-batch-min", Severity::Warning)));
    // Findings are in file order, independent of their rule.
    let value_sources: Vec<_> = draft.findings.iter().filter_map(|d| d.span).collect();
    assert!(value_sources.is_sorted_by_key(|span| (span.file, span.start)));
    // Without FSDP one process drives all GPUs.
    let overrides = [
        "model=pythia28",
        "loss=sft",
        "exp_name=run",
        "batch_size=64",
    ];
    let recipe = read_with(root.join(DPO), &overrides).unwrap();
    for gpus in [1, 6, 8] {
        let draft = at(&recipe, gpus);
        assert_eq!(draft.split.unwrap().formula(), "1 × 64 × 1 = 64", "{gpus}");
    }
}

#[test]
fn a_tree_keeps_its_batch_in_other_worlds() {
    let Some(root) = corpus::root() else { return };
    let overrides = [
        "exp_name=run",
        "train_datasets=[a]",
        "test_datasets=[a]",
        "model=llama",
        "loss=dpo",
        "model.batch_size=64",
        "model.gradient_accumulation_steps=2",
        "model.eval_batch_size=64",
        "evenkeel.batch.gpus=4",
    ];
    let recipe = read_with(root.join(HALOS), &overrides).unwrap();
    for (gpus, formula) in [
        (2, "2 × 8 × 4 = 64"),
        (4, "4 × 8 × 2 = 64"),
        (8, "8 × 8 × 1 = 64"),
        (64, "64 × 1 × 1 = 64"),
    ] {
        let draft = at(&recipe, gpus);
        assert_eq!(draft.split.unwrap().formula(), formula);
        assert_eq!(found(&draft), [], "{gpus}");
    }
    let legacy = read_with(root.join(LEGACY).join("model/llama65b.yaml"), &[]).unwrap();
    assert_eq!(at(&legacy, 4).split.unwrap().formula(), "4 × 4 × 4 = 64");
}
