//! The Hydra tree of HALOs: `config/config.yaml` with the groups `model` and `loss`.
//!
//! The meaning of `model.batch_size` has changed twice; [`version`] determines the version of a tree.
//!
//! Sources: HALOs 4831988, `launch.py` (`main`), `train/trainers.py` (`BasicTrainer.train`),
//! `train/dataloader.py`; the same files at 2f70d00^; 61b9ee6 `train.py`, `trainers.py`,
//! `dataloader.py`, `utils.py` (`slice_and_move_batch_for_device`).

mod preferences;
mod version;

use std::path::Path;

use super::hydra::Type::{self, Bool, Float, Int, Text};
use super::hydra::{Program, Values};
use super::preference::{self, DTYPES, DataSet, Kind};
use super::tree_effects;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::files::TreeBatch;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::{
    Checkpoints, Detected, ReadOptions, Reader, Resume, Translated,
};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::schema::untrained::{Untrained, UntrainedReason};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::FileId;

use version::Version;

/// Reads the tree of HALOs.
pub struct Halos;

/// The resolvers and keys of `launch.py`.
const PROGRAM: Program = Program {
    resolvers: &[],
    // Upstream reads it with `config.loss.get(…)`.
    optional: &["loss.control_tokens"],
};

const OASST: DataSet = (
    "oasst",
    "OpenAssistant/oasst1",
    ["train", "validation"],
    "ranked-replies",
);
const ULTRABIN: DataSet = (
    "ultrabin",
    "HuggingFaceH4/ultrafeedback_binarized",
    ["train_prefs", "test_prefs"],
    "last-messages",
);
const ALPACA_EVAL: DataSet = (
    "alpacaeval",
    "tatsu-lab/alpaca_eval",
    ["eval", "eval"],
    "unknown",
);

/// Data sets that upstream knows by name.
const DATA_SETS: &[DataSet] = &[
    (
        "shp",
        "stanfordnlp/SHP",
        ["train", "test"],
        "scored-messages",
    ),
    (
        "hh",
        "Anthropic/hh-rlhf",
        ["train", "test"],
        "dialogue-messages",
    ),
    (
        "hh_helpful",
        "Anthropic/hh-rlhf/helpful-base",
        ["train", "test"],
        "dialogue-messages",
    ),
    (
        "hh_harmless",
        "Anthropic/hh-rlhf/harmless-base",
        ["train", "test"],
        "dialogue-messages",
    ),
    OASST,
    ULTRABIN,
    (
        "ultrachat",
        "HuggingFaceH4/ultrachat_200k",
        ["train_sft", "test_sft"],
        "conversation",
    ),
    (
        "ultrafeedback_armorm",
        "princeton-nlp/llama3-ultrafeedback-armorm",
        ["train", "test"],
        "last-messages",
    ),
    (
        "ultrafeedback_armorm_gemma",
        "princeton-nlp/gemma2-ultrafeedback-armorm",
        ["train", "test"],
        "last-messages",
    ),
    (
        "s1k_11",
        "simplescaling/s1K-1.1",
        ["train", "train"],
        "unknown",
    ),
    (
        "safe_rlhf",
        "PKU-Alignment/PKU-SafeRLHF-single-dimension",
        ["train", "test"],
        "numbered-responses",
    ),
    ALPACA_EVAL,
];

/// Those of the legacy tree, which knows no files.
const LEGACY_DATA_SETS: &[DataSet] = &[
    (
        "shp",
        "stanfordnlp/SHP",
        ["train", "test"],
        "seeded-scored-messages",
    ),
    (
        "hh",
        "Anthropic/hh-rlhf",
        ["train", "test"],
        "dialogue-marked",
    ),
    (
        "hh_helpful",
        "Anthropic/hh-rlhf/helpful-base",
        ["train", "test"],
        "dialogue-marked",
    ),
    (
        "hh_harmless",
        "Anthropic/hh-rlhf/harmless-base",
        ["train", "test"],
        "dialogue-marked",
    ),
    OASST,
    ULTRABIN,
    ALPACA_EVAL,
];

/// Keys that only the legacy tree reads.
const LEGACY_KEYS: &[&str] = &[
    "assistant_prefix",
    "assistant_suffix",
    "human_prefix",
    "human_suffix",
];

/// The splits of files of feedback, for training and for evaluation.
const FEEDBACK_SPLITS: [&str; 2] = ["train", "test"];

/// Upstream's trainers, with the objective that each is planned as.
const TRAINERS: &[(&str, &str)] = &[
    ("SFTTrainer", "sft"),
    ("DPOTrainer", "dpo"),
    ("CDPOTrainer", "dpo"),
    ("IPOTrainer", "dpo"),
    ("SimPOTrainer", "simpo"),
    ("ORPOTrainer", "orpo"),
    ("KTOTrainer", "kto"),
    ("GRPOTrainer", "grpo"),
    ("PPOTrainer", "ppo"),
    ("BradleyTerryTrainer", "reward"),
];

/// Data loaders, with an objective whose batches they make.
const LOADERS: &[(&str, &str)] = &[
    ("SFTDataLoader", "sft"),
    ("ConditionalSFTDataLoader", "sft"),
    ("PairedPreferenceDataLoader", "dpo"),
    ("UnpairedPreferenceDataLoader", "kto"),
    ("ScoreDataLoader", "kto"),
    ("HalfPrefDataLoader", "kto"),
    ("GroupUnpairedPreferenceDataLoader", "grpo"),
];

/// Keys that become native ones unchanged.
const KEYS: &[(&str, Type, &str)] = &[
    (
        "batch.accumulation",
        Int,
        "model.gradient_accumulation_steps",
    ),
    ("data.sequence_length", Int, "model.max_length"),
    ("evaluation.batch", Int, "model.eval_batch_size"),
    ("evaluation.every_samples", Int, "eval_every"),
    ("evaluation.samples", Int, "n_eval_examples"),
    ("learning_rate.peak", Float, "lr"),
    ("learning_rate.warmup_ratio", Float, "warmup"),
    ("learning_rate.warmup_steps", Int, "warmup_steps"),
    (
        "model.activation_checkpointing",
        Bool,
        "model.activation_checkpointing",
    ),
    ("optimizer.beta1", Float, "beta1"),
    ("optimizer.beta2", Float, "beta2"),
    ("optimizer.gradient_clip", Float, "model.max_grad_norm"),
    ("optimizer.name", Text, "optimizer"),
    ("optimizer.weight_decay", Float, "weight_decay"),
    ("output", Text, "local_run_dir"),
];

impl Reader for Halos {
    fn dialect(&self) -> Dialect {
        Dialect::Halos
    }

    fn detect(&self, root: &Node, path: &Path, origin: &Origin) -> Option<Detected> {
        preference::detect(root, path, origin, Kind::Halos)
    }

    fn has_versions(&self) -> bool {
        true
    }

    fn read(&self, root: Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> Translated {
        let composed = preference::compose(root, asked, &PROGRAM, reading);
        let values = Values::new(&composed.config);
        let roots = [Some(&composed.config), composed.part_of.as_ref()];
        let (version, read_as) = version::detect(&values, roots, asked.version, reading);
        let mut tree = Tree::new(composed.config.span);
        preference::name(&values, asked.path, &mut tree, reading);
        let supervised = objective(&values, &mut tree, reading);
        batch(&values, version, &mut tree, reading);
        evaluation(&values, version, &mut tree, reading);
        model(&values, version, &mut tree, reading);
        training(&values, supervised, version, &mut tree, reading);
        data(&values, version, &mut tree, reading);
        values.translate(KEYS, &mut tree, reading);
        let wrong_adapters = adapters(&values, version, &mut tree, reading);
        without_effect(&values, asked.command_line, reading);
        let objective = preference::objective(&tree);
        if objective.is_likelihood() || objective.is_over_preferences() {
            let (config, typed) = (&composed.config, asked.command_line);
            let more: &[&str] = match version {
                Version::Legacy => LEGACY_KEYS,
                Version::Head | Version::PerStep => &[],
            };
            tree_effects::find((config, Kind::Halos, more), objective, typed, reading);
            reading.untrained.extend(wrong_adapters);
            let translate = match objective.is_likelihood() {
                true => preferences::translate_supervised,
                false => preferences::translate,
            };
            translate(&values, version, &mut tree, reading);
            preferences::find(&values, version, objective, reading);
            // Weights in upstream's own format.
            let loaded = values
                .node("model.load_from")
                .filter(|_| version == Version::Legacy);
            reading.untrained.extend(loaded.map(|node| Untrained {
                key: "model.load_from".to_owned(),
                value: node.shown().to_owned(),
                span: node.span,
                reason: UntrainedReason::Unsupported(Some("model.load_from=null".to_owned())),
            }));
        }
        Translated {
            native: tree.into_node(),
            source: composed.config,
            version: Some(read_as),
            part: composed.part_of.is_some(),
        }
    }

    fn batch_keys(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("model.batch_size", "batch.global"),
            ("model.gradient_accumulation_steps", "batch.accumulation"),
        ]
    }

    /// `launch.py` (031a524) loads weights, optimiser, scheduler and the count of examples from a checkpoint;
    /// `train/trainers.py` writes `step-N` with every evaluation if `intermediate_checkpoints` is on.
    fn resume(&self) -> Option<Resume> {
        Some(Resume {
            key: "model.from_checkpoint",
            output: "local_run_dir",
            checkpoints: Checkpoints {
                prefix: "step-",
                needs: &[
                    "metrics.json",
                    "optimizer.pt",
                    "scheduler.pt",
                    "config.json",
                ],
                unless: None,
            },
        })
    }

    fn argument(&self, key: &str, value: &str) -> Vec<String> {
        vec![format!("++{key}={value}")]
    }
}

/// Sets the objective. Returns whether it is plain supervised fine-tuning, which has a different learning
/// rate schedule.
fn objective(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) -> bool {
    let trainer = values.text("loss.trainer", reading);
    let loader = values.text("loss.dataloader", reading);
    let of = |table: &[(&str, &'static str)], given: &Option<Given<String>>| {
        let word = &given.as_ref()?.value;
        let found = table.iter().find(|(known, _)| known == word);
        found.map(|(_, objective)| *objective)
    };
    let (by_trainer, by_loader) = (of(TRAINERS, &trainer), of(LOADERS, &loader));
    let is_loader = |name: &str| loader.as_ref().filter(|loader| loader.value == name);
    if let Some(loader) = is_loader("ConditionalSFTDataLoader") {
        preference::taken_as(loader, "sft", reading);
    }
    let supervised = is_loader("SFTDataLoader").is_some();
    let Some(trainer) = trainer else {
        // No loss is chosen yet, which is reported elsewhere.
        tree.default("objective", by_loader.unwrap_or("dpo"));
        return supervised;
    };
    if let Some(objective) = by_trainer.or(by_loader) {
        if by_trainer.is_none() {
            preference::taken_as(&trainer, objective, reading);
        }
        tree.text("objective", &trainer.with(objective.to_owned()));
    } else {
        reading.warning(
            "objective-assumed",
            Some(trainer.span),
            format!(
                "`loss.trainer` is `{}`, which upstream does not have: assumed to be dpo",
                trainer.value
            ),
            "give `evenkeel.objective=…`, or a `loss.dataloader` of upstream",
        );
        tree.default("objective", "dpo");
    }
    supervised
}

fn batch(values: &Values<'_>, version: Version, tree: &mut Tree, reading: &mut Reading) {
    let accumulation = values.int("model.gradient_accumulation_steps", &mut Reading::default());
    let size = values.int("model.batch_size", reading);
    reading.files.tree = Some(TreeBatch {
        size: size.clone(),
        accumulation: accumulation.clone(),
        per_pass: version != Version::Head,
    });
    let passes = accumulation.as_ref().map_or(1, |given| given.value);
    if let Some(size) = size {
        let global = match version {
            Version::Head => size.value,
            Version::PerStep | Version::Legacy => size.value.saturating_mul(passes),
        };
        tree.plain("batch.global", &size.with(global));
    }
    let division = match version {
        Version::Head | Version::PerStep => "exact",
        Version::Legacy => "floored",
    };
    tree.default("batch.division", division);
    tree.default("batch.last_batch", "drop");
    if let Some(sharded) = values.bool("use_fsdp", reading) {
        if sharded.value {
            tree.text("parallel.strategy", &sharded.with("fsdp".to_owned()))
        } else {
            tree.plain("parallel.one_process", &sharded.with(true))
        }
    }
}

fn evaluation(values: &Values<'_>, version: Version, tree: &mut Tree, reading: &mut Reading) {
    let (division, rounding) = match version {
        Version::Head => ("passes", "batch"),
        Version::PerStep => ("ranks", "pass"),
        Version::Legacy => ("floored", "pass"),
    };
    tree.default("evaluation.division", division);
    tree.default("evaluation.rounding", rounding);
    let saves = values.bool("intermediate_checkpoints", reading);
    let saves = saves.is_some_and(|saves| saves.value);
    preference::checkpoints(values, saves, tree, reading);
}

fn model(values: &Values<'_>, version: Version, tree: &mut Tree, reading: &mut Reading) {
    let value_sources = [
        "model.from_checkpoint",
        "model.load_from",
        "model.name_or_path",
    ];
    // Legacy checkpoints have upstream's format, so the named model gives the shape.
    let value_sources = match version {
        Version::Legacy => &value_sources[2..],
        Version::Head | Version::PerStep => &value_sources[..],
    };
    let path = value_sources
        .iter()
        .find_map(|key| values.text(key, reading));
    tree.text_if("model.path", path);
    let tokenizer = ["model.tokenizer_name_or_path", "model.name_or_path"];
    let tokenizer = tokenizer.iter().find_map(|key| values.text(key, reading));
    tree.text_if("tokenizer.path", tokenizer);
    let dtype = values.word("model.policy_dtype", DTYPES, reading);
    let half = dtype.as_ref().is_some_and(|given| given.value != "f32");
    tree.text_if(
        "model.precision",
        dtype.map(|given| given.with(given.value.to_owned())),
    );
    // Upstream uses the kernel only in half precision, else the plain one.
    let kernel = values.text("model.attn_implementation", reading);
    let flash = values.bool("model.use_flash_attention", reading);
    let flash = flash.filter(|given| given.value);
    let flash = flash.map(|given| given.with("flash_attention_2".to_owned()));
    tree.text_if("model.attention", kernel.filter(|_| half).or(flash));
}

/// The adapters of `launch.py` (`LoraConfig`, PEFT 0.12), which sets no defaults. Returns the key by which others
/// would be trained.
fn adapters(
    values: &Values<'_>,
    version: Version,
    tree: &mut Tree,
    reading: &mut Reading,
) -> Option<Untrained> {
    let asked = values.bool("model.use_peft", reading)?;
    tree.plain("model.adapters", &asked);
    if !asked.value {
        return None;
    }
    let rank = values.int("model.peft.lora_r", reading);
    let alpha = values.float("model.peft.lora_alpha", reading);
    let dropout = values.float("model.peft.lora_dropout", reading);
    let is_whole = rank.is_some() && alpha.is_some() && dropout.is_some();
    tree.plain_if("model.lora_rank", rank);
    tree.plain_if("model.lora_alpha", alpha);
    tree.plain_if("model.lora_dropout", dropout);
    let refused = |key: &str, node: &Node, instead: &str| {
        Some(Untrained {
            key: key.to_owned(),
            value: node.shown().to_owned(),
            span: node.span,
            reason: UntrainedReason::Unsupported(Some(format!("{key}={instead}"))),
        })
    };
    let key = "model.peft.target_modules";
    let modules = values.node(key);
    let all = "all-linear";
    if let Some(node) = modules.filter(|node| node.items().is_none()) {
        let text = node.text().unwrap_or_default();
        if !text.eq_ignore_ascii_case(all) {
            // A regular expression for whole names.
            return refused(key, node, all);
        }
        let given = Given::new(key, all.to_owned(), node.span);
        tree.push("model.lora_target_modules", Tree::of(&given));
    } else {
        for module in values.texts(key, reading) {
            tree.push("model.lora_target_modules", Tree::of(&module));
        }
    }
    // The legacy tree has no adapters, and a value that is missing ends `launch.py`.
    let node = values.node("model.use_peft")?;
    if is_whole && version != Version::Legacy {
        return None;
    }
    refused("model.use_peft", node, "false")
}

fn training(
    values: &Values<'_>,
    supervised: bool,
    version: Version,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    preference::budget(values, tree, reading);
    // PyTorch's optimisers decay all parameters.
    tree.default("optimizer.weight_decay_on", "all");
    match version {
        Version::Legacy => {
            preference::warm_up(values, tree);
            // The default of PyTorch's AdamW.
            if values.node("optimizer").and_then(Node::text) == Some("AdamW") {
                tree.default("optimizer.weight_decay", "0.01");
            }
        }
        // The start of `LinearLR`.
        Version::Head | Version::PerStep => tree.default("learning_rate.warmup_start", 0.1),
    }
    // Constant after the warm-up, except in supervised fine-tuning.
    let shape = if supervised && values.node("warmup").is_some() {
        "cosine"
    } else {
        "constant"
    };
    tree.default("learning_rate.shape", shape);
}

fn data(values: &Values<'_>, version: Version, tree: &mut Tree, reading: &mut Reading) {
    let known = match version {
        Version::Legacy => LEGACY_DATA_SETS,
        Version::Head | Version::PerStep => DATA_SETS,
    };
    let both: Vec<Given<String>> = values.texts("datasets", reading);
    for (part, key) in ["train_datasets", "test_datasets"].into_iter().enumerate() {
        let names = values.texts(key, reading);
        let names = if names.is_empty() { &both } else { &names };
        let feedback = Some(FEEDBACK_SPLITS[part]);
        preference::sources(names, part, known, feedback, tree);
    }
}

/// Notes keys on the command line that the config has but the program never reads.
fn without_effect(values: &Values<'_>, command_line: Option<FileId>, reading: &mut Reading) {
    for (key, why) in [
        (
            "eps",
            "the optimiser does not receive it and uses PyTorch's default of 1e-8",
        ),
        (
            "save_every",
            "upstream writes checkpoints with evaluations, every `eval_every` examples",
        ),
    ] {
        let typed = values.node(key).map(|node| node.span);
        if let Some(span) = typed.filter(|span| Some(span.file) == command_line) {
            let message = format!("`{key}` has no effect upstream: {why}");
            reading.note("unsupported-value", Some(span), message, "remove it");
        }
    }
}

#[cfg(test)]
mod tests;
