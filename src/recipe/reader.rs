//! What a dialect has to offer.
//!
//! A new dialect is one file with a [`Reader`] in it and one line in [`super::readers`].

use std::path::Path;

use super::dialect::Dialect;
use super::node::Node;
use super::reading::Reading;

/// How sure a reader is that a file is its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// Some keys fit.
    Possible,
    /// Keys that only this dialect has.
    Likely,
    /// The file says so itself.
    Certain,
}

/// Why a reader takes a file for its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detected {
    /// How sure it is.
    pub confidence: Confidence,
    /// One line for the user.
    pub reason: String,
}

/// One dialect.
pub trait Reader: Sync {
    /// Its name.
    fn dialect(&self) -> Dialect;

    /// Whether a file looks like this dialect.
    fn detect(&self, root: &Node, path: &Path) -> Option<Detected>;

    /// The path in the file of a key that an override names.
    fn override_path(&self, key: &str) -> String {
        key.to_owned()
    }

    /// Translates to a tree with native keys ([`super::Spec`]'s). Values that a person wrote keep
    /// their places and their upstream keys ([`Node::key`]); the dialect's own defaults have no
    /// key. Problems go to `reading`; errors among them end the reading.
    fn translate(&self, root: &Node, path: &Path, reading: &mut Reading) -> Node;
}

/// The name of a dialect that is known but not read yet, for the message that refuses it.
pub(super) fn others(root: &Node) -> Option<&'static str> {
    let has = |keys: &[&str]| keys.iter().all(|key| root.get(key).is_some());
    if has(&["defaults", "model", "loss"]) || has(&["defaults", "exp_name"]) {
        return Some("a Hydra config (HALOs or direct-preference-optimization)");
    }
    if has(&["zero_optimization"])
        || has(&["train_micro_batch_size_per_gpu"])
        || has(&["train_batch_size"])
    {
        return Some("a DeepSpeed config");
    }
    None
}
