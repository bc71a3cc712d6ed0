//! What the built-in trainer does with the keys of recipes that it trains: every key of TRL's trainers, of the handbook and of
//! `TrainingArguments` is read, without effect on the weights, or refused with the values that would change them.

use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::untrained::{Effect, Untrained, UntrainedReason};
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::words::Words;

use super::preference;
use super::schedule::is_followed;
use super::values;
use super::versions::Versions;

/// Keys that change no weights, or only by rounding or the order of the samples: logs, names, uploads, kernels, memory, workers, other devices,
/// and settings of what another key switches on.
const WITHOUT_EFFECT: Words = Words(
    "activation_checkpointing_kwargs activation_offloading base_model_revision batch_eval_metrics benchmarks \
     bf16_full_eval callbacks chars_per_token data_seed \
     dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers \
     dataloader_pin_memory dataloader_prefetch_factor dataset_batch_size dataset_num_proc dataset_streaming \
     ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout \
     debug disable_tqdm dispatch_batches do_eval do_predict do_train dtype enable_jit_checkpoint env \
     eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_packing eval_use_gather_object \
     fp16_backend fp16_full_eval fp16_opt_level fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap \
     full_determinism gradient_checkpointing_kwargs gradient_checkpointing_use_reentrant greater_is_better \
     half_precision_backend hub_always_push hub_model_id hub_model_revision hub_private_repo hub_revision \
     hub_strategy hub_token ignore_bias_buffers ignore_data_skip include_for_metrics include_inputs_for_metrics \
     include_num_input_tokens_seen include_tokens_per_second jit_mode_eval label_names length_column_name \
     liger_kernel_config local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step \
     logging_nan_inf_filter logging_strategy \
     metric_for_best_model model_code_revision \
     mp_parameters no_cuda num_of_sequences overwrite_cache overwrite_hub_revision \
     overwrite_output_dir pad_to_multiple_of pad_token padding_free past_index prediction_loss_only \
     preprocessing_num_workers project push_to_hub push_to_hub_model_id push_to_hub_organization \
     push_to_hub_revision push_to_hub_token ray_scope remove_unused_columns \
     restore_callback_states_from_checkpoint reward_funcs reward_model_name_or_path router_aux_loss_coef \
     sanity_check save_on_each_node save_safetensors shuffle_dataset skip_memory_metrics streaming torch_compile \
     torch_compile_backend torch_compile_mode torch_dtype torch_empty_cache_steps torchdynamo tpu_metrics_debug \
     tpu_num_cores trackio_bucket_id trackio_space_id trackio_static_space_id trust_remote_code \
     use_cache use_cpu use_fast_tokenizer use_ipex use_legacy_prediction_loop \
     use_liger use_liger_kernel use_mps_device wandb_entity wandb_project wandb_run_group",
);

/// Keys that change the weights, each with the values that do not, the first one for messages.
const UNSUPPORTED: [(&str, &[&str]); 24] = [
    ("auto_insert_empty_system_msg", &["false"]),
    ("average_tokens_across_devices", &["true"]),
    ("bnb_4bit_quant_storage", &[]),
    ("bnb_4bit_quant_type", &["nf4"]),
    ("config_name", &[]),
    ("dataset_kwargs", &[]),
    ("eos_token", &[]),
    ("group_by_length", &["false"]),
    ("load_best_model_at_end", &["false"]),
    ("loss_type", &["nll", "chunked_nll", "dft"]),
    ("lora_target_parameters", &[]),
    ("lora_task_type", &["CAUSAL_LM"]),
    ("max_eval_samples", &[]),
    ("max_source_length", &[]),
    ("max_train_samples", &[]),
    ("model_init_kwargs", &[]),
    ("optim_args", &[]),
    ("optim_target_modules", &[]),
    (
        "packing_strategy",
        &["bfd", "bfd_split", "bfd-requeue", "wrapped"],
    ),
    ("system_prompt", &[]),
    ("task_name", &[]),
    ("truncation_mode", &["keep_start"]),
    ("truncation_side", &["right"]),
    ("use_dora", &["false"]),
];

/// The integration of `report_to` that the built-in trainer writes.
const WRITTEN: &str = "tensorboard";

/// Whether the built-in trainer writes TensorBoard's files for this `report_to`. `all` is every integration that is
/// installed.
pub(crate) fn writes_tensorboard(report_to: &Node) -> bool {
    reports(report_to).any(|name| [WRITTEN, "all"].contains(&name))
}

/// What of `report_to` the built-in trainer does not write; `None`: it writes all of it.
fn unwritten(report_to: &Node) -> Option<UntrainedReason> {
    let neutral = ["none", "no", WRITTEN];
    let is_more = reports(report_to).any(|name| !neutral.contains(&name));
    is_more.then(|| match writes_tensorboard(report_to) {
        true => UntrainedReason::NoEffectExcept(WRITTEN),
        false => UntrainedReason::NoEffect,
    })
}

/// The names in `report_to`, which is one or a list.
fn reports(node: &Node) -> impl Iterator<Item = &str> {
    let listed = node.items().unwrap_or(std::slice::from_ref(node));
    listed.iter().filter_map(Node::text)
}

pub(crate) fn effect(key: &str, objective: Objective) -> Effect {
    if objective.is_over_preferences()
        && let Some(effect) = preference::effect(key, objective)
    {
        return effect;
    }
    let unsupported = UNSUPPORTED.iter().find(|(name, _)| *name == key);
    match unsupported {
        Some((_, neutral)) => Effect::Unsupported(neutral),
        None if WITHOUT_EFFECT.has(key) => Effect::None,
        None => Effect::Read,
    }
}

/// Finds the keys by which the built-in trainer does not train. `is_known`: upstream's versions have the key.
pub(crate) fn find(
    root: &Node,
    objective: Objective,
    versions: Versions,
    is_known: impl Fn(&str) -> bool,
    reading: &mut Reading,
) {
    let is_on = |key| {
        root.get(key)
            .is_some_and(|value| !is_neutral(value, &["false"]))
    };
    let [packs, adapts, quantises] = ["packing", "use_peft", "load_in_4bit"].map(is_on);
    let of_adapters =
        |key: &str| key.starts_with("lora_") || ["use_dora", "use_rslora"].contains(&key);
    let is_dft = root.get("loss_type").and_then(Node::text) == Some("dft");
    let scheduler = root.get("lr_scheduler_type").and_then(Node::text);
    let scheduler = scheduler.unwrap_or("linear");
    for entry in root.entries().unwrap_or_default() {
        let key = entry.name.as_str();
        let value = entry.value.shown().to_owned();
        let instead = preference::instead(key, &entry.value, objective, versions);
        let reason = match effect(key, objective) {
            _ if key == RESERVED => continue,
            _ if !is_known(key) => UntrainedReason::Unknown,
            _ if !adapts && of_adapters(key) => UntrainedReason::NoEffect,
            _ if !quantises && key.contains("bnb_") => UntrainedReason::NoEffect,
            Effect::Read if key == "report_to" => match unwritten(&entry.value) {
                Some(reason) => reason,
                None => continue,
            },
            Effect::Read
                if key == "label_smoothing_factor"
                    && is_dft
                    && !is_neutral(&entry.value, &["0"]) =>
            {
                UntrainedReason::NoEffect
            }
            Effect::Read if instead.is_some() => {
                UntrainedReason::Unsupported(instead.map(str::to_owned))
            }
            Effect::Read if key == "lr_scheduler_type" && !is_followed(&value, None) => {
                UntrainedReason::Unsupported(Some("lr_scheduler_type=cosine".to_owned()))
            }
            Effect::Read
                if key == "lr_scheduler_kwargs" && !is_followed(scheduler, Some(&entry.value)) =>
            {
                UntrainedReason::Unsupported(None)
            }
            Effect::Read => continue,
            Effect::Unsupported(_) if key == "packing_strategy" && !packs => {
                UntrainedReason::NoEffect
            }
            Effect::Unsupported(neutral) if is_neutral(&entry.value, neutral) => continue,
            Effect::Unsupported(neutral) => {
                let instead = neutral.first().map(|value| format!("{key}={value}"));
                UntrainedReason::Unsupported(instead)
            }
            Effect::None => UntrainedReason::NoEffect,
        };
        reading.untrained.push(Untrained {
            key: key.to_owned(),
            value,
            span: entry.name_span,
            reason,
        });
    }
}

/// Keys of `dataset_kwargs` and `model_init_kwargs` that change nothing, with the only value that does not, if there is
/// one: types, kernels and caches of the model, and what the built-in trainer does not do either.
const NEUTRAL_INSIDE: [(&str, Option<&str>); 9] = [
    ("add_special_tokens", Some("false")),
    ("append_concat_token", Some("false")),
    ("attn_implementation", None),
    ("device_map", None),
    ("dtype", None),
    ("skip_prepare_dataset", Some("false")),
    ("torch_dtype", None),
    ("trust_remote_code", None),
    ("use_cache", None),
];

/// Whether a value is one of these, or empty.
pub(crate) fn is_neutral(value: &Node, neutral: &[&str]) -> bool {
    match &value.value {
        Value::Mapping(entries) => entries.iter().all(|entry| {
            let inside = NEUTRAL_INSIDE.iter().find(|(name, _)| *name == entry.name);
            inside.is_some_and(|(_, only)| match only {
                Some(only) => is_neutral(&entry.value, &[only]),
                None => true,
            })
        }),
        Value::Sequence(items) => items.iter().all(|item| is_neutral(item, neutral)),
        Value::Scalar(_) => {
            let text = value.text().unwrap_or_default();
            let same = |other: &&str| {
                let numbers = (text.parse::<f64>().ok(), other.parse::<f64>().ok());
                let truths = (truth(text), truth(other));
                text.eq_ignore_ascii_case(other)
                    || matches!(numbers, (Some(a), Some(b)) if a == b)
                    || (["true", "false"].contains(other) && truths.0 == truths.1)
            };
            text.is_empty() || value.is_null(Schema::PyYaml) || neutral.iter().any(same)
        }
    }
}

/// The truth of a word, as YAML 1.1 and transformers read it.
fn truth(text: &str) -> Option<bool> {
    match text.to_lowercase().as_str() {
        "on" => Some(true),
        "off" => Some(false),
        text => values::truth(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::dialects::handbook::keys;
    use crate::recipe::dialects::preference::Kind;
    use crate::recipe::dialects::tree_effects;
    use crate::recipe::schema::untrained::Keys;
    use crate::recipe::{Dialect, Recipe, Request, read_text};
    use crate::util::testing::is_kept;

    /// Every key that is read, with a value that changes the run, and after `|` lines that it needs.
    const SAMPLES: &str = "\
accelerator_config: {split_batches: true}
activation_checkpointing: false
adafactor: true
adam_beta1: 0.5
adam_beta2: 0.5
adam_epsilon: 0.5
assistant_only_loss: true
attn_implementation: eager
auto_find_batch_size: true
bf16: false
block_size: 77
chat_template: x
chat_template_path: nowhere.jinja
completion_only_loss: false
cutoff_len: 77
dataloader_drop_last: true
dataset: a
dataset_config: b|dataset_name: a
dataset_config_name: b|dataset_name: a
dataset_configs: [b]|dataset_mixer: {a: 1.0}
dataset_mixer: {a: 1.0}
dataset_mixture: {datasets: [{id: a}]}
dataset_name: a
dataset_splits: [train_sft]|dataset_mixer: {a: 1.0}
dataset_test_split: b|dataset_name: a|eval_strategy: epoch
dataset_text_field: b|dataset_name: a
dataset_train_split: b|dataset_name: a
datasets: [{path: a}]
deepspeed: {zero_optimization: {stage: 3}}
eval_steps: 5|eval_strategy: steps
eval_strategy: epoch
evaluation_strategy: epoch
fp16: true
fsdp: full_shard
fsdp_config: {version: 1}|fsdp: full_shard
gradient_accumulation_steps: 3
gradient_checkpointing: false
label_smoothing_factor: 0.1
learning_rate: 0.5
load_in_4bit: true
load_in_8bit: true
logging_steps: 3|eval_strategy: steps
lora_alpha: 9|use_peft: true
lora_dropout: 0.5|use_peft: true
lora_modules_to_save: [a]|use_peft: true
lora_r: 9|use_peft: true
lora_target_modules: [a]|use_peft: true
lr_scheduler_kwargs: {min_lr_rate: 0.5}|lr_scheduler_type: cosine_with_min_lr
lr_scheduler_type: cosine
max_grad_norm: 0.5
max_length: 77
max_seq_length: 77
max_steps: 7
model_max_length: 77
model_name_or_path: b
model_revision: v2
neftune_noise_alpha: 5
num_train_epochs: 9
optim: adafactor
output_dir: out/b
packing: true
parallelism_config: {tp_size: 2}
per_device_eval_batch_size: 3
per_device_train_batch_size: 3
per_gpu_eval_batch_size: 3
per_gpu_train_batch_size: 3
report_to: tensorboard
resume_from_checkpoint: a
run_name: b
save_only_model: true
save_steps: 3
save_strategy: epoch
save_total_limit: 3
seed: 3
split_batches: true
test_split_size: 0.5|datasets: [{path: a}]
text_column: b|dataset_name: a
tf32: true
tokenizer_name: b
tokenizer_name_or_path: b
tp_size: 2
train_file: a.json
train_sampling_strategy: sequential
use_bnb_nested_quant: true|load_in_4bit: true
use_flash_attention_2: true
use_peft: true
use_rslora: true|use_peft: true
validation_file: b.json|eval_strategy: epoch
warmup_ratio: 0.5
warmup_steps: 5
weight_decay: 0.5
";

    fn read(text: &str, dialect: Dialect) -> Recipe {
        let request = Request {
            path: "sft/config.yaml".into(),
            dialect: Some(dialect),
            ..Request::default()
        };
        read_text(&request, text.to_owned())
            .unwrap_or_else(|e| panic!("{text}: {:?}", e.diagnostics))
    }

    /// Every key of supervised recipes, in alphabetical order.
    fn all() -> Vec<&'static str> {
        let mut keys = keys::known(Objective::Sft);
        keys.extend(keys::examples());
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    #[test]
    fn every_key_is_read_or_refused_or_without_effect() {
        let sample = |key: &str| {
            let mut lines = SAMPLES.lines();
            lines.find(|line| line.split(':').next() == Some(key))
        };
        for key in all() {
            let Some(sample) = sample(key) else {
                assert_ne!(
                    effect(key, Objective::Sft),
                    Effect::Read,
                    "{key} has no sample"
                );
                continue;
            };
            assert_eq!(effect(key, Objective::Sft), Effect::Read, "{key}");
            let dialect = match keys::kind(key, Objective::Sft) {
                Some(_) => Dialect::HandbookTrl,
                None => Dialect::Transformers,
            };
            let (line, more) = sample.split_once('|').unwrap_or((sample, ""));
            let base = format!(
                "per_device_train_batch_size: 2\nnum_train_epochs: 1\n{}\n",
                more.replace('|', "\n")
            );
            let base = match key {
                "num_train_epochs" | "per_device_train_batch_size" => "max_steps: -1\n".to_owned(),
                _ => base,
            };
            let (with, without) = (
                read(&format!("{base}{line}\n"), dialect),
                read(&base, dialect),
            );
            let changes =
                with.spec != without.spec || with.diagnostics.len() != without.diagnostics.len();
            assert!(changes, "{key} changes nothing");
            assert_eq!(with.untrained, without.untrained, "{key}");
        }
        let keys = all();
        for line in SAMPLES.lines() {
            let key = line.split(':').next().unwrap();
            assert!(keys.contains(&key), "{key} is no key");
        }
        for (key, _) in UNSUPPORTED {
            assert!(keys.contains(&key) && !WITHOUT_EFFECT.has(key), "{key}");
        }
        for key in WITHOUT_EFFECT.iter() {
            assert!(keys.contains(&key), "{key}");
        }
    }

    #[test]
    fn a_value_that_changes_nothing_is_accepted() {
        let untrained = |lines: &str| {
            let recipe = read(
                &format!("per_device_train_batch_size: 2\n{lines}"),
                Dialect::HandbookTrl,
            );
            let untrained = recipe.untrained.into_iter();
            untrained
                .map(|key| (key.key, key.reason))
                .collect::<Vec<_>>()
        };
        let neutral = "label_smoothing_factor: 0.0\nneftune_noise_alpha: null\ngroup_by_length: False\nloss_type: nll\n\
                       dataset_kwargs: {add_special_tokens: false}\ntruncation_mode: keep_start\npacking: off\n\
                       load_best_model_at_end: 0\nmodel_init_kwargs: {torch_dtype: bfloat16}\n\
                       lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n";
        assert_eq!(untrained(neutral), []);
        let key = |key: &str, reason| (key.to_owned(), reason);
        let instead = |text: &str| UntrainedReason::Unsupported(Some(text.to_owned()));
        for packed in [
            "packing: true\npacking_strategy: wrapped\n",
            "packing: true\npacking_strategy: bfd_split\n",
            "packing: true\n",
            "packing: true\nmax_seq_length: 8\nuse_liger: true\n",
        ] {
            let found = untrained(packed);
            assert!(
                found
                    .iter()
                    .all(|(_, reason)| *reason == UntrainedReason::NoEffect),
                "{found:?}"
            );
        }
        for (line, expected) in [
            (
                "group_by_length: true",
                key("group_by_length", instead("group_by_length=false")),
            ),
            (
                "dataset_kwargs: {skip_prepare_dataset: true}",
                key("dataset_kwargs", UntrainedReason::Unsupported(None)),
            ),
            ("loss_type: own", key("loss_type", instead("loss_type=nll"))),
            (
                "loss_type: dft\nlabel_smoothing_factor: 0.1",
                key("label_smoothing_factor", UntrainedReason::NoEffect),
            ),
            (
                "packing: true\npacking_strategy: ffd",
                key("packing_strategy", instead("packing_strategy=bfd")),
            ),
            (
                "packing_strategy: bfd",
                key("packing_strategy", UntrainedReason::NoEffect),
            ),
            (
                "push_to_hub: true",
                key("push_to_hub", UntrainedReason::NoEffect),
            ),
            (
                "report_to: [wandb, tensorboard]",
                key("report_to", UntrainedReason::NoEffectExcept("tensorboard")),
            ),
            (
                "report_to: all",
                key("report_to", UntrainedReason::NoEffectExcept("tensorboard")),
            ),
            (
                "report_to: wandb",
                key("report_to", UntrainedReason::NoEffect),
            ),
            (
                "model_init_kwargs: {revision: v2}",
                key("model_init_kwargs", UntrainedReason::Unsupported(None)),
            ),
            (
                "lr_scheduler_type: greedy",
                key("lr_scheduler_type", instead("lr_scheduler_type=cosine")),
            ),
            (
                "lr_scheduler_kwargs: {power: 2.0}",
                key("lr_scheduler_kwargs", UntrainedReason::Unsupported(None)),
            ),
            ("my_own_key: 3", key("my_own_key", UntrainedReason::Unknown)),
        ] {
            assert_eq!(untrained(line), [expected], "{line}");
        }
    }

    /// Keys in lines of at most 80 columns.
    fn block(keys: impl Iterator<Item = &'static str>) -> String {
        let mut lines = vec![String::new()];
        for key in keys {
            let last = lines.last_mut().unwrap();
            if last.is_empty() {
                *last += key;
            } else if last.len() + 1 + key.len() <= 80 {
                *last += &format!(" {key}");
            } else {
                lines.push(key.to_owned());
            }
        }
        format!("```text\n{}\n```", lines.join("\n"))
    }

    /// Keys with the values that change nothing.
    fn table(keys: &[(&str, &[&str])]) -> String {
        let rows = keys.iter().map(|(key, neutral)| {
            let neutral: Vec<String> = neutral.iter().map(|value| format!("`{value}`")).collect();
            let neutral = if neutral.is_empty() {
                "none".to_owned()
            } else {
                neutral.join(", ")
            };
            format!("| `{key}` | {neutral} |\n")
        });
        let rows: String = rows.collect();
        format!("| key | values that change nothing |\n|---|---|\n{rows}")
    }

    /// The three lists of a section.
    fn lists(keys: &Keys) -> String {
        format!(
            "## Read\n\n{}\n\n## Without effect\n\n{}\n\n## Refused\n\n{}",
            block(keys.read.iter()),
            block(keys.without_effect.iter()),
            table(keys.unsupported)
        )
    }

    /// `docs/keys.md` has the table of keys; `UPDATE=1` writes it.
    #[test]
    fn the_page_lists_every_key() {
        let all = all();
        let list = |wanted: fn(Effect) -> bool| {
            let keys = all.iter().filter(|key| wanted(effect(key, Objective::Sft)));
            block(keys.copied())
        };
        let trees = [
            (Kind::Halos, "HALOs", "4831988"),
            (Kind::Dpo, "direct-preference-optimization", "f8b8c0f"),
        ];
        let trees = trees.map(|(kind, title, revision)| {
            let keys = tree_effects::keys(kind);
            let preferences = tree_effects::keys_of_preferences(kind);
            let refused = match preferences.unsupported {
                [] => String::new(),
                keys => format!("\n\nThese are refused:\n\n{}", table(keys)),
            };
            format!(
                "\n# {title}\n\nThe same for the tree of revision {revision} with `loss=sft`. A launch names a key without \
                 effect only if it is\ntyped on the command line.\n\n\
                 {}\nWith losses over preferences these are read too:\n\n{}{refused}\n",
                lists(keys),
                block(preferences.read.iter()),
            )
        });
        let preferences = format!(
            "\n# TRL's DPO, KTO, ORPO and CPO\n\nKeys that only these trainers have, or treat differently. The others of \
             TRL are as above. What a key does follows\nthe recipe's version: TRL 0.29 and later ignore `label_smoothing` \
             under `loss_type: sigmoid`, and have no\n`max_prompt_length`.\n\n\
             {}",
            lists(&preference::KEYS)
        );
        let page = format!(
            "<!-- Generated by src/recipe/dialects/handbook/effects.rs: UPDATE=1 cargo test --lib effects -->\n\
             # Keys and the built-in trainer\n\n\
             Every key of TRL's SFT, of the alignment-handbook and of transformers' `TrainingArguments` is read, has no effect\n\
             on the trained weights, or is refused by `evenkeel launch`. So is a key that upstream's versions do not have.\n\
             A program after `--` gets all of them.\n\n\
             ## Read\n\n{}\n\n\
             ## Without effect\n\n\
             They change no weights, or only by rounding: logs, names, uploads, kernels, memory, workers, other devices, and\n\
             settings of what another key switches on. `data_seed` and `shuffle_dataset` choose another order of the samples;\n\
             the built-in trainer has its own, by `seed`. A launch lists those of the recipe in one note. Weights stay in\n\
             f32, whatever `dtype` says.\n\n{}\n\n\
             ## Refused\n\n{}{}",
            list(|effect| effect == Effect::Read),
            list(|effect| effect == Effect::None),
            table(&UNSUPPORTED),
            preferences + &trees.concat(),
        );
        is_kept("docs/keys.md", &page);
    }
}
