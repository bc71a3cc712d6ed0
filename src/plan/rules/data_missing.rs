//! `data-missing`: the training data are on this machine.

use super::{Check, Example, Rule, surveyed};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "data-missing",
    severity: Severity::Error,
    summary: "the data that the recipe names are not on this machine",
    why: "A run reads its data from files: JSONL, Parquet, plain text or token ids. Nothing is \
downloaded, so fetch a data set of the hub first and give its path, for example \
`dataset_mixture.datasets.0.id=chat.jsonl` in the handbook's dialect. A plan only warns, \
because it may be for another machine. It does not report data sets of the hub, which other trainers \
download.",
    upstream: "`datasets` downloads from the hub when the job starts, on every machine, and fails there if \
it cannot.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data:\n    train: [{path: data/nowhere/train.jsonl}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data:\n    train: [{path: synthetic}]\n"
        ),
    },
    check: Check::PlanWarning(surveyed),
};

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::reported;
    use crate::recipe::Severity::{Error, Warning};

    #[test]
    fn missing_data_fail_a_launch_and_not_a_plan() {
        assert_eq!(reported("data-missing"), [vec![Warning], vec![Error]]);
    }
}
