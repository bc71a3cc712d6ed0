//! `max-batch-below-base`: the norm test's maximum is above the base batch.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::BatchSchedule;

pub(super) const RULE: Rule = Rule {
    id: "max-batch-below-base",
    severity: Severity::Error,
    summary: "the norm test's maximum batch is below the base batch",
    why: "The norm test starts at the recipe's global batch and lets it grow up to \
`schedule.max_batch`, rounded down to a multiple of the quantum. A maximum below the base batch is an \
error. A maximum less than one quantum above it allows no growth: a warning.",
    upstream: "arXiv 2412.21124: tests stop at the maximum batch.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule: {kind: norm-test, max_batch: 128}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule: {kind: norm-test, max_batch: 8192}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (BatchSchedule::NormTest(test), Some(global)) =
        (&case.spec().schedule, case.draft.global_batch_size)
    else {
        return;
    };
    let paths = ["schedule.max_batch", "schedule", "batch.global"];
    let (key, max) = (case.key("schedule.max_batch"), test.max_batch);
    if max < global {
        findings.at(
            &paths,
            format!("{key} {max} is below the base batch {global}"),
            format!("raise it above {global}, or lower the global batch"),
        );
    } else if let Some(quantum) = case.draft.quantum
        && max - max % quantum <= global
    {
        findings.add(
            Severity::Warning,
            &paths,
            format!(
                "the batch can never grow: {key} {max} leaves no multiple of the quantum {quantum} \
                 above the base batch {global}"
            ),
            format!(
                "raise it to {} or more, or narrow {} and {} for a finer quantum",
                global.saturating_add(quantum),
                case.key("elasticity.min"),
                case.key("elasticity.max")
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{norm_test, only};
    use crate::recipe::Severity;

    #[test]
    fn a_maximum_that_allows_no_growth_is_reported() {
        let of = |max| {
            let recipe = norm_test(|test| test.max_batch = max);
            let found = only("max-batch-below-base", &recipe, &PlanRequest::gpus(4));
            found.first().map(|d| d.severity)
        };
        assert_eq!(of(64), Some(Severity::Error));
        assert_eq!(of(200), Some(Severity::Warning));
        assert_eq!(of(256), None);
    }
}
