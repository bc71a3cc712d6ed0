//! `dataset-smaller-than-batch`: the data fill at least one global batch.

use super::dataset_truncated::wrapping;
use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::util::format::count;

pub(super) const RULE: Rule = Rule {
    id: "dataset-smaller-than-batch",
    severity: Severity::Error,
    summary: "the data set holds fewer samples than one global batch",
    why: "With `last_batch: drop` such an epoch has no batch, and the run trains on nothing: an error. \
With `last_batch: wrap` one step sees the same samples several times, which is rarely intended: a \
warning.",
    upstream: "transformers 5.23.0, `trainer.py`: with `dataloader_drop_last` the loader is empty \
and training ends at once.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16, last_batch: drop}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 100}}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 64, per_device_batch_size: 16, last_batch: drop}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 100}}]\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some((samples, horizon, global)) = case.known_lengths() else {
        return;
    };
    if samples >= global {
        return;
    }
    let message = format!(
        "the data hold {}, one global batch takes {global}",
        count(samples, "sample")
    );
    let smaller = format!("a global batch of {samples} or less, or more data");
    if samples == 0 {
        findings.at(
            &["data.train"],
            "the data hold no samples",
            "give other data",
        );
    } else if horizon.dropped_samples > 0 {
        let help = format!("use {}, {smaller}", wrapping(case));
        findings.at(&["batch.last_batch", "data.train"], message, help);
    } else {
        let message = format!("{message}: a step sees the same sample more than once");
        let help = format!("use {smaller}");
        findings.add(
            Severity::Warning,
            &["data.train", "batch.global"],
            message,
            help,
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Severity;
    use crate::recipe::schema::spec::LastBatch;

    #[test]
    fn an_epoch_without_a_batch_is_refused() {
        let mut recipe = recipe();
        let mut of = |samples, last_batch| {
            recipe.spec.batch.last_batch = last_batch;
            let request = PlanRequest {
                data_samples: Some(samples),
                ..PlanRequest::gpus(8)
            };
            let found = only("dataset-smaller-than-batch", &recipe, &request);
            found.first().map(|d| d.severity)
        };
        assert_eq!(of(100, LastBatch::Drop), Some(Severity::Error));
        assert_eq!(of(100, LastBatch::Wrap), Some(Severity::Warning));
        assert_eq!(of(0, LastBatch::Wrap), Some(Severity::Error));
        assert_eq!(of(128, LastBatch::Drop), None);
    }
}
