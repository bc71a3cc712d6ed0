//! Every accepted input adds up: upstream's recipes under random overrides, most of them
//! meaningless.

use std::path::PathBuf;

use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::plan::rules::testing::launch;
use crate::plan::{MOST_GPUS, descend};
use crate::recipe::Recipe;

/// Keys that a plan depends on, as upstream and under the reserved key.
const KEYS: &[&str] = &[
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    "eval_strategy",
    "eval_steps",
    "save_steps",
    "max_steps",
    "num_train_epochs",
    "warmup_ratio",
    "warmup_steps",
    "learning_rate",
    "max_length",
    "output_dir",
    "run_name",
    "seed",
    "model_name_or_path",
    "use_peft",
    "load_in_4bit",
    "optim",
    "fsdp",
    "deepspeed",
    "tp_size",
    "parallelism_config",
    "auto_find_batch_size",
    "dataloader_drop_last",
    "accelerator_config.split_batches",
    "dataset_mixture.test_split_size",
    "dataset_mixture.datasets.0.weight",
    "evenkeel.name",
    "evenkeel.batch",
    "evenkeel.batch.global",
    "evenkeel.batch.per_device_batch_size",
    "evenkeel.batch.accumulation",
    "evenkeel.batch.gpus",
    "evenkeel.batch.prefer",
    "evenkeel.batch.remainder",
    "evenkeel.batch.last_batch",
    "evenkeel.parallel.strategy",
    "evenkeel.parallel.tensor",
    "evenkeel.parallel.pipeline",
    "evenkeel.parallel.data_shard",
    "evenkeel.data.held_out",
    "evenkeel.data.sequence_length",
    "evenkeel.data.train",
    "evenkeel.elasticity.min",
    "evenkeel.elasticity.max",
    "evenkeel.schedule",
    "evenkeel.schedule.kind",
    "evenkeel.model.config.hidden_size",
    "evenkeel.model.config.num_hidden_layers",
    "evenkeel.generation.num_generations",
    "evenkeel.objective",
];

/// Values that fit some keys, and values that fit none.
const WORDS: &[&str] = &[
    "",
    "null",
    "true",
    "no",
    "0",
    "-1",
    "1.5",
    "0.1",
    ".nan",
    ".inf",
    "1e-5",
    "1e300",
    "18446744073709551615",
    "99999999999999999999999999",
    "[]",
    "{}",
    "[1, 2]",
    "{a: 1}",
    "{",
    "\"",
    "steps",
    "epoch",
    "constant",
    "norm-test",
    "{kind: norm-test, max_batch: 4096}",
    "{kind: stages, stages: [{share: 1, batch: 256}]}",
    "{kind: stages, stages: []}",
    "{global: 96, per_device_batch_size: 7}",
    "fsdp",
    "full_shard",
    "zero2",
    "ddp",
    "uneven",
    "exact",
    "per_device_batch_size",
    "drop",
    "kto",
    "grpo",
    "rloo",
    "ppo",
    "dpo",
    "../../x",
    "meta-llama/Llama-2-70b-hf",
    "[{path: synthetic}]",
    "[{path: synthetic, synthetic: {samples: 100}}]",
    "paged_adamw_8bit",
];

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (0..300_u64).prop_map(|n| n.to_string()),
        1 => any::<i64>().prop_map(|n| n.to_string()),
        1 => any::<f64>().prop_map(|n| n.to_string()),
        4 => select(WORDS).prop_map(str::to_owned),
        1 => any::<String>(),
    ]
}

/// Every recipe of the corpus that reads without errors, and the examples.
fn recipes() -> Vec<PathBuf> {
    let examples = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut found = vec![
        examples.join("quickstart.yaml"),
        examples.join("tinyllama-1.1b-fsdp-norm.yaml"),
    ];
    if let Some(root) = corpus::root() {
        let manifest = std::fs::read_to_string(root.join("manifest.csv")).unwrap();
        let rows = corpus::csv(&manifest).skip(1);
        let read = rows.filter(|row| {
            ["handbook-trl", "accelerate-yaml"]
                .iter()
                .any(|d| row[5].contains(d))
        });
        found.extend(read.map(|row| root.join(&row[3])));
    }
    found
}

/// Asserts the invariants of an accepted plan.
fn adds_up(recipe: &Recipe, request: &PlanRequest, plan: &Plan) {
    let ranks = plan.data_parallel_size;
    let per_device_batch_size = plan.per_device_batch_size;
    let global = plan.global_batch_size;
    let dealt = plan.deal(global);
    assert_eq!(dealt.len() as u64, ranks);
    assert_eq!(dealt.iter().sum::<u64>() * per_device_batch_size, global);
    assert_eq!(dealt.iter().max(), Some(&plan.gradient_accumulation_steps));
    if plan.facts.remainder == Remainder::Exact {
        assert_eq!(
            ranks * per_device_batch_size * plan.gradient_accumulation_steps,
            global
        );
    }
    assert!(dealt.iter().all(|&each| each > 0));
    let axes = plan.facts.tensor_parallel_size
        * plan.facts.pipeline_parallel_size
        * plan.facts.context_parallel_size
        * plan.facts.sequence_parallel_size;
    assert_eq!(ranks * axes, plan.facts.world_size);
    assert_eq!(plan.facts.world_size, request.gpus);
    let batch = &recipe.spec.batch;
    match (
        batch.global,
        batch.per_device_batch_size,
        batch.accumulation,
        batch.gpus,
    ) {
        (Some(stated), ..) => assert_eq!(global, stated),
        (None, Some(own), accumulation, Some(gpus)) => {
            assert_eq!(global, own * accumulation.unwrap_or(1) * gpus / axes);
        }
        other => panic!("no global batch, and a plan: {other:?}"),
    }
    if batch.prefer == Prefer::Accumulation {
        assert!(
            batch
                .per_device_batch_size
                .is_none_or(|own| per_device_batch_size <= own)
        );
    }
    assert_eq!(global % plan.quantum, 0);
    let exact = plan
        .facts
        .feasible_gpu_counts
        .contains(&plan.facts.world_size);
    assert_eq!(
        exact,
        plan.facts.remainder == Remainder::Exact && plan.facts.world_size <= MOST_GPUS
    );
    let json = serde_json::to_string(plan).unwrap();
    assert_eq!(&serde_json::from_str::<Plan>(&json).unwrap(), plan);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_accepted_input_adds_up(
        path in select(recipes()),
        overrides in prop::collection::vec((select(KEYS), value()), 0..4),
        // Mostly worlds that divide upstream's batches, so that many inputs are accepted.
        gpus in prop_oneof![
            4 => select(&[1_u64, 2, 4, 8, 16, 32, 64][..]),
            2 => 1..=16_u64,
            1 => Just(1 << 20),
        ],
        recipe_gpus in prop_oneof![
            3 => select(&[4_u64, 8, 16][..]).prop_map(Some),
            1 => (1..=16_u64).prop_map(Some),
            1 => Just(None),
        ],
        memory in prop_oneof![Just(None), (30..40_u32).prop_map(|power| Some(1_u64 << power))],
        launched: bool,
        limit in prop_oneof![Just(None), (1..9_u64).prop_map(Some)],
    ) {
        let setting = |gpus: u64| Setting {
            flag: "--recipe-gpus",
            path: "batch.gpus",
            value: gpus.to_string(),
        };
        let asked = Request {
            path,
            overrides: overrides.iter().map(|(key, value)| format!("{key}={value}")).collect(),
            settings: recipe_gpus.map(setting).into_iter().collect(),
            ..Request::default()
        };
        let Ok(recipe) = read(&asked) else {
            return Ok(());
        };
        let request = PlanRequest {
            gpus,
            device_memory: memory,
            per_device_batch_size_limit: limit,
            ..if launched { launch() } else { PlanRequest::gpus(1) }
        };
        match plan(&recipe, &request) {
            Ok(plan) => {
                adds_up(&recipe, &request, &plan);
                prop_assert_eq!(plan.flaw().filter(|_| gpus <= 1 << 16), None);
                // Every step of the descent that the rules allow holds the invariants too.
                for smaller in descend(&plan, plan.global_batch_size) {
                    let request = PlanRequest { per_device_batch_size_limit: Some(smaller), ..request.clone() };
                    if let Ok(plan) = super::plan(&recipe, &request) {
                        adds_up(&recipe, &request, &plan);
                    }
                }
            }
            Err(refused) => {
                let error = refused.findings.iter().any(|d| d.is_error());
                prop_assert!(error || recipe.dialect == crate::recipe::Dialect::Accelerate);
                prop_assert!(!refused.to_string().is_empty());
            }
        }
    }
}
