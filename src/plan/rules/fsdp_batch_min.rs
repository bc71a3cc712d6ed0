//! `fsdp-batch-min`: an FSDP trainer of direct-preference-optimization has enough samples on each GPU.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::schema::spec::Strategy;
use crate::recipe::{Dialect, Severity};

/// Samples on a GPU from which upstream reports that FSDP is faster.
const LEAST: u64 = 2;

pub(super) const RULE: Rule = Rule {
    id: "fsdp-batch-min",
    severity: Severity::Warning,
    summary: "fewer than 2 samples a GPU make FSDP slow",
    why: "Sharding gathers every layer's weights for each forward and backward pass, whatever the \
micro-batch. A single sample has too little computation to hide that communication, and upstream's authors \
saw no speed-up over one process. Fewer accumulation steps, mixed precision \
(`model.fsdp_policy_mp=bfloat16`) or activation checkpointing allow more samples.",
    upstream: "direct-preference-optimization f8b8c0f, `README.md` (\"Tips for faster training on multiple \
GPUs\"): a batch of at least 2 on each GPU.",
    wrong: Example {
        flags: "--gpus 8 --dialect dpo",
        recipe: "trainer: FSDPTrainer\nbatch_size: 16\ngradient_accumulation_steps: 2\neval_batch_size: 16\n",
    },
    right: Example {
        flags: "--gpus 8 --dialect dpo",
        recipe: "trainer: FSDPTrainer\nbatch_size: 32\ngradient_accumulation_steps: 2\neval_batch_size: 16\n",
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(split) = case.draft.split else {
        return;
    };
    let sharded = case.spec().parallel.strategy == Strategy::Fsdp;
    if case.recipe.dialect != Dialect::Dpo || !sharded || split.per_device_batch_size >= LEAST {
        return;
    }
    findings.at(
        &["batch.global", "batch.accumulation"],
        format!(
            "an FSDP trainer with {} a GPU gains little: {}",
            crate::util::format::count(split.per_device_batch_size, "sample"),
            split.formula()
        ),
        format!(
            "use fewer GPUs, or lower {}",
            case.key("batch.accumulation")
        ),
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Dialect;
    use crate::recipe::schema::spec::{Division, Strategy};

    #[test]
    fn one_sample_per_gpu_warns_for_fsdp_only() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Dpo;
        recipe.spec.parallel.strategy = Strategy::Fsdp;
        recipe.spec.batch.global = Some(32);
        recipe.spec.batch.per_device_batch_size = None;
        recipe.spec.batch.accumulation = Some(2);
        recipe.spec.batch.division = Division::Floored;
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("fsdp-batch-min", recipe, &PlanRequest::gpus(gpus)).len()
        };
        assert_eq!((of(&recipe, 8), of(&recipe, 16)), (0, 1));
        recipe.spec.parallel.strategy = Strategy::Ddp;
        assert_eq!(of(&recipe, 16), 0);
    }
}
