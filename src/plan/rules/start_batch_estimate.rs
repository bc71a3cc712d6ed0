//! `start-batch-estimate`: the source of a micro-batch that is not the recipe's.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::draft::DEFAULT_MICRO;
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "start-batch-estimate",
    severity: Severity::Warning,
    summary: "the micro-batch is an estimate, not the recipe's",
    why: "There are three cases. `--estimate` requests the largest micro-batch that fits, whatever the \
recipe states (a note). Or the recipe's micro-batch does not fit into a device by the estimate: the plan \
takes the largest divisor that fits and raises accumulation, so the global batch stays. Or the recipe \
states no micro-batch: the plan takes the largest that fits, or 8 if the devices' memory is not \
known (a note). If the estimate is too high, an out-of-memory error leads to the next smaller \
one. If it is too low, state the micro-batch.",
    upstream: "transformers 5.23.0, `training_args.py`: the default of `per_device_train_batch_size` is 8. \
Its rule of thumb: 4 samples of a 7B model on a GPU of 24 GB, 2 of a 13B model, and \
model parallelism for 70B.",
    wrong: Example {
        flags: "--gpus 8 --device-memory 24GB",
        recipe: native!(
            "  objective: sft\n  batch: {global: 128, per_device_batch_size: 16}\n  parallel: {strategy: fsdp}\n  data: {sequence_length: 2048}\n  model:\n    path: mistralai/Mistral-7B-v0.1\n    precision: bf16\n    activation_checkpointing: true\n"
        ),
    },
    right: Example {
        flags: "--gpus 8 --device-memory 80GB",
        recipe: native!(
            "  objective: sft\n  batch: {global: 128, per_device_batch_size: 16}\n  parallel: {strategy: fsdp}\n  data: {sequence_length: 2048}\n  model:\n    path: mistralai/Mistral-7B-v0.1\n    precision: bf16\n    activation_checkpointing: true\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(split) = case.draft.split else {
        return;
    };
    let memory = case.memory();
    let path = "batch.per_device_batch_size";
    if case.request.estimate {
        report_proposal(case, findings);
    } else if let (Some(unlimited), Some(memory)) = (case.draft.unlimited, &memory)
        && let Some(stated) = case.draft.per_device_batch_size(case.spec())
        && memory.fits(split.ranks, split.per_device_batch_size)
    {
        findings.at(
            &[path],
            format!(
                "micro-batch {} (stated: {stated}) needs about {} per device; {} of {} can be used: \
                 {} fits, by estimate",
                unlimited.per_device_batch_size,
                memory.needed(split.ranks, unlimited.per_device_batch_size),
                memory.usable(),
                memory.available(),
                split.per_device_batch_size
            ),
            format!(
                "no action needed: accumulation makes up the rest, {}",
                split.formula()
            ),
        );
    } else if case.draft.per_device_batch_size(case.spec()).is_none() {
        let (message, help) = match memory {
            // `model-needs-sharding` covers this case.
            Some(memory) if !memory.fits(split.ranks, split.per_device_batch_size) => return,
            Some(memory) => (
                format!(
                    "no micro-batch is stated: {} is the largest that fits, by estimate ({} of {})",
                    split.per_device_batch_size,
                    memory.needed(split.ranks, split.per_device_batch_size),
                    memory.usable()
                ),
                format!("state {} to choose another", case.key(path)),
            ),
            None => (
                format!(
                    "no micro-batch is stated, and the devices' memory is not known: {} is the \
                     largest that divides the batch up to {DEFAULT_MICRO}",
                    split.per_device_batch_size
                ),
                format!(
                    "state {}, or give `--device-memory` and a model whose shape is known",
                    case.key(path)
                ),
            ),
        };
        findings.add(Severity::Note, &[path, "batch.global"], message, help);
    }
}

/// `--estimate`: reports the micro-batch proposed instead of the recipe's.
fn report_proposal(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(split), Some(memory)) = (case.draft.split, case.memory()) else {
        return;
    };
    if !memory.fits(split.ranks, split.per_device_batch_size) {
        return;
    }
    let path = "batch.per_device_batch_size";
    let stated = match case.spec().batch.per_device_batch_size {
        Some(stated) => format!(" (stated: {stated})"),
        None => String::new(),
    };
    findings.add(
        Severity::Note,
        &[path],
        format!(
            "{} is the largest micro-batch that fits, by estimate: {} of {}{stated}",
            split.per_device_batch_size,
            memory.needed(split.ranks, split.per_device_batch_size),
            memory.usable()
        ),
        format!(
            "`--emit` writes it; an out-of-memory error leads to the next smaller one and keeps {}",
            split.formula()
        ),
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{only, recipe, seven_billion};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::Severity;

    #[test]
    fn a_micro_batch_that_does_not_fit_moves_down_and_keeps_the_batch() {
        let recipe = seven_billion();
        let request = PlanRequest {
            device_memory: Some(24_000_000_000),
            ..PlanRequest::gpus(8)
        };
        let found = only("start-batch-estimate", &recipe, &request);
        assert_eq!(found[0].severity, Severity::Warning);
        let plan = plan(&recipe, &request).unwrap();
        assert_eq!(plan.formula, "8 × 2 × 8 = 128");
        assert_eq!(
            plan.outline.adjusted[0].reason,
            "as much as the devices' memory allows, by estimate"
        );
    }

    #[test]
    fn a_requested_estimate_may_exceed_the_stated_micro_batch() {
        let recipe = seven_billion();
        let request = PlanRequest {
            device_memory: Some(141_000_000_000),
            estimate: true,
            ..PlanRequest::gpus(4)
        };
        let found = only("start-batch-estimate", &recipe, &request);
        assert_eq!(found[0].severity, Severity::Note);
        assert!(found[0].message.ends_with("(stated: 16)"), "{found:?}");
        assert_eq!(plan(&recipe, &request).unwrap().formula, "4 × 32 × 1 = 128");
    }

    #[test]
    fn without_a_stated_micro_batch_memory_decides() {
        let mut recipe = seven_billion();
        recipe.spec.batch.per_device_batch_size = None;
        let request = PlanRequest {
            device_memory: Some(80_000_000_000),
            ..PlanRequest::gpus(8)
        };
        let found = only("start-batch-estimate", &recipe, &request);
        assert_eq!(found[0].severity, Severity::Note);
        assert_eq!(plan(&recipe, &request).unwrap().formula, "8 × 16 × 1 = 128");
    }

    #[test]
    fn without_memory_upstreams_default_is_the_limit() {
        let mut recipe = recipe();
        recipe.spec.batch.per_device_batch_size = None;
        let plan = plan(&recipe, &PlanRequest::gpus(8)).unwrap();
        assert_eq!(plan.formula, "8 × 8 × 2 = 128");
        assert_eq!(plan.outline.diagnostics[0].rule, "start-batch-estimate");
    }
}
