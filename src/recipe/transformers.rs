//! transformers' `TrainingArguments`: the arguments of its example scripts and of other scripts
//! around `Trainer`, as YAML, as JSON or as a command line.
//!
//! Scripts define further arguments. Those of transformers' example scripts are read where they
//! concern the run. All others are ignored, unless they look like a misspelled field.
//! Sources: transformers 5.23.0 `training_args.py` (fields, defaults), `hf_argparser.py`,
//! `trainer.py` (`get_total_train_batch_size`); `examples/pytorch` of 4.57 and 5.23.

use std::path::Path;

use super::deepspeed;
use super::dialect::{Dialect, RESERVED};
use super::handbook::abbreviation::{Meant, meant};
use super::handbook::keys::{self, Kind};
use super::handbook::values::Values;
use super::handbook::{self, settings};
use super::node::Node;
use super::origin::Origin;
use super::reader::{Asked, Confidence, Detected, Reader, Resume, Translated, others};
use super::reading::Reading;
use super::suggest;
use super::tree::Tree;

/// Reads the keys of `TrainingArguments`.
pub struct Transformers;

/// Arguments of the example scripts that concern the batch, the model or the data, and those that
/// distinguish such a file from TRL's.
const EXAMPLES: &[(&str, Kind)] = &[
    ("attn_implementation", Kind::Str),
    ("block_size", Kind::Int),
    ("config_name", Kind::Str),
    ("dataset_config_name", Kind::Str),
    ("dataset_name", Kind::Str),
    ("dtype", Kind::Str),
    ("max_eval_samples", Kind::Int),
    ("max_length", Kind::Int),
    ("max_seq_length", Kind::Int),
    ("max_source_length", Kind::Int),
    ("max_train_samples", Kind::Int),
    ("model_name_or_path", Kind::Str),
    ("overwrite_cache", Kind::Bool),
    ("preprocessing_num_workers", Kind::Int),
    ("streaming", Kind::Bool),
    ("task_name", Kind::Str),
    ("tokenizer_name", Kind::Str),
    ("torch_dtype", Kind::Str),
    ("train_file", Kind::Str),
    ("trust_remote_code", Kind::Bool),
    ("use_fast_tokenizer", Kind::Bool),
    ("validation_file", Kind::Str),
];

/// Keys of those scripts that neither TRL nor the handbook has.
const DISTINCTIVE: &[&str] = &[
    "block_size",
    "config_name",
    "dataset_config_name",
    "do_predict",
    "do_train",
    "max_source_length",
    "overwrite_cache",
    "overwrite_output_dir",
    "task_name",
    "tokenizer_name",
    "train_file",
    "use_fast_tokenizer",
    "validation_file",
];

/// Fields that nearly every file of `TrainingArguments` has.
const COMMON: &[&str] = &[
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "output_dir",
];

const BATCH: &[&str] = &["per_device_train_batch_size", "per_gpu_train_batch_size"];

/// Fields that only programs with `TrainingArguments` commonly have. Others (`output_dir`,
/// `learning_rate`, `num_train_epochs`, `tp_size`) are widespread: the training loops of diffusers,
/// DeepSpeed-Chat, open-instruct and accelerate's examples have them with different defaults.
const TRAINER_FIELDS: &[&str] = &[
    "accelerator_config",
    "auto_find_batch_size",
    "average_tokens_across_devices",
    "batch_eval_metrics",
    "bf16_full_eval",
    "dataloader_drop_last",
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "ddp_broadcast_buffers",
    "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters",
    "ddp_timeout",
    // Without a value it is DeepSpeed's own switch, which `take_switch` has removed.
    "deepspeed",
    "dispatch_batches",
    "do_eval",
    "do_predict",
    "do_train",
    "eval_accumulation_steps",
    "eval_delay",
    "eval_do_concat_batches",
    "eval_on_start",
    "eval_strategy",
    "evaluation_strategy",
    "fp16_backend",
    "fp16_full_eval",
    "fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap",
    "gradient_checkpointing_kwargs",
    "greater_is_better",
    "group_by_length",
    "half_precision_backend",
    "hub_strategy",
    "ignore_data_skip",
    "include_for_metrics",
    "include_inputs_for_metrics",
    "include_num_input_tokens_seen",
    "include_tokens_per_second",
    "jit_mode_eval",
    "label_smoothing_factor",
    "length_column_name",
    "load_best_model_at_end",
    "log_level_replica",
    "log_on_each_node",
    "logging_first_step",
    "logging_nan_inf_filter",
    "logging_strategy",
    "lr_scheduler_kwargs",
    "metric_for_best_model",
    "neftune_noise_alpha",
    "optim_target_modules",
    "overwrite_output_dir",
    "prediction_loss_only",
    "remove_unused_columns",
    "restore_callback_states_from_checkpoint",
    "save_on_each_node",
    "save_only_model",
    "save_safetensors",
    "save_strategy",
    "skip_memory_metrics",
    "torch_compile_backend",
    "torch_empty_cache_steps",
    "train_sampling_strategy",
    "use_legacy_prediction_loop",
    "use_liger_kernel",
    "use_mps_device",
];

/// The default of `logging_steps`.
const LOGGING_STEPS: u64 = 500;

/// The type of an argument of the example scripts.
pub(super) fn example(key: &str) -> Option<Kind> {
    let found = EXAMPLES.iter().find(|(name, _)| *name == key);
    found.map(|(_, kind)| *kind)
}

impl Reader for Transformers {
    fn dialect(&self) -> Dialect {
        Dialect::Transformers
    }

    fn detect(&self, root: &Node, path: &Path, _origin: &Origin) -> Option<Detected> {
        let has = |key: &&str| root.get(key).is_some();
        if others(root).is_some()
            || deepspeed::is_one(root)
            || root.get(RESERVED).is_some()
            || !COMMON.iter().any(has)
        {
            return None;
        }
        let entries = root.entries().unwrap_or_default();
        if entries
            .iter()
            .any(|entry| handbook::only_trl_has(&entry.name))
        {
            return None;
        }
        let json = path.extension().is_some_and(|e| e == "json");
        let reason = match DISTINCTIVE.iter().find(|key| has(key)) {
            Some(key) => format!("it has the key `{key}` and none of TRL's"),
            None if json => {
                "it is JSON with `TrainingArguments`' keys and none of TRL's".to_owned()
            }
            None => return None,
        };
        Some(Detected {
            confidence: Confidence::Likely,
            reason,
        })
    }

    fn read(&self, mut root: Node, asked: &Asked<'_>, reading: &mut Reading) -> Translated {
        asked.put_into(&mut root, str::to_owned, reading);
        take_switch(&mut root, reading);
        let trainer = is_for_a_trainer(&root);
        if !trainer && let Some(zero) = &mut reading.zero {
            zero.take_file();
        }
        let mut native = translate(&root, asked.path, reading);
        if !trainer {
            // The program's defaults are not `Trainer`'s.
            native.remove_path("batch.micro");
            native.remove_path("batch.accumulation");
        }
        Translated::whole(root, native)
    }

    fn upstream_key(&self, path: &str) -> Option<&'static str> {
        settings::upstream_key(path)
    }

    fn older_keys(&self, path: &str) -> &'static [&'static str] {
        settings::older_keys(path)
    }

    fn resume(&self) -> Option<Resume> {
        Some(Resume::TRANSFORMERS)
    }

    fn argument(&self, key: &str, value: &str) -> Vec<String> {
        vec![format!("--{key}"), value.to_owned()]
    }
}

/// Whether a program takes `Trainer`'s batch arguments, or any other argument that only `Trainer`
/// has. A program without them, or with a batch under another name, may be another training loop.
fn is_for_a_trainer(root: &Node) -> bool {
    let entries = root.entries().unwrap_or_default();
    let any = |test: &dyn Fn(&str) -> bool| entries.iter().any(|entry| test(&entry.name));
    let other_batch = |name: &str| {
        let batch = name.ends_with("batch_size") && !name.contains("eval");
        batch && keys::kind_in_training(name).is_none()
    };
    any(&|name| BATCH.contains(&name))
        || (any(&|name| TRAINER_FIELDS.contains(&name)) && !any(&other_batch))
}

fn translate(root: &Node, path: &Path, reading: &mut Reading) -> Node {
    warn_unknown(root, reading);
    let kind_of = |key: &str| keys::kind_in_training(key).or_else(|| example(key));
    let values = Values::check(root, "", kind_of, reading);
    let mut tree = Tree::new(root.span);
    tree.default("objective", "language-modelling");
    settings::name(&values, path, &mut tree, reading);
    tree.default("budget.epochs", 3);
    tree.default("seed", 42);
    let evaluates = handbook::training_arguments(&values, path, LOGGING_STEPS, &mut tree, reading);
    tree.text_if("tokenizer.path", values.text("tokenizer_name"));
    let length = ["block_size", "max_seq_length", "max_length"];
    tree.plain_if(
        "data.sequence_length",
        length.iter().find_map(|key| values.int(key)),
    );
    data(&values, evaluates, &mut tree);
    tree.into_node()
}

/// Batch numbers whose defaults are those of `TrainingArguments` only.
pub(super) const MUST_BE_TYPED: [&str; 2] =
    ["per_device_train_batch_size", "gradient_accumulation_steps"];

/// Removes DeepSpeed's own switch. Its program does not hand its arguments to `TrainingArguments`,
/// so their defaults are unknown.
fn take_switch(root: &mut Node, reading: &mut Reading) {
    let Some(switch) = handbook::deepspeed::switch(root) else {
        return;
    };
    let span = switch.span;
    root.remove_path("deepspeed");
    for key in MUST_BE_TYPED
        .into_iter()
        .filter(|key| root.get(key).is_none())
    {
        reading.error(
            "mandatory-missing",
            Some(span),
            format!(
                "`--deepspeed` without a value is DeepSpeed's switch, not the field of `TrainingArguments`: the program's default of `{key}` is unknown"
            ),
            format!("add `--{key} N`, or name a DeepSpeed config that states the batch with `--deepspeed_config FILE`"),
        );
    }
}

/// Reports keys that look like a misspelled field, which the script refuses or ignores, and
/// abbreviated options. An abbreviation means a field only if the script has no option with that
/// prefix, which is unknown here, so it is not expanded.
fn warn_unknown(root: &Node, reading: &mut Reading) {
    let command = reading.files.command.map(|(file, _)| file);
    for entry in root.entries().unwrap_or_default() {
        let name = entry.name.as_str();
        let known = keys::kind_in_training(name).is_some() || example(name).is_some();
        if known || name == RESERVED || name.len() < 6 || name.len() > 80 {
            continue;
        }
        let typed = Some(entry.name_span.file) == command;
        if let (true, Meant::One(field)) = (typed, meant(name, keys::training())) {
            reading.warning(
                "unknown-key",
                Some(entry.name_span),
                format!("`--{name}` is ignored: argparse reads it as `--{field}` only if the script has no option with this prefix"),
                format!("write `--{field}` in full if you mean it"),
            );
            continue;
        }
        if let Some(field) = suggest::within(name, keys::training(), 2) {
            reading.warning(
                "unknown-key",
                Some(entry.name_span),
                format!("`TrainingArguments` has no field `{name}`"),
                format!("did you mean `{field}`? Keep it if the script defines it"),
            );
        }
    }
}

/// `train_file` and `validation_file`, or a data set's name.
fn data(values: &Values, evaluates: bool, tree: &mut Tree) {
    let named = values.text("dataset_name");
    for (file, path, split, wanted) in [
        ("train_file", "data.train", "train", true),
        (
            "validation_file",
            "data.evaluation",
            "validation",
            evaluates,
        ),
    ] {
        if !wanted {
            continue;
        }
        if let Some(given) = values.text(file) {
            let mut source = Tree::new(given.span);
            source.text("path", &given);
            tree.push(path, source);
        } else if let Some(name) = &named {
            let mut source = Tree::new(name.span);
            source.text("path", name);
            source.text_if("config", values.text("dataset_config_name"));
            source.default("split", split);
            tree.push(path, source);
        }
    }
}

#[cfg(test)]
mod tests;
