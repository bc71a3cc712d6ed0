//! `paper-eta-out-of-reach`: the paper's estimator can ask for more than the base batch.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::{BatchSchedule, Estimator};

pub(super) const RULE: Rule = Rule {
    id: "paper-eta-out-of-reach",
    severity: Severity::Warning,
    summary: "with few workers the paper's test rarely asks for more than the base batch",
    why: "The test as printed divides the variance between J workers' gradients by ‖ḡ‖², the squared norm \
of their mean ḡ. With b samples a step it lacks the factor b/(J−1). For pure-noise gradients, T·η² is \
about J − 1 on average, whatever the batch: with 4 workers and η 0.2 the test asks for about 75 samples. A \
larger base batch grows only by chance. So the paper's η is not valid for another J or b: \
η_unbiased = η_paper·√(b/(J−1)).",
    upstream: "arXiv 2412.21124, the test as printed.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule: {kind: norm-test, estimator: paper, eta: 0.2}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule: {kind: norm-test, estimator: unbiased, eta: 0.2}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (BatchSchedule::NormTest(test), Some(split)) = (&case.spec().schedule, case.draft.split)
    else {
        return;
    };
    if test.estimator != Estimator::Paper || split.ranks < 2 {
        return;
    }
    let global = (split.per_device_batch_size * split.micro_batches) as f64;
    let others = (split.ranks - 1) as f64;
    let target = others / (test.eta * test.eta);
    if target < global {
        findings.at(
            &["schedule.eta", "schedule.estimator"],
            format!(
                "for pure noise {} workers and η {} ask for about {target:.0} samples, fewer than \
                 the base batch of {global}",
                split.ranks, test.eta
            ),
            format!(
                "use {}, or η below {:.3} with this estimator",
                case.set("schedule.estimator", "unbiased"),
                (others / global).sqrt()
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{norm_test, only};
    use crate::recipe::schema::spec::Estimator;

    #[test]
    fn the_papers_setting_is_out_of_reach() {
        let of = |eta| {
            let mut recipe = norm_test(|test| (test.eta, test.estimator) = (eta, Estimator::Paper));
            recipe.spec.batch.global = Some(256);
            only("paper-eta-out-of-reach", &recipe, &PlanRequest::gpus(4))
        };
        assert!(of(0.2)[0].message.contains("about 75 samples"));
        assert!(of(0.2)[0].help.contains("η below 0.108"));
        assert!(of(0.1).is_empty());
    }
}
