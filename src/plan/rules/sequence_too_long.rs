//! `sequence-too-long`: the model has a position for every token of a sample.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "sequence-too-long",
    severity: Severity::Error,
    summary: "samples are longer than the model's number of positions",
    why: "A model has `max_position_embeddings` positions. It was never trained on positions beyond them, so \
longer samples are refused rather than truncated or extrapolated. For a hub model that is not on this \
machine the number is not known, and the rule checks nothing. Reduce \
`data.sequence_length` (upstream's `max_length`), or state the model's positions in \
`model.config`.",
    upstream: "transformers 5.23.0: the tokenizer warns once, and RoPE extrapolates beyond the trained \
positions.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data: {sequence_length: 4096}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256, max_position_embeddings: 2048}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data: {sequence_length: 2048}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256, max_position_embeddings: 2048}\n"
        ),
    },
    check: Check::Plan(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::reported;
    use crate::recipe::Severity::Error;

    #[test]
    fn a_sample_beyond_the_positions_is_refused_for_every_trainer() {
        assert_eq!(reported("sequence-too-long"), [vec![Error], vec![Error]]);
    }
}
