//! `eval-batch-divisible`: evaluation batches hold whole groups of generations.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::spec::Objective;

pub(super) const RULE: Rule = Rule {
    id: "eval-batch-divisible",
    severity: Severity::Error,
    summary: "the evaluation batch does not hold whole groups of generations",
    why: "GRPO compares the generations of one prompt with each other, so an evaluation batch over \
all devices must be a multiple of the number of generations. The product changes with the number of \
devices, so a recipe that evaluates in one world may not in another.",
    upstream: "TRL f2cd577, `trainer/grpo_config.py` (`__post_init__`): raises when \
per_device_eval_batch_size × num_processes is not a multiple of num_generations.",
    wrong: Example {
        flags: "--gpus 2",
        recipe: native!(
            "  objective: grpo\n  batch: {global: 64, micro: 8}\n  evaluation: {micro: 2, every_samples: 640}\n  generation: {num_generations: 8}\n"
        ),
    },
    right: Example {
        flags: "--gpus 2",
        recipe: native!(
            "  objective: grpo\n  batch: {global: 64, micro: 8}\n  evaluation: {micro: 4, every_samples: 640}\n  generation: {num_generations: 8}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let evaluation = &spec.evaluation;
    let (Some(micro), Some(group), Some(ranks)) = (
        evaluation.micro,
        spec.generation.num_generations,
        case.draft.data_parallel_size,
    ) else {
        return;
    };
    if spec.objective != Objective::Grpo || evaluation.intervals().is_empty() || group == 0 {
        return;
    }
    let product = u128::from(micro) * u128::from(ranks);
    if product.is_multiple_of(u128::from(group)) {
        return;
    }
    let fits = (1..=group)
        .find(|m| (m * ranks).is_multiple_of(group))
        .unwrap_or(group);
    findings.at(
        &["evaluation.micro", "generation.num_generations"],
        format!(
            "evaluation batches of {ranks} × {micro} = {product} do not hold whole groups of \
             {group} generations"
        ),
        format!(
            "use a multiple of {fits} for {}",
            case.key("evaluation.micro")
        ),
    );
}

#[cfg(test)]
mod tests {
    use crate::batch::PlanRequest;
    use crate::batch::rules::testing::{only, recipe};
    use crate::recipe::spec::Objective;

    #[test]
    fn grpo_evaluates_whole_groups() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Grpo;
        recipe.spec.generation.num_generations = Some(8);
        recipe.spec.evaluation.micro = Some(2);
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("eval-batch-divisible", recipe, &PlanRequest::gpus(gpus))
        };
        assert!(of(&recipe, 2).is_empty());
        recipe.spec.evaluation.every_steps = Some(10);
        assert_eq!(
            of(&recipe, 2)[0].help,
            "use a multiple of 4 for `evaluation.micro`"
        );
        assert!(of(&recipe, 4).is_empty());
        recipe.spec.objective = Objective::Sft;
        assert!(of(&recipe, 2).is_empty());
    }
}
