//! `auto-find-shrinks-batch`: upstream's batch finder changes the global batch.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::OomPolicy;
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "auto-find-shrinks-batch",
    severity: Severity::Warning,
    summary: "upstream's `auto_find_batch_size` silently shrinks the global batch",
    why: "When memory runs out, upstream tries again with a smaller per-device batch and leaves \
accumulation as it is, so the global batch shrinks without a message. Evenkeel \
steps down through the divisors of the batch instead and raises accumulation, so the global batch \
stays. `plan --oom-policy transformers` shows upstream's result, step by step.",
    upstream: "accelerate 16cb6eb, `utils/memory.py` (`find_executable_batch_size`): int(0.9 × b) \
on every failure since 1.9.0, before that b // 2. transformers 5.23.0, `training_args.py` \
(`auto_find_batch_size`), and `trainer.py`: has no effect with ZeRO-3. TRL f2cd577, `trainer/grpo_config.py`: \
GRPO refuses it, because a smaller batch no longer holds whole groups.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!("  batch: {global: 128, per_device_batch_size: 16, auto_find: true}\n"),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!("  batch: {global: 128, per_device_batch_size: 16}\n"),
    },
    check: Check::Plan(check),
};

/// Checks an upstream policy requested with `--oom-policy`.
fn check_policy(case: &Case<'_>, findings: &mut Findings<'_>) {
    let policy = case.request.oom_policy;
    let Some(split) = case.draft.split else {
        return;
    };
    let Some(smaller) = policy.smaller(split.per_device_batch_size) else {
        return;
    };
    let passes = split.accumulation();
    let batch = u128::from(split.ranks) * u128::from(smaller) * u128::from(passes);
    let what = match smaller {
        0 => format!("{} is the last micro-batch", split.per_device_batch_size),
        _ => format!(
            "one failure and {} becomes {smaller}, {} × {smaller} × {passes} = {batch} instead of {}",
            split.per_device_batch_size,
            split.ranks,
            split.per_device_batch_size * split.micro_batches
        ),
    };
    findings.at(
        &["batch.per_device_batch_size", "batch.global"],
        format!("upstream's policy shrinks the global batch: {what}"),
        "leave `--oom-policy` out: accumulation then rises and the global batch stays",
    );
}

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    if case.request.oom_policy != OomPolicy::Exact {
        check_policy(case, findings);
    }
    let batch = &case.spec().batch;
    if !batch.auto_find {
        return;
    }
    let lost = match (batch.per_device_batch_size, case.draft.split) {
        (Some(per_device_batch_size), Some(split)) if per_device_batch_size > 1 => {
            let shrunk = per_device_batch_size * 9 / 10;
            let accumulation = split.accumulation();
            format!(
                ": one failure and {per_device_batch_size} becomes {shrunk}, {} × {shrunk} × {accumulation} = {}",
                split.ranks,
                u128::from(split.ranks) * u128::from(shrunk) * u128::from(accumulation)
            )
        }
        _ => String::new(),
    };
    findings.at(
        &["batch.auto_find"],
        format!(
            "{} shrinks the global batch upstream{lost}",
            case.key("batch.auto_find")
        ),
        "remove it: after an out-of-memory error Evenkeel lowers the micro-batch and raises \
         accumulation, so the global batch stays",
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};

    #[test]
    fn message_shows_the_batch_after_one_failure() {
        let mut recipe = recipe();
        recipe.spec.batch.auto_find = true;
        let found = only("auto-find-shrinks-batch", &recipe, &PlanRequest::gpus(8));
        assert!(
            found[0]
                .message
                .ends_with("16 becomes 14, 8 × 14 × 1 = 112"),
            "{}",
            found[0].message
        );
    }
}
