//! The DeepSpeed config that a recipe contains or names: the parallelism that it sets, and whether
//! its numbers equal the trainer's.
//!
//! Source: transformers 5.23.0 `integrations/deepspeed.py` (`fill_match`, `trainer_config_process`,
//! `trainer_config_finalize`): it collects every value that is neither "auto" nor the trainer's and
//! refuses all of them together. `propagate_args_to_deepspeed` does the same with the file of an
//! accelerate config.

use std::path::Path;

use crate::recipe::dialects::accelerate;
use crate::recipe::dialects::deepspeed::{self as config, AUTO, number};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::util::suggest::short;

use super::schedule::stated_warmup;
use super::values::Values;
use super::versions::Versions;

/// Reads the config of the key `deepspeed`. Without that key, compares the file that the launcher's
/// config names.
pub(super) fn read(
    values: &Values,
    path: &Path,
    versions: Versions,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    let Some(node) = values.node("deepspeed") else {
        // The launcher's reader has compared the batch of its config.
        let plugin = reading.deepspeed_plugin.as_mut();
        if let Some(launched) = plugin.and_then(|plugin| plugin.file.take()) {
            compare(&launched, values, versions, tree, reading);
        }
        return;
    };
    accelerate::overrule(reading);
    let config = if node.text().is_none() {
        config::require_zero_optimization(node, reading);
        Some(node.clone())
    } else {
        config::open_named(node, path, "put it beside the recipe", reading)
    };
    let Some(config) = config else {
        return;
    };
    let mut native = config::translate(&config, "deepspeed", reading);
    config::refuse_another_batch(&native, |path| tree.get(path), reading);
    compare(&config, values, versions, tree, reading);
    for key in ["per_device_batch_size", "accumulation"] {
        native.remove_path(&format!("batch.{key}"));
    }
    config::refuse_elasticity(&mut native, reading);
    tree.lay(native);
}

/// Refuses values other than the batch that differ from the trainer's, as the trainer does. Truth values count as 0
/// and 1.
fn compare(config: &Node, values: &Values, versions: Versions, tree: &Tree, reading: &mut Reading) {
    let given = |key: &str, default: f64| values.float(key).map_or(default, |given| given.value);
    // TRL's trainers have their own defaults, which are in the tree.
    let rate = tree.get("learning_rate.peak").and_then(number);
    let rate = given("learning_rate", rate.unwrap_or(5e-5));
    let betas = [given("adam_beta1", 0.9), given("adam_beta2", 0.999)];
    let fp16 = values.is_true("fp16");
    // TRL switches bf16 on where the recipe sets neither.
    let of_trl = tree.get("model.precision").and_then(Node::text) == Some("bf16");
    let bf16 = values
        .bool("bf16")
        .map_or(of_trl && !fp16, |given| given.value);
    let steps = values.int("max_steps").filter(|steps| steps.value > 0);
    let steps = steps.map(|steps| steps.value as f64);
    // No warm-up is 0 steps in transformers 4 and 1 in 5.23.0, so both pass.
    let warmup = warmup(values, versions, steps).filter(|steps| *steps > 0.0);
    let float = |value: f64| (vec![value], format!("{value:?}"));
    // The arguments, or those of evaluation, switch the precision on.
    let switch = |key: &str, on: bool| {
        let on = on || values.is_true(&format!("{key}_full_eval"));
        (vec![f64::from(u8::from(on))], on.to_string())
    };
    let pair = (betas.to_vec(), format!("[{}, {}]", betas[0], betas[1]));
    let clip = given("max_grad_norm", 1.0);
    let decay = given("weight_decay", 0.0);
    // Path in the config, argument, and the trainer's numbers with their text.
    for (path, key, in_trainer) in [
        ("gradient_clipping", "max_grad_norm", Some(float(clip))),
        ("optimizer.params.lr", "learning_rate", Some(float(rate))),
        (
            "optimizer.params.eps",
            "adam_epsilon",
            Some(float(given("adam_epsilon", 1e-8))),
        ),
        (
            "optimizer.params.betas",
            "adam_beta1` and `adam_beta2",
            Some(pair),
        ),
        (
            "optimizer.params.weight_decay",
            "weight_decay",
            Some(float(decay)),
        ),
        (
            "scheduler.params.warmup_max_lr",
            "learning_rate",
            Some(float(rate)),
        ),
        (
            "scheduler.params.total_num_steps",
            "max_steps",
            steps.map(float),
        ),
        (
            "scheduler.params.warmup_num_steps",
            "warmup_steps",
            warmup.map(float),
        ),
        ("fp16.enabled", "fp16", Some(switch("fp16", fp16))),
        ("bf16.enabled", "bf16", Some(switch("bf16", bf16))),
    ] {
        let (Some(node), Some((in_trainer, text))) = (config.get_path(path), in_trainer) else {
            continue;
        };
        // The program itself may set what the command does not.
        if values.node(key).is_none() && reading.program.sets(key) {
            continue;
        }
        let parts = node.items().unwrap_or(std::slice::from_ref(node)).iter();
        let in_config: Vec<Option<f64>> = parts.clone().map(number_or_truth).collect();
        // "auto" and the like take the trainer's.
        if in_config == [None]
            || in_config
                .iter()
                .copied()
                .eq(in_trainer.into_iter().map(Some))
        {
            continue;
        }
        let shown: Vec<&str> = parts.map(Node::shown).collect();
        let shown = match node.items() {
            Some(_) => format!("[{}]", shown.join(", ")),
            None => short(&shown.concat()),
        };
        reading.error(
            "deepspeed-conflict",
            Some(node.span),
            format!("the DeepSpeed config's `{path}` is {shown}, the trainer's `{key}` is {text}"),
            AUTO,
        );
    }
}

fn number_or_truth(node: &Node) -> Option<f64> {
    match node.resolve(Schema::PyYaml) {
        Some(Resolved::Bool(value)) => Some(f64::from(u8::from(value))),
        _ => number(node),
    }
}

/// Steps of warm-up; `None` where they depend on an unknown number of steps.
fn warmup(values: &Values, versions: Versions, steps: Option<f64>) -> Option<f64> {
    match stated_warmup(values, versions)?.value {
        count if count >= 1.0 => Some(count.trunc()),
        share => steps.map(|steps| (steps * share).ceil()),
    }
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
        let errors = errors.filter(|d| d.is_error());
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
