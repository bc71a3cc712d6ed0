//! The parts of a DeepSpeed JSON config that a recipe or an accelerate config brings with it: the
//! ZeRO stage and the batch triple. `"auto"` values come from the trainer and say nothing here.
//!
//! Sources: transformers 5.23.0 `integrations/deepspeed.py` (`trainer_config_process` compares each
//! value with the trainer's), accelerate 16cb6eb `utils/dataclasses.py` (`DeepSpeedPlugin`).

use super::node::Node;
use super::scalar::{Resolved, Schema};
use super::tree::{Given, Tree};

/// The native strategy of a ZeRO stage.
pub(super) fn strategy(stage: i128) -> Option<&'static str> {
    match stage {
        0 => Some("ddp"),
        1 => Some("zero1"),
        2 => Some("zero2"),
        3 => Some("fsdp"),
        _ => None,
    }
}

/// What a config says, as a native tree whose keys are called `prefix.KEY`.
pub(super) fn translate(root: &Node, prefix: &str) -> Node {
    let mut tree = Tree::new(root.span);
    let int = |node: Option<&Node>, key: &str| {
        let node = node?;
        match node.resolve(Schema::PyYaml)? {
            Resolved::Int(value) => Some(Given {
                key: format!("{prefix}.{key}"),
                value,
                span: node.span,
            }),
            _ => None,
        }
    };
    for (key, path) in [
        ("train_batch_size", "batch.global"),
        ("train_micro_batch_size_per_gpu", "batch.micro"),
        ("gradient_accumulation_steps", "batch.accumulation"),
    ] {
        tree.plain_if(path, int(root.get(key), key));
    }
    let stage = root.get_path("zero_optimization.stage");
    if let Some(stage) = int(stage, "zero_optimization.stage")
        && let Some(strategy) = strategy(stage.value)
    {
        tree.plain("parallel.strategy", &stage.with(strategy));
    }
    tree.into_node()
}
