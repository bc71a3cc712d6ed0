//! What a plan states is what the ranks reserve on a CPU.

use std::path::Path;

use evenkeel::plan::memory::Memory;
use evenkeel::plan::{AskedRunner, DeviceKind, MemoryEstimate, PlanRequest, Runner};
use evenkeel::recipe::{Request, read};
use serde_json::{Value, json};

use super::support::{Run, merge, small, stderr};

/// The estimate for a recipe in a world, with micro-batches of this number of samples.
fn estimate(recipe: &Path, ranks: u64, micro_batch: u64) -> MemoryEstimate {
    let request = Request {
        path: recipe.to_owned(),
        ..Request::default()
    };
    let recipe = read(&request).unwrap_or_else(|error| panic!("{error:?}"));
    let runner = Runner::of(&recipe.spec, AskedRunner::BuiltIn, DeviceKind::Cpu, None);
    let request = PlanRequest::of(runner, ranks);
    let memory = Memory::of(&recipe.spec, recipe.dialect, &request).unwrap();
    memory.estimate(ranks, micro_batch)
}

/// A recipe whose tensors outweigh what a process needs besides them, with these changes.
fn measured(changes: &[&Value]) -> Value {
    let mut spec = small(json!({
        "batch": {"global": 24, "per_device_batch_size": 4},
        "budget": {"samples": 24},
        "model": {"config": {
            "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 2048,
            "max_position_embeddings": 128,
        }},
        "data": {"sequence_length": 128, "train": [{"path": "synthetic", "synthetic": {"vocabulary": 2048}}]},
    }));
    for change in changes {
        merge(&mut spec, (*change).clone());
    }
    spec
}

/// Whether the first micro-batch fits into a limit.
fn fits(spec: &Value, ranks: u64, limit: f64) -> bool {
    let run = Run::of(spec.clone());
    let (ranks, limit) = (ranks.to_string(), (limit as u64).to_string());
    let output = run.launch(&["--quiet", "--procs", &ranks, "--rank-memory", &limit]);
    assert!(output.status.success(), "{}", stderr(&output));
    run.worlds().len() == 1
}

#[test]
fn a_rank_needs_the_memory_that_the_plan_states() {
    let fsdp = json!({"parallel": {"strategy": "fsdp"}});
    let untied = json!({"model": {"config": {"tie_word_embeddings": false}}});
    let norm_test = json!({"schedule": {"kind": "norm-test", "eta": 0.3, "max_batch": 96}});
    let unsharded = json!({"schedule": {"unsharded_accumulation": true, "coordinate_interval": 5}});
    let adapters =
        json!({"model": {"adapters": true, "lora_rank": 8, "lora_target_modules": ["all-linear"]}});
    let dropout = json!({"model": {"lora_dropout": 0.1, "load_in_4bit": true}});
    let checkpointing = json!({"model": {"activation_checkpointing": true}});
    let [qwen3, gpt_neox, gpt2] = ["qwen3", "gpt_neox", "gpt2"]
        .map(|name| json!({"model": {"config": {"model_type": name}}}));
    let no_dropout =
        json!({"model": {"config": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}}});
    let cases: [(&str, u64, Vec<&Value>); 13] = [
        ("plain", 1, vec![]),
        ("untied", 2, vec![&untied]),
        ("checkpointing", 1, vec![&checkpointing]),
        ("measured", 2, vec![&norm_test]),
        ("sharded", 2, vec![&fsdp]),
        ("sharded untied", 3, vec![&fsdp, &untied, &norm_test]),
        ("unsharded sums", 2, vec![&fsdp, &norm_test, &unsharded]),
        ("adapters", 1, vec![&adapters]),
        (
            "sharded below adapters",
            2,
            vec![&adapters, &fsdp, &norm_test],
        ),
        ("in 4 bits", 2, vec![&adapters, &dropout, &fsdp]),
        ("qwen3", 1, vec![&qwen3]),
        ("gpt_neox", 2, vec![&gpt_neox, &fsdp]),
        ("gpt2", 1, vec![&gpt2, &no_dropout]),
    ];
    for (name, ranks, changes) in cases {
        let spec = measured(&changes);
        let stated = estimate(Run::of(spec.clone()).recipe(), ranks, 4);
        let total = stated.total as f64;
        assert!(fits(&spec, ranks, 1.01 * total), "{name}: {stated:#?}");
        assert!(!fits(&spec, ranks, 0.99 * total), "{name}: {stated:#?}");
    }
}

/// Gradients in fixed point. No micro-batch is smaller than one sample.
#[test]
fn a_rank_of_determinism_world_needs_the_memory_that_the_plan_states() {
    let fsdp = json!({"parallel": {"strategy": "fsdp"}});
    let untied = json!({"model": {"config": {"tie_word_embeddings": false}}});
    let norm_test = json!({"schedule": {"kind": "norm-test", "eta": 0.3, "max_batch": 96}});
    let adapters =
        json!({"model": {"adapters": true, "lora_rank": 8, "lora_target_modules": ["all-linear"]}});
    let world = json!({"determinism": "world"});
    let cases: [(&str, u64, Vec<&Value>); 5] = [
        ("plain", 1, vec![]),
        ("measured", 2, vec![&norm_test, &untied]),
        ("sharded", 2, vec![&fsdp]),
        ("sharded untied", 3, vec![&fsdp, &untied, &norm_test]),
        ("adapters", 2, vec![&adapters, &fsdp, &norm_test]),
    ];
    for (name, ranks, changes) in cases {
        let spec = measured(&[&[&world], &changes[..]].concat());
        let stated = estimate(Run::of(spec.clone()).recipe(), ranks, 1);
        let fits = |share: f64| {
            let limit = ((share * stated.total as f64) as u64).to_string();
            let run = Run::of(spec.clone());
            let ranks = ranks.to_string();
            let output = run.launch(&["--quiet", "--procs", &ranks, "--rank-memory", &limit]);
            let is_refused = stderr(&output).contains("memory");
            assert!(output.status.success() || is_refused, "{}", stderr(&output));
            output.status.success()
        };
        assert!(fits(1.01), "{name}: {stated:#?}");
        assert!(!fits(0.99), "{name}: {stated:#?}");
    }
}

/// The plan does not count the padding of shards.
#[test]
fn weights_that_do_not_fit_are_reported_without_a_descent() {
    let run = Run::of(small(json!({"parallel": {"strategy": "fsdp"}})));
    let stated = estimate(run.recipe(), 3, 4);
    let limit = (stated.total - stated.activations).to_string();
    let output = run.launch(&["--quiet", "--procs", "3", "--rank-memory", &limit]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = stderr(&output);
    let expected = "weights, gradients and optimiser states alone do not fit";
    assert!(message.contains(expected), "{message}");
    assert_eq!(run.worlds().len(), 1, "one generation");
}
