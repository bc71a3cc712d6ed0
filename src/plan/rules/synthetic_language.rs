//! `synthetic-language`: the synthetic language can be learnt.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "synthetic-language",
    severity: Severity::Error,
    summary: "the synthetic language is mostly noise, or is not the only source",
    why: "The synthetic language has a known entropy, the floor of the loss. It is worth learning if that \
floor is well below the loss before training: at most half of ln V nats for V words, with at \
least 2 successors of every word. A `branching` that is too large makes it noise. It must be the only \
source: with files its floor would mean nothing.",
    upstream: "None: the language exists only in Evenkeel.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 64, branching: 64}}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 64, branching: 4}}]\n"
        ),
    },
    check: Check::Plan(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::reported;
    use crate::recipe::Severity::Error;

    #[test]
    fn a_language_of_noise_is_refused_for_every_trainer() {
        assert_eq!(reported("synthetic-language"), [vec![Error], vec![Error]]);
    }
}
