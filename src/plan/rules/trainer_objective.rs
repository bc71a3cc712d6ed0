//! `trainer-objective`: the built-in trainer supports the recipe's objective.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::Objective;

/// Objectives of the built-in trainer.
pub(super) const TRAINED: [Objective; 2] = [Objective::LanguageModelling, Objective::Sft];

pub(super) const RULE: Rule = Rule {
    id: "trainer-objective",
    severity: Severity::Error,
    summary: "the built-in trainer does not train this objective",
    why: "Evenkeel reads and plans recipes of every objective. The built-in trainer supports language \
modelling and supervised fine-tuning. It refuses another objective by name instead of training one of \
these.",
    upstream: "None: it concerns Evenkeel's built-in trainer.",
    wrong: Example {
        flags: "",
        recipe: native!("  objective: dpo\n  batch: {global: 128, per_device_batch_size: 4}\n"),
    },
    right: Example {
        flags: "",
        recipe: native!("  objective: sft\n  batch: {global: 128, per_device_batch_size: 4}\n"),
    },
    check: Check::Trainer(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let objective = case.spec().objective;
    if !TRAINED.contains(&objective) {
        findings.at(
            &["objective"],
            format!("the built-in trainer does not train {objective}"),
            "it trains language-modelling and sft; `evenkeel plan` plans the others too",
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{launched, recipe};
    use crate::recipe::schema::spec::Objective;

    #[test]
    fn other_objectives_are_refused() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Dpo;
        assert_eq!(launched("trainer-objective", &recipe).len(), 1);
        recipe.spec.objective = Objective::Sft;
        assert!(launched("trainer-objective", &recipe).is_empty());
    }
}
