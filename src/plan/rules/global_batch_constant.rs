//! `global-batch-constant`: the global batch with which upstream would train in this world.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "global-batch-constant",
    severity: Severity::Note,
    summary: "upstream would train with another global batch in this world",
    why: "The recipe fixes the numbers of one device, so upstream the global batch follows the number of \
GPUs: half the GPUs, half the batch, at the same learning rate. Evenkeel keeps the global batch and \
changes accumulation or the micro-batch. This note explains why the per-device numbers differ from the \
recipe's.",
    upstream: "alignment-handbook 925acdf, `scripts/README.md`, leaves it to the reader: \"scaling up the \
per-device batch size or number of gradient accumulation steps to keep the global batch size constant\". \
transformers 5.23.0, `trainer.py` (`get_total_train_batch_size`).",
    wrong: Example {
        flags: "--gpus 4 --recipe-gpus 8",
        recipe: "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nevenkeel:\n  objective: sft\n",
    },
    right: Example {
        flags: "--gpus 8 --recipe-gpus 8",
        recipe: "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nevenkeel:\n  objective: sft\n",
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let batch = &case.spec().batch;
    let (Some(per_device_batch_size), Some(split)) =
        (batch.per_device_batch_size, case.draft.split)
    else {
        return;
    };
    // DeepSpeed asserts a stated train batch: `deepspeed-batch-triple`.
    let stated = case.recipe.dialect == Dialect::Deepspeed && batch.global.is_some();
    if case.recipe.dialect == Dialect::Native || stated {
        return;
    }
    let accumulation = batch.accumulation.unwrap_or(1);
    let upstream =
        u128::from(split.ranks) * u128::from(per_device_batch_size) * u128::from(accumulation);
    let global = split.per_device_batch_size * split.micro_batches;
    if upstream != u128::from(global) {
        findings.at(
            &["batch.accumulation", "batch.per_device_batch_size"],
            format!(
                "as written, {} data-parallel ranks would train with {} × {per_device_batch_size} × {accumulation} \
                 = {upstream} samples a step instead of {global}",
                split.ranks, split.ranks
            ),
            format!(
                "no action needed: the plan keeps {global}, {}",
                split.formula()
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Dialect;

    #[test]
    fn note_names_the_batch_that_upstream_would_use() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::HandbookTrl;
        let found = only("global-batch-constant", &recipe, &PlanRequest::gpus(4));
        assert_eq!(
            found[0].message,
            "as written, 4 data-parallel ranks would train with 4 × 16 × 1 = 64 samples a step \
             instead of 128"
        );
        assert!(only("global-batch-constant", &recipe, &PlanRequest::gpus(8)).is_empty());
    }
}
