//! `model-needs-sharding`: the smallest micro-batch fits into a device.

use super::{Case, Check, Example, Findings, Rule};
use crate::batch::draft::MOST_GPUS;
use crate::recipe::spec::Strategy;
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "model-needs-sharding",
    severity: Severity::Error,
    summary: "weights, gradients and optimiser states do not fit into a device",
    why: "Training in full takes about 16 bytes a parameter before the first activation: 7B \
parameters are 108 GiB. Where that does not fit, it has to be spread: FSDP or ZeRO-3 divide all of \
it by the data-parallel ranks, adapters leave most of it out. It is an error when the states alone \
are too large, and a warning when only the activations of a single sample are, since that part of \
the estimate depends most on the implementation. A recipe of another dialect that does not say how \
it is sharded (the alignment-handbook's say it in the accelerate config that they are launched \
with) is only warned: the estimate then counts everything on every device, which may not be meant.",
    upstream: "ZeRO (arXiv 1910.02054, section 3.1) for the 16 bytes. Upstream starts and ends in an \
out-of-memory error.",
    wrong: Example {
        flags: "--gpus 8 --device-memory 80GB",
        recipe: native!(
            "  batch: {global: 128, micro: 4}\n  model: {path: mistralai/Mistral-7B-v0.1, precision: bf16}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8 --device-memory 80GB",
        recipe: native!(
            "  batch: {global: 128, micro: 4}\n  parallel: {strategy: fsdp}\n  model: {path: mistralai/Mistral-7B-v0.1, precision: bf16, activation_checkpointing: true}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(split), Some(memory)) = (case.draft.split, case.memory()) else {
        return;
    };
    if memory.fits(split.ranks, split.micro) {
        return;
    }
    let strategy = case.spec().parallel.strategy;
    let axes = case.request.gpus / split.ranks.max(1);
    let enough = memory
        .sharded_ranks(MOST_GPUS / axes.max(1), |ranks| case.is_feasible(ranks))
        .map(|ranks| ranks * axes);
    let shard = match (strategy, enough) {
        (Strategy::Fsdp, Some(gpus)) => format!("use {} or more", case.count(gpus)),
        (_, Some(gpus)) if gpus <= case.request.gpus => "shard it (`fsdp`, ZeRO-3)".to_owned(),
        (_, Some(gpus)) => format!(
            "shard it (`fsdp`, ZeRO-3) over {} or more",
            case.count(gpus)
        ),
        (_, None) => "use larger devices, or split the model (tensor, pipeline)".to_owned(),
    };
    let dialect = case.recipe.dialect;
    let unstated = dialect != Dialect::Native && case.recipe.span("parallel.strategy").is_none();
    let mut ways = Vec::new();
    if unstated {
        ways.push(
            "say how it is sharded, `--accelerate FILE` or `evenkeel.parallel.strategy=fsdp`"
                .to_owned(),
        );
    }
    ways.push(shard);
    let model = &case.spec().model;
    if !model.adapters {
        ways.push("train adapters".to_owned());
    }
    if !model.activation_checkpointing {
        ways.push("checkpoint activations".to_owned());
    }
    let help = ways.join(", or ");
    let paths = ["parallel.strategy", "model.path", "model.config"];
    if memory.states_fit(split.ranks) {
        let message = format!(
            "a single sample needs about {} a device, {} of {} can be used",
            memory.needed(split.ranks, split.micro),
            memory.usable(),
            memory.available()
        );
        findings.add(Severity::Warning, &paths, message, help);
    } else {
        let message = format!(
            "weights, gradients and optimiser states need about {} a device, {} of {} can be used",
            memory.states(split.ranks),
            memory.usable(),
            memory.available()
        );
        if unstated {
            let message = format!("with everything on every device, {message}");
            findings.add(Severity::Warning, &paths, message, help);
        } else {
            findings.at(&paths, message, help);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::batch::PlanRequest;
    use crate::batch::rules::testing::{only, seven_billion};
    use crate::recipe::Severity;
    use crate::recipe::spec::Strategy;

    #[test]
    fn seven_billion_parameters_do_not_fit_whole() {
        let mut recipe = seven_billion();
        recipe.spec.parallel.strategy = Strategy::Ddp;
        let of = |recipe: &crate::recipe::Recipe, gpus, gb: u64| {
            let request = PlanRequest {
                device_memory: Some(gb * 1_000_000_000),
                ..PlanRequest::gpus(gpus)
            };
            only("model-needs-sharding", recipe, &request)
        };
        let found = of(&recipe, 8, 80);
        assert_eq!(found[0].severity, Severity::Error);
        assert_eq!(
            found[0].help,
            "shard it (`fsdp`, ZeRO-3), or train adapters"
        );
        assert_eq!(
            of(&recipe, 1, 80)[0].help,
            "shard it (`fsdp`, ZeRO-3) over 2 GPUs or more, or train adapters"
        );
        recipe.spec.parallel.strategy = Strategy::Fsdp;
        assert!(of(&recipe, 8, 80).is_empty());
        assert_eq!(
            of(&recipe, 4, 24)[0].help,
            "use 8 GPUs or more, or train adapters"
        );
        assert!(of(&recipe, 4, 1)[0].help.starts_with("use larger devices"));
    }

    #[test]
    fn a_dialect_that_does_not_say_how_it_shards_is_only_warned() {
        let mut recipe = seven_billion();
        recipe.dialect = crate::recipe::Dialect::HandbookTrl;
        recipe.spec.parallel.strategy = Strategy::Ddp;
        let request = PlanRequest {
            device_memory: Some(80_000_000_000),
            ..PlanRequest::gpus(8)
        };
        let found = only("model-needs-sharding", &recipe, &request);
        assert_eq!(found[0].severity, Severity::Warning);
        assert!(found[0].help.contains("--accelerate"));
        // Going down would not help: the recipe's micro-batch stays.
        let plan = crate::batch::plan(&recipe, &request).unwrap();
        assert_eq!(plan.proof, "8 × 16 × 1 = 128");
    }

    #[test]
    fn activations_alone_are_a_warning() {
        let mut recipe = seven_billion();
        recipe.spec.data.sequence_length = 32_768;
        let request = PlanRequest {
            device_memory: Some(24_000_000_000),
            ..PlanRequest::gpus(8)
        };
        let found = only("model-needs-sharding", &recipe, &request);
        assert_eq!(found[0].severity, Severity::Warning);
        assert!(found[0].message.starts_with("a single sample needs"));
    }
}
