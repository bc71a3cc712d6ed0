//! `elasticity` of a DeepSpeed config: its keys, and the checks that do not depend on the world.
//!
//! Source: DeepSpeed edaa722 `elasticity/config.py` (`ElasticityConfig`), `elasticity/elasticity.py`
//! (`compute_elastic_config`), `runtime/config.py`.

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};

use super::TRIPLE;

/// The known values of `version`; the last one is the default.
const VERSIONS: [&str; 2] = ["0.1", "0.2"];

const RULE: &str = "deepspeed-elastic-batch";

/// The block, if elasticity is on.
fn enabled(root: &Node) -> Option<&Node> {
    let block = root.get("elasticity")?;
    let on = block.get("enabled")?.is_bool(true, Schema::PyYaml);
    on.then_some(block)
}

/// Whether elasticity computes the batch.
pub(super) fn is_enabled(root: &Node) -> bool {
    enabled(root).is_some()
}

/// The block as native keys, without values of a wrong type, which [`check`] reports.
pub(super) fn translate(root: &Node, key: &dyn Fn(&str) -> String, tree: &mut Tree) {
    let Some(block) = enabled(root) else { return };
    let name = |name: &str| key(&format!("elasticity.{name}"));
    let int = |field: &str| {
        let node = block.get(field)?;
        Some(Given::new(
            name(field),
            node.int(Schema::PyYaml)?,
            node.span,
        ))
    };
    for (field, path) in [
        ("max_train_batch_size", "max_batch"),
        ("min_gpus", "min_gpus"),
        ("max_gpus", "max_gpus"),
        ("num_gpus_per_node", "gpus_per_node"),
        ("model_parallel_size", "model_parallel"),
    ] {
        tree.plain_if(&format!("batch.elastic.{path}"), int(field));
    }
    if let Some(sizes) = block.get("micro_batch_sizes") {
        let value: Vec<i128> = sizes
            .items()
            .unwrap_or_default()
            .iter()
            .filter_map(whole)
            .collect();
        let given = Given::new(name("micro_batch_sizes"), value, sizes.span);
        tree.plain_list("batch.elastic.micro_batches", &given);
    }
    if let Some(node) = block.get("prefer_larger_batch")
        && let Some(Resolved::Bool(value)) = node.resolve(Schema::PyYaml)
    {
        let given = Given::new(name("prefer_larger_batch"), value, node.span);
        tree.plain("batch.elastic.prefer_larger", &given);
    }
    let version = block.get("version");
    let text = version.and_then(Node::text).unwrap_or("0.2").to_owned();
    if !VERSIONS.contains(&text.as_str()) {
        return;
    }
    let span = version.map_or(block.span, |node| node.span);
    tree.text(
        "batch.elastic.version",
        &Given::new(name("version"), text, span),
    );
}

fn whole(node: &Node) -> Option<i128> {
    node.int(Schema::PyYaml)
}

/// Reports everything that upstream refuses when it reads the block.
pub(super) fn check(root: &Node, reading: &mut Reading) {
    let Some(block) = enabled(root) else { return };
    for field in ["max_train_batch_size", "micro_batch_sizes"] {
        if block.get(field).is_none() {
            reading.error(
                RULE,
                Some(block.span),
                format!("elasticity is on without `{field}`"),
                format!("add `{field}`: DeepSpeed refuses the config without it"),
            );
        }
    }
    if let Some(sizes) = block.get("micro_batch_sizes")
        && !sizes.items().is_some_and(|items| {
            !items.is_empty() && items.iter().all(|item| whole(item).is_some_and(|n| n > 0))
        })
    {
        reading.error(
            RULE,
            Some(sizes.span),
            "`micro_batch_sizes` takes a list of whole numbers of at least 1",
            "write `[1, 2, 4]`",
        );
    }
    let number = |field: &str, default: i128| block.get(field).and_then(whole).unwrap_or(default);
    let (min, max) = (number("min_gpus", 1), number("max_gpus", 10_000));
    if max < min {
        reading.error(
            RULE,
            block.get("min_gpus").map(|node| node.span),
            format!("`min_gpus` {min} is above `max_gpus` {max}"),
            "set `min_gpus` to at most `max_gpus`",
        );
    }
    version(block, number("model_parallel_size", 1), reading);
    let ignored = block.get("ignore_non_elastic_batch_info");
    if ignored.is_some_and(|node| node.is_bool(true, Schema::PyYaml)) {
        return;
    }
    for (key, _) in TRIPLE {
        if let Some(node) = root.get(key) {
            reading.error(
                RULE,
                Some(node.span),
                format!("`{key}` is set beside `elasticity`, which computes the batch: DeepSpeed refuses both"),
                "remove it, or set `elasticity.enabled` to false so that Evenkeel keeps the batch",
            );
        }
    }
}

fn version(block: &Node, model_parallel: i128, reading: &mut Reading) {
    let node = block.get("version");
    let text = node.and_then(Node::text).unwrap_or("0.2");
    let span = node.map(|node| node.span);
    match text {
        "0.1" if model_parallel > 1 => reading.error(
            RULE,
            span,
            format!(
                "elasticity 0.1 does not support model parallelism, and `model_parallel_size` is {model_parallel}"
            ),
            "use version 0.2",
        ),
        "0.1" | "0.2" => {}
        other => reading.error(
            RULE,
            span,
            format!("DeepSpeed has no elasticity version `{other}`"),
            "use 0.1 or 0.2",
        ),
    }
}
