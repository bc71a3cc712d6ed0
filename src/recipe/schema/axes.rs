//! Sizes of the parallelism axes in `parallelism_config` of a recipe or an accelerate config, with the keys of
//! accelerate's `ParallelismConfig`.
//!
//! Source: accelerate 16cb6eb, `parallelism_config.py`.

use super::reading::Reading;
use super::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};

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
        match entry.value.resolve(Schema::PyYaml) {
            Some(Resolved::Int(value)) => {
                tree.plain(path, &Given::new(key, value, entry.value.span));
            }
            Some(Resolved::Null) => {}
            _ => reading.error(
                "wrong-type",
                Some(entry.value.span),
                format!(
                    "`{key}` takes a whole number, this is {}",
                    entry.value.kind()
                ),
                "give a whole number",
            ),
        }
    }
}
