use serde_json::{Value, json};

use super::*;

/// Numbers of any size: seeds, and keys of a model's `config.json`.
const FREE: &[&str] = &[
    "seed",
    "model.config.hidden_size",
    "data.train.0.synthetic.seed",
    "data.evaluation.0.synthetic.seed",
];

/// Specs with every key, one for each kind of schedule.
fn whole_specs() -> Vec<Spec> {
    let source = json!({
        "path": "synthetic", "format": "text", "split": "a", "config": "b", "columns": ["c"],
        "weight": 0.5,
        "synthetic": {"vocabulary": 256, "branching": 8, "samples": 10, "seed": 1}
    });
    let intervals = |more: Value| {
        let mut all = json!({"every_samples": 1, "every_steps": 1, "every_share": 0.1});
        all.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        all
    };
    let spec = json!({
        "batch": {"global": 8, "micro": 4, "accumulation": 2, "gpus": 1,
                  "elastic": {"version": "0.1"}},
        "parallel": {"data_replicate": 1, "data_shard": 1},
        "model": {"path": "m", "attention": "sdpa", "config": {"hidden_size": 64}},
        "tokenizer": {"path": "byte", "chat_template": "t"},
        "data": {"train": [source], "evaluation": [source], "held_out": 0.1, "answers_only": true},
        "budget": {"samples": 1, "steps": 1, "epochs": 1.0},
        "optimizer": {"name": "adamw", "gradient_clip": 1.0},
        "learning_rate": {"warmup_samples": 1, "warmup_steps": 1, "warmup_ratio": 0.1},
        "evaluation": intervals(json!({"micro": 1, "batch": 1, "samples": 1})),
        "checkpoint": intervals(json!({"keep": 1})),
        "elasticity": {"min": 1, "max": 2},
        "generation": {"num_generations": 2, "num_generations_eval": 2, "generation_batch_size": 2,
                       "steps_per_generation": 1, "num_mini_batches": 1},
        "trainer": {"command": ["t"], "checkpoint_dir": "c"},
        "output": "o",
    });
    [
        json!({"norm-test": {}}),
        json!({"stages": {"stages": [{"share": 1.0, "batch": 8}]}}),
        json!({"replay": {"runs": [{"batch": 8, "steps": 1}]}}),
    ]
    .map(|schedule| {
        let mut spec = spec.clone();
        spec["schedule"] = schedule;
        serde_json::from_value(spec).unwrap()
    })
    .to_vec()
}

/// The paths of all numbers and of all absent values.
fn leaves(value: &Value, path: &str, numbers: &mut Vec<String>, absent: &mut Vec<String>) {
    let below = |name: &str| match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    };
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                leaves(value, &below(name), numbers, absent);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                leaves(item, &below(&index.to_string()), numbers, absent);
            }
        }
        Value::Number(_) => numbers.push(path.to_owned()),
        Value::Null => absent.push(path.to_owned()),
        Value::Bool(_) | Value::String(_) => {}
    }
}

#[test]
fn every_number_of_a_recipe_has_a_range() {
    for spec in whole_specs() {
        let (mut numbers, mut absent) = (Vec::new(), Vec::new());
        let value = serde_json::to_value(&spec).unwrap();
        leaves(&value, "", &mut numbers, &mut absent);
        assert_eq!(
            absent,
            Vec::<String>::new(),
            "the specs of this test lack these keys"
        );
        for path in numbers {
            let limited = LIMITS.iter().any(|limit| {
                values_at(&value, limit.path)
                    .iter()
                    .any(|(at, _)| *at == path)
            });
            assert!(
                limited || FREE.contains(&path.as_str()),
                "{path} has no range"
            );
        }
    }
}

#[test]
fn every_range_belongs_to_an_existing_key() {
    let specs = whole_specs();
    let values: Vec<Value> = specs
        .iter()
        .map(|s| serde_json::to_value(s).unwrap())
        .collect();
    for limit in LIMITS {
        let found = values
            .iter()
            .any(|value| !values_at(value, limit.path).is_empty());
        assert!(found, "{} is no key", limit.path);
    }
}
