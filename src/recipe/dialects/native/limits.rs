//! Ranges of the native recipe's numbers. They apply to every dialect and refuse zero and absurd
//! sizes.

use serde_json::{Map, Value};

/// The range of a key; `*` means any list index.
struct Limit {
    path: &'static str,
    min: f64,
    max: f64,
    bounds: Bounds,
}

/// The numbers that belong to a range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bounds {
    Both,
    /// Above the minimum, up to the maximum.
    Upper,
    /// Above the minimum; from 1 on whole numbers only. Below 1 it is a share, otherwise a count.
    ShareOrCount,
}

const fn range(path: &'static str, min: f64, max: f64) -> Limit {
    Limit {
        path,
        min,
        max,
        bounds: Bounds::Both,
    }
}

/// More than `min`, at most `max`.
const fn above(path: &'static str, min: f64, max: f64) -> Limit {
    Limit {
        bounds: Bounds::Upper,
        ..range(path, min, max)
    }
}

const fn share_or_count(path: &'static str) -> Limit {
    Limit {
        bounds: Bounds::ShareOrCount,
        ..range(path, 0.0, COUNT)
    }
}

/// Maximum samples in a batch.
const BATCH: f64 = (1_u64 << 32) as f64;
/// Maximum devices along an axis.
const DEVICES: f64 = (1_u64 << 20) as f64;
/// Maximum vocabulary size.
const WORDS: f64 = (1_u64 << 24) as f64;
/// Maximum samples or steps of a run. Exact in a double, so sums are exact too.
const COUNT: f64 = (1_u64 << 53) as f64;

const LIMITS: &[Limit] = &[
    range("batch.global", 1.0, BATCH),
    range("batch.per_device_batch_size", 1.0, BATCH),
    range("batch.accumulation", 1.0, BATCH),
    range("batch.gpus", 1.0, DEVICES),
    range("batch.elastic.max_batch", 1.0, BATCH),
    range("batch.elastic.micro_batches.*", 1.0, BATCH),
    range("batch.elastic.min_gpus", 1.0, DEVICES),
    range("batch.elastic.max_gpus", 1.0, DEVICES),
    range("batch.elastic.gpus_per_node", 1.0, DEVICES),
    range("batch.elastic.model_parallel", 1.0, DEVICES),
    range("parallel.tensor", 1.0, DEVICES),
    range("parallel.pipeline", 1.0, DEVICES),
    range("parallel.context", 1.0, DEVICES),
    range("parallel.sequence", 1.0, DEVICES),
    range("parallel.data_replicate", 1.0, DEVICES),
    range("parallel.data_shard", 1.0, DEVICES),
    range("likelihood.label_smoothing", 0.0, 0.999),
    range("likelihood.neftune_alpha", 0.0, 1e6),
    above("preference.beta", 0.0, 1e6),
    range("preference.label_smoothing", 0.0, 0.499),
    range("preference.target_margin", 0.0, 1e6),
    range("preference.likelihood_weight", 0.0, 1e6),
    range("preference.desirable_weight", 0.0, 1e6),
    range("preference.undesirable_weight", 0.0, 1e6),
    range("model.lora_rank", 1.0, DEVICES),
    above("model.lora_alpha", 0.0, 1e6),
    range("model.lora_dropout", 0.0, 0.999),
    above("schedule.eta", 0.0, 1e6),
    range("schedule.interval", 1.0, 100.0),
    range("schedule.max_batch", 1.0, BATCH),
    above("schedule.growth_cap", 1.0, 1e6),
    range("schedule.hysteresis", 0.0, 1.0),
    range("schedule.ema", 0.0, 0.999_999),
    range("schedule.coordinate_interval", 0.0, COUNT),
    range("schedule.stages.*.share", 0.0, 1.0),
    range("schedule.stages.*.batch", 1.0, BATCH),
    range("schedule.runs.*.batch", 1.0, BATCH),
    range("schedule.runs.*.steps", 1.0, COUNT),
    share_or_count("data.held_out"),
    range("data.sequence_length", 1.0, (1_u64 << 24) as f64),
    range("data.max_prompt_length", 1.0, (1_u64 << 24) as f64),
    range("data.rows.max_prompt_length", 1.0, (1_u64 << 24) as f64),
    range("data.rows.max_completion_length", 1.0, (1_u64 << 24) as f64),
    share_or_count("data.train.*.weight"),
    range("data.evaluation.*.weight", 0.0, 1.0),
    range("data.train.*.synthetic.vocabulary", 2.0, WORDS),
    range("data.train.*.synthetic.branching", 1.0, WORDS),
    range("data.train.*.synthetic.samples", 1.0, COUNT),
    range("data.evaluation.*.synthetic.vocabulary", 2.0, WORDS),
    range("data.evaluation.*.synthetic.branching", 1.0, WORDS),
    range("data.evaluation.*.synthetic.samples", 1.0, COUNT),
    range("budget.samples", 1.0, COUNT),
    range("budget.steps", 1.0, COUNT),
    above("budget.epochs", 0.0, 1e6),
    range("optimizer.beta1", 0.0, 0.999_999_999),
    range("optimizer.beta2", 0.0, 0.999_999_999),
    above("optimizer.epsilon", 0.0, 1.0),
    range("optimizer.weight_decay", 0.0, 1e3),
    range("optimizer.gradient_clip", 0.0, 1e9),
    range("learning_rate.peak", 0.0, 1e3),
    range("learning_rate.floor", 0.0, 1.0),
    range("learning_rate.warmup_start", 0.0, 1.0),
    range("learning_rate.warmup_samples", 0.0, COUNT),
    range("learning_rate.warmup_steps", 0.0, COUNT),
    range("learning_rate.warmup_ratio", 0.0, 1.0),
    range("evaluation.every_samples", 1.0, COUNT),
    range("evaluation.every_steps", 1.0, COUNT),
    above("evaluation.every_share", 0.0, 1.0),
    range("evaluation.per_device_batch_size", 1.0, BATCH),
    range("evaluation.batch", 1.0, BATCH),
    range("evaluation.samples", 1.0, COUNT),
    range("checkpoint.every_samples", 1.0, COUNT),
    range("checkpoint.every_steps", 1.0, COUNT),
    above("checkpoint.every_share", 0.0, 1.0),
    range("checkpoint.keep", 1.0, COUNT),
    range("elasticity.min", 1.0, DEVICES),
    range("elasticity.max", 1.0, DEVICES),
    range("elasticity.spares", 0.0, 64.0),
    range("trainer.drain_seconds", 1.0, 86_400.0),
    range("generation.num_generations", 1.0, BATCH),
    range("generation.num_generations_eval", 1.0, BATCH),
    range("generation.generation_batch_size", 1.0, BATCH),
    range("generation.steps_per_generation", 1.0, BATCH),
    range("generation.num_mini_batches", 1.0, BATCH),
];

/// The valid range of the key at a path, if it excludes a whole number.
pub(super) fn of_int(path: &str, value: i128) -> Option<String> {
    // Compares whole numbers as integers, because a double rounds large ones.
    let excludes = |limit: &&Limit| value > limit.max as i128 || limit.excludes(value as f64);
    find(path).filter(excludes).map(Limit::help)
}

/// As [`of_int`], for a float.
pub(super) fn of_float(path: &str, value: f64) -> Option<String> {
    let excludes = |limit: &&Limit| limit.excludes(value);
    find(path).filter(excludes).map(Limit::help)
}

impl Limit {
    fn excludes(&self, value: f64) -> bool {
        let below = match self.bounds {
            Bounds::Both => value < self.min,
            Bounds::Upper | Bounds::ShareOrCount => value <= self.min,
        };
        let part = self.bounds == Bounds::ShareOrCount && value >= 1.0 && value.fract() != 0.0;
        value > self.max || below || part
    }

    /// The help of the diagnostic: the valid range.
    fn help(&self) -> String {
        let Limit { min, max, .. } = self;
        match self.bounds {
            Bounds::Both => format!("give a number from {min} to {max}"),
            Bounds::Upper => format!("give a number above {min} and at most {max}"),
            Bounds::ShareOrCount => {
                format!("give a share between {min} and 1, or a whole number from 1 to {max}")
            }
        }
    }

    /// Whether this is the range of the key at a recipe's path.
    fn is_of(&self, path: &str) -> bool {
        let mut parts = path.split('.');
        let mut fits = |part: &str| parts.next().is_some_and(|key| part == key || part == "*");
        self.path.split('.').all(&mut fits) && parts.next().is_none()
    }
}

fn find(path: &str) -> Option<&'static Limit> {
    LIMITS.iter().find(|limit| limit.is_of(path))
}

/// Writes the ranges into the schema of a spec.
pub(super) fn put(schema: &mut Value) {
    for limit in LIMITS {
        let path: Vec<&str> = limit.path.split('.').collect();
        for fields in at(schema, &path) {
            let is_whole = fields["type"] == "integer" || fields["type"][0] == "integer";
            let number = |value: f64| match is_whole {
                true => Value::from(value as u64),
                false => Value::from(value),
            };
            let above = match limit.bounds {
                Bounds::Both => "minimum",
                Bounds::Upper | Bounds::ShareOrCount => "exclusiveMinimum",
            };
            fields.insert(above.to_owned(), number(limit.min));
            fields.insert("maximum".to_owned(), number(limit.max));
        }
    }
}

/// The schemas below a path of a recipe's keys, in which `*` is any item of a list.
fn at<'s>(schema: &'s mut Value, path: &[&str]) -> Vec<&'s mut Map<String, Value>> {
    let Some((key, rest)) = path.split_first() else {
        return schema.as_object_mut().into_iter().collect();
    };
    let Some(fields) = schema.as_object_mut() else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for (name, below) in fields {
        match (name.as_str(), *key) {
            ("properties", key) if key != "*" => {
                found.extend(below.get_mut(key).into_iter().flat_map(|one| at(one, rest)));
            }
            ("items", "*") => found.extend(at(below, rest)),
            ("oneOf" | "anyOf", _) => {
                let all = below.as_array_mut().into_iter().flatten();
                found.extend(all.flat_map(|one| at(one, path)));
            }
            _ => {}
        }
    }
    found
}

/// The valid range of the key at a path, where it is known.
pub(super) fn help(path: &str) -> Option<String> {
    find(path).map(Limit::help)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::recipe::schema::spec::Spec;
    use crate::recipe::syntax::node::joined;

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
            "path": "synthetic", "format": "text", "split": "a", "config": "b", "revision": "v2", "columns": ["c"], "feedback_split": "a", "conversion": "last-messages",
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
            "batch": {"global": 8, "per_device_batch_size": 4, "accumulation": 2, "gpus": 1,
                      "elastic": {"version": "0.1"}},
            "parallel": {"data_replicate": 1, "data_shard": 1},
            "model": {"revision": "v2", "subfolder": "a/b", "path": "m", "attention": "sdpa", "config": {"hidden_size": 64}, "lora_rank": 8, "lora_alpha": 16},
            "tokenizer": {"path": "byte", "chat_template": "t"},
            "data": {"train": [source], "evaluation": [source], "held_out": 0.1, "answers_only": true, "completions_only": true, "extra_token": true, "max_prompt_length": 1, "rows": {"max_prompt_length": 1, "max_completion_length": 1}},
            "budget": {"samples": 1, "steps": 1, "epochs": 1.0},
            "optimizer": {"name": "adamw", "gradient_clip": 1.0},
            "learning_rate": {"warmup_samples": 1, "warmup_steps": 1, "warmup_ratio": 0.1},
            "evaluation": intervals(json!({"per_device_batch_size": 1, "batch": 1, "samples": 1})),
            "checkpoint": intervals(json!({"keep": 1})),
            "elasticity": {"min": 1, "max": 2},
            "preference": {"beta": 0.1, "by_token": true, "target_margin": 0.5, "likelihood_weight": 1.0, "desirable_weight": 1.0, "undesirable_weight": 1.0},
            "generation": {"num_generations": 2, "num_generations_eval": 2, "generation_batch_size": 2,
                           "steps_per_generation": 1, "num_mini_batches": 1},
            "trainer": {"command": ["t"], "checkpoint_dir": "c", "deepspeed_config": "{}",
                        "progress_pattern": "p"},
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
        let below = |name: &str| joined(path, name);
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

    /// The recipe's path of a number: recipes write settings beside `kind`, serde below the variant's name.
    fn without_kind(path: &str) -> String {
        let mut parts: Vec<&str> = path.split('.').collect();
        if parts[0] == "schedule" {
            parts.remove(1);
        }
        parts.join(".")
    }

    /// The paths of all numbers of a spec.
    fn numbers(spec: &Spec) -> Vec<String> {
        let (mut numbers, mut absent) = (Vec::new(), Vec::new());
        let value = serde_json::to_value(spec).unwrap();
        leaves(&value, "", &mut numbers, &mut absent);
        assert_eq!(
            absent,
            Vec::<String>::new(),
            "the specs of this test lack these keys"
        );
        numbers.iter().map(|path| without_kind(path)).collect()
    }

    #[test]
    fn every_number_of_a_recipe_has_a_range() {
        for path in whole_specs().iter().flat_map(numbers) {
            let limited = find(&path).is_some() || FREE.contains(&path.as_str());
            assert!(limited, "{path} has no range");
        }
    }

    #[test]
    fn every_range_belongs_to_an_existing_key() {
        let paths: Vec<String> = whole_specs().iter().flat_map(numbers).collect();
        for limit in LIMITS {
            let found = paths.iter().any(|path| limit.is_of(path));
            assert!(found, "{} is no key", limit.path);
        }
    }
}
