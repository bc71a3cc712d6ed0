//! Switches of `accelerate launch`, which exist in no config. They are part of the tree of a config and
//! its options under their own names (`--cpu`), with the key that [`Tree`] gives to command-line values.
//!
//! Source: accelerate 16cb6eb, `commands/launch.py` (`_validate_launch_command`).
//!
//! [`Tree`]: crate::recipe::schema::tree::Tree

use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::{Entry, Node};

/// Switches that choose the distributed type, in the order in which `launch_command` checks them.
pub(super) const KINDS: &[(&str, &str)] = &[
    ("use_deepspeed", "DEEPSPEED"),
    ("use_fsdp", "FSDP"),
    ("use_megatron_lm", "MEGATRON_LM"),
    ("multi_gpu", "MULTI_GPU"),
    ("tpu", "XLA"),
];

/// The switch that starts a single process.
pub(super) const CPU: &str = "cpu";
/// The switch without which accelerate passes no sizes of axes on.
pub(super) const PARALLELISM: &str = "use_parallelism_config";

/// Whether an option of `accelerate launch` is a switch that affects the world.
pub(crate) fn is_switch(name: &str) -> bool {
    [CPU, PARALLELISM].contains(&name) || KINDS.iter().any(|(switch, _)| *switch == name)
}

/// Whether a value comes from the command line, not from the config's file.
pub(super) fn is_typed(node: &Node) -> bool {
    node.key.is_some()
}

/// Whether an entry is a switch, not a key of the file with the same name.
pub(super) fn is_entry(entry: &Entry) -> bool {
    entry.name.starts_with("--") && is_typed(&entry.value)
}

/// A switch on the command line.
pub(super) fn switch<'n>(root: &'n Node, name: &str) -> Option<&'n Node> {
    let node = root.get(&format!("--{name}"))?;
    is_typed(node).then_some(node)
}

/// The distributed type of the command line, which overrides every config.
pub(super) fn kind(root: &Node) -> Option<(&'static str, &Node)> {
    let mut kinds = KINDS.iter();
    kinds.find_map(|(name, kind)| Some((*kind, switch(root, name)?)))
}

/// Refuses the combinations that accelerate refuses before it reads a config.
pub(super) fn refuse(root: &Node, reading: &mut Reading) {
    let one_of = ["cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp"];
    let mut typed = one_of.iter().filter_map(|name| switch(root, name));
    let name = |node: &Node| node.key.clone().unwrap_or_default();
    if let (Some(first), Some(second)) = (typed.next(), typed.next()) {
        reading.error(
            "unsupported-value",
            Some(second.span),
            format!(
                "accelerate refuses `{}` together with `{}`",
                name(first),
                name(second)
            ),
            "remove one of them",
        );
    }
    let processes = root.get("num_processes").filter(|node| is_typed(node));
    let processes = processes.and_then(|node| node.text()?.parse::<i128>().ok());
    if let (Some(multi), Some(processes)) = (switch(root, "multi_gpu"), processes)
        && processes < 2
    {
        reading.error(
            "unsupported-value",
            Some(multi.span),
            format!("`--multi_gpu` needs at least 2 processes, but the command has {processes}"),
            "remove `--multi_gpu`",
        );
    }
    if let Some(asked) = switch(root, PARALLELISM)
        && switch(root, "use_fsdp").is_none()
    {
        reading.error(
            "parallelism-product",
            Some(asked.span),
            "`--use_parallelism_config` needs `--use_fsdp`",
            "add `--use_fsdp --fsdp_version 2`, or set the type and the sizes in a config file",
        );
    }
}
