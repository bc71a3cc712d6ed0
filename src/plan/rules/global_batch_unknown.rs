//! `global-batch-unknown`: the recipe determines its global batch.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "global-batch-unknown",
    severity: Severity::Error,
    summary: "the recipe does not determine its global batch",
    why:
        "A per-device batch and an accumulation make a global batch only together with the number \
of GPUs that the author had. Recipes of the alignment-handbook keep that number in an accelerate \
config, in a comment, or do not state it. A guess would fix the one number that everything else must \
keep.

An accelerate config alone describes a world without a batch: give it with a recipe, \
`--accelerate FILE`. A DeepSpeed config whose batch is \"auto\" takes the batch of a trainer: give it with \
that trainer's arguments.

A command states its batch as arguments. If a shell variable may expand to further arguments \
(`train.py $ARGS`), or if a script starts several trainings, its text does not determine the batch. A \
program without an argument that only `TrainingArguments` has (`--do_train`, `--eval_strategy`, \
`--deepspeed FILE`; many programs have `--output_dir` and `--learning_rate`) may not use the `Trainer`, \
so it does not get the `Trainer`'s default of 8. A program that only has the name of one of TRL's (`rloo.py`) \
may set its batch itself, so it does not get TRL's defaults either.",
    upstream: "transformers 5.23.0, `trainer.py` (`get_total_train_batch_size`): micro-batch × \
accumulation × the current world. alignment-handbook 925acdf, `recipes/*/README.md`: \
the numbers of GPUs, as text.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nevenkeel:\n  objective: sft\n",
    },
    right: Example {
        flags: "--gpus 4 --recipe-gpus 8",
        recipe: "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nevenkeel:\n  objective: sft\n",
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    if case.draft.global_batch_size.is_some() || case.draft.recipe_product.is_some() {
        return;
    }
    if case.recipe.dialect == Dialect::Accelerate {
        findings.at(
            &[],
            "an accelerate config gives the number of devices, but no batch",
            "plan the recipe that is launched with it: `recipe.yaml --accelerate FILE`",
        );
        return;
    }
    if case.recipe.part {
        findings.add(
            Severity::Note,
            &[],
            "this part of a config tree has no batch",
            "plan the whole tree: give its directory, and choose this part on the command line",
        );
        return;
    }
    let batch = &case.spec().batch;
    if case.recipe.dialect == Dialect::Deepspeed && batch.elastic.is_some() {
        // `deepspeed-elastic-batch` reports why there is no batch.
        return;
    }
    if case.recipe.dialect == Dialect::Deepspeed && batch.per_device_batch_size.is_none() {
        findings.at(
            &[],
            "the DeepSpeed config has no batch: \"auto\" takes the batch of a trainer",
            "give it with the trainer's arguments, `evenkeel plan -- deepspeed train.py --deepspeed FILE …`",
        );
        return;
    }
    if batch.gpus.is_some() && batch.per_device_batch_size.is_some() {
        // The recipe states its GPUs, but the other axes do not divide them; `parallelism-product` reports it.
        return;
    }
    let (message, help) = match (batch.per_device_batch_size, batch.accumulation) {
        (Some(per_device_batch_size), accumulation) => {
            let each = u128::from(per_device_batch_size) * u128::from(accumulation.unwrap_or(1));
            let message = format!(
                "the recipe gives {per_device_batch_size} × {} = {each} samples per device, but not the number of \
                 devices",
                accumulation.unwrap_or(1)
            );
            let help = "give the number of GPUs that it was written for, `--recipe-gpus N`, or the samples per \
                        step, `--global-batch-size B`";
            (message, help)
        }
        (None, _) => (
            "the recipe states no batch".to_owned(),
            match case.recipe.dialect {
                Dialect::Transformers | Dialect::HandbookTrl => {
                    "give the samples per step, `--global-batch-size B`; for a `Trainer`'s default write \
                     `--per_device_train_batch_size 8`"
                }
                _ => "give the samples per step, `--global-batch-size B`",
            },
        ),
    };
    findings.at(
        &["batch.per_device_batch_size", "batch.accumulation"],
        message,
        help,
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::{Dialect, Severity};

    #[test]
    fn a_per_device_batch_without_devices_is_not_enough() {
        let mut recipe = recipe();
        recipe.spec.batch.global = None;
        recipe.spec.batch.accumulation = Some(2);
        let found = only("global-batch-unknown", &recipe, &PlanRequest::gpus(4));
        assert_eq!(
            found[0].message,
            "the recipe gives 16 × 2 = 32 samples per device, but not the number of devices"
        );
        recipe.spec.batch.gpus = Some(8);
        assert!(only("global-batch-unknown", &recipe, &PlanRequest::gpus(4)).is_empty());
        recipe.dialect = Dialect::Accelerate;
        recipe.spec.batch = Default::default();
        let found = only("global-batch-unknown", &recipe, &PlanRequest::gpus(4));
        assert_eq!(found[0].severity, Severity::Error);
        assert!(found[0].help.contains("--accelerate FILE"));
        recipe.dialect = Dialect::Native;
        let found = only("global-batch-unknown", &recipe, &PlanRequest::gpus(4));
        assert_eq!(found[0].message, "the recipe states no batch");
        recipe.dialect = Dialect::Transformers;
        let found = only("global-batch-unknown", &recipe, &PlanRequest::gpus(4));
        assert!(found[0].help.contains("--per_device_train_batch_size 8"));
    }
}
