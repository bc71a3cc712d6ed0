//! `elasticity` of a DeepSpeed config: its keys, and the checks that do not depend on the world.
//!
//! Source: DeepSpeed edaa722 `elasticity/config.py` (`ElasticityConfig`), `elasticity/elasticity.py`
//! (`compute_elastic_config`), `runtime/config.py`.

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::Schema;

use super::TRIPLE;

/// The block, if elasticity computes the batch.
pub(super) fn enabled(root: &Node) -> Option<&Node> {
    let block = root.get("elasticity")?;
    let on = block.get("enabled")?.is_bool(true, Schema::PyYaml);
    on.then_some(block)
}

/// The block as native keys. The native reader checks their values.
pub(super) fn translate(block: &Node, key: &dyn Fn(&str) -> String, tree: &mut Tree) {
    // A number in JSON.
    let version = block.get("version");
    let place = version.map_or(block.span, |node| node.span);
    let version = Node::string(version.map_or("0.2", Node::shown), place);
    tree.put("batch.elastic.version", &key("elasticity.version"), version);
    for (field, path) in [
        ("max_train_batch_size", "max_batch"),
        ("micro_batch_sizes", "micro_batches"),
        ("min_gpus", "min_gpus"),
        ("max_gpus", "max_gpus"),
        ("num_gpus_per_node", "gpus_per_node"),
        ("model_parallel_size", "model_parallel"),
        ("prefer_larger_batch", "prefer_larger"),
    ] {
        let Some(node) = block.get(field) else {
            continue;
        };
        let key = key(&format!("elasticity.{field}"));
        let mut node = node.clone();
        node.name_entries(&key);
        tree.put(&format!("batch.elastic.{path}"), &key, node);
    }
}

/// Reports what upstream refuses when it reads the block, apart from the types and ranges of single values.
pub(super) fn check(root: &Node, reading: &mut Reading) {
    let Some(block) = enabled(root) else { return };
    let mut refuse = |node: &Node, message: String, help: &str| {
        reading.error("deepspeed-elastic-batch", Some(node.span), message, help);
    };
    let of_none = |node: &Node| node.items().is_some_and(<[_]>::is_empty);
    for field in ["max_train_batch_size", "micro_batch_sizes"] {
        if block.get(field).is_none_or(of_none) {
            let message = format!("elasticity is on without `{field}`");
            refuse(
                block,
                message,
                "add it: DeepSpeed refuses the config without it",
            );
        }
    }
    let number = |field: &str, default: i128| {
        let node = block.get(field);
        let value = node.and_then(|node| node.int(Schema::PyYaml));
        (node.unwrap_or(block), value.unwrap_or(default))
    };
    let ((node, min), (_, max)) = (number("min_gpus", 1), number("max_gpus", 10_000));
    if max < min {
        let message = format!("`min_gpus` {min} is above `max_gpus` {max}");
        refuse(node, message, "set `min_gpus` to at most `max_gpus`");
    }
    let (node, parallel) = number("model_parallel_size", 1);
    if parallel > 1 && block.get("version").and_then(Node::text) == Some("0.1") {
        let message = format!(
            "elasticity 0.1 does not support model parallelism, and `model_parallel_size` is {parallel}"
        );
        refuse(node, message, "use version 0.2");
    }
    let ignored = block.get("ignore_non_elastic_batch_info");
    if ignored.is_some_and(|node| node.is_bool(true, Schema::PyYaml)) {
        return;
    }
    for (key, _) in TRIPLE {
        if let Some(node) = root.get(key) {
            let message = format!(
                "`{key}` is set beside `elasticity`, which computes the batch: DeepSpeed refuses both"
            );
            let help =
                "remove it, or set `elasticity.enabled` to false so that Evenkeel keeps the batch";
            refuse(node, message, help);
        }
    }
}
