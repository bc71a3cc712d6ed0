//! `dataset-truncated`: samples that an epoch leaves out.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "dataset-truncated",
    severity: Severity::Warning,
    summary: "samples that do not fill the last batch of an epoch are not trained on",
    why: "With `last_batch: drop` an epoch ends at the last whole batch. What is left over is not \
trained on in that epoch, and the larger the global batch, the more that is. With `last_batch: \
wrap`, the default, the batch is filled up from the next epoch and nothing is left out.

HALOs and direct-preference-optimization drop without a key that says so. HALOs on one device makes a \
smaller last step of the rest; here the rest is left out in every world, so that the steps do not \
depend on it.",
    upstream: "torch `DataLoader(drop_last=True)`, which transformers 5.23.0 calls \
`dataloader_drop_last`. Without it transformers takes a smaller last step \
(`trainer.py`: the remainder of the epoch over accumulation), so its last step of an epoch has \
another global batch. HALOs 4831988, `train/dataloader.py` \
(`get_process_data`): ⌊n / B⌋ · B samples in a world of more than one. direct-preference-optimization f8b8c0f, \
`preference_datasets.py` (`get_batch_iterator`): begins every epoch with an empty batch.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, micro: 16, last_batch: drop}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 1000}}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, micro: 16, last_batch: wrap}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 1000}}]\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some((samples, horizon, global)) = case.known_lengths() else {
        return;
    };
    let dropped = horizon.dropped_samples;
    // With less than one batch nothing is left; `dataset-smaller-than-batch` says so.
    if dropped > 0 && samples > dropped {
        findings.at(
            &["batch.last_batch"],
            format!(
                "{samples} samples are {} batches of {global}: every epoch leaves out {dropped}",
                samples / global
            ),
            format!(
                "fill the last batch from the next epoch with {}, or choose a divisor of {samples}",
                wrapping(case)
            ),
        );
    }
}

/// How to say in the recipe's dialect that nothing is dropped: upstream by a truth value.
pub(super) fn wrapping(case: &Case<'_>) -> String {
    let path = "batch.last_batch";
    match &*case.recipe.key(path) {
        "dataloader_drop_last" => case.set(path, "false"),
        _ => case.set(path, "wrap"),
    }
}

#[cfg(test)]
mod tests {
    use crate::batch::PlanRequest;
    use crate::batch::rules::testing::{only, recipe};
    use crate::recipe::spec::LastBatch;

    #[test]
    fn dropped_samples_are_counted() {
        let mut recipe = recipe();
        let mut request = PlanRequest::gpus(8);
        request.data_samples = Some(1000);
        assert!(only("dataset-truncated", &recipe, &request).is_empty());
        recipe.spec.batch.last_batch = LastBatch::Drop;
        let found = only("dataset-truncated", &recipe, &request);
        assert_eq!(
            found[0].message,
            "1000 samples are 7 batches of 128: every epoch leaves out 104"
        );
        request.data_samples = Some(1024);
        assert!(only("dataset-truncated", &recipe, &request).is_empty());
    }
}
