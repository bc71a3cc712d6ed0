//! An unmodified upstream recipe, moved from 8 GPUs to the processes of this machine. It is planned
//! for other counts, refused where no plan exists, and trained with a shrunk model. A resize and a
//! killed rank do not change its global batch.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::support::{Run, evenkeel};

const RECIPE: &str =
    "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml";

/// The corpus of upstream recipes; `None` and a message if it is missing.
pub fn corpus() -> Option<PathBuf> {
    let root = std::env::var_os("EVENKEEL_RECIPES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/recipes"),
        PathBuf::from,
    );
    let found = root.join(RECIPE).is_file();
    if !found {
        println!("skipped: no recipe corpus at {}", root.display());
    }
    found.then_some(root)
}

fn plan(recipe: &Path, gpus: u64) -> (Option<i32>, Value) {
    let output = evenkeel()
        .arg("plan")
        .arg(recipe)
        .args([
            "--recipe-gpus",
            "8",
            "--gpus",
            &gpus.to_string(),
            "-o",
            "json",
        ])
        .output()
        .unwrap();
    let result = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), result)
}

#[test]
fn the_global_batch_of_zephyr_sft_survives_every_feasible_count() {
    let Some(recipe) = corpus().map(|root| root.join(RECIPE)) else {
        return;
    };
    for (gpus, formula) in [
        (4, "4 × 16 × 2 = 128"),
        (8, "8 × 16 × 1 = 128"),
        (16, "16 × 8 × 1 = 128"),
    ] {
        let (code, result) = plan(&recipe, gpus);
        assert_eq!(code, Some(0), "{result}");
        assert_eq!(result["formula"], formula);
        assert_eq!(result["global_batch_size"], 128);
    }
    let (code, result) = plan(&recipe, 6);
    assert_eq!(code, Some(1), "{result}");
    let rules: Vec<&Value> = result["diagnostics"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|d| d["severity"] == "error")
        .map(|d| &d["rule"])
        .collect();
    assert_eq!(rules, ["batch-divisible"]);
}

/// Conversations of two turns, each with an answer.
fn conversations(path: &Path, count: usize) {
    let lines: Vec<String> = (0..count)
        .map(|i| {
            json!({"messages": [
                {"role": "user", "content": format!("what is {i} plus {i}?")},
                {"role": "assistant", "content": format!("{i} plus {i} is {}.", 2 * i)},
            ]})
            .to_string()
        })
        .collect();
    std::fs::write(path, lines.join("\n") + "\n").unwrap();
}

#[test]
fn zephyr_sft_keeps_its_batch_over_a_resize_and_a_lost_rank() {
    let Some(recipe) = corpus().map(|root| root.join(RECIPE)) else {
        return;
    };
    let run = Run::of_file(&recipe);
    let data = run.scratch().join("chat.jsonl");
    conversations(&data, 128 * 40);
    let source = format!("dataset_mixture.datasets=[{{id: {}}}]", data.display());
    let launched = run.start(&[
        "--recipe-gpus=8",
        "--procs=2",
        "--remainder=uneven",
        &source,
        "dataset_mixture.test_split_size=16",
        "max_seq_length=128",
        "evenkeel.tokenizer.path=byte",
        "evenkeel.model.init=random",
        "evenkeel.model.config.hidden_size=64",
        "evenkeel.model.config.intermediate_size=128",
        "evenkeel.model.config.num_hidden_layers=2",
        "evenkeel.model.config.num_attention_heads=4",
        "evenkeel.model.config.num_key_value_heads=2",
        "evenkeel.model.config.vocab_size=512",
    ]);
    run.wait_for_steps(1, 3);
    let resized = run.call("resize", &["4"]);
    assert!(resized.status.success(), "{resized:?} {}", run.log());
    run.wait_for_steps(2, 3);
    run.signal_rank(2, 2, Signal::KILL);
    assert!(launched.wait().success(), "{}", run.log());

    assert_eq!(run.worlds(), [2, 4, 3]);
    let steps = run.steps();
    assert!(steps.values().all(|step| step["batch"] == 128));
    assert_eq!(
        run.proofs(),
        [
            "2 × 16 × 4 = 128",
            "4 × 16 × 2 = 128",
            "16 × (3 + 3 + 2) = 128"
        ]
    );
    let result = run.prove();
    assert_eq!(result["proved"], true, "{result}");
    assert_eq!(result["samples"].as_u64(), Some(128 * steps.len() as u64));
}
