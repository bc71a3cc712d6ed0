//! `stage-shares`: the shares of all stages add up to the whole budget.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::BatchSchedule;

/// Tolerance of the sum: shares are decimals.
const TOLERANCE: f64 = 1e-6;

pub(super) const RULE: Rule = Rule {
    id: "stage-shares",
    severity: Severity::Error,
    summary: "the shares of a stage-wise schedule do not add up to 1",
    why: "Every stage takes its share of the sample budget, so the shares must add up to 1. A \
smaller sum leaves samples without a batch, a larger sum leaves stages without samples.",
    upstream: "arXiv 2412.21124, the stage-wise baseline: 2.5 % of the samples at 2048, 2.5 % at 4096, 95 % at 8192.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule:\n    kind: stages\n    stages: [{share: 0.5, batch: 256}, {share: 0.4, batch: 512}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule:\n    kind: stages\n    stages: [{share: 0.5, batch: 256}, {share: 0.5, batch: 512}]\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let BatchSchedule::Stages { stages } = &case.spec().schedule else {
        return;
    };
    let sum: f64 = stages.iter().map(|stage| stage.share).sum();
    if !stages.is_empty() && (sum - 1.0).abs() > TOLERANCE {
        findings.at(
            &["schedule.stages", "schedule"],
            format!(
                "the shares of {} add up to {sum}",
                case.key("schedule.stages")
            ),
            "make them add up to 1",
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::schema::spec::{BatchSchedule, Stage};

    #[test]
    fn shares_are_the_whole_budget() {
        let of = |shares: &[f64]| {
            let mut recipe = recipe();
            let stages = shares.iter().map(|&share| Stage { share, batch: 128 });
            recipe.spec.schedule = BatchSchedule::Stages {
                stages: stages.collect(),
            };
            only("stage-shares", &recipe, &PlanRequest::gpus(4)).len()
        };
        assert_eq!(of(&[0.025, 0.025, 0.95]), 0);
        assert_eq!(of(&[0.1; 10]), 0);
        assert_eq!(of(&[0.5, 0.4]), 1);
        assert_eq!(of(&[1.0, 0.5]), 1);
    }
}
