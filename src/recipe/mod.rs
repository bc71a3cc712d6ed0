//! Recipe readers: one file per upstream dialect, every one of them to the same [`Recipe`].
//!
//! A reader translates its dialect into a tree with the native recipe's keys whose values still
//! point at the user's own lines; [`native`] turns that tree into a [`Spec`] and the map of
//! places. Nothing here plans, and nothing here looks at hardware.

pub mod diagnostic;
pub mod source;
pub mod spec;

use serde::{Deserialize, Serialize};

pub use diagnostic::{Diagnostic, Located, Severity};
pub use source::{FileId, Place, Places, Sources, Span};
pub use spec::Spec;

/// Which upstream (or our own) way of writing recipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// `evenkeel.dev/v1alpha1`, kind `Recipe`.
    Native,
    /// alignment-handbook and TRL YAML.
    HandbookTrl,
}

/// A recipe that was read: what it says, where it says it, and what was noticed on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// How it was written.
    pub dialect: Dialect,
    /// Why the reader took it for that dialect, one line.
    pub detected: String,
    /// What it says.
    pub spec: Spec,
    /// Where it says it, by native path.
    pub places: Places,
    /// The files that were read.
    pub sources: Sources,
    /// What the reader noticed. Errors of form are never here: they end the reading.
    pub diagnostics: Vec<Diagnostic>,
}

impl Recipe {
    /// Where the value at a native path stood, if anybody wrote it.
    pub fn span(&self, path: &str) -> Option<Span> {
        self.places.get(path).map(|p| p.span)
    }

    /// The key as the user's dialect spells it, for messages; the native path if nobody wrote it.
    pub fn key<'a>(&'a self, path: &'a str) -> &'a str {
        self.places.get(path).map_or(path, |p| p.key.as_str())
    }
}
