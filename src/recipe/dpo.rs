//! The Hydra tree of direct-preference-optimization: `config/config.yaml` with the groups `model`
//! and `loss`.
//!
//! `batch_size` is the global batch. Upstream cuts it into `gradient_accumulation_steps` slices and
//! each slice into one for every GPU. Both times it rounds down and drops the remainder. Only an
//! FSDP trainer starts a process for every GPU of one machine; the others drive all GPUs from one process.
//!
//! Source: direct-preference-optimization f8b8c0f, `train.py` (`main`), `trainers.py`
//! (`BasicTrainer.train`), `utils.py` (`slice_and_move_batch_for_device`, `get_local_run_dir`),
//! `preference_datasets.py` (`get_batch_iterator`).

use std::path::Path;

use super::dialect::Dialect;
use super::files::TreeBatch;
use super::hydra::{Program, Registered, Values};
use super::node::Node;
use super::origin::Origin;
use super::preference::{self, DTYPES, Kind, Known};
use super::reader::{Asked, Detected, Reader, Translated};
use super::reading::Reading;
use super::scalar::{Resolved, Schema};
use super::suggest::{did_you_mean, short};
use super::tree::Tree;

/// Reads the tree of direct-preference-optimization.
pub struct Dpo;

/// The resolvers and keys of `train.py`.
const PROGRAM: Program = Program {
    resolvers: &[Registered {
        name: "get_local_run_dir",
        call: local_run_dir,
    }],
    optional: &[],
};

/// The values of `trainer` that upstream accepts.
const TRAINERS: &[&str] = &["BasicTrainer", "FSDPTrainer", "TensorParallelTrainer"];

/// Losses, with the objective that each is planned as.
const LOSSES: &[(&str, &str)] = &[("sft", "sft"), ("dpo", "dpo"), ("ipo", "dpo")];

/// Data sets that upstream knows by name.
const DATA_SETS: &[Known] = &[
    Known {
        word: "hh",
        id: "Anthropic/hh-rlhf",
        splits: ["train", "test"],
    },
    Known {
        word: "shp",
        id: "stanfordnlp/SHP",
        splits: ["train", "test"],
    },
    Known {
        word: "se",
        id: "HuggingFaceH4/stack-exchange-preferences",
        splits: ["train", "test"],
    },
];

impl Reader for Dpo {
    fn dialect(&self) -> Dialect {
        Dialect::Dpo
    }

    fn detect(&self, root: &Node, path: &Path, origin: &Origin) -> Option<Detected> {
        preference::detect(root, path, origin, Kind::Dpo)
    }

    fn read(&self, root: Node, asked: &Asked<'_>, reading: &mut Reading) -> Translated {
        let composed = preference::compose(root, asked, &PROGRAM, reading);
        let values = Values::new(&composed.config);
        let mut tree = Tree::new(composed.config.span);
        preference::name(&values, asked.path, &mut tree, reading);
        objective(&values, &mut tree, reading);
        world(&values, &mut tree, reading);
        batch(&values, &mut tree, reading);
        model(&values, &mut tree, reading);
        training(&values, &mut tree, reading);
        let names = values.texts("datasets", reading);
        preference::sources(&names, 0, DATA_SETS, &mut tree);
        preference::sources(&names, 1, DATA_SETS, &mut tree);
        tree.text_if("output", values.text("local_run_dir", reading));
        Translated {
            native: tree.into_node(),
            source: composed.config,
            version: None,
            part: composed.part_of.is_some(),
        }
    }

    fn upstream_key(&self, path: &str) -> Option<&'static str> {
        match path {
            "batch.global" => Some("batch_size"),
            "batch.accumulation" => Some("gradient_accumulation_steps"),
            _ => None,
        }
    }
}

/// `${get_local_run_dir:${exp_name},${local_dirs}}`: the last of the directories, which upstream
/// creates if none exists. Upstream appends the time to the name; Evenkeel numbers
/// runs instead.
fn local_run_dir(arguments: &[Node]) -> Option<String> {
    let [name, folders] = arguments else {
        return None;
    };
    let last = folders.items()?.last()?.text()?;
    Some(format!("{last}/{}", name.text()?))
}

fn objective(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    let Some(name) = values.text("loss.name", reading) else {
        tree.default("objective", "dpo");
        return;
    };
    let known = LOSSES.iter().find(|(word, _)| *word == name.value);
    // A loss of the tree itself splits like all others; an unknown one on the command line may be a typo.
    if known.is_none() && Some(name.span.file) == reading.files.command_line {
        let help = did_you_mean(&name.value, LOSSES.iter().map(|(word, _)| *word));
        let message = format!("`loss.name` is `{}`", short(&name.value));
        reading.error("unknown-value", Some(name.span), message, help);
    }
    let taken = known.map_or("dpo", |(_, objective)| *objective);
    tree.text("objective", &name.with(taken.to_owned()));
    if known.is_none() || name.value == "ipo" {
        preference::taken_as(&name, taken, reading);
    }
}

/// The number of processes: one for every GPU, or one in total.
fn world(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    let Some(trainer) = values.text("trainer", reading) else {
        return;
    };
    if !TRAINERS.contains(&trainer.value.as_str()) {
        let help = did_you_mean(&trainer.value, TRAINERS.iter().copied());
        let message = format!("`trainer` is `{}`", trainer.value);
        reading.error("unknown-value", Some(trainer.span), message, help);
    }
    match trainer.value.contains("FSDP") {
        true => tree.text("parallel.strategy", &trainer.with("fsdp".to_owned())),
        false => tree.plain("parallel.one_process", &trainer.with(true)),
    }
}

fn batch(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    let global = values.int("batch_size", reading);
    let accumulation = values.int("gradient_accumulation_steps", reading);
    reading.files.tree = Some(TreeBatch {
        size: global.clone(),
        accumulation: accumulation.clone(),
        per_pass: false,
    });
    tree.plain_if("batch.accumulation", accumulation);
    tree.default("batch.division", "floored");
    tree.default("batch.last_batch", "drop");
    tree.plain_if("evaluation.batch", values.int("eval_batch_size", reading));
    tree.default("evaluation.division", "floored");
    tree.default("evaluation.rounding", "batch");
    tree.plain_if("evaluation.samples", values.int("n_eval_examples", reading));
    let every = values.int("eval_every", reading);
    let debug = values
        .bool("debug", reading)
        .is_some_and(|debug| debug.value);
    // Upstream writes a checkpoint after every evaluation; the planner rounds both by the batch of the run.
    if let (Some(every), false) = (&every, debug) {
        tree.plain("checkpoint.every_samples", every);
    }
    tree.plain_if("evaluation.every_samples", every);
    tree.plain_if("batch.global", global);
}

fn model(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    tree.text_if("model.path", values.text("model.name_or_path", reading));
    tree.text_if(
        "tokenizer.path",
        values.text("model.tokenizer_name_or_path", reading),
    );
    // Only FSDP trains in another precision than that of the weights.
    let sharded = tree.get("parallel.strategy").is_some();
    let policy = values.word("model.policy_dtype", DTYPES, reading);
    let mixed = values.word("model.fsdp_policy_mp", DTYPES, reading);
    let precision = mixed.filter(|_| sharded).or(policy);
    let precision = precision.map(|given| given.with(given.value.to_owned()));
    tree.text_if("model.precision", precision);
    let checkpointing = values.bool("activation_checkpointing", reading);
    tree.plain_if(
        "model.activation_checkpointing",
        checkpointing.filter(|_| sharded),
    );
    let block = values.node("model.block_name");
    if sharded && block.is_none() && values.has("model.block_name") {
        let span = values.node("trainer").map(|node| node.span);
        reading.error(
            "mandatory-missing",
            span,
            "an FSDP trainer needs `model.block_name`, but it is null",
            "give the class of the model's blocks: `model.block_name=GPTNeoXLayer`",
        );
    }
    let archive = values.node("model.archive");
    if let Some(archive) = archive.filter(|a| a.resolve(Schema::OmegaConf) != Some(Resolved::Null))
    {
        reading.note(
            "unsupported-value",
            Some(archive.span),
            "`model.archive` is a checkpoint in upstream's format: the built-in trainer starts from the weights at `model.name_or_path`",
            "no action needed for a plan",
        );
    }
}

fn training(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    tree.plain_if("data.sequence_length", values.int("max_length", reading));
    preference::budget(values, tree, reading);
    tree.plain_if("learning_rate.peak", values.float("lr", reading));
    // Linear warm-up over `warmup_steps`, then constant.
    tree.default("learning_rate.shape", "constant");
    tree.plain_if(
        "learning_rate.warmup_steps",
        values.int("warmup_steps", reading),
    );
    tree.plain_if(
        "optimizer.gradient_clip",
        values.float("max_grad_norm", reading),
    );
    let optimizer = values.text("optimizer", reading);
    // The default weight decay of PyTorch's AdamW is 0.01.
    if optimizer
        .as_ref()
        .is_some_and(|given| given.value == "AdamW")
    {
        tree.default("optimizer.weight_decay", "0.01");
    }
    tree.text_if("optimizer.name", optimizer);
}

#[cfg(test)]
mod tests;
