//! `sharded-workers`: the norm test uses only gradients that sharding keeps.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::{BatchSchedule, Estimator, Groups, Strategy};

pub(super) const RULE: Rule = Rule {
    id: "sharded-workers",
    severity: Severity::Error,
    summary: "the norm test needs gradients that sharding does not keep",
    why: "`estimator: paper` and `groups: workers` compare each worker's gradient over all of its \
micro-batches. FSDP and ZeRO-2 reduce and scatter every micro-batch's gradient at once: \
no rank holds a worker's sum, only a shard of the sum over all workers. `unsharded_accumulation: true` \
keeps it, at the cost of a whole gradient in memory on every rank. Otherwise the test is \
refused, because it would use the wrong gradients. Micro-batches as groups need none of that.",
    upstream: "arXiv 2412.21124, FSDP-Norm: unsharded local gradients, with one \
micro-batch a step or with unsharded accumulation.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {strategy: fsdp}\n  schedule: {kind: norm-test, estimator: paper, eta: 0.1}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {strategy: fsdp}\n  schedule: {kind: norm-test, estimator: paper, eta: 0.1, unsharded_accumulation: true}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (BatchSchedule::NormTest(test), Some(split)) = (&case.spec().schedule, case.draft.split)
    else {
        return;
    };
    let strategy = case.spec().parallel.strategy;
    let sharded = matches!(strategy, Strategy::Fsdp | Strategy::Zero2);
    let (path, asked) = match (test.estimator, test.groups) {
        (Estimator::Paper, _) => ("schedule.estimator", "`estimator: paper`"),
        (Estimator::Unbiased, Groups::Workers) => ("schedule.groups", "`groups: workers`"),
        (Estimator::Unbiased, Groups::MicroBatches) => return,
    };
    let accumulation = test
        .max_batch
        .div_ceil(split.ranks * split.per_device_batch_size);
    if sharded && accumulation > 1 && !test.unsharded_accumulation {
        findings.at(
            &[path, "schedule"],
            format!(
                "{asked} needs each worker's gradient over up to {accumulation} micro-batches, \
                 which sharding does not keep"
            ),
            format!(
                "set {} (a whole gradient on every rank), or use {} with {}",
                case.set("schedule.unsharded_accumulation", "true"),
                case.set("schedule.estimator", "unbiased"),
                case.set("schedule.groups", "micro-batches")
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{norm_test, only};
    use crate::recipe::schema::spec::{Estimator, Groups, Strategy};

    #[test]
    fn workers_under_sharding_need_unsharded_accumulation() {
        let of = |strategy, change: &dyn Fn(&mut crate::recipe::schema::spec::NormTest)| {
            let mut recipe = norm_test(change);
            recipe.spec.parallel.strategy = strategy;
            only("sharded-workers", &recipe, &PlanRequest::gpus(4)).len()
        };
        assert_eq!(
            of(Strategy::Fsdp, &|test| test.estimator = Estimator::Paper),
            1
        );
        assert_eq!(
            of(Strategy::Zero2, &|test| test.groups = Groups::Workers),
            1
        );
        assert_eq!(of(Strategy::Ddp, &|test| test.groups = Groups::Workers), 0);
        assert_eq!(of(Strategy::Fsdp, &|_| {}), 0);
        let paid = |test: &mut crate::recipe::schema::spec::NormTest| {
            test.estimator = Estimator::Paper;
            test.unsharded_accumulation = true;
        };
        assert_eq!(of(Strategy::Fsdp, &paid), 0);
    }
}
