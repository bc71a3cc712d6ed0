//! What the schema layer knows of DeepSpeed: how its config is recognised, and the plugin with which
//! accelerate starts a program.

use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::{FileId, Span};
use crate::recipe::syntax::words::Words;
use crate::recipe::syntax::{json, yaml};

/// Keys that only DeepSpeed configs have.
const DISTINCTIVE: Words =
    Words("zero_optimization train_micro_batch_size_per_gpu train_batch_size elasticity");

/// Whether a file is a DeepSpeed config.
pub fn is_config(root: &Node) -> bool {
    distinctive_key(root).is_some()
}

/// Whether a text has the name of a key that only DeepSpeed configs have.
pub fn is_mentioned(text: &str) -> bool {
    DISTINCTIVE.iter().any(|key| text.contains(key))
}

/// The mapping in the text of a DeepSpeed config. `None`: the text is not one, or repeats a key.
pub fn parse(text: &str) -> Option<Node> {
    let plain = json::without_comments(text);
    if json::problem(&plain).is_some() {
        return None;
    }
    let mut problems = Vec::new();
    let root = yaml::parse(&plain, FileId(0), &mut problems)?;
    (problems.is_empty() && root.entries().is_some()).then_some(root)
}

/// A top-level key that only DeepSpeed configs have. Other dialects hold whole DeepSpeed configs
/// under one of their keys.
pub fn distinctive_key(root: &Node) -> Option<&'static str> {
    // verl's data config has a `train_batch_size` too, and so has the state of a `Trainer`, for one device.
    const OTHERS: Words = Words(
        "per_device_train_batch_size model_name_or_path output_dir distributed_type defaults train_files log_history",
    );
    let has = |key: &&str| root.get(key).is_some();
    let found = DISTINCTIVE.iter().find(has);
    found.filter(|_| !OTHERS.iter().any(|key| has(&key)))
}

/// A key of an accelerate config, and where it is written.
pub type ConfigKey = (String, Span);

/// DeepSpeed as accelerate starts a program with it (accelerate's `DeepSpeedPlugin`).
#[derive(Debug)]
pub struct DeepSpeedPlugin {
    /// Keys of the accelerate config that accelerate refuses beside a DeepSpeed file.
    pub config_keys: Vec<ConfigKey>,
    /// The DeepSpeed file that the config names. The trainer compares it with its own numbers.
    pub file: Option<Node>,
    /// The values of its config, with native keys.
    pub native: Node,
}
