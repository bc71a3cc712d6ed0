//! What a dialect has to offer, and the list of those that are read.
//!
//! A new dialect is one file with a [`Reader`] in it and one line in [`READERS`].

use std::path::Path;

use super::Dialect;
use super::diagnostic::Diagnostic;
use super::native::Native;
use super::node::Node;
use super::scalar::Schema;

/// Every dialect that is read. When several are equally sure, the first wins.
pub const READERS: &[&dyn Reader] = &[&Native];

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

/// What a reader makes of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Translation {
    /// A tree with native keys ([`super::Spec`]'s), whose values keep the places and the upstream
    /// keys ([`Node::key`]) of what they came from.
    pub native: Node,
}

/// One dialect.
pub trait Reader: Sync {
    /// Its name.
    fn dialect(&self) -> Dialect;

    /// How its loader resolves scalars.
    fn schema(&self) -> Schema;

    /// Whether a file looks like this dialect.
    fn detect(&self, root: &Node, path: &Path) -> Option<Detected>;

    /// The path in the file of a key that an override names.
    fn override_path(&self, key: &str) -> String {
        key.to_owned()
    }

    /// Translates to native keys. Problems go to `diagnostics`; errors among them end the reading.
    fn translate(&self, root: &Node, path: &Path, diagnostics: &mut Vec<Diagnostic>)
    -> Translation;
}
