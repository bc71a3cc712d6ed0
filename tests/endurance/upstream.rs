//! An unmodified upstream recipe, from its 8 GPUs to the processes of this machine: planned for
//! other counts, refused where it must be, trained with a shrunk model, resized, a rank killed,
//! and finished with its global batch untouched.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::support::{Run, evenkeel};

const RECIPE: &str =
    "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml";

/// The corpus of upstream recipes; `None`, said aloud, where there is none.
fn corpus() -> Option<PathBuf> {
    let root = std::env::var_os("EVENKEEL_RECIPES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/recipes"),
        PathBuf::from,
    );
    let found = root.join(RECIPE).is_file();
    if !found {
        println!("skipped: no recipe corpus at {}", root.display());
    }
    found.then(|| root.join(RECIPE))
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
    let said = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), said)
}

#[test]
fn the_global_batch_of_zephyr_sft_survives_every_feasible_count() {
    let Some(recipe) = corpus() else { return };
    for (gpus, proof) in [
        (4, "4 × 16 × 2 = 128"),
        (8, "8 × 16 × 1 = 128"),
        (16, "16 × 8 × 1 = 128"),
    ] {
        let (code, said) = plan(&recipe, gpus);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(said["proof"], proof);
        assert_eq!(said["global_batch_size"], 128);
    }
    let (code, said) = plan(&recipe, 6);
    assert_eq!(code, Some(1), "{said}");
    let rules: Vec<&Value> = said["diagnostics"]
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
fn zephyr_sft_trains_here_is_resized_loses_a_rank_and_keeps_its_batch() {
    let Some(recipe) = corpus() else { return };
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
    let said = run.prove();
    assert_eq!(said["proved"], true, "{said}");
    assert_eq!(said["samples"].as_u64(), Some(128 * steps.len() as u64));
}
