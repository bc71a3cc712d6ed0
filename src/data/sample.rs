//! A training sample: token ids and the mask of the loss.

use crate::engine::IGNORE;

/// One sample: tokens, and for each of them whether a model learns to predict it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// Token ids; at least two.
    pub tokens: Vec<u32>,
    /// Whether each token carries loss; as long as `tokens`. The first token never does, whatever its value
    /// here: no token precedes it.
    pub loss_mask: Vec<bool>,
}

impl Sample {
    pub(super) fn with_capacity(tokens: usize) -> Sample {
        Sample {
            tokens: Vec::with_capacity(tokens),
            loss_mask: Vec::with_capacity(tokens),
        }
    }

    pub(super) fn push(&mut self, id: u32, target: bool) {
        self.tokens.push(id);
        self.loss_mask.push(target);
    }

    /// Inputs and targets, both one shorter than the sample: the input at position t predicts the token at t
    /// + 1. This is the only place that shifts tokens.
    pub(super) fn next_token(&self) -> impl Iterator<Item = (u32, u32)> {
        let next = self.tokens.iter().zip(&self.loss_mask).skip(1);
        self.tokens
            .iter()
            .zip(next)
            .map(|(&input, (&next, &target))| (input, if target { next } else { IGNORE }))
    }
}
