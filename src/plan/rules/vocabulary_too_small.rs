//! `vocabulary-too-small`: the model has an embedding for every token id.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "vocabulary-too-small",
    severity: Severity::Error,
    summary: "the data contain token ids without an embedding in the model",
    why: "Every token id needs a row of the embedding. The built-in vocabulary of bytes has 259 \
ids, the synthetic language one for each word; data preparation counts those of a `tokenizer.json`.",
    upstream: "PyTorch: an index out of range in the first forward pass, on a GPU a device-side assertion.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 128}\n  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 256}}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 256}}]\n"
        ),
    },
    check: Check::Plan(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::reported;
    use crate::recipe::Severity::Error;

    #[test]
    fn an_id_without_an_embedding_is_refused_for_every_trainer() {
        assert_eq!(reported("vocabulary-too-small"), [vec![Error], vec![Error]]);
    }
}
