//! Sizes of the parallelism axes: those in `parallelism_config` of a recipe or an accelerate config, with the keys of
//! accelerate's `ParallelismConfig`, and those that are not read.
//!
//! Source: accelerate 16cb6eb, `parallelism_config.py`.

use super::dialect::RESERVED;
use super::reading::Reading;
use super::tree::Tree;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Node, joined};
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::shell::word::variable;
use crate::recipe::syntax::words::Words;
use crate::util::suggest::short;

/// Translates the sizes in `parallelism_config`. Keys may have the prefix `parallelism_config_`.
pub(crate) fn axes(sizes: &Node, prefix: &str, tree: &mut Tree, reading: &mut Reading) {
    const AXES: &[(&str, &str)] = &[
        ("dp_replicate_size", "parallel.data_replicate"),
        ("dp_shard_size", "parallel.data_shard"),
        ("tp_size", "parallel.tensor"),
        ("cp_size", "parallel.context"),
        ("sp_size", "parallel.sequence"),
    ];
    for entry in sizes.entries().unwrap_or_default() {
        let name = entry
            .name
            .strip_prefix("parallelism_config_")
            .unwrap_or(&entry.name);
        let Some((_, path)) = AXES.iter().find(|(axis, _)| *axis == name) else {
            continue;
        };
        let key = format!("{prefix}.{}", entry.name);
        if let Some(size) = reading.int(key, &entry.value) {
            tree.plain(path, &size);
        }
    }
}

/// An axis that another program divides its ranks by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Axis {
    Tensor,
    Pipeline,
    Context,
    Sequence,
    /// Experts or replicas, which most programs lay over the data-parallel ranks.
    OverData,
    /// One that its name does not say.
    Other,
}

impl Axis {
    /// The native names of the axes that settle this one. The first is its own.
    fn names(self) -> &'static [&'static str] {
        match self {
            Axis::Tensor => &["tensor"],
            Axis::Pipeline => &["pipeline"],
            // Ring attention and Ulysses split the same sequence.
            Axis::Context => &["context", "sequence"],
            Axis::Sequence => &["sequence", "context"],
            Axis::OverData | Axis::Other => &["tensor", "pipeline", "context", "sequence"],
        }
    }
}

/// Words of a name that say how large an axis is.
const SIZES: Words = Words("degree dim size world");

/// Words beside an axis that leave the name the size of it.
const BESIDE: Words =
    Words("attention attn group gpu gpus model n num of parallel shards ulysses way ways");

/// A key in lower case, without the name of verl's group, which has its trainer's settings (`actor`) beside those of its
/// inference (`rollout`).
fn plain_path(path: &str) -> String {
    let path = path.to_lowercase().replace('-', "_");
    path.trim_start_matches("actor_rollout_ref.").to_owned()
}

fn words_of(name: &str) -> Vec<&str> {
    let words = name.split(['_', '.']).filter(|word| !word.is_empty());
    words.collect()
}

/// Whether a key is for another model than the one whose batch is planned: for inference, the reference, the reward or the
/// critic.
pub(crate) fn is_of_another_model(path: &str) -> bool {
    const ELSEWHERE: Words = Words(
        "critic draft eval gen generation generator infer inference ref reward rollout sampler sampling serve sglang virtual \
         vllm",
    );
    words_of(&plain_path(path))
        .iter()
        .any(|word| ELSEWHERE.has(word))
}

/// The axis whose size a key may be, by the words of its name; `--ring_attn_size`, `--tp`, `num_model_shards`. The sizes
/// of inference engines and virtual stages do not divide the trainer's ranks.
fn axis_of(path: &str) -> Option<Axis> {
    let path = plain_path(path);
    if is_of_another_model(&path) {
        return None;
    }
    if is_mode(&path) {
        return Some(Axis::Sequence);
    }
    // `tensor_parallel.size` is named by both.
    let mut keys = path.rsplit('.');
    let mut words = words_of(keys.next()?);
    if words.iter().all(|word| SIZES.has(word)) {
        words.extend(words_of(keys.next()?));
    }
    let has = |names: &str| names.split(' ').any(|name| words.contains(&name));
    let is_parallel = words.iter().any(|word| word.contains("parallel")) || has("para");
    let is_sized = words.iter().any(|word| SIZES.has(word));
    let divides = is_parallel || has("shards");
    let axis = if divides && has("expert data") || is_sized && has("ep") {
        Axis::OverData
    } else if has("tp") || divides && has("tensor") {
        Axis::Tensor
    } else if has("pp") || divides && has("pipeline pipe") {
        Axis::Pipeline
    } else if has("cp ring") || divides && has("context") {
        Axis::Context
    } else if has("sp ulysses") || divides && has("sequence seq") {
        Axis::Sequence
    } else if has("mp") || divides && has("model") {
        Axis::Tensor
    } else if is_parallel && is_sized {
        Axis::Other
    } else {
        return None;
    };
    let of_axis = "tp pp cp sp mp ep ring para tensor pipeline pipe context sequence seq expert";
    let fits = |word: &&str| {
        let own = of_axis.split(' ').any(|name| name == *word);
        own || SIZES.has(word) || BESIDE.has(word) || word.contains("parallel")
    };
    // A long name with any other word is one only if it says so.
    let says = is_parallel && words.last().is_some_and(|last| SIZES.has(last));
    (says || words.iter().all(fits)).then_some(axis)
}

/// Whether a key is the size of an axis of the trainer.
pub(crate) fn is_size(key: &str) -> bool {
    axis_of(key).is_some()
}

/// Whether the words of a key's value say how the ranks share a sequence (jzhang38/EasyContext 1ee8bb5 `train.py`).
fn is_mode(path: &str) -> bool {
    path.rsplit('.').next() == Some("parallel_mode")
}

/// Whether a value of such a key may be more than 1. A name that mentions no size may have another meaning (`sp`, a path of a
/// model; `pp`, a switch), so that only a number counts.
fn divides(key: &str, text: &str) -> bool {
    if is_mode(&plain_path(key)) {
        const SHARING: Words = Words("context ring seq sequence striped ulysses zigzag");
        return variable(text).is_some()
            || words_of(&plain_path(text))
                .iter()
                .any(|word| SHARING.has(word));
    }
    let is_sized = key.split(['_', '-', '.']).any(|word| SIZES.has(word));
    match text.parse::<i64>() {
        Ok(size) => size > 1,
        Err(_) if is_sized => {
            !["", "null", "none", "false"].contains(&text.to_lowercase().as_str())
        }
        Err(_) => variable(text).is_some_and(is_size),
    }
}

/// The sizes above 1 in a tree, with their paths.
fn sizes<'n>(node: &'n Node, path: &str, found: &mut Vec<(String, Axis, &'n Node)>) {
    let schema = Schema::PyYaml;
    if node
        .get("enabled")
        .is_some_and(|on| on.is_bool(false, schema))
    {
        return;
    }
    for entry in node.entries().unwrap_or_default() {
        let path = joined(path, &entry.name);
        match (axis_of(&path), entry.value.text()) {
            _ if path == RESERVED => {}
            (Some(axis), Some(text)) if divides(&entry.name, text) => {
                found.push((path, axis, &entry.value));
            }
            _ => sizes(&entry.value, &path, found),
        }
    }
}

/// Refuses the sizes above 1 of axes in a recipe or a command that are not in `native`: they divide the data-parallel
/// ranks, so the batch depends on them. The user may state the axes with native keys. `states_batch`: the user gives the
/// global batch, which no axis over the data-parallel ranks changes.
pub(crate) fn refuse_unread(root: &Node, native: &Node, states_batch: bool, reading: &mut Reading) {
    let parallel = native.get("parallel").and_then(Node::entries);
    let parallel = parallel.unwrap_or_default();
    let reserved = format!("{RESERVED}.");
    let is_stated = |axis: Axis| {
        let mut stated = parallel.iter().filter(|entry| {
            let key = entry.value.key.as_deref();
            key.is_some_and(|key| key.starts_with(&reserved))
        });
        stated.any(|entry| axis.names().contains(&entry.name.as_str()))
    };
    let mut found = Vec::new();
    sizes(root, "", &mut found);
    // All words of one variable have its place, so that the place of another setting tells nothing.
    let read = ["parallel", "batch.gpus", "batch.elastic"].map(|path| native.get_path(path));
    let is_read = |span| {
        read.into_iter()
            .flatten()
            .any(|node| node.is_anywhere(span))
    };
    found.retain(|(_, axis, value)| {
        let is_safe = states_batch && *axis == Axis::OverData;
        !is_safe && !is_stated(*axis) && !is_read(value.span)
    });
    for (key, axis, value) in found {
        let text = value.shown();
        let size = text.parse::<u64>().map_or("N", |_| text);
        let own = format!("{reserved}parallel.{}", axis.names()[0]);
        let (divides, help) = match axis {
            Axis::OverData => (
                "it may divide",
                format!(
                    "give the samples of a step, `--global-batch-size B`; `{own}=1` says that no rank shares its samples"
                ),
            ),
            Axis::Other => (
                "it divides",
                format!(
                    "state the axes as `{own}=N` (`pipeline`, `context`, `sequence`), and the batch follows"
                ),
            ),
            _ => (
                "it divides",
                format!(
                    "{PROPOSES}{own}={size}`, and the batch follows; with 1 where every rank still takes other samples, as in \
                     ms-swift's GRPO"
                ),
            ),
        };
        let message = format!(
            "`{key}` is {}: {divides} the data-parallel ranks and is not read",
            short(text)
        );
        let mut problem = Diagnostic::error("unsupported-value", Some(value.span), message, help);
        if let Some(words) = proposed(&problem).map(str::to_owned) {
            problem = problem.ended_by([words]);
        }
        reading.diagnostics.push(problem);
    }
}

/// The override that the refusal of an axis proposes.
pub(crate) fn proposed(refusal: &Diagnostic) -> Option<&str> {
    let rest = refusal.help.strip_prefix(PROPOSES)?;
    rest.split('`').next()
}

/// The beginning of a help that proposes an override.
const PROPOSES: &str = "add `";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_an_axis_is_known_in_any_spelling() {
        for (key, axis) in [
            ("tp", Axis::Tensor),
            ("n_gpus_tp", Axis::Tensor),
            ("mp_size", Axis::Tensor),
            ("num_model_shards", Axis::Tensor),
            ("tensor-model-parallel-size", Axis::Tensor),
            ("tensor_para_size", Axis::Tensor),
            ("pp", Axis::Pipeline),
            ("pipe_parallel_size", Axis::Pipeline),
            ("pipeline-model-parallel-size", Axis::Pipeline),
            ("model_parallel_size", Axis::Tensor),
            ("ring_attn_size", Axis::Context),
            ("ds.ring_attn_size", Axis::Context),
            ("context_parallel", Axis::Context),
            ("sp-ulysses-degree", Axis::Sequence),
            ("sequence_parallel.size", Axis::Sequence),
            ("trainer.ulysses_sequence_parallel_size", Axis::Sequence),
            (
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
                Axis::Sequence,
            ),
            ("sp_world_size", Axis::Sequence),
            ("parallel_mode", Axis::Sequence),
            ("tensor_parallel_dim", Axis::Tensor),
            ("ep_size", Axis::OverData),
            ("expert_model_parallel_size", Axis::OverData),
            ("data_parallel_size", Axis::OverData),
            ("parallel_size", Axis::Other),
        ] {
            assert_eq!(axis_of(key), Some(axis), "{key}");
        }
        for key in [
            "ep",
            "num_ep",
            "epochs",
            "sp_model_path",
            "train_sp_batch_size",
            "ring_attn_head_stride",
            "tp_rank",
            "num_shards",
            "shards",
            "parallel",
            "dataloader_parallel_workers",
            "vllm_tensor_parallel_size",
            "rollout.tensor_model_parallel_size",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
            "rl-inference-tensor-model-parallel-size",
            "reward_model.megatron.tensor_model_parallel_size",
            "critic.megatron.pipeline_model_parallel_size",
            "head_dim",
            "mode",
            "dp_shard_size",
            "step_size",
            "model_size",
            "world_size",
            "num_sequences",
            "group_size",
        ] {
            assert_eq!(axis_of(key), None, "{key}");
        }
    }

    #[test]
    fn a_short_name_is_a_size_only_with_a_number() {
        for (key, text) in [
            ("tp", "2"),
            ("sp", "$SP_SIZE"),
            ("sp_size", "$N"),
            ("cp_size", "auto"),
            ("parallel_mode", "zigzag_ring_attn"),
            ("parallel_mode", "$MODE"),
        ] {
            assert!(divides(key, text), "{key} {text}");
        }
        for (key, text) in [
            ("sp", "spm.model"),
            ("sp", "$SPM"),
            ("pp", "true"),
            ("tp", "1"),
            ("tp_size", "None"),
            ("sp_size", "-1"),
            ("parallel_mode", "data_parallel"),
        ] {
            assert!(!divides(key, text), "{key} {text}");
        }
    }
}
