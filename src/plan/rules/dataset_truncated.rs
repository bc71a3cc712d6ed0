//! `dataset-truncated`: an epoch drops no samples.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "dataset-truncated",
    severity: Severity::Warning,
    summary: "every epoch drops the samples that do not fill its last batch",
    why: "With `last_batch: drop` an epoch ends at the last whole batch and drops the samples after it; \
a larger global batch drops more. With `last_batch: \
wrap`, the default, the next epoch fills up the batch and no sample is dropped.

HALOs and direct-preference-optimization drop samples without a key for it. HALOs on one device runs \
a smaller last step on the remainder. Evenkeel drops it in every world, so that the steps do not \
depend on the world.",
    upstream: "torch `DataLoader(drop_last=True)`, which transformers 5.23.0 calls \
`dataloader_drop_last`. Without it transformers runs a smaller last step \
(`trainer.py`: the remainder of the epoch over accumulation), so its last step of an epoch has \
another global batch. HALOs 4831988, `train/dataloader.py` \
(`get_process_data`): ⌊n / B⌋ · B samples in a world of more than one. direct-preference-optimization f8b8c0f, \
`preference_datasets.py` (`get_batch_iterator`): begins every epoch with an empty batch.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16, last_batch: drop}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 1000}}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16, last_batch: wrap}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 1000}}]\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some((samples, horizon, global)) = case.known_lengths() else {
        return;
    };
    let dropped = horizon.dropped_samples;
    // With less than one batch, `dataset-smaller-than-batch` reports it.
    if dropped > 0 && samples > dropped {
        findings.at(
            &["batch.last_batch"],
            format!(
                "{samples} samples are {} batches of {global}: every epoch drops {dropped}",
                samples / global
            ),
            format!(
                "fill the last batch from the next epoch with {}, or choose a divisor of {samples}",
                wrapping(case)
            ),
        );
    }
}

/// The setting that drops nothing, in the recipe's dialect; upstream dialects use a boolean.
pub(super) fn wrapping(case: &Case<'_>) -> String {
    let path = "batch.last_batch";
    match &*case.recipe.key(path) {
        "dataloader_drop_last" => case.set(path, "false"),
        _ => case.set(path, "wrap"),
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::schema::spec::LastBatch;

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
            "1000 samples are 7 batches of 128: every epoch drops 104"
        );
        request.data_samples = Some(1024);
        assert!(only("dataset-truncated", &recipe, &request).is_empty());
    }
}
