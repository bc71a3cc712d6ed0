//! DeepSpeed as an accelerate config has it: by itself, or in a file of DeepSpeed's that it names. A
//! trainer with a DeepSpeed config of its own reads that one instead.
//!
//! Sources: accelerate 16cb6eb `commands/launch.py` (`launch_command`: the keys of the config's file are
//! handed on by name), `utils/launch.py` (`prepare_deepspeed_cmd_env`), `utils/dataclasses.py`
//! (`DeepSpeedPlugin`: `_deepspeed_config_checks` refuses these keys beside any file, and what is typed
//! fills the file's "auto" alone); transformers 5.23.0 `training_args.py` (`__post_init__`: the trainer's
//! file comes first), `trainer.py` (`create_accelerator_and_postprocess`: accelerate's is compared too).

use std::path::Path;

use super::typed::is_typed;
use crate::recipe::deepspeed;
use crate::recipe::node::Node;
use crate::recipe::reading::Reading;
use crate::recipe::scalar::{Resolved, Schema};
use crate::recipe::source::Span;
use crate::recipe::tree::{Given, Tree};

/// Keys of `deepspeed_config` that belong into the file of DeepSpeed's, where there is one.
const IN_THE_FILE: &[&str] = &[
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
];

const PRECISION: &str = "mixed_precision";

/// A key of a config, and where it stands.
pub(super) type Own = (String, Span);

/// What a job is launched with, where that is DeepSpeed.
#[derive(Debug, Default)]
pub(in crate::recipe) struct Zero {
    /// Keys of the config beside which accelerate takes no file of DeepSpeed's.
    own: Vec<Own>,
    /// The file that the config names, which the trainer compares with its own numbers.
    file: Option<Node>,
    /// The trainer has a DeepSpeed config of its own, and nobody reads this one.
    overruled: bool,
}

impl Zero {
    /// The file that the trainer compares with its own numbers, for the one who does.
    pub fn take_file(&mut self) -> Option<Node> {
        self.file.take()
    }

    /// Whether a trainer's own DeepSpeed config stands in its place.
    pub fn is_overruled(&self) -> bool {
        self.overruled
    }
}

/// The keys that a config's file has itself, before anything is typed over it: accelerate goes by these
/// whatever is typed.
pub(super) fn own(root: &Node) -> Vec<Own> {
    let below = root.get("deepspeed_config").and_then(Node::entries);
    let below = below.unwrap_or_default().iter();
    let below = below.filter(|entry| IN_THE_FILE.contains(&entry.name.as_str()));
    let precision = root.entries().unwrap_or_default().iter();
    let precision = precision.filter(|entry| entry.name == PRECISION && !is_null(&entry.value));
    let found = below.chain(precision).filter(|e| !is_typed(&e.value));
    found.map(|e| (e.name.clone(), e.name_span)).collect()
}

fn is_null(node: &Node) -> bool {
    node.resolve(Schema::PyYaml) == Some(Resolved::Null)
}

/// The ZeRO stage (2 where nothing is said) and accumulation, from the config itself or the DeepSpeed
/// file that it names.
pub(super) fn read(
    root: &Node,
    path: &Path,
    mut own: Vec<Own>,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    // A precision that is typed is not the config's.
    let typed = root.get(PRECISION).is_some_and(is_typed);
    own.retain(|(name, _)| !(typed && name == PRECISION));
    tree.default("parallel.strategy", "zero2");
    let config = root.get("deepspeed_config");
    let file = config.and_then(|config| config.get("deepspeed_config_file"));
    let file = file.filter(|node| !is_null(node) && node.text() != Some("none"));
    let file = match (config, file) {
        (Some(config), Some(node)) => {
            refuse_both(&own, reading);
            in_file(config, node, path, tree, reading)
        }
        (Some(config), None) => {
            stage(config, tree, reading);
            accumulation(config, tree);
            None
        }
        (None, _) => None,
    };
    reading.zero = Some(Zero {
        own,
        file,
        overruled: false,
    });
}

/// The file that the config names. Without an accumulation it means 1, and the trainer compares.
fn in_file(
    config: &Node,
    node: &Node,
    path: &Path,
    tree: &mut Tree,
    reading: &mut Reading,
) -> Option<Node> {
    let name = node.text().unwrap_or_default();
    let Some(file) = reading.beside(path, name) else {
        reading.warning(
            "deepspeed-unread",
            Some(node.span),
            format!("the DeepSpeed config `{name}` is not there: its ZeRO stage is not known"),
            "put it beside this file, or give `evenkeel.parallel.strategy`",
        );
        return None;
    };
    let file = deepspeed::open(&file, reading)?;
    let mut native = deepspeed::translate(&file, "deepspeed_config_file");
    deepspeed::refuse_elasticity(&mut native, reading);
    tree.lay(native);
    if file.get("gradient_accumulation_steps").is_none() {
        let given = Given::new("deepspeed_config_file", 1, node.span);
        tree.plain("batch.accumulation", &given);
    }
    if fills(
        "zero_stage",
        "zero_optimization.stage",
        config,
        &file,
        reading,
    ) {
        stage(config, tree, reading);
    }
    let key = "gradient_accumulation_steps";
    if fills(key, key, config, &file, reading) {
        accumulation(config, tree);
    }
    Some(file)
}

/// Whether what is typed for a key takes the place of an "auto" in the file. It does nothing else.
fn fills(key: &str, path: &str, config: &Node, file: &Node, reading: &mut Reading) -> bool {
    let Some(typed) = config.get(key).filter(|node| is_typed(node)) else {
        return false;
    };
    let stated = file.get_path(path).and_then(Node::text);
    if stated == Some("auto") {
        return true;
    }
    if stated != typed.text() {
        let option = typed.key.as_deref().unwrap_or(key);
        let value = typed.text().unwrap_or_default();
        reading.warning(
            "unsupported-value",
            Some(typed.span),
            match stated {
                Some(stated) => format!(
                    "`{option} {value}` does nothing: `{path}` is {stated} in the DeepSpeed file, which counts"
                ),
                None => format!(
                    "`{option} {value}` does nothing: the DeepSpeed file counts, and has no `{path}`"
                ),
            },
            format!("say it in the file, or write \"auto\" for `{path}` there"),
        );
    }
    false
}

fn stage(config: &Node, tree: &mut Tree, reading: &mut Reading) {
    let Some(node) = config.get("zero_stage") else {
        return;
    };
    match node.resolve(Schema::PyYaml) {
        Some(Resolved::Int(stage)) if deepspeed::strategy(stage).is_some() => {
            let value = deepspeed::strategy(stage).unwrap_or_default().to_owned();
            let key = "deepspeed_config.zero_stage";
            tree.text("parallel.strategy", &Given::new(key, value, node.span));
        }
        _ => reading.error(
            "out-of-range",
            Some(node.span),
            format!("`zero_stage` is `{}`", node.text().unwrap_or(node.kind())),
            "give 0, 1, 2 or 3",
        ),
    }
}

fn accumulation(config: &Node, tree: &mut Tree) {
    if let Some(node) = config.get("gradient_accumulation_steps")
        && let Some(Resolved::Int(value)) = node.resolve(Schema::PyYaml)
    {
        let key = "deepspeed_config.gradient_accumulation_steps";
        tree.plain("batch.accumulation", &Given::new(key, value, node.span));
    }
}

/// Beside a DeepSpeed file accelerate refuses a config that says the same things itself; what is
/// typed it leaves alone.
fn refuse_both(own: &[Own], reading: &mut Reading) {
    for (name, at) in own {
        reading.error(
            "unsupported-value",
            Some(*at),
            format!("accelerate takes `{name}` not beside `deepspeed_config_file`"),
            "say it in the DeepSpeed file, and leave it out here",
        );
    }
}

/// A trainer with a DeepSpeed config of its own: that one counts, and accelerate refuses it beside a
/// config that says the same things itself.
pub(in crate::recipe) fn overrule(reading: &mut Reading) {
    let Some(zero) = &mut reading.zero else {
        return;
    };
    zero.overruled = true;
    let names: Vec<String> = zero
        .own
        .iter()
        .map(|(name, _)| format!("`{name}`"))
        .collect();
    if let Some((_, at)) = zero.own.first().cloned() {
        reading.error(
            "deepspeed-conflict",
            Some(at),
            format!(
                "accelerate takes {} not beside the trainer's own DeepSpeed config",
                names.join(", ")
            ),
            "leave the trainer's `deepspeed` out, or start it with a config whose type is not `DEEPSPEED`",
        );
    }
}

/// Takes out of what the launcher says whatever DeepSpeed is told by it.
pub(in crate::recipe) fn leave_to_trainer(launched: &mut Node) {
    for path in [
        "batch.global",
        "batch.micro",
        "batch.accumulation",
        "parallel.strategy",
        "parallel.tensor",
        "parallel.sequence",
    ] {
        let key = launched.get_path(path).and_then(|node| node.key.as_deref());
        if key.is_some_and(|key| key.starts_with("deepspeed_config")) {
            launched.remove_path(path);
        }
    }
}

#[cfg(test)]
mod tests;
