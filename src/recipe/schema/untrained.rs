//! Keys by which the built-in trainer does not train.

use crate::recipe::syntax::source::Span;

/// What the built-in trainer does with a known key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    Read,
    None,
    /// Only these values, empty ones, and mappings of them change nothing.
    Unsupported(&'static [&'static str]),
}

/// A key of an upstream recipe by which the built-in trainer does not train.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Untrained {
    pub key: String,
    /// The value as written.
    pub value: String,
    /// The place of the key.
    pub span: Span,
    pub reason: UntrainedReason,
}

/// The reason for which the built-in trainer does not train by a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UntrainedReason {
    /// It changes no weights, or only by rounding.
    NoEffect,
    /// It would change the weights. An override such as `group_by_length=false` leaves them.
    Unsupported(Option<String>),
    /// Upstream's versions do not have it: a program may define it.
    Unknown,
}
