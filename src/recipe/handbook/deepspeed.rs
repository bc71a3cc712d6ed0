//! The DeepSpeed config that a trainer's recipe holds, or names: what it says about the ranks, and
//! whether its numbers are the trainer's.
//!
//! Source: transformers 5.23.0 `integrations/deepspeed.py` (`fill_match`, `trainer_config_process`,
//! `trainer_config_finalize`): a value that is not "auto" and not the trainer's is collected, and all of
//! them are refused together; `propagate_args_to_deepspeed` does the same with the file of an accelerate
//! config.

use std::path::Path;

use crate::recipe::accelerate::{self, Zero};
use crate::recipe::deepspeed as config;
use crate::recipe::node::Node;
use crate::recipe::reading::Reading;
use crate::recipe::scalar::{Resolved, Schema};
use crate::recipe::suggest::short;
use crate::recipe::tree::Tree;

use super::values::Values;

/// Numbers of `TrainingArguments` that a config's are compared with: where they stand there, the
/// argument, its default.
const NUMBERS: [(&str, &str, f64); 3] = [
    ("gradient_clipping", "max_grad_norm", 1.0),
    ("optimizer.params.eps", "adam_epsilon", 1e-8),
    ("optimizer.params.weight_decay", "weight_decay", 0.0),
];

/// `learning_rate` without a trainer of TRL's around it.
const LEARNING_RATE: f64 = 5e-5;

/// Reads the config of the key `deepspeed`. Without one, the file that the launcher's config names is
/// compared in the same way.
pub(super) fn read(values: &Values, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    let Some(node) = values.node("deepspeed") else {
        // The batch of a launcher's config is compared with the launcher's other numbers.
        if let Some(launched) = reading.zero.as_mut().and_then(Zero::take_file) {
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
    for own in ["micro", "accumulation"] {
        native.remove_path(&format!("batch.{own}"));
    }
    config::refuse_elasticity(&mut native, reading);
    tree.lay(native);
}

fn load(node: &Node, path: &Path, reading: &mut Reading) -> Option<Node> {
    let Some(name) = node.text() else {
        config::refuse_no_zero(node, reading);
        return Some(node.clone());
    };
    let Some(file) = reading.beside(path, name) else {
        reading.warning(
            "deepspeed-unread",
            Some(node.span),
            format!("the DeepSpeed config `{name}` is not there: its ZeRO stage is not known"),
            "put it beside the recipe, or give `evenkeel.parallel.strategy`",
        );
        return None;
    };
    config::open(&file, reading)
}

const AUTO: &str = "write \"auto\" there, so that the recipe decides";

/// The trainer compares its own batch with the file's and refuses a difference.
fn compare_batch(native: &Node, tree: &Tree, reading: &mut Reading) {
    for (path, rule, key) in [
        (
            "batch.accumulation",
            "accumulation-conflict",
            "gradient_accumulation_steps",
        ),
        (
            "batch.micro",
            "deepspeed-batch-triple",
            "per_device_train_batch_size",
        ),
    ] {
        let (Some(theirs), Some(own)) = (native.get_path(path), tree.get(path)) else {
            continue;
        };
        let (theirs_text, own_text) = (theirs.text(), own.text());
        if theirs_text != own_text {
            reading.error(
                rule,
                Some(theirs.span),
                format!(
                    "the DeepSpeed config says {}, the recipe's `{key}` is {}",
                    theirs_text.unwrap_or_default(),
                    own_text.unwrap_or_default()
                ),
                AUTO,
            );
        }
    }
}

/// Everything else that the trainer compares.
fn compare(config: &Node, values: &Values, tree: &Tree, reading: &mut Reading) {
    let mut differs = |path: &str, key: &str, own: f64| {
        let Some(node) = config.get_path(path) else {
            return;
        };
        if let Some(theirs) = theirs(node)
            && theirs != own
        {
            tell(node, path, key, &format!("{own:?}"), reading);
        }
    };
    for (path, key, default) in NUMBERS {
        let own = values.float(key).map_or(default, |given| given.value);
        differs(path, key, own);
    }
    // TRL's trainers have defaults of their own, which stand in the tree.
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
    // No warm-up is 0 steps to transformers 4 and 1 to 5.23.0, so both are let pass.
    if let Some(warmup) = warmup(values, steps).filter(|steps| *steps > 0.0) {
        differs("scheduler.params.warmup_num_steps", "warmup_steps", warmup);
    }
    compare_betas(config, values, reading);
    compare_precision(config, values, tree, reading);
}

/// A number of the config; `None` for "auto", for nothing and for what no number is.
fn theirs(node: &Node) -> Option<f64> {
    match node.resolve(Schema::PyYaml)? {
        Resolved::Int(value) => Some(value as f64),
        Resolved::Float(value) => Some(value),
        // JSON's `1e-5`.
        Resolved::Str(text) => text.parse().ok(),
        _ => None,
    }
}

/// Steps of warm-up; `None` where they hang on a number of steps that is not known.
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
    let Some(theirs) = node.items() else {
        return;
    };
    let own = [("adam_beta1", 0.9), ("adam_beta2", 0.999)];
    let own = own.map(|(key, default)| values.float(key).map_or(default, |given| given.value));
    let theirs: Vec<Option<f64>> = theirs.iter().map(self::theirs).collect();
    if theirs != own.map(Some) {
        let own = format!("[{}, {}]", own[0], own[1]);
        tell(node, path, "adam_beta1` and `adam_beta2", &own, reading);
    }
}

/// `fp16` and `bf16` are switched on by the arguments, or those of evaluation.
fn compare_precision(config: &Node, values: &Values, tree: &Tree, reading: &mut Reading) {
    let fp16 = values.is_true("fp16");
    // TRL switches bf16 on where neither is said.
    let of_trl = tree.get("model.precision").and_then(Node::text) == Some("bf16");
    let bf16 = values.bool("bf16").map(|given| given.value);
    let bf16 = bf16.unwrap_or(of_trl && !fp16);
    for (key, own) in [("fp16", fp16), ("bf16", bf16)] {
        let own = own || values.is_true(&format!("{key}_full_eval"));
        let path = format!("{key}.enabled");
        let Some(node) = config.get_path(&path) else {
            continue;
        };
        let theirs = match node.resolve(Schema::PyYaml) {
            Some(Resolved::Bool(value)) => value,
            Some(Resolved::Int(value @ (0 | 1))) => value == 1,
            _ => continue,
        };
        if theirs != own {
            tell(node, &path, key, &own.to_string(), reading);
        }
    }
}

fn tell(node: &Node, path: &str, key: &str, own: &str, reading: &mut Reading) {
    let theirs = match node.items() {
        Some(items) => {
            let items: Vec<&str> = items.iter().filter_map(Node::text).collect();
            format!("[{}]", items.join(", "))
        }
        None => short(node.text().unwrap_or_default()),
    };
    reading.error(
        "deepspeed-conflict",
        Some(node.span),
        format!("the DeepSpeed config's `{path}` is {theirs}, the trainer's `{key}` is {own}"),
        AUTO,
    );
}

/// Where a command has `--deepspeed` without a value: the switch of `deepspeed.add_config_arguments`
/// (DeepSpeed edaa722, `__init__.py`), which `TrainingArguments` does not have, so the program around it
/// is another one.
pub(in crate::recipe) fn switch(arguments: &Node) -> Option<&Node> {
    let entry = arguments
        .entries()?
        .iter()
        .find(|e| e.name == "deepspeed")?;
    let bare = entry.value.span == entry.name_span && entry.value.text() == Some("true");
    bare.then_some(&entry.value)
}

#[cfg(test)]
mod tests {
    use crate::recipe::{Request, Severity, read};

    /// What is said of a DeepSpeed config, without its batch, beside arguments.
    fn said(config: &str, arguments: &str) -> Vec<String> {
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
    fn every_number_that_is_not_the_trainers_is_refused() {
        let optimizer = "\"optimizer\": {\"params\": {\"lr\": 1e-3, \"betas\": [0.9, 0.95], \
                         \"eps\": 1e-6, \"weight_decay\": 0.1}}, \"gradient_clipping\": 0.5";
        assert_eq!(
            said(optimizer, ""),
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
        assert!(said(optimizer, same).is_empty());
        let auto = "\"optimizer\": {\"params\": {\"lr\": \"auto\", \"betas\": \"auto\"}}";
        assert!(said(auto, "").is_empty());
    }

    #[test]
    fn warm_up_and_precision_are_compared_too() {
        let scheduler = "\"scheduler\": {\"params\": {\"total_num_steps\": 100, \
                         \"warmup_num_steps\": 10, \"warmup_max_lr\": 1e-4}}";
        let rate = "--learning_rate 1e-4";
        assert!(
            said(
                scheduler,
                &format!("{rate} --warmup_ratio 0.1 --max_steps 100")
            )
            .is_empty()
        );
        assert!(said(scheduler, &format!("{rate} --warmup_ratio 0.1")).is_empty());
        let other = said(
            scheduler,
            &format!("{rate} --warmup_steps 5 --max_steps 50"),
        );
        assert_eq!(other.len(), 2, "{other:?}");
        let half = "\"fp16\": {\"enabled\": true}";
        assert_eq!(
            said(half, "--bf16"),
            ["`fp16.enabled` is true, the trainer's `fp16` is false"]
        );
        assert!(said(half, "--fp16").is_empty());
        assert!(said("\"bf16\": {\"enabled\": \"auto\"}", "").is_empty());
    }
}
