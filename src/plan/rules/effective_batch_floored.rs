//! `effective-batch-floored`: upstream trains on fewer samples a step than the recipe states.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::arithmetic::divisors;
use crate::recipe::Severity;
use crate::recipe::schema::spec::Division;

pub(super) const RULE: Rule = Rule {
    id: "effective-batch-floored",
    severity: Severity::Error,
    summary: "upstream drops samples of every batch",
    why: "direct-preference-optimization and HALOs' legacy tree cut a batch into one slice for every \
accumulation step and every GPU, and round down both times. They load the remainder and drop it at \
every step, without a message: a batch of 64 with 2 accumulation steps on 6 GPUs trains on 60. The \
warning names both numbers. Where a slice is empty, upstream trains on nothing: an error.

The plan keeps the batch that the recipe states and trains on every sample. Where that batch does not \
split at all, `batch-divisible` refuses it and names the counts that work; \
`--global-batch-size` with the smaller number trains as upstream would.",
    upstream: "direct-preference-optimization f8b8c0f and HALOs 61b9ee6, `utils.py` \
(`slice_and_move_batch_for_device`): chunk_size = batch // world_size, twice in the former's `trainers.py` \
(`train`). HALOs issue 9 reports the empty slice.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!("  batch: {global: 4, accumulation: 1, division: floored}\n"),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!("  batch: {global: 64, accumulation: 2, division: floored}\n"),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let batch = &case.spec().batch;
    let (Some(global), Some(upstream)) = (case.draft.global_batch_size, case.draft.upstream) else {
        return;
    };
    if batch.division != Division::Floored || upstream.used == global {
        return;
    }
    let (ranks, passes, per_device_batch_size) = (
        upstream.ranks,
        upstream.accumulation,
        upstream.per_device_batch_size,
    );
    let on = case.count(ranks);
    let formula = format!("⌊⌊{global} / {passes}⌋ / {ranks}⌋ = {per_device_batch_size}");
    let paths = ["batch.global", "batch.accumulation"];
    let exact = if global.is_multiple_of(passes) {
        divisors(global / passes)
    } else {
        Vec::new()
    };
    let exact: Vec<String> = exact.iter().take(8).map(u64::to_string).collect();
    let counts = match exact.as_slice() {
        [] => String::new(),
        [one] => format!("{one} GPU drops no sample; "),
        counts => format!("{} GPUs drop no sample; ", counts.join(", ")),
    };
    if upstream.used == 0 {
        findings.at(
            &paths,
            format!("on {on} upstream gives every GPU an empty batch: {formula}"),
            format!(
                "{counts}raise {} to {} or more",
                case.key("batch.global"),
                passes * ranks
            ),
        );
        return;
    }
    findings.add(
        Severity::Warning,
        &paths,
        format!(
            "on {on} upstream trains on {used} of {global} samples a step: {formula}, and \
             {ranks} × {per_device_batch_size} × {passes} = {used}",
            used = upstream.used
        ),
        format!(
            "{counts}`--global-batch-size {}` trains as upstream would",
            upstream.used
        ),
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Severity;
    use crate::recipe::schema::spec::Division;

    #[test]
    fn both_numbers_and_the_exact_counts_are_named() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(64);
        recipe.spec.batch.per_device_batch_size = None;
        recipe.spec.batch.accumulation = Some(2);
        recipe.spec.batch.division = Division::Floored;
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("effective-batch-floored", recipe, &PlanRequest::gpus(gpus))
        };
        let found = of(&recipe, 6);
        assert_eq!(found[0].severity, Severity::Warning);
        assert_eq!(
            found[0].message,
            "on 6 GPUs upstream trains on 60 of 64 samples a step: ⌊⌊64 / 2⌋ / 6⌋ = 5, and \
             6 × 5 × 2 = 60"
        );
        assert_eq!(
            found[0].help,
            "1, 2, 4, 8, 16, 32 GPUs drop no sample; `--global-batch-size 60` trains as upstream would"
        );
        for gpus in [1, 2, 4, 8, 16, 32] {
            assert!(of(&recipe, gpus).is_empty(), "{gpus}");
        }
        let empty = of(&recipe, 64);
        assert_eq!(empty[0].severity, Severity::Error);
        assert!(
            empty[0].message.contains("an empty batch"),
            "{}",
            empty[0].message
        );
        // In another world than the recipe's, the plan's numbers count, not the recipe's.
        recipe.spec.batch.gpus = Some(4);
        assert!(of(&recipe, 6).is_empty());
        recipe.spec.batch.gpus = None;
        recipe.spec.batch.division = Division::Exact;
        assert!(of(&recipe, 6).is_empty());
    }
}
