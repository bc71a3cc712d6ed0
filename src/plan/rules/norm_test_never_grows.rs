//! `norm-test-never-grows`: η is below 1, so that the test can fail.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::{BatchSchedule, Estimator};

pub(super) const RULE: Rule = Rule {
    id: "norm-test-never-grows",
    severity: Severity::Warning,
    summary: "with η of 1 or more the norm test never fails",
    why: "The test fails, and the batch grows, if the share of noise in the gradient's squared \
norm is above η². That share is at most 1, so a test with η ≥ 1 always passes and the batch never \
grows. Useful values are between 0.05 and 0.5. The batch settles where η² = noise scale / (noise \
scale + batch).",
    upstream: "arXiv 2412.21124: η in (0, 1).",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule: {kind: norm-test, eta: 1.5}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule: {kind: norm-test, eta: 0.15}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    if let BatchSchedule::NormTest(test) = &case.spec().schedule
        && test.estimator == Estimator::Unbiased
        && test.eta >= 1.0
    {
        findings.at(
            &["schedule.eta"],
            format!(
                "{} {} is not below 1: the test never fails",
                case.key("schedule.eta"),
                test.eta
            ),
            "use a value between 0.05 and 0.5",
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{norm_test, only};
    use crate::recipe::schema::spec::Estimator;

    #[test]
    fn only_the_unbiased_test_is_bounded_by_one() {
        let of = |eta, estimator| {
            let recipe = norm_test(|test| (test.eta, test.estimator) = (eta, estimator));
            only("norm-test-never-grows", &recipe, &PlanRequest::gpus(4)).len()
        };
        assert_eq!(of(1.0, Estimator::Unbiased), 1);
        assert_eq!(of(0.99, Estimator::Unbiased), 0);
        assert_eq!(of(1.0, Estimator::Paper), 0);
    }
}
