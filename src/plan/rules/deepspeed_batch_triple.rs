//! `deepspeed-batch-triple`: DeepSpeed's train batch is micro-batch × accumulation × world.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "deepspeed-batch-triple",
    severity: Severity::Error,
    summary: "DeepSpeed's train batch is not micro-batch × accumulation × world",
    why: "DeepSpeed derives a missing one of `train_batch_size`, `train_micro_batch_size_per_gpu` and \
`gradient_accumulation_steps` by floor division. It then asserts that the product with the world is the \
train batch. For example, 32 with a micro-batch of 2 in a world of 3 gives an accumulation of 5. The assertion \
fails, because 30 is not 32. A trainer's own numbers must agree as well; `\"auto\"` takes the trainer's.

If the train batch splits exactly, but not into the config's own numbers, the finding is a warning: the \
plan names numbers that do, and `--emit recipe` writes them. The reader refuses three numbers that are \
no product in any world, because the file does not say which of them is wrong.",
    upstream: "DeepSpeed edaa722, `runtime/config.py` (`_set_batch_related_parameters`, \
`_batch_assertion`). transformers 5.23.0, `integrations/deepspeed.py` (`fill_match`): the comparison \
with the trainer's own.",
    wrong: Example {
        flags: "--gpus 3",
        recipe: "{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 2}\n",
    },
    right: Example {
        flags: "--gpus 4",
        recipe: "{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 2}\n",
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    if case.recipe.dialect != Dialect::Deepspeed || case.spec().batch.elastic.is_some() {
        return;
    }
    let batch = &case.spec().batch;
    let Some(world) = case.draft.data_parallel_size else {
        return;
    };
    let (per_device_batch_size, accumulation) = match (
        batch.global,
        batch.per_device_batch_size,
        batch.accumulation,
    ) {
        // Without a train batch, the batch follows the world.
        (None, ..) => return,
        (Some(_), Some(per_device_batch_size), Some(accumulation)) => {
            (per_device_batch_size, accumulation)
        }
        (Some(global), Some(per_device_batch_size), None) => (
            per_device_batch_size,
            global / per_device_batch_size / world,
        ),
        (Some(global), None, accumulation) => {
            let accumulation = accumulation.unwrap_or(1);
            (global / world / accumulation, accumulation)
        }
    };
    let global = batch.global.unwrap_or(0);
    let product = u128::from(per_device_batch_size) * u128::from(accumulation) * u128::from(world);
    if product == u128::from(global) {
        return;
    }
    let paths = [
        "batch.global",
        "batch.per_device_batch_size",
        "batch.accumulation",
    ];
    let message = format!(
        "as written, DeepSpeed refuses a world of {world}: {global} ≠ {per_device_batch_size} × {accumulation} × \
         {world} = {product}"
    );
    match case.draft.split {
        Some(split) => findings.add(
            Severity::Warning,
            &paths,
            message,
            format!(
                "use the plan's numbers, {}; `--emit recipe` writes them",
                split.formula()
            ),
        ),
        None => findings.at(&paths, message, format!("use {}", case.feasible_near())),
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{only, recipe};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::{Dialect, Recipe, Severity};

    fn config(
        global: u64,
        per_device_batch_size: Option<u64>,
        accumulation: Option<u64>,
    ) -> Recipe {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Deepspeed;
        recipe.spec.batch.global = Some(global);
        recipe.spec.batch.per_device_batch_size = per_device_batch_size;
        recipe.spec.batch.accumulation = accumulation;
        recipe
    }

    fn found(recipe: &Recipe, gpus: u64) -> Option<(Severity, String)> {
        let found = only("deepspeed-batch-triple", recipe, &PlanRequest::gpus(gpus));
        let first = found.into_iter().next()?;
        Some((first.severity, first.message))
    }

    #[test]
    fn missing_numbers_are_derived_by_floor_and_the_product_is_asserted() {
        let by_micro = config(32, Some(2), None);
        for gpus in [1, 2, 4, 8, 16] {
            assert_eq!(found(&by_micro, gpus), None, "{gpus}");
        }
        let (severity, message) = found(&by_micro, 3).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(message.ends_with("32 ≠ 2 × 5 × 3 = 30"), "{message}");
        let by_accumulation = config(32, None, Some(1));
        let (_, message) = found(&by_accumulation, 6).unwrap();
        assert!(message.ends_with("32 ≠ 5 × 1 × 6 = 30"), "{message}");
        let plan = plan(&by_accumulation, &PlanRequest::gpus(4)).unwrap();
        assert_eq!(plan.formula, "4 × 8 × 1 = 32");
    }

    #[test]
    fn a_world_that_other_numbers_fit_only_warns() {
        let (severity, message) = found(&config(32, Some(2), None), 32).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(message.ends_with("32 ≠ 2 × 0 × 32 = 0"), "{message}");
    }
}
