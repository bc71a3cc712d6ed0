//! A token of a row.

/// A token and whether it carries loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    /// Id in the vocabulary.
    pub id: u32,
    /// Whether a model learns to predict it.
    pub target: bool,
}
