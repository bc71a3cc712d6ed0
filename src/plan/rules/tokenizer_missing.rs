//! `tokenizer-missing`: the tokenizer is on this machine.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "tokenizer-missing",
    severity: Severity::Error,
    summary: "the tokeniser that the recipe names is not on this machine",
    why: "A `tokenizer.json`, the recipe's own or the model's, turns text into tokens, or the built-in \
vocabulary of bytes does: `tokenizer.path=byte`, in upstream dialects `evenkeel.tokenizer.path=byte` or \
`tokenizer_name_or_path: byte`. Nothing is downloaded. A plan only warns, because it may \
be for another machine. It does not report models of the hub, which have a tokeniser.",
    upstream: "transformers 5.23.0, `AutoTokenizer`: downloads from the hub when the job starts.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  tokenizer: {path: nowhere/tokenizer.json}\n  data:\n    train: [{path: chat.jsonl}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  tokenizer: {path: byte}\n  data:\n    train: [{path: chat.jsonl}]\n"
        ),
    },
    check: Check::PlanWarning(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::reported;
    use crate::recipe::Severity::{Error, Warning};

    #[test]
    fn a_missing_tokenizer_fails_a_launch_and_not_a_plan() {
        assert_eq!(reported("tokenizer-missing"), [vec![Warning], vec![Error]]);
    }
}
