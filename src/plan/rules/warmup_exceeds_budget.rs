//! `warmup-exceeds-budget`: warm-up ends before the budget does.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "warmup-exceeds-budget",
    severity: Severity::Warning,
    summary: "the learning rate is still warming up when the budget ends",
    why: "Warm-up and budget are both counted in samples. If the warm-up is not shorter, the run \
never reaches its peak learning rate and never decays it. The norm test waits for \
the end of the warm-up, so it never lets the batch grow.",
    upstream: "transformers 5.23.0, `optimization.py`: silently trains below the peak.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  budget: {samples: 10000}\n  learning_rate: {warmup_steps: 100}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  budget: {samples: 10000}\n  learning_rate: {warmup_ratio: 0.1}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(horizon) = &case.draft.horizon else {
        return;
    };
    let (Some(warmup), Some(budget)) = (horizon.warmup_samples, horizon.budget_samples) else {
        return;
    };
    if warmup > 0 && warmup >= budget {
        findings.at(
            &[
                "learning_rate.warmup_samples",
                "learning_rate.warmup_steps",
                "learning_rate.warmup_ratio",
            ],
            format!("warm-up takes {warmup} samples, but the budget is {budget}"),
            "shorten the warm-up, or raise the budget",
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};

    #[test]
    fn warm_up_must_end_before_the_budget() {
        let mut recipe = recipe();
        recipe.spec.budget.steps = Some(10);
        let mut of = |steps| {
            recipe.spec.learning_rate.warmup_steps = Some(steps);
            only("warmup-exceeds-budget", &recipe, &PlanRequest::gpus(8)).len()
        };
        assert_eq!((of(0), of(9), of(10)), (0, 0, 1));
    }
}
