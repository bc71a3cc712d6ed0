//! `model-shape`: the model's sizes fit together.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "model-shape",
    severity: Severity::Error,
    summary: "the model's sizes are no shape that could be computed",
    why: "The sizes of the recipe's `model.config`, or of the `config.json` in the model's directory, must \
be a model: none of them 0 or beyond what any machine holds, the heads dividing the width, the \
key-value heads dividing the heads, an even width of a head for RoPE.",
    upstream: "transformers 5.23.0, `modeling_llama.py` and `configuration_llama.py`: raises on heads that do \
not divide the width, divides by 0, or fails in the first forward pass on the others.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, micro: 16}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 6, num_hidden_layers: 2, vocab_size: 256}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, micro: 16}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n"
        ),
    },
    check: Check::Plan(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::batch::rules::testing::reported;
    use crate::recipe::Severity::Error;

    #[test]
    fn a_shape_that_does_not_fit_is_refused_for_everybody() {
        assert_eq!(reported("model-shape"), [vec![Error], vec![Error]]);
    }
}
