//! What a sample of the data is.
//!
//! A pair's sample holds the tokens of its two rows, one after the other: the prompt with the chosen completion, then the
//! prompt with the rejected one. Only completions carry loss, and the first token of a row never does, so that the marks of
//! loss tell where the second row begins. A sample with a label has a token more after its row, which carries no loss: 1 for
//! a desirable completion, 0 for another. If rows are decoded, the tokens of its prompt and of its completion follow, of which
//! mismatched rows are made.

use serde::{Deserialize, Serialize};

use crate::recipe::schema::spec::Objective;

/// What a sample is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// One row of text, a prompt with its completion, or a conversation.
    #[default]
    Text,
    /// A chosen and a rejected row.
    Pair,
    /// A row with a label.
    Labelled,
}

impl Kind {
    /// The samples of an objective.
    pub fn of(objective: Objective) -> Kind {
        match objective {
            Objective::Dpo | Objective::Orpo | Objective::Cpo | Objective::Simpo => Kind::Pair,
            Objective::Kto => Kind::Labelled,
            _ => Kind::Text,
        }
    }

    /// The columns that hold a sample, by name: the first of these that a row has.
    pub(super) fn columns(self) -> &'static [&'static [&'static str]] {
        match self {
            Kind::Text => &[&["messages"], &["prompt", "completion"], &["text"]],
            Kind::Pair => &[&["prompt", "chosen", "rejected"], &["chosen", "rejected"]],
            Kind::Labelled => &[
                &["prompt", "completion", "label"],
                &["prompt", "chosen", "rejected"],
                &["chosen", "rejected"],
            ],
        }
    }

    pub(super) fn is_text(&self) -> bool {
        *self == Kind::Text
    }

    /// Rows that a sample has in a micro-batch.
    pub fn rows(self) -> u64 {
        match self {
            Kind::Text | Kind::Labelled => 1,
            Kind::Pair => 2,
        }
    }

    /// Most tokens of a sample whose rows have at most `row` tokens, without what follows a label.
    pub(super) fn longest(self, row: u64) -> u64 {
        match self {
            Kind::Text => row,
            Kind::Pair => 2 * row,
            Kind::Labelled => row + 1,
        }
    }
}
