//! DeepSpeed in an accelerate config: inline, or in a DeepSpeed file that it names. A
//! trainer's own DeepSpeed config replaces that file.
//!
//! Sources: accelerate 16cb6eb `commands/launch.py` (`launch_command`: it passes the keys of the config's file
//! on by name), `utils/launch.py` (`prepare_deepspeed_cmd_env`), `utils/dataclasses.py`
//! (`DeepSpeedPlugin`: `_deepspeed_config_checks` refuses these keys with any file; command-line values
//! replace only "auto" in the file); transformers 5.23.0 `training_args.py` (`__post_init__`: the trainer's
//! file comes first), `trainer.py` (`create_accelerator_and_postprocess`: accelerate's is compared too).

use std::path::Path;

use super::typed::is_typed;
use crate::recipe::deepspeed;
use crate::recipe::node::Node;
use crate::recipe::reading::Reading;
use crate::recipe::scalar::{Resolved, Schema};
use crate::recipe::source::Span;
use crate::recipe::tree::{Given, Tree};

/// Keys of `deepspeed_config` that belong in the DeepSpeed file, if there is one.
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

/// A key of a config, with its position.
pub(super) type ConfigKey = (String, Span);

/// The DeepSpeed config that a job is launched with.
#[derive(Debug, Default)]
pub(in crate::recipe) struct Zero {
    /// Keys of the config with which accelerate refuses a DeepSpeed file.
    config_keys: Vec<ConfigKey>,
    /// The file that the config names, which the trainer compares with its numbers.
    file: Option<Node>,
    /// Whether the trainer's own DeepSpeed config replaces this one.
    overruled: bool,
}

impl Zero {
    /// Takes the file that the trainer compares with its numbers.
    pub fn take_file(&mut self) -> Option<Node> {
        self.file.take()
    }

    /// Whether the trainer's own DeepSpeed config replaces this one.
    pub fn is_overruled(&self) -> bool {
        self.overruled
    }
}

/// The keys in a config's file, before the command line overrides them: accelerate checks these,
/// independent of the command line.
pub(super) fn config_keys(root: &Node) -> Vec<ConfigKey> {
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

/// The ZeRO stage (default 2) and accumulation, from the config itself or the DeepSpeed
/// file that it names.
pub(super) fn read(
    root: &Node,
    path: &Path,
    mut config_keys: Vec<ConfigKey>,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    // A precision of the command line is not the config's.
    let typed = root.get(PRECISION).is_some_and(is_typed);
    config_keys.retain(|(name, _)| !(typed && name == PRECISION));
    tree.default("parallel.strategy", "zero2");
    let config = root.get("deepspeed_config");
    let file = config.and_then(|config| config.get("deepspeed_config_file"));
    let file = file.filter(|node| !is_null(node) && node.text() != Some("none"));
    let file = match (config, file) {
        (Some(config), Some(node)) => {
            refuse_both(&config_keys, reading);
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
        config_keys,
        file,
        overruled: false,
    });
}

/// The file that the config names. Without an accumulation it means 1, which the trainer compares.
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
            format!("the DeepSpeed config `{name}` does not exist: its ZeRO stage is unknown"),
            "create it next to this file, or set `evenkeel.parallel.strategy`",
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

/// Whether a command-line value replaces an "auto" in the file. It has no other effect.
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
                    "`{option} {value}` has no effect: `{path}` is {stated} in the DeepSpeed file, which counts"
                ),
                None => format!(
                    "`{option} {value}` has no effect: the DeepSpeed file counts, and has no `{path}`"
                ),
            },
            format!("set it in the file, or write \"auto\" for `{path}` there"),
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

/// Refuses a config that states the same values as its DeepSpeed file, as accelerate does; it accepts
/// command-line values.
fn refuse_both(config_keys: &[ConfigKey], reading: &mut Reading) {
    for (name, at) in config_keys {
        reading.error(
            "unsupported-value",
            Some(*at),
            format!("accelerate refuses `{name}` together with `deepspeed_config_file`"),
            "set it in the DeepSpeed file, and remove it here",
        );
    }
}

/// A trainer's own DeepSpeed config counts, and accelerate refuses it with a
/// config that states the same values.
pub(in crate::recipe) fn overrule(reading: &mut Reading) {
    let Some(zero) = &mut reading.zero else {
        return;
    };
    zero.overruled = true;
    let names: Vec<String> = zero
        .config_keys
        .iter()
        .map(|(name, _)| format!("`{name}`"))
        .collect();
    if let Some((_, at)) = zero.config_keys.first().cloned() {
        reading.error(
            "deepspeed-conflict",
            Some(at),
            format!(
                "accelerate refuses {} together with the trainer's own DeepSpeed config",
                names.join(", ")
            ),
            "remove the trainer's `deepspeed`, or launch it with a config whose type is not `DEEPSPEED`",
        );
    }
}

/// Removes the values for DeepSpeed from the launcher's tree.
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
