//! Sharding and model parallelism in the config of each distributed
//! type: FSDP's plugin, Megatron-LM's degrees. [`zero`](super::zero) has DeepSpeed's.
//!
//! Source: accelerate 16cb6eb, `utils/dataclasses.py` (`FullyShardedDataParallelPlugin`,
//! `MegatronLMPlugin`).

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};

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
        let strategy = match text.as_str() {
            "FULL_SHARD" | "1" | "HYBRID_SHARD" | "4" => "fsdp",
            "SHARD_GRAD_OP" | "2" | "HYBRID_SHARD_ZERO2" | "5" => "zero2",
            "NO_SHARD" | "3" => "ddp",
            _ => {
                let known = [
                    "FULL_SHARD",
                    "SHARD_GRAD_OP",
                    "NO_SHARD",
                    "HYBRID_SHARD",
                    "HYBRID_SHARD_ZERO2",
                ];
                reading.unknown_value(&key, &text, node.span, known);
                return;
            }
        };
        tree.text(
            "parallel.strategy",
            &Given::new(key, strategy.to_owned(), node.span),
        );
    } else if let Some((key, node)) = reshards
        && (node.text())
            .is_some_and(|text| ["false", "no", "off"].contains(&text.to_lowercase().as_str()))
    {
        tree.text(
            "parallel.strategy",
            &Given::new(key, "zero2".to_owned(), node.span),
        );
    }
    if let Some((key, node)) = find("activation_checkpointing")
        && node.is_bool(true, Schema::PyYaml)
    {
        tree.plain(
            "model.activation_checkpointing",
            &Given::new(key, true, node.span),
        );
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
