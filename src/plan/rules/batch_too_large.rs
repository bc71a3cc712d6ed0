//! `batch-too-large`: micro-batch × accumulation × ranks stays within the limit.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::draft::MAX_BATCH;
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "batch-too-large",
    severity: Severity::Error,
    summary: "micro-batch × accumulation × ranks exceeds the largest global batch",
    why: "Each number may be in its range and their product still be absurd, most often because a \
recipe gives a global batch where a per-device one belongs. The limit is 2^32 samples a step.",
    upstream: "None: upstream uses the product and runs out of data or memory.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {per_device_batch_size: 1048576, accumulation: 1048576, gpus: 8}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!("  batch: {per_device_batch_size: 16, accumulation: 4, gpus: 8}\n"),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let batch = &case.spec().batch;
    let stated = case.request.global_batch_size.or(batch.global);
    let (None, Some(product)) = (stated, case.draft.recipe_product) else {
        return;
    };
    if product > u128::from(MAX_BATCH) {
        let message = format!(
            "{} ranks × {} × {} is a global batch of {product} samples, more than {MAX_BATCH}",
            case.draft.recipe_ranks.unwrap_or(1),
            batch.per_device_batch_size.unwrap_or(1),
            batch.accumulation.unwrap_or(1)
        );
        let help = format!(
            "lower {} or {}: both count for one device",
            case.key("batch.per_device_batch_size"),
            case.key("batch.accumulation")
        );
        findings.at(
            &["batch.per_device_batch_size", "batch.accumulation"],
            message,
            help,
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{only, recipe};
    use crate::plan::{PlanRequest, plan};

    #[test]
    fn absurd_products_are_refused_with_the_number() {
        let mut recipe = recipe();
        recipe.spec.batch.global = None;
        recipe.spec.batch.per_device_batch_size = Some(1 << 32);
        recipe.spec.batch.accumulation = Some(1 << 32);
        recipe.spec.batch.gpus = Some(1 << 20);
        let request = PlanRequest::gpus(8);
        let found = only("batch-too-large", &recipe, &request);
        assert!(found[0].message.contains(&(1_u128 << 84).to_string()));
        assert!(plan(&recipe, &request).is_err());
    }
}
