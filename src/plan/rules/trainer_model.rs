//! `trainer-model`: the built-in trainer supports the model's architecture.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "trainer-model",
    severity: Severity::Error,
    summary: "the built-in trainer does not support this model",
    why: "It supports the Llama family: RMSNorm, gated SiLU MLPs, RoPE without scaling, no biases, no \
dropout, attention over the whole sample. Another architecture, or a sample longer than a sliding \
window, would be another model under the same name.",
    upstream: "None: it concerns Evenkeel's built-in trainer.",
    wrong: Example {
        flags: "",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  model:\n    config: {model_type: qwen2, hidden_size: 64, num_hidden_layers: 2, vocab_size: 256}\n"
        ),
    },
    right: Example {
        flags: "",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  model:\n    config: {model_type: llama, hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n"
        ),
    },
    check: Check::Trainer(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::reported;
    use crate::recipe::Severity::Error;

    #[test]
    fn another_architecture_fails_only_a_launch() {
        assert_eq!(reported("trainer-model"), [vec![], vec![Error]]);
    }
}
