//! Keys by which the built-in trainer does not train.

use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;

/// What the built-in trainer does with a known key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    Read,
    None,
    /// Only these values, empty ones, and mappings of them change nothing.
    Unsupported(&'static [&'static str]),
}

/// The keys of a dialect, by what the built-in trainer does with them. A group means all keys below it.
pub(crate) struct Keys {
    pub read: Words,
    /// Keys that change no weights, or only by rounding: logs, names, caches, memory, and settings of what another key switches
    /// on.
    pub without_effect: Words,
    /// Keys that change the weights, each with the values that do not, the first one for messages.
    pub unsupported: &'static [(&'static str, &'static [&'static str])],
}

impl Keys {
    /// What the built-in trainer does with a key; `None`: it is not among these.
    pub fn effect(&self, key: &str) -> Option<Effect> {
        let unsupported = self.unsupported.iter().find(|(name, _)| *name == key);
        let above = key.rsplit_once('.').map_or("", |(above, _)| above);
        match unsupported {
            Some((_, neutral)) => Some(Effect::Unsupported(neutral)),
            None if self.read.has(key) => Some(Effect::Read),
            None if self.without_effect.has(key) || self.without_effect.has(above) => {
                Some(Effect::None)
            }
            None => None,
        }
    }
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
    /// As [`UntrainedReason::NoEffect`], except for the part with this name.
    NoEffectExcept(&'static str),
    /// It would change the weights. An override such as `group_by_length=false` leaves them.
    Unsupported(Option<String>),
    /// Upstream's versions do not have it: a program may define it.
    Unknown,
}
