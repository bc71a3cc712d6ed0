//! `generation-batch-divisible`: GRPO and RLOO generate whole groups, in whole passes.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::arithmetic::product;
use crate::plan::draft::generation_batch;
use crate::recipe::schema::spec::Objective;
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "generation-batch-divisible",
    severity: Severity::Error,
    summary: "the generation batch of GRPO or RLOO does not hold whole groups, or does not divide into whole passes",
    why: "GRPO and RLOO generate completions for a batch of prompts, `num_generations` of each, and train \
on them over several steps. The generation batch must hold whole groups, because the algorithms compare the \
completions of one prompt. It must be a multiple of micro-batch × data-parallel ranks, because every pass \
takes one such slice. Evenkeel keeps the generation batch when the world changes, and changes \
`steps_per_generation` instead.",
    upstream: "TRL f2cd577, `trainer/grpo_config.py` and `trainer/rloo_config.py` (`__post_init__`): \
raise on both, on fewer than two generations, and when both `generation_batch_size` and \
`steps_per_generation` are given; GRPO's also on `auto_find_batch_size`, and on context and sequence \
parallelism.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  objective: grpo\n  batch: {global: 64, per_device_batch_size: 8}\n  generation: {num_generations: 8, generation_batch_size: 96}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  objective: grpo\n  batch: {global: 64, per_device_batch_size: 8}\n  generation: {num_generations: 8, generation_batch_size: 128}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let Some(default) = spec.objective.default_generations() else {
        return;
    };
    let grpo = spec.objective == Objective::Grpo;
    if grpo && spec.batch.auto_find {
        findings.at(
            &["batch.auto_find"],
            format!(
                "{} with GRPO: a smaller batch no longer holds whole groups",
                case.key("batch.auto_find")
            ),
            "remove it: TRL refuses it too",
        );
    }
    let (context, sequence) = (spec.parallel.context, spec.parallel.sequence);
    if grpo && case.recipe.dialect != Dialect::Native && (context > 1 || sequence > 1) {
        findings.at(
            &["parallel.context", "parallel.sequence"],
            format!("GRPO with context-parallel size {context} and sequence-parallel size {sequence}"),
            "set both to 1: TRL builds its inputs after generation and cannot cut them along the sequence",
        );
    }
    let generation = &spec.generation;
    let size = "generation.generation_batch_size";
    let steps = "generation.steps_per_generation";
    let count = "generation.num_generations";
    if generation.generation_batch_size.is_some() && generation.steps_per_generation.is_some() {
        let message = format!("{} and {} are both given", case.key(size), case.key(steps));
        findings.at(&[steps, size], message, "leave one of them out");
        return;
    }
    let group = generation.num_generations.unwrap_or(default);
    if group < 2 {
        let message = format!(
            "{} is {group}, but a group needs at least 2 completions",
            case.key(count)
        );
        findings.at(&[count], message, "use 2 or more");
        return;
    }
    let Some(batch) = generation_batch(spec, case.draft) else {
        return;
    };
    let paths = [
        size,
        steps,
        count,
        "batch.global",
        "batch.per_device_batch_size",
    ];
    if !batch.is_multiple_of(group) {
        findings.at(
            &paths,
            format!("a generation batch of {batch} does not hold whole groups of {group}"),
            format!("use a multiple of {group}, or another {}", case.key(count)),
        );
    }
    let pass = case
        .draft
        .split
        .and_then(|s| product(&[s.ranks, s.per_device_batch_size]));
    if let (Some(pass), Some(split)) = (pass, case.draft.split)
        && !batch.is_multiple_of(pass)
    {
        findings.at(
            &paths,
            format!(
                "a generation batch of {batch} is not a multiple of a pass, {} × {} = {pass} samples",
                split.ranks, split.per_device_batch_size
            ),
            format!(
                "use a multiple of {pass} for {}, or another world",
                case.key(size)
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{only, recipe};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::Recipe;
    use crate::recipe::schema::spec::Objective;

    fn grpo() -> Recipe {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Grpo;
        recipe.spec.generation.num_generations = Some(8);
        recipe
    }

    fn messages(recipe: &Recipe, gpus: u64) -> Vec<String> {
        let found = only(
            "generation-batch-divisible",
            recipe,
            &PlanRequest::gpus(gpus),
        );
        found.into_iter().map(|d| d.message).collect()
    }

    #[test]
    fn whole_groups_and_whole_passes_are_required() {
        let mut recipe = grpo();
        assert!(messages(&recipe, 8).is_empty());
        recipe.spec.generation.generation_batch_size = Some(100);
        assert_eq!(
            messages(&recipe, 8),
            [
                "a generation batch of 100 does not hold whole groups of 8",
                "a generation batch of 100 is not a multiple of a pass, 8 × 16 = 128 samples"
            ]
        );
        recipe.spec.generation.steps_per_generation = Some(2);
        assert!(messages(&recipe, 8)[0].contains("both given"));
    }

    #[test]
    fn rloo_compares_two_completions_by_default() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Rloo;
        recipe.spec.batch.auto_find = true;
        assert!(messages(&recipe, 8).is_empty());
        recipe.spec.generation.num_generations = Some(1);
        assert!(messages(&recipe, 8)[0].contains("at least 2 completions"));
        recipe.spec.generation.num_generations = Some(3);
        assert!(messages(&recipe, 8)[0].contains("whole groups of 3"));
    }

    #[test]
    fn steps_per_generation_follow_the_world() {
        let mut recipe = grpo();
        recipe.spec.batch.global = None;
        recipe.spec.batch.accumulation = Some(1);
        recipe.spec.batch.gpus = Some(8);
        recipe.spec.generation.steps_per_generation = Some(2);
        let plan = plan(&recipe, &PlanRequest::gpus(4)).unwrap();
        let change = plan
            .outline
            .adjusted
            .iter()
            .find(|a| a.key.contains("steps_per_generation"));
        // 2 × 16 × 8 = 256 completions are 4 passes of 16 × 4.
        assert_eq!(
            change.map(|a| (a.from.as_str(), a.to.as_str())),
            Some(("2", "4"))
        );
    }
}
