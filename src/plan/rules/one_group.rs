//! `one-group`: the norm test has at least two groups.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::{BatchSchedule, Estimator, Groups};

pub(super) const RULE: Rule = Rule {
    id: "one-group",
    severity: Severity::Error,
    summary: "the norm test has only one group",
    why: "The norm test estimates the variance of the gradient from the differences between groups: all \
micro-batches of all workers, or the workers themselves. A single group has no variance. A run \
with a single worker and `groups: workers` (or `estimator: paper`), or with a single micro-batch a \
step, has no estimate, and the batch silently never grows.",
    upstream: "arXiv 2412.21124: the variance over J workers; norm-test code that \
divides by J − 1 fails at J = 1.",
    wrong: Example {
        flags: "--gpus 1",
        recipe: native!(
            "  batch: {global: 64, per_device_batch_size: 64}\n  schedule: {kind: norm-test}\n"
        ),
    },
    right: Example {
        flags: "--gpus 1",
        recipe: native!(
            "  batch: {global: 64, per_device_batch_size: 16}\n  schedule: {kind: norm-test}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (BatchSchedule::NormTest(test), Some(split)) = (&case.spec().schedule, case.draft.split)
    else {
        return;
    };
    let workers = test.estimator == Estimator::Paper || test.groups == Groups::Workers;
    if workers && split.ranks < 2 {
        let (paths, asked) = match test.estimator {
            Estimator::Paper => (["schedule.estimator"], "`estimator: paper`"),
            Estimator::Unbiased => (["schedule.groups"], "`groups: workers`"),
        };
        findings.at(
            &paths,
            format!("{asked} compares workers, and this world has 1"),
            format!(
                "use 2 or more data-parallel ranks, or {} with {}",
                case.set("schedule.estimator", "unbiased"),
                case.set("schedule.groups", "micro-batches")
            ),
        );
    } else if !workers && split.micro_batches < 2 {
        findings.at(
            &["batch.per_device_batch_size", "schedule"],
            format!(
                "the norm test compares micro-batches, and a step of {} has 1",
                split.per_device_batch_size * split.micro_batches
            ),
            format!(
                "lower {} below {}",
                case.key("batch.per_device_batch_size"),
                split.per_device_batch_size
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{norm_test, only};
    use crate::recipe::schema::spec::{Estimator, Groups};

    #[test]
    fn one_worker_or_one_micro_batch_is_refused() {
        let found = |recipe: &crate::recipe::Recipe, gpus| {
            only("one-group", recipe, &PlanRequest::gpus(gpus)).len()
        };
        let mut recipe = norm_test(|_| {});
        assert_eq!(found(&recipe, 1), 0);
        recipe.spec.batch.per_device_batch_size = Some(128);
        assert_eq!(found(&recipe, 1), 1);
        assert_eq!(found(&recipe, 2), 0);
        let workers = norm_test(|test| test.groups = Groups::Workers);
        assert_eq!((found(&workers, 1), found(&workers, 2)), (1, 0));
        let paper = norm_test(|test| test.estimator = Estimator::Paper);
        assert_eq!((found(&paper, 1), found(&paper, 2)), (1, 0));
    }
}
