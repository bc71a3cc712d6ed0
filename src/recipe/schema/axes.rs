//! Sizes of the parallelism axes: those in `parallelism_config` of a recipe or an accelerate config, with the keys of
//! accelerate's `ParallelismConfig`, and those that are not read.
//!
//! Source: accelerate 16cb6eb, `parallelism_config.py`.

use super::dialect::RESERVED;
use super::reading::Reading;
use super::tree::Tree;
use crate::recipe::syntax::node::Node;
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

/// Whether a key is the size of an axis of the trainer. The sizes of inference engines do not divide its
/// ranks.
pub(crate) fn is_size(key: &str) -> bool {
    const ENGINES: [&str; 3] = ["rollout", "sglang", "vllm"];
    // Names without `parallel` that several projects give to such a size.
    const SHORT: Words = Words(
        "cp_degree cp_size pp_degree pp_size ring_degree sp_degree sp_size tensor_model_parallel tp_degree \
         ulysses_degree ulysses_size",
    );
    let named = key.contains("parallel") && (key.ends_with("size") || key.ends_with("degree"));
    (named || SHORT.has(key)) && !ENGINES.iter().any(|engine| key.starts_with(engine))
}

/// Refuses a size above 1 of an axis that is not read: it divides the data-parallel ranks, so the batch depends on it.
/// The user may state the axes with native keys. `read`: the sizes that are read.
pub(crate) fn refuse_unread(root: &Node, read: &[&str], reading: &mut Reading) {
    if root.get_path(&format!("{RESERVED}.parallel")).is_some() {
        return;
    }
    for entry in root.entries().unwrap_or_default() {
        let text = entry.value.shown();
        let name = entry.name.replace('-', "_");
        let is_one = ["1", "", "null", "None"].contains(&text);
        if !is_size(&name) || read.contains(&name.as_str()) || is_one {
            continue;
        }
        let message = format!(
            "`{}` is {}: it divides the data-parallel ranks and is not read",
            entry.name,
            short(text)
        );
        let help = "state the axes as `evenkeel.parallel.sequence=N` (`tensor`, `pipeline`, `context`), and the batch follows; with 1 where every rank still takes other samples, as in ms-swift's GRPO";
        reading.error("unsupported-value", Some(entry.value.span), message, help);
    }
}
