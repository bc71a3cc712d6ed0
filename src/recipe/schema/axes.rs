//! Sizes of the parallelism axes in `parallelism_config` of a recipe or an accelerate config, with the keys of
//! accelerate's `ParallelismConfig`.
//!
//! Source: accelerate 16cb6eb, `parallelism_config.py`.

use super::reading::Reading;
use super::tree::Tree;
use crate::recipe::syntax::node::Node;

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
