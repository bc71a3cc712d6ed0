//! `eval-batch-divisible`: evaluation batches hold whole groups of generations.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::arithmetic::gcd;
use crate::recipe::Severity;
use crate::recipe::schema::spec::{EvaluationDivision, Remainder};
use crate::util::format::count;

pub(super) const RULE: Rule = Rule {
    id: "eval-batch-divisible",
    severity: Severity::Error,
    summary: "the evaluation batch does not split, or does not hold whole groups of generations",
    why: "Recipes of HALOs and of direct-preference-optimization state how many samples all devices \
evaluate together. HALOs divides that by the ranks and by accumulation, and raises on a remainder. \
direct-preference-optimization and HALOs' legacy tree round down and drop the remainder: a warning, or \
an error where a rank gets no sample.

GRPO and RLOO compare the generations of one prompt with each other, so an evaluation batch over \
all devices must be a multiple of the number of generations. The product changes with the number of \
devices, so a recipe that evaluates in one world may not in another.",
    upstream: "TRL f2cd577, `trainer/grpo_config.py` and `trainer/rloo_config.py` (`__post_init__`): raise when \
per_device_eval_batch_size × num_processes is not a multiple of num_generations_eval, or where that is \
not given of num_generations. HALOs 4831988, `launch.py` (`main`): raises unless eval_batch_size is a \
multiple of num_processes × gradient_accumulation_steps. direct-preference-optimization f8b8c0f, `utils.py` \
(`slice_and_move_batch_for_device`): rounds down.",
    wrong: Example {
        flags: "--gpus 2",
        recipe: native!(
            "  objective: grpo\n  batch: {global: 64, per_device_batch_size: 8}\n  evaluation: {per_device_batch_size: 2, every_samples: 640}\n  generation: {num_generations: 8}\n"
        ),
    },
    right: Example {
        flags: "--gpus 2",
        recipe: native!(
            "  objective: grpo\n  batch: {global: 64, per_device_batch_size: 8}\n  evaluation: {per_device_batch_size: 4, every_samples: 640}\n  generation: {num_generations: 8}\n"
        ),
    },
    check: Check::Plan(check),
};

/// Checks a batch over all devices, divided as in the recipe's dialect.
fn check_batch(case: &Case<'_>, findings: &mut Findings<'_>) {
    let evaluation = &case.spec().evaluation;
    let (Some(batch), Some(ranks)) = (evaluation.batch, case.draft.data_parallel_size) else {
        return;
    };
    // Only the built-in trainer deals unevenly, and it evaluates unevenly too.
    if case
        .draft
        .split
        .is_some_and(|split| split.remainder == Remainder::Uneven)
    {
        return;
    }
    let key = case.key("evaluation.batch");
    let paths = ["evaluation.batch"];
    let passes = match evaluation.division {
        EvaluationDivision::Passes => {
            let planned = case.draft.split.map(|split| split.accumulation());
            planned.or(case.spec().batch.accumulation).unwrap_or(1)
        }
        EvaluationDivision::Ranks | EvaluationDivision::Floored => 1,
    };
    let by = u128::from(ranks) * u128::from(passes);
    let rest = u128::from(batch) % by;
    if rest == 0 {
        return;
    }
    let divisor = match passes {
        1 => count(ranks, "rank"),
        passes => format!("{} × {passes} accumulation steps", count(ranks, "rank")),
    };
    let used = u128::from(batch) - rest;
    let help = match used {
        0 => format!("use {by} or a multiple of it"),
        used => format!("use {used} or {}", used + by),
    };
    if evaluation.division == EvaluationDivision::Floored && used > 0 {
        let message = format!(
            "{key} {batch} does not split over {divisor}: upstream evaluates {used} of them and \
             drops {rest}"
        );
        findings.add(Severity::Warning, &paths, message, help);
        return;
    }
    let message = format!("{key} {batch} does not split over {divisor}: {batch} % {by} = {rest}");
    findings.at(&paths, message, help);
}

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    check_batch(case, findings);
    let spec = case.spec();
    let evaluation = &spec.evaluation;
    let (Some(per_device_batch_size), Some(group), Some(ranks)) = (
        evaluation.per_device_batch_size,
        spec.generation
            .num_generations_eval
            .or(spec.generation.num_generations),
        case.draft.data_parallel_size,
    ) else {
        return;
    };
    let compares = spec.objective.default_generations().is_some();
    if !compares || evaluation.intervals().is_empty() || group == 0 {
        return;
    }
    let product = u128::from(per_device_batch_size) * u128::from(ranks);
    if product.is_multiple_of(u128::from(group)) {
        return;
    }
    let fits = group / gcd(ranks, group);
    findings.at(
        &[
            "evaluation.per_device_batch_size",
            "generation.num_generations_eval",
            "generation.num_generations",
        ],
        format!(
            "evaluation batches of {ranks} × {per_device_batch_size} = {product} do not hold whole groups of \
             {group} generations"
        ),
        format!(
            "use a multiple of {fits} for {}",
            case.key("evaluation.per_device_batch_size")
        ),
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Severity;
    use crate::recipe::schema::spec::{EvaluationDivision, Objective};

    #[test]
    fn a_batch_over_all_devices_follows_upstreams_division() {
        let mut recipe = recipe();
        recipe.spec.evaluation.batch = Some(32);
        recipe.spec.batch.global = Some(64);
        recipe.spec.batch.per_device_batch_size = Some(4);
        let mut of = |division, gpus| {
            recipe.spec.evaluation.division = division;
            let found = only("eval-batch-divisible", &recipe, &PlanRequest::gpus(gpus));
            found.first().map(|d| (d.severity, d.message.clone()))
        };
        // 64 is 4 × 4 × 4.
        assert_eq!(of(EvaluationDivision::Passes, 4), None);
        assert_eq!(of(EvaluationDivision::Ranks, 32), None);
        let (severity, message) = of(EvaluationDivision::Ranks, 64).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(message.ends_with("32 % 64 = 32"), "{message}");
        let (severity, message) = of(EvaluationDivision::Floored, 6).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(
            message.ends_with("evaluates 30 of them and drops 2"),
            "{message}"
        );
        assert_eq!(
            of(EvaluationDivision::Floored, 64).unwrap().0,
            Severity::Error
        );
    }

    #[test]
    fn grpo_evaluates_whole_groups() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Grpo;
        recipe.spec.generation.num_generations = Some(8);
        recipe.spec.evaluation.per_device_batch_size = Some(2);
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("eval-batch-divisible", recipe, &PlanRequest::gpus(gpus))
        };
        assert!(of(&recipe, 2).is_empty());
        recipe.spec.evaluation.every_steps = Some(10);
        assert_eq!(
            of(&recipe, 2)[0].help,
            "use a multiple of 4 for `evaluation.per_device_batch_size`"
        );
        assert!(of(&recipe, 4).is_empty());
        recipe.spec.objective = Objective::Sft;
        assert!(of(&recipe, 2).is_empty());
    }
}
