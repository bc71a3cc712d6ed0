//! Sharding and model parallelism in the config of each distributed
//! type: FSDP's plugin, Megatron-LM's degrees. [`zero`](super::zero) has DeepSpeed's.
//!
//! Source: accelerate 16cb6eb, `utils/dataclasses.py` (`FullyShardedDataParallelPlugin`,
//! `MegatronLMPlugin`).

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};

/// The sharding strategies of FSDP, their numbers, and the native ones.
const SHARDINGS: [(&str, &str, &str); 5] = [
    ("FULL_SHARD", "1", "fsdp"),
    ("SHARD_GRAD_OP", "2", "zero2"),
    ("NO_SHARD", "3", "ddp"),
    ("HYBRID_SHARD", "4", "fsdp"),
    ("HYBRID_SHARD_ZERO2", "5", "zero2"),
];

/// The sharding of FSDP. Keys may lack the prefix `fsdp_`. `reshard_after_forward` frees parameters after
/// the forward pass: a boolean in version 2; version 1 also accepts the strategy's name.
pub(super) fn fsdp(config: Option<&Node>, tree: &mut Tree, reading: &mut Reading) {
    let find = |name: &str| {
        let config = config?;
        let long = format!("fsdp_{name}");
        [long.as_str(), name].into_iter().find_map(|key| {
            let node = config.get(key)?;
            Some((format!("fsdp_config.{key}"), node))
        })
    };
    tree.default("parallel.strategy", "fsdp");
    let is_bool = |node: &Node| match node.resolve(Schema::PyYaml) {
        // accelerate passes text on, and the program reads it.
        Some(Resolved::Str(text)) => ["true", "false"].contains(&text.to_lowercase().as_str()),
        resolved => matches!(resolved, Some(Resolved::Bool(_))),
    };
    let reshards = find("reshard_after_forward");
    let named = || reshards.clone().filter(|(_, node)| !is_bool(node));
    if let Some((key, node)) = find("sharding_strategy").or_else(named) {
        let text = node.text().unwrap_or_default().to_uppercase();
        let is =
            |(name, number, _): &&(&str, &str, &str)| [*name, *number].contains(&text.as_str());
        let Some((.., strategy)) = SHARDINGS.iter().find(is) else {
            let known = SHARDINGS.iter().map(|(name, ..)| *name);
            reading.unknown_value(&key, &text, node.span, known);
            return;
        };
        let strategy = Given::new(key, strategy, node.span);
        tree.plain("parallel.strategy", &strategy);
    } else if let Some((key, node)) = reshards
        && (node.text())
            .is_some_and(|text| ["false", "no", "off"].contains(&text.to_lowercase().as_str()))
    {
        tree.plain("parallel.strategy", &Given::new(key, "zero2", node.span));
    }
    if let Some((key, node)) = find("activation_checkpointing")
        && node.is_bool(true, Schema::PyYaml)
    {
        let on = Given::new(key, true, node.span);
        tree.plain("model.activation_checkpointing", &on);
    }
}

/// The sizes of Megatron-LM's axes.
pub(super) fn megatron(config: Option<&Node>, tree: &mut Tree, reading: &mut Reading) {
    let Some(config) = config else { return };
    for (key, path) in [
        ("megatron_lm_tp_degree", "parallel.tensor"),
        ("megatron_lm_pp_degree", "parallel.pipeline"),
        ("megatron_lm_context_parallel_size", "parallel.context"),
    ] {
        let named = format!("megatron_lm_config.{key}");
        if let Some(size) = config.get(key).and_then(|node| reading.int(named, node)) {
            tree.plain(path, &size);
        }
    }
}
