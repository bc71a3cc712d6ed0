//! All settings except the data: batch, parallelism, model, optimizer, schedule, evaluation,
//! checkpoints.
//!
//! Defaults are those of the versions that the recipe is read as. Source: the wheels in `versions.txt`,
//! `trainer/*_config.py`.

use std::path::Path;

use crate::recipe::schema::axes::axes;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::run_name;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::words::Words;
use crate::util::suggest::did_you_mean;

use super::accelerator;
use super::deepspeed;
use super::effects;
use super::values::{Values, truth};
use super::versions::Versions;

/// Translates `gradient_accumulation_steps`, `per_device_train_batch_size` and related keys.
pub(crate) fn batch(values: &Values, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    let size = values.int("per_gpu_train_batch_size");
    let size = size.or_else(|| values.int("per_device_train_batch_size"));
    tree.default("batch.accumulation", 1);
    let accumulation = values.int("gradient_accumulation_steps");
    tree.plain_if("batch.accumulation", accumulation);
    match accelerator::read(values, path, tree, reading) {
        Some(split) => accelerator::split_batches(size, split, tree),
        None => {
            tree.default("batch.per_device_batch_size", 8);
            tree.plain_if("batch.per_device_batch_size", size);
        }
    }
    if let Some(drop) = values.bool("dataloader_drop_last") {
        let how = if drop.value { "drop" } else { "wrap" };
        tree.plain("batch.last_batch", &drop.with(how));
    }
    tree.plain_if("batch.auto_find", values.bool("auto_find_batch_size"));
    if let Some(only) = values.bool("save_only_model") {
        tree.plain("trainer.saves_optimizer", &only.with(!only.value));
    }
    for key in [
        "num_generations",
        "num_generations_eval",
        "generation_batch_size",
        "steps_per_generation",
        "num_mini_batches",
    ] {
        tree.plain_if(&format!("generation.{key}"), values.int(key));
    }
    tree.plain_if("generation.whiten_rewards", values.bool("whiten_rewards"));
    let liger = values
        .bool("use_liger_kernel")
        .or_else(|| values.bool("use_liger"));
    tree.plain_if("model.fused_loss", liger);
    if let Some(dtype) = values.text("torch_dtype").or_else(|| values.text("dtype")) {
        let half = ["bfloat16", "float16", "bf16", "fp16"].contains(&dtype.value.as_str());
        tree.plain("model.half_weights", &dtype.with(half));
    }
    if let Some(loss) = values.text("loss_type")
        && loss.value == "apo_zero_unpaired"
    {
        tree.plain("generation.without_kl", &loss.with(true));
    }
    let resumed = values.node("resume_from_checkpoint");
    if let Some(node) = resumed.filter(|node| !node.is_bool(false, Schema::PyYaml)) {
        reading.warning(
            "resume-restores-batch",
            Some(node.span),
            "transformers up to 5.1 resumes with the checkpoint's per-device batch and ignores the recipe's",
            "use `launch --resume`, which keeps the recipe's global batch",
        );
    }
}

/// Translates what a token adds to the loss, and the noise on its embedding. TRL's DFT is not smoothed.
pub(crate) fn likelihood(values: &Values, objective: Objective, tree: &mut Tree) {
    if !objective.is_likelihood() {
        return;
    }
    tree.plain_if(
        "likelihood.neftune_alpha",
        values.float("neftune_noise_alpha"),
    );
    match values.text("loss_type").filter(|loss| loss.value == "dft") {
        Some(loss) => tree.plain("likelihood.loss", &loss),
        None => tree.plain_if(
            "likelihood.label_smoothing",
            values.float("label_smoothing_factor"),
        ),
    }
}

/// Sets the defaults of the objective.
pub(crate) fn objective_defaults(
    objective: Objective,
    versions: Versions,
    values: &Values,
    tree: &mut Tree,
) {
    if let Some(generations) = objective.default_generations() {
        tree.default("generation.num_generations", generations);
    }
    // A device generates all completions of a prompt (TRL 0.14.0 and 0.15.2 `trainer/grpo_trainer.py`).
    if objective == Objective::Grpo && !versions.trl_since(0, 15) {
        tree.default("generation.counts_prompts", true);
    } else if objective == Objective::Grpo && !versions.trl_since(0, 17) {
        // TRL 0.15.2 and 0.16.0 `trainer/grpo_trainer.py`; 0.17.0 multiplies by the accumulation.
        tree.default("generation.group_in_pass", true);
    }
    if matches!(objective, Objective::Grpo | Objective::Rloo) {
        // `beta` is 0.05 in RLOO, and was 0.04 in GRPO (TRL 0.17.0 and 0.19.0 `trainer/grpo_config.py`).
        let default = objective == Objective::Rloo || !versions.trl_since(0, 19);
        tree.default("generation.reference", default);
        let beta = values.float("beta");
        tree.plain_if(
            "generation.reference",
            beta.map(|beta| beta.with(beta.value != 0.0)),
        );
    }
    match objective {
        Objective::Ppo => tree.default("generation.num_mini_batches", 1),
        // KTO's KL term pairs every example with its neighbour in a fixed order.
        Objective::Kto => tree.default("data.shuffle", false),
        _ => {}
    }
    let peak = match objective {
        Objective::Grpo | Objective::Rloo => "1e-6",
        Objective::Ppo => "3e-6",
        Objective::Reward if versions.trl_since(0, 24) => "1e-4",
        Objective::Sft | Objective::LanguageModelling if versions.trl_since(0, 12) => "2e-5",
        Objective::Dpo | Objective::Kto | Objective::Orpo | Objective::Cpo
            if versions.trl_since(0, 12) =>
        {
            "1e-6"
        }
        Objective::Kto if versions.trl_since(0, 11) => "5e-7",
        _ => "5e-5",
    };
    tree.default("learning_rate.peak", peak);
    let bf16 = versions.trl_since(0, 19);
    tree.default("model.precision", if bf16 { "bf16" } else { "f32" });
    tree.default("model.activation_checkpointing", versions.trl_since(0, 22));
    tree.default("budget.epochs", 3);
    tree.default("seed", 42);
}

/// FSDP, DeepSpeed and the sizes of the other axes, where the recipe itself sets them.
pub(crate) fn parallel(
    values: &Values,
    path: &Path,
    versions: Versions,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    fsdp(values, tree, reading);
    deepspeed::read(values, path, versions, tree, reading);
    tree.plain_if("parallel.tensor", values.int("tp_size"));
    if let Some(sizes) = values.node("parallelism_config") {
        axes(sizes, "parallelism_config", tree, reading);
    }
}

/// The word of `fsdp` that keeps parameters, gradients and optimiser states on the host.
const OFFLOAD: &str = "offload";

/// The words of `fsdp` with their native strategies. Some have none.
const FSDP: [(&str, &str); 11] = [
    ("full_shard", "fsdp"),
    ("shard_grad_op", "zero2"),
    ("hybrid_shard", "fsdp"),
    ("hybrid_shard_zero2", "zero2"),
    ("no_shard", "ddp"),
    ("auto_wrap", ""),
    ("offload", OFFLOAD),
    ("true", "fsdp"),
    ("True", "fsdp"),
    ("false", "ddp"),
    ("False", "ddp"),
];

/// `full_shard auto_wrap`, a list of the same words, or `true` with the options in `fsdp_config`. transformers shards
/// with FSDP 2 by default since 5.10.
///
/// Source: transformers 5.24.0 `training_args.py` (`_process_fsdp_args`, `_apply_legacy_fsdp_to_config`).
fn fsdp(values: &Values, tree: &mut Tree, reading: &mut Reading) {
    let Some(node) = values.node("fsdp") else {
        return;
    };
    let words: Vec<&str> = match node.items() {
        Some(items) => items.iter().filter_map(Node::text).collect(),
        None => node.text().unwrap_or_default().split_whitespace().collect(),
    };
    let config = values.node("fsdp_config");
    // A file may hold a version, and is not read.
    let (named, config) = match config {
        Some(config) if accelerator::named(config).is_some() => (true, None),
        Some(config) => (false, accelerator::inline(config, reading)),
        None => (false, None),
    };
    let option = |key: &str| {
        let config = config.as_ref()?;
        config
            .get(key)
            .or_else(|| config.get(&format!("fsdp_{key}")))
    };
    let second = match option("version") {
        Some(version) => version.text() == Some("2"),
        // Only FSDP 1 takes these words.
        None => !named && !words.iter().any(|word| word.starts_with("hybrid_shard")),
    };
    let second = Given::new("fsdp", second, node.span);
    tree.plain("trainer.chooses_fsdp_2", &second);
    // FSDP 2 may keep the gathered parameters after the forward pass.
    let keeps = option("reshard_after_forward").is_some_and(|on| on.is_bool(false, Schema::PyYaml));
    for word in words {
        match FSDP.iter().find(|(known, _)| *known == word) {
            Some((_, "")) => {}
            Some((_, OFFLOAD)) => {
                tree.plain("parallel.offload_parameters", &second.with(true));
                tree.plain("parallel.offload_optimizer", &second.with(true));
            }
            Some(("true" | "True", _)) if keeps => {
                tree.plain("parallel.strategy", &second.with("zero2"));
            }
            Some((_, strategy)) => tree.plain("parallel.strategy", &second.with(strategy)),
            None => {
                let message = format!("`fsdp` holds `{word}`");
                let help = did_you_mean(word, FSDP[..7].iter().map(|(known, _)| *known));
                reading.error("unknown-value", Some(node.span), message, help);
            }
        }
    }
}

/// The model, its precision, its adapters and its tokenizer.
pub(crate) fn model(values: &Values, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    tree.text_if("model.path", values.text("model_name_or_path"));
    let revision = values.text("model_revision");
    tree.text_if(
        "model.revision",
        revision.filter(|named| named.value != "main"),
    );
    let (bf16, fp16) = (values.bool("bf16"), values.bool("fp16"));
    let on = |given: &Option<Given<bool>>| given.clone().filter(|given| given.value);
    let precision = match (on(&bf16), on(&fp16)) {
        (Some(_), Some(fp16)) => {
            let message = "`fp16` and `bf16` are both true";
            let help = "set one of them to false";
            reading.error("out-of-range", Some(fp16.span), message, help);
            None
        }
        (Some(bf16), None) => Some(bf16.with("bf16")),
        (None, Some(fp16)) => Some(fp16.with("f16")),
        (None, None) => bf16.map(|off| off.with("f32")),
    };
    tree.plain_if("model.precision", precision);
    tree.plain_if("model.tf32", values.bool("tf32"));
    tree.text_if("model.attention", values.text("attn_implementation"));
    if let Some(flash) = on(&values.bool("use_flash_attention_2")) {
        tree.plain("model.attention", &flash.with("flash_attention_2"));
    }
    let checkpointing = values.bool("activation_checkpointing");
    let checkpointing = checkpointing.or_else(|| values.bool("gradient_checkpointing"));
    tree.plain_if("model.activation_checkpointing", checkpointing);
    tree.plain_if("model.adapters", values.bool("use_peft"));
    tree.plain_if("model.load_in_4bit", values.bool("load_in_4bit"));
    tree.plain_if("model.load_in_8bit", values.bool("load_in_8bit"));
    let nested = values.bool("use_bnb_nested_quant");
    tree.plain_if("model.use_bnb_nested_quant", nested);
    tree.text_if("tokenizer.path", values.text("tokenizer_name_or_path"));
    tree.text_if("tokenizer.chat_template", values.text("chat_template"));
    if let Some(given) = values.text("chat_template_path") {
        template(&given, path, tree, reading);
    }
}

/// Spellings of the rank of adapters.
const RANKS: Words = Words("lora_rank lora_r lora_dim");

/// The rank of adapters, their modules, and weights in few bits, by the keys of TRL, PEFT's examples, LLaMA-Factory and
/// ms-swift. Every key has one meaning in all of them.
pub(crate) fn adapter_sizes(root: &Node, tree: &mut Tree) {
    for entry in root.entries().unwrap_or_default() {
        let (name, node) = (entry.name.as_str(), &entry.value);
        let path = match name {
            "lora_target_modules" | "lora_target" | "target_modules" => "model.lora_target_modules",
            "lora_modules_to_save" | "modules_to_save" | "additional_target" => {
                "model.lora_modules_to_save"
            }
            "bnb_4bit_use_double_quant" | "double_quantization" => {
                if let Some(Resolved::Bool(is_on)) = node.resolve(Schema::PyYaml) {
                    let given = Given::new(name, is_on, node.span);
                    tree.plain("model.use_bnb_nested_quant", &given);
                }
                continue;
            }
            "quantization_bit" | "quant_bits" | "load_in_bits" => {
                let bits = match node.int(Schema::PyYaml) {
                    Some(4) => "model.load_in_4bit",
                    Some(8) => "model.load_in_8bit",
                    _ => continue,
                };
                tree.plain(bits, &Given::new(name, true, node.span));
                continue;
            }
            name if RANKS.has(name) => {
                // A script may mean none by 0; TRL's rank is refused below 1.
                let is_asked = root.get("use_peft").is_some();
                let rank = node
                    .int(Schema::PyYaml)
                    .filter(|rank| is_asked || *rank > 0);
                tree.plain_if(
                    "model.lora_rank",
                    rank.map(|rank| Given::new(name, rank, node.span)),
                );
                continue;
            }
            _ => continue,
        };
        let items = node.items().unwrap_or(std::slice::from_ref(node));
        let given = items.iter().filter(|item| !item.is_null(Schema::PyYaml));
        let texts: Vec<&str> = given.filter_map(Node::text).collect();
        let between = |c: char| c.is_whitespace() || "[],'\"".contains(c);
        let modules = texts.iter().flat_map(|text| text.split(between));
        for module in modules.filter(|module| !["", "None"].contains(module)) {
            let given = Given::new(name, module.to_owned(), node.span);
            tree.push(path, Tree::of(&given));
        }
    }
}

/// Arguments by which scripts train low-rank adapters, which `Trainer` does not have: a rank, a switch, or a word.
pub(crate) fn adapters(root: &Node) -> Option<Given<bool>> {
    const SWITCHES: Words = Words("use_lora lora_enable q_lora enable_lora use_peft");
    const WORDS: [(&str, &str); 4] = [
        ("finetuning_type", "lora"),
        ("train_mode", "lora"),
        ("train_mode", "qlora"),
        ("train_type", "lora"),
    ];
    root.entries()?.iter().find_map(|entry| {
        let (name, text) = (entry.name.as_str(), entry.value.text()?);
        let rank = RANKS.has(name) && text.parse().is_ok_and(|rank: u64| rank > 0);
        let switch = SWITCHES.has(name) && truth(text) == Some(true);
        let word = WORDS
            .iter()
            .any(|(key, word)| *key == name && text.eq_ignore_ascii_case(word));
        (rank || switch || word).then(|| Given::new(name, true, entry.value.span))
    })
}

/// A Jinja file, or a tokenizer with a template.
fn template(given: &Given<String>, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    let Some(file) = reading.beside(path, &given.value) else {
        let message = format!("the chat template `{}` does not exist", given.value);
        let help = "put the Jinja file beside the recipe, or write its text in `chat_template`";
        reading.warning("unsupported-value", Some(given.span), message, help);
        return;
    };
    if let Some(text) = reading.text(&file, Some(given.span)) {
        reading.sources.add(file, text.as_str());
        tree.text("tokenizer.chat_template", &given.with(text));
    }
}

/// Lengths, packing and the order of the data.
pub(crate) fn lengths(values: &Values, objective: Objective, versions: Versions, tree: &mut Tree) {
    if objective.default_generations().is_some() {
        // Prompts without a limit have TRL's last default, 512.
        let prompt = values.int("max_prompt_length");
        let completion = values.int("max_completion_length");
        let value = |given: &Option<Given<i128>>, default| {
            given.as_ref().map_or(default, |given| given.value)
        };
        let generated = if versions.trl_since(1, 10) { 512 } else { 256 };
        let sum = value(&prompt, 512).saturating_add(value(&completion, generated));
        tree.default("data.sequence_length", sum);
        let place = completion.or(prompt);
        tree.plain_if("data.sequence_length", place.map(|place| place.with(sum)));
    } else {
        // Without a length, the older trainers of preferences take 512 (0.13.0 `trainer/*_trainer.py`, `__init__`).
        let supervised = matches!(objective, Objective::Sft | Objective::LanguageModelling);
        let older = !supervised && !versions.trl_since(0, 14);
        tree.default("data.sequence_length", if older { 512 } else { 1024 });
        for key in ["max_length", "max_seq_length"] {
            tree.plain_if("data.sequence_length", values.int(key));
        }
    }
    tree.plain_if("data.packing", values.bool("packing"));
    if values.bool("packing").is_some_and(|packing| packing.value) {
        // `trainer/sft_config.py`: `bfd` since 0.19. TRL 1 renamed `bfd-requeue` to `bfd_split`.
        if versions.trl_since(0, 19) {
            tree.default("data.packing_strategy", "bfd");
        }
        let strategy = values.text("packing_strategy");
        let known = strategy.and_then(|given| {
            let name = match given.value.as_str() {
                "bfd_split" | "bfd-requeue" => "bfd-split",
                name => name,
            };
            let name = ["wrapped", "bfd", "bfd-split"]
                .into_iter()
                .find(|known| *known == name)?;
            Some(given.with(name))
        });
        tree.plain_if("data.packing_strategy", known);
    }
    // `trainer/sft_config.py`: `assistant_only_loss` is false, and `completion_only_loss`, which came with 0.17, is true
    // where there are completions.
    if objective == Objective::Sft {
        tree.default("data.answers_only", false);
        tree.default("data.completions_only", versions.trl_since(0, 17));
    }
    tree.plain_if("data.answers_only", values.bool("assistant_only_loss"));
    tree.plain_if("data.completions_only", values.bool("completion_only_loss"));
    if let Some(order) = values.text("train_sampling_strategy") {
        let shuffle = order.value != "sequential";
        tree.plain("data.shuffle", &order.with(shuffle));
    }
}

/// The length of the run: `max_steps` where it is positive, else epochs; PPO counts episodes.
pub(crate) fn budget(values: &Values, tree: &mut Tree) {
    let steps = values.int("max_steps").filter(|steps| steps.value > 0);
    let epochs = values.float("num_train_epochs");
    // `Trainer` ignores the epochs beside steps, so files write -1.
    let epochs = epochs.filter(|epochs| steps.is_none() || epochs.value > 0.0);
    tree.plain_if("budget.epochs", epochs);
    tree.plain_if("budget.steps", steps);
    tree.plain_if("budget.samples", values.int("total_episodes"));
    tree.plain_if("seed", values.int("seed"));
}

/// `report_to` with TensorBoard.
pub(crate) fn tensorboard(values: &Values, tree: &mut Tree) {
    let node = values.node("report_to");
    if let Some(node) = node.filter(|node| effects::writes_tensorboard(node)) {
        tree.plain("tensorboard", &Given::new("report_to", true, node.span));
    }
}

pub(crate) fn optimizer(values: &Values, tree: &mut Tree) {
    tree.plain_if("optimizer.beta1", values.float("adam_beta1"));
    tree.plain_if("optimizer.beta2", values.float("adam_beta2"));
    tree.plain_if("optimizer.epsilon", values.float("adam_epsilon"));
    tree.plain_if("optimizer.weight_decay", values.float("weight_decay"));
    // `Trainer` clips to a positive norm only.
    let clip = values
        .float("max_grad_norm")
        .map(|given| given.with(given.value.max(0.0)));
    tree.plain_if("optimizer.gradient_clip", clip);
    tree.text_if("optimizer.name", values.text("optim"));
    if let Some(adafactor) = values.bool("adafactor").filter(|given| given.value) {
        tree.plain("optimizer.name", &adafactor.with("adafactor"));
    }
}

/// The keys whose values depend on the world, with their native paths. transformers 4 takes
/// `per_gpu_train_batch_size or per_device_train_batch_size` (`TrainingArguments.train_batch_size`).
pub(crate) const BATCH_KEYS: &[(&str, &str)] = &[
    ("per_device_train_batch_size", "batch.per_device_batch_size"),
    ("per_gpu_train_batch_size", "batch.per_device_batch_size"),
    ("gradient_accumulation_steps", "batch.accumulation"),
    ("steps_per_generation", "generation.steps_per_generation"),
];

/// The run's name: its name in reports, else the last part of the output directory, else the file's
/// name. Upstream accepts any text.
pub(crate) fn name(values: &Values, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    let given = values.text("run_name").or_else(|| {
        let given = values.text("output_dir")?;
        let last = Path::new(&given.value).file_name()?.to_str()?;
        Some(given.with(last.to_owned()))
    });
    let Some(given) = given else {
        tree.default("name", run_name::of_file(path));
        return;
    };
    run_name::put(&given, tree, reading);
}
