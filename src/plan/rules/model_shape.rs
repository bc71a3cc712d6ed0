//! `model-shape`: the model's sizes are consistent.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "model-shape",
    severity: Severity::Error,
    summary: "the model's sizes are inconsistent",
    why: "The sizes of the recipe's `model.config`, or of the `config.json` in the model's directory, must \
describe a model. None of them is 0 or beyond the memory of any machine. The heads divide the width, and the \
key-value heads divide the heads. The width of a head is even, for RoPE.",
    upstream: "transformers 5.23.0, `modeling_llama.py` and `configuration_llama.py`: raises on heads that do \
not divide the width, divides by 0, or fails in the first forward pass on the other errors.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 6, num_hidden_layers: 2, vocab_size: 256}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n"
        ),
    },
    check: Check::Plan(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::reported;
    use crate::recipe::Severity::Error;

    #[test]
    fn an_inconsistent_shape_is_refused_for_every_trainer() {
        assert_eq!(reported("model-shape"), [vec![Error], vec![Error]]);
    }
}
