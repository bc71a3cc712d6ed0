//! `batch-divisible`: the global batch splits exactly over the data-parallel ranks.

use super::uneven_dealing::only_another_trainer;
use super::{Case, Check, Example, Findings, Rule};
use crate::plan::arithmetic::divisors;
use crate::plan::split::{Cap, Splitter};
use crate::recipe::Severity;
use crate::recipe::schema::spec::{Division, EvaluationDivision};

pub(super) const RULE: Rule = Rule {
    id: "batch-divisible",
    severity: Severity::Error,
    summary: "the global batch does not split exactly over the data-parallel ranks",
    why: "Every rank runs the same number of equal micro-batches, so the global batch must be a \
multiple of the number of data-parallel ranks. Rounding it would train with another batch than the \
recipe states, and the learning rate, the warm-up and every published result belong to the stated \
one.

Use a count that divides it (the message names the nearest ones), or distribute whole micro-batches \
unevenly with `--remainder uneven`: some ranks then run one more than others. The loss is normalised \
over the whole batch, so the sum is exact. Only the built-in trainer does this.",
    upstream: "DeepSpeed edaa722, `runtime/config.py`: asserts that train batch = micro-batch × \
accumulation × world, and exits otherwise. transformers 5.23.0, `trainer.py` \
(`get_total_train_batch_size`): multiplies the numbers that it gets, so another world silently trains \
with another batch; alignment-handbook 925acdf, `scripts/README.md`, asks its users to correct \
that by hand. HALOs 4831988, `launch.py` (`main`): raises unless the batch is a multiple of \
num_processes × gradient_accumulation_steps; before 2f70d00 (2025-05-01), of num_processes.",
    wrong: Example {
        flags: "--gpus 6",
        recipe: native!("  batch: {global: 128, per_device_batch_size: 16}\n"),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!("  batch: {global: 128, per_device_batch_size: 16}\n"),
    },
    check: Check::Plan(check),
};

/// HALOs divides by the recipe's accumulation too. In the world that a recipe was written for, its batch
/// must be a multiple of both.
fn check_passes(case: &Case<'_>, findings: &mut Findings<'_>) {
    let batch = &case.spec().batch;
    let (Some(global), Some(upstream)) = (case.draft.global_batch_size, case.draft.upstream) else {
        return;
    };
    let (ranks, passes) = (upstream.ranks, upstream.accumulation);
    let fits = !global.is_multiple_of(ranks) || upstream.used == global;
    if batch.division != Division::Exact || fits || case.request.is_of_a_run() {
        return;
    }
    let share = global / ranks;
    let shares = divisors(share);
    let smaller = shares.iter().rfind(|&&smaller| smaller < passes);
    let set = case.set("batch.accumulation", &smaller.unwrap_or(&1).to_string());
    let mut help = format!("set {set}");
    if share < passes && case.spec().evaluation.division == EvaluationDivision::Passes {
        help += &format!(
            "; before 2025-05-01 {} counted one accumulation step, so {global} meant {}: \
             `--dialect-version before-2025-05-01`",
            case.key("batch.global"),
            global.saturating_mul(passes)
        );
    }
    findings.at(
        &["batch.accumulation", "batch.global"],
        format!(
            "global batch {global} does not split over {ranks} data-parallel ranks × {passes} \
             accumulation steps: {global} % ({ranks} × {passes}) = {}",
            u128::from(global) % (u128::from(ranks) * u128::from(passes))
        ),
        help,
    );
}

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    check_passes(case, findings);
    let draft = case.draft;
    let (Some(global), Some(ranks), None) = (
        draft.global_batch_size,
        draft.data_parallel_size,
        draft.split,
    ) else {
        return;
    };
    let counts = case.feasible_near();
    let message = match case.request.current_batch {
        Some(current) if global.is_multiple_of(ranks) && !current.is_multiple_of(ranks) => format!(
            "batch {current}, which the run has reached, does not split over {ranks} data-parallel \
             ranks: {current} % {ranks} = {}",
            current % ranks
        ),
        _ => format!(
            "global batch {global} does not split over {ranks} data-parallel ranks: \
             {global} % {ranks} = {}",
            global % ranks
        ),
    };
    let anything = |_: u64, _: u64| true;
    let per_device_batch_size = case
        .spec()
        .batch
        .per_device_batch_size
        .unwrap_or(crate::plan::draft::DEFAULT_MICRO);
    let uneven = Splitter::new(
        global,
        case.request.current_batch,
        Cap::at(per_device_batch_size),
        &anything,
    )
    .uneven(ranks);
    // A run keeps the remainder policy that it started with.
    let may_be_dealt = !case.request.is_of_a_run()
        && !case.spec().trainer.is_external()
        && only_another_trainer(case).is_none();
    let help = match uneven.filter(|_| may_be_dealt) {
        Some(split) => format!(
            "use {counts}, or deal micro-batches unevenly with `--remainder uneven`: {}",
            split.formula()
        ),
        None => format!("use {counts}"),
    };
    findings.at(
        &["batch.global", "batch.per_device_batch_size"],
        message,
        help,
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};

    #[test]
    fn names_the_remainder_and_the_counts_on_both_sides() {
        let found = only("batch-divisible", &recipe(), &PlanRequest::gpus(6));
        assert_eq!(
            found[0].message,
            "global batch 128 does not split over 6 data-parallel ranks: 128 % 6 = 2"
        );
        assert_eq!(
            found[0].help,
            "use 2, 4, 8 or 16 GPUs, or deal micro-batches unevenly with `--remainder uneven`: \
             16 × (2 + 2 + 1 + 1 + 1 + 1) = 128"
        );
    }

    #[test]
    fn counts_outside_of_the_elasticity_bounds_are_not_suggested() {
        let mut recipe = recipe();
        recipe.spec.elasticity.max = Some(7);
        let help = |recipe: &crate::recipe::Recipe| {
            let found = only("batch-divisible", recipe, &PlanRequest::gpus(6));
            found[0].help.split(", or deal").next().unwrap().to_owned()
        };
        assert_eq!(help(&recipe), "use 2 or 4 GPUs");
        recipe.spec.elasticity.min = Some(3);
        assert_eq!(help(&recipe), "use 4 GPUs");
        recipe.spec.elasticity.min = Some(5);
        assert_eq!(help(&recipe), "use another global batch");
    }

    #[test]
    fn uneven_dealing_is_offered_only_where_the_trainer_supports_it() {
        let mut recipe = recipe();
        recipe.spec.objective = crate::recipe::schema::spec::Objective::Dpo;
        let found = only("batch-divisible", &recipe, &PlanRequest::gpus(6));
        assert_eq!(found[0].help, "use 2, 4, 8 or 16 GPUs");
    }

    #[test]
    fn one_process_is_not_called_gpus_and_a_run_keeps_its_remainder_policy() {
        let mut request = PlanRequest::processes(6);
        request.global_batch_size = Some(7);
        let found = only("batch-divisible", &recipe(), &request);
        assert_eq!(found[0].help, "use 1 or 7 processes");
        request.gpus = 200;
        request.global_batch_size = Some(1);
        let found = only("batch-divisible", &recipe(), &request);
        assert_eq!(found[0].help, "use 1 process");
    }

    #[test]
    fn more_ranks_than_samples_do_not_offer_uneven_dealing() {
        let found = only("batch-divisible", &recipe(), &PlanRequest::gpus(200));
        assert!(found[0].message.ends_with("128 % 200 = 128"));
        assert_eq!(found[0].help, "use 64 or 128 GPUs");
    }

    #[test]
    fn a_grown_batch_must_split_too() {
        let mut request = PlanRequest::gpus(8);
        request.current_batch = Some(132);
        let found = only("batch-divisible", &recipe(), &request);
        assert!(
            found[0].message.contains("132 % 8 = 4"),
            "{}",
            found[0].message
        );
    }

    #[test]
    fn accumulation_must_divide_where_upstream_divides_by_it() {
        let mut recipe = recipe();
        recipe.dialect = crate::recipe::Dialect::Halos;
        let batch = &mut recipe.spec.batch;
        batch.global = Some(8);
        batch.per_device_batch_size = None;
        batch.accumulation = Some(8);
        batch.division = crate::recipe::schema::spec::Division::Exact;
        recipe.spec.evaluation.division = crate::recipe::schema::spec::EvaluationDivision::Passes;
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("batch-divisible", recipe, &PlanRequest::gpus(gpus))
        };
        let found = of(&recipe, 4);
        assert_eq!(
            found[0].message,
            "global batch 8 does not split over 4 data-parallel ranks × 8 accumulation steps: \
             8 % (4 × 8) = 8"
        );
        assert!(found[0].help.contains("so 8 meant 64"), "{}", found[0].help);
        assert!(of(&recipe, 1).is_empty());
        // In another world than the recipe's, the plan may change accumulation.
        recipe.spec.batch.gpus = Some(1);
        assert!(of(&recipe, 4).is_empty());
    }

    #[test]
    fn exact_and_uneven_splits_are_fine() {
        assert!(only("batch-divisible", &recipe(), &PlanRequest::gpus(64)).is_empty());
        let mut uneven = recipe();
        uneven.spec.batch.remainder = crate::recipe::schema::spec::Remainder::Uneven;
        assert!(only("batch-divisible", &uneven, &PlanRequest::gpus(6)).is_empty());
    }
}
