//! `budget-missing`: a launched run has a budget.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "budget-missing",
    severity: Severity::Error,
    summary: "the recipe does not say how long to train",
    why: "A plan needs no budget, a run does: the budget sets the learning rate schedule, the stages of \
a batch schedule and the end of training. Give samples, steps of the global batch, or epochs.",
    upstream: "transformers 5.23.0, `training_args.py`: 3 epochs by default. The readers of its dialects \
use the same default.",
    wrong: Example {
        flags: "",
        recipe: native!("  batch: {global: 128, per_device_batch_size: 16}\n"),
    },
    right: Example {
        flags: "",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  budget: {samples: 100000}\n"
        ),
    },
    check: Check::Trainer(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let budget = &case.spec().budget;
    // `global-batch-unknown` covers a config of `accelerate launch`, which is not a recipe.
    let recipe = case.recipe.dialect != Dialect::Accelerate;
    if recipe && budget.samples.is_none() && budget.steps.is_none() && budget.epochs.is_none() {
        findings.at(
            &["budget"],
            "the recipe does not say how long to train",
            format!(
                "give {}, {} or {}",
                case.key("budget.samples"),
                case.key("budget.steps"),
                case.key("budget.epochs")
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{launched, recipe};

    #[test]
    fn a_run_needs_a_budget_and_a_plan_does_not() {
        let mut recipe = recipe();
        assert_eq!(launched("budget-missing", &recipe).len(), 1);
        recipe.spec.budget.epochs = Some(1.0);
        assert!(launched("budget-missing", &recipe).is_empty());
    }
}
