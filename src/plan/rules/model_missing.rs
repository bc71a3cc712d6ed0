//! `model-missing`: the model is on this machine.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "model-missing",
    severity: Severity::Error,
    summary: "the model that the recipe names is not on this machine",
    why: "A run starts from weights in a directory, or from random weights of a shape that the recipe gives. \
Nothing is downloaded: give the directory of a download, or start from random weights with \
`model.init=random` (`evenkeel.model.init=random` in upstream dialects). A plan only warns, because it \
may be for another machine. It does not report models of the hub, which other trainers download.",
    upstream: "transformers 5.23.0, `from_pretrained`: downloads from the hub when the job starts, on every \
machine.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  model: {path: models/that/does-not/exist}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n"
        ),
    },
    check: Check::PlanWarning(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::reported;
    use crate::recipe::Severity::{Error, Warning};

    #[test]
    fn a_missing_model_fails_a_launch_and_not_a_plan() {
        assert_eq!(reported("model-missing"), [vec![Warning], vec![Error]]);
    }
}
