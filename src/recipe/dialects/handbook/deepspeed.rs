//! The DeepSpeed config that a recipe contains or names: the parallelism that it sets, and whether
//! its numbers equal the trainer's.
//!
//! Source: transformers 5.23.0 `integrations/deepspeed.py` (`fill_match`, `trainer_config_process`,
//! `trainer_config_finalize`): it collects every value that is neither "auto" nor the trainer's and
//! refuses all of them together. `propagate_args_to_deepspeed` does the same with the file of an
//! accelerate config.

use std::path::Path;

use crate::recipe::dialects::accelerate;
use crate::recipe::dialects::deepspeed as config;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::util::suggest::short;

use super::values::Values;

/// Numbers of the config that must equal those of `TrainingArguments`: path in the config,
/// argument, default.
const NUMBERS: [(&str, &str, f64); 3] = [
    ("gradient_clipping", "max_grad_norm", 1.0),
    ("optimizer.params.eps", "adam_epsilon", 1e-8),
    ("optimizer.params.weight_decay", "weight_decay", 0.0),
];

/// The default of `learning_rate` outside TRL's trainers.
const LEARNING_RATE: f64 = 5e-5;

/// Reads the config of the key `deepspeed`. Without that key, compares the file that the launcher's
/// config names.
pub(super) fn read(values: &Values, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    let Some(node) = values.node("deepspeed") else {
        // The launcher's reader has compared the batch of its config.
        if let Some(launched) = reading
            .deepspeed_plugin
            .as_mut()
            .and_then(|plugin| plugin.file.take())
        {
            compare(&launched, values, tree, reading);
        }
        return;
    };
    accelerate::overrule(reading);
    let Some(config) = load(node, path, reading) else {
        return;
    };
    let mut native = config::translate(&config, "deepspeed");
    compare_batch(&native, tree, reading);
    compare(&config, values, tree, reading);
    for key in ["per_device_batch_size", "accumulation"] {
        native.remove_path(&format!("batch.{key}"));
    }
    config::refuse_elasticity(&mut native, reading);
    tree.lay(native);
}

fn load(node: &Node, path: &Path, reading: &mut Reading) -> Option<Node> {
    if node.text().is_none() {
        config::require_zero_optimization(node, reading);
        return Some(node.clone());
    }
    config::open_named(node, path, "put it beside the recipe", reading)
}

const AUTO: &str = "write \"auto\" there, so that the recipe decides";

/// The trainer compares its batch with the file's and refuses a difference.
fn compare_batch(native: &Node, tree: &Tree, reading: &mut Reading) {
    for (path, rule, key) in [
        (
            "batch.accumulation",
            "accumulation-conflict",
            "gradient_accumulation_steps",
        ),
        (
            "batch.per_device_batch_size",
            "deepspeed-batch-triple",
            "per_device_train_batch_size",
        ),
    ] {
        let (Some(in_config), Some(in_trainer)) = (native.get_path(path), tree.get(path)) else {
            continue;
        };
        let (config_text, trainer_text) = (in_config.text(), in_trainer.text());
        if config_text != trainer_text {
            reading.error(
                rule,
                Some(in_config.span),
                format!(
                    "the DeepSpeed config has {}, the recipe's `{key}` is {}",
                    config_text.unwrap_or_default(),
                    trainer_text.unwrap_or_default()
                ),
                AUTO,
            );
        }
    }
}

/// Compares the other values that the trainer compares.
fn compare(config: &Node, values: &Values, tree: &Tree, reading: &mut Reading) {
    let mut differs = |path: &str, key: &str, in_trainer: f64| {
        let Some(node) = config.get_path(path) else {
            return;
        };
        if let Some(in_config) = config_number(node)
            && in_config != in_trainer
        {
            report_conflict(node, path, key, &format!("{in_trainer:?}"), reading);
        }
    };
    for (path, key, default) in NUMBERS {
        let in_trainer = values.float(key).map_or(default, |given| given.value);
        differs(path, key, in_trainer);
    }
    // TRL's trainers have their own defaults, which are in the tree.
    let default = tree.get("learning_rate.peak").and_then(Node::text);
    let default = default.and_then(|text| text.parse().ok());
    let rate = values.float("learning_rate").map(|given| given.value);
    let rate = rate.or(default).unwrap_or(LEARNING_RATE);
    for path in ["optimizer.params.lr", "scheduler.params.warmup_max_lr"] {
        differs(path, "learning_rate", rate);
    }
    let steps = values.int("max_steps").filter(|steps| steps.value > 0);
    let steps = steps.map(|steps| steps.value as f64);
    if let Some(steps) = steps {
        differs("scheduler.params.total_num_steps", "max_steps", steps);
    }
    // No warm-up is 0 steps in transformers 4 and 1 in 5.23.0, so both pass.
    if let Some(warmup) = warmup(values, steps).filter(|steps| *steps > 0.0) {
        differs("scheduler.params.warmup_num_steps", "warmup_steps", warmup);
    }
    compare_betas(config, values, reading);
    compare_precision(config, values, tree, reading);
}

/// A number of the config; `None` for "auto", an absent value and other types.
pub(super) fn config_number(node: &Node) -> Option<f64> {
    match node.resolve(Schema::PyYaml)? {
        Resolved::Int(value) => Some(value as f64),
        Resolved::Float(value) => Some(value),
        // JSON's `1e-5` has no point.
        Resolved::Str(text) => text.parse().ok(),
        _ => None,
    }
}

/// Steps of warm-up; `None` where they depend on an unknown number of steps.
fn warmup(values: &Values, steps: Option<f64>) -> Option<f64> {
    let given = |key| values.float(key).map(|given| given.value);
    let given = |key| given(key).filter(|value| *value != 0.0);
    match given("warmup_steps").or_else(|| given("warmup_ratio")) {
        None => Some(0.0),
        Some(count) if count >= 1.0 => Some(count.trunc()),
        Some(share) => steps.map(|steps| (steps * share).ceil()),
    }
}

fn compare_betas(config: &Node, values: &Values, reading: &mut Reading) {
    let path = "optimizer.params.betas";
    let Some(node) = config.get_path(path) else {
        return;
    };
    let Some(in_config) = node.items() else {
        return;
    };
    let in_trainer = [("adam_beta1", 0.9), ("adam_beta2", 0.999)];
    let in_trainer =
        in_trainer.map(|(key, default)| values.float(key).map_or(default, |given| given.value));
    let in_config: Vec<Option<f64>> = in_config.iter().map(config_number).collect();
    if in_config != in_trainer.map(Some) {
        let in_trainer = format!("[{}, {}]", in_trainer[0], in_trainer[1]);
        report_conflict(
            node,
            path,
            "adam_beta1` and `adam_beta2",
            &in_trainer,
            reading,
        );
    }
}

/// The arguments, or those of evaluation, switch `fp16` and `bf16` on.
fn compare_precision(config: &Node, values: &Values, tree: &Tree, reading: &mut Reading) {
    let fp16 = values.is_true("fp16");
    // TRL switches bf16 on where the recipe sets neither.
    let of_trl = tree.get("model.precision").and_then(Node::text) == Some("bf16");
    let bf16 = values.bool("bf16").map(|given| given.value);
    let bf16 = bf16.unwrap_or(of_trl && !fp16);
    for (key, in_trainer) in [("fp16", fp16), ("bf16", bf16)] {
        let in_trainer = in_trainer || values.is_true(&format!("{key}_full_eval"));
        let path = format!("{key}.enabled");
        let Some(node) = config.get_path(&path) else {
            continue;
        };
        let in_config = match node.resolve(Schema::PyYaml) {
            Some(Resolved::Bool(value)) => value,
            Some(Resolved::Int(value @ (0 | 1))) => value == 1,
            _ => continue,
        };
        if in_config != in_trainer {
            report_conflict(node, &path, key, &in_trainer.to_string(), reading);
        }
    }
}

fn report_conflict(node: &Node, path: &str, key: &str, in_trainer: &str, reading: &mut Reading) {
    let in_config = match node.items() {
        Some(items) => {
            let items: Vec<&str> = items.iter().filter_map(Node::text).collect();
            format!("[{}]", items.join(", "))
        }
        None => short(node.text().unwrap_or_default()),
    };
    reading.error(
        "deepspeed-conflict",
        Some(node.span),
        format!(
            "the DeepSpeed config's `{path}` is {in_config}, the trainer's `{key}` is {in_trainer}"
        ),
        AUTO,
    );
}

/// Finds a `--deepspeed` without a value: the switch of `deepspeed.add_config_arguments` (DeepSpeed
/// edaa722, `__init__.py`). `TrainingArguments` has no such switch, so the program has another
/// parser.
pub(crate) fn switch(arguments: &Node) -> Option<&Node> {
    let entry = arguments
        .entries()?
        .iter()
        .find(|e| e.name == "deepspeed")?;
    let bare = entry.value.span == entry.name_span && entry.value.text() == Some("true");
    bare.then_some(&entry.value)
}

#[cfg(test)]
mod tests {
    use crate::recipe::read;
    use crate::recipe::schema::request::Request;
    use crate::recipe::syntax::diagnostic::Severity;

    /// The conflicts of a DeepSpeed config, without its batch, with the arguments.
    fn conflicts(config: &str, arguments: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ds.json");
        let auto = "\"train_batch_size\": \"auto\", \"zero_optimization\": {\"stage\": 1}";
        std::fs::write(&path, format!("{{{auto}, {config}}}")).unwrap();
        let line = format!(
            "deepspeed --num_gpus 2 t.py --output_dir o --deepspeed {} {arguments}",
            path.display()
        );
        let request = Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            ..Request::default()
        };
        let Err(error) = read(&request) else {
            return Vec::new();
        };
        let errors = error.diagnostics.iter();
        let errors = errors.filter(|d| d.severity == Severity::Error);
        errors
            .map(|d| {
                assert_eq!(d.rule, "deepspeed-conflict");
                d.message.replace("the DeepSpeed config's ", "")
            })
            .collect()
    }

    #[test]
    fn a_number_that_differs_from_the_trainers_is_refused() {
        let optimizer = "\"optimizer\": {\"params\": {\"lr\": 1e-3, \"betas\": [0.9, 0.95], \
                         \"eps\": 1e-6, \"weight_decay\": 0.1}}, \"gradient_clipping\": 0.5";
        assert_eq!(
            conflicts(optimizer, ""),
            [
                "`optimizer.params.lr` is 1e-3, the trainer's `learning_rate` is 5e-5",
                "`optimizer.params.betas` is [0.9, 0.95], the trainer's `adam_beta1` and `adam_beta2` is [0.9, 0.999]",
                "`optimizer.params.eps` is 1e-6, the trainer's `adam_epsilon` is 1e-8",
                "`optimizer.params.weight_decay` is 0.1, the trainer's `weight_decay` is 0.0",
                "`gradient_clipping` is 0.5, the trainer's `max_grad_norm` is 1.0",
            ]
        );
        let same = "--learning_rate 0.001 --adam_beta2 0.95 --adam_epsilon 1e-6 \
                    --weight_decay 0.1 --max_grad_norm 0.5";
        assert!(conflicts(optimizer, same).is_empty());
        let auto = "\"optimizer\": {\"params\": {\"lr\": \"auto\", \"betas\": \"auto\"}}";
        assert!(conflicts(auto, "").is_empty());
    }

    #[test]
    fn warm_up_and_precision_are_compared_too() {
        let scheduler = "\"scheduler\": {\"params\": {\"total_num_steps\": 100, \
                         \"warmup_num_steps\": 10, \"warmup_max_lr\": 1e-4}}";
        let rate = "--learning_rate 1e-4";
        assert!(
            conflicts(
                scheduler,
                &format!("{rate} --warmup_ratio 0.1 --max_steps 100")
            )
            .is_empty()
        );
        assert!(conflicts(scheduler, &format!("{rate} --warmup_ratio 0.1")).is_empty());
        let other = conflicts(
            scheduler,
            &format!("{rate} --warmup_steps 5 --max_steps 50"),
        );
        assert_eq!(other.len(), 2, "{other:?}");
        let half = "\"fp16\": {\"enabled\": true}";
        assert_eq!(
            conflicts(half, "--bf16"),
            ["`fp16.enabled` is true, the trainer's `fp16` is false"]
        );
        assert!(conflicts(half, "--fp16").is_empty());
        assert!(conflicts("\"bf16\": {\"enabled\": \"auto\"}", "").is_empty());
    }
}
