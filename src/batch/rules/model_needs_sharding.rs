//! `model-needs-sharding`: the smallest micro-batch fits into a device.

use super::{Case, Check, Example, Findings, Rule};
use crate::batch::draft::MOST_GPUS;
use crate::batch::memory::Device;
use crate::recipe::spec::{Model, Strategy};
use crate::recipe::{Dialect, Severity, Spec};

pub(super) const RULE: Rule = Rule {
    id: "model-needs-sharding",
    severity: Severity::Error,
    summary: "weights, gradients and optimiser states, or a single sample, do not fit into a device",
    why: "Training in full takes about 16 bytes a parameter before the first activation: 7B \
parameters are 108 GiB. Where that does not fit, it has to be spread: FSDP or ZeRO-3 divide all of \
it by the data-parallel ranks, adapters leave most of it out. It is an error when the states alone \
are too large, and a warning when only the activations of a single sample are, since that part of \
the estimate depends most on the implementation. A recipe of another dialect that does not say how \
it is sharded (the alignment-handbook's say it in the accelerate config that they are launched \
with) is only warned, as long as it would fit with everything sharded: the estimate counts everything \
on every device, which may not be meant. Nothing is offloaded to the host in any estimate. Where the \
devices' memory is not known, nothing is said: give `--device-memory`.",
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
    let ranks = split.ranks;
    if memory.fits(ranks, split.micro) {
        return;
    }
    let sharded_spec = sharded(case.spec());
    let sharded = memory.with(&sharded_spec);
    let states_fit = memory.states_fit(ranks);
    // The recipe is of another dialect, which says how it is sharded elsewhere.
    let unstated = case.recipe.dialect != Dialect::Native
        && case.recipe.span("parallel.strategy").is_none()
        && case.spec().parallel.strategy == Strategy::Ddp;
    let mut ways = Vec::new();
    if unstated && sharded.states_fit(ranks) {
        ways.push(
            "say how it is sharded, `--accelerate FILE` or `evenkeel.parallel.strategy=fsdp`"
                .to_owned(),
        );
    }
    ways.push(how_to_shard(case, &sharded, ranks));
    ways.extend(how_to_save(case, &memory, ranks));
    let help = ways.join(", or ");
    let paths = ["parallel.strategy", "model.path", "model.config"];
    let room = format!("{} of {} can be used", memory.usable(), memory.available());
    if states_fit {
        let need = memory.needed(ranks, 1);
        let message = format!("a single sample needs about {need} a device, {room}");
        findings.add(Severity::Warning, &paths, message, help);
        return;
    }
    let what = "weights, gradients and optimiser states";
    if !unstated {
        let need = memory.states(ranks);
        findings.at(
            &paths,
            format!("{what} need about {need} a device, {room}"),
            help,
        );
    } else if sharded.states_fit(ranks) {
        let need = memory.states(ranks);
        let message =
            format!("with everything on every device, {what} need about {need} a device, {room}");
        findings.add(Severity::Warning, &paths, message, help);
    } else {
        let need = sharded.states(ranks);
        let over = case.count(case.request.gpus);
        let message =
            format!("even sharded over {over}, {what} need about {need} a device, {room}");
        findings.at(&paths, message, help);
    }
}

/// The recipe with everything sharded over all data-parallel ranks.
fn sharded(spec: &Spec) -> Spec {
    let mut spec = spec.clone();
    spec.parallel.strategy = Strategy::Fsdp;
    spec.parallel.data_shard = None;
    spec
}

/// Over how many devices it would fit with everything sharded.
fn how_to_shard(case: &Case<'_>, sharded: &Device<'_>, ranks: u64) -> String {
    let axes = (case.request.gpus / ranks.max(1)).max(1);
    let enough = (1..=MOST_GPUS / axes)
        .find(|&ranks| case.is_feasible(ranks) && sharded.fits(ranks, 1))
        .map(|ranks| ranks * axes);
    match (case.spec().parallel.strategy, enough) {
        (Strategy::Fsdp, Some(gpus)) => format!("use {} or more", case.count(gpus)),
        (_, Some(gpus)) if gpus <= case.request.gpus => "shard it (`fsdp`, ZeRO-3)".to_owned(),
        (_, Some(gpus)) => format!(
            "shard it (`fsdp`, ZeRO-3) over {} or more",
            case.count(gpus)
        ),
        (_, None) => "use larger devices, or split the model (tensor, pipeline)".to_owned(),
    }
}

/// What would make room on the same devices, where it would make enough.
fn how_to_save(case: &Case<'_>, memory: &Device<'_>, ranks: u64) -> Vec<String> {
    let fits = |change: fn(&mut Model)| {
        let mut spec = case.spec().clone();
        change(&mut spec.model);
        spec.model != case.spec().model && memory.with(&spec).fits(ranks, 1)
    };
    let mut ways = Vec::new();
    if fits(|model| model.adapters = true) {
        ways.push("train adapters".to_owned());
    }
    if fits(|model| model.activation_checkpointing = true) {
        ways.push("checkpoint activations".to_owned());
    }
    ways
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
    fn what_fits_in_no_way_is_refused_however_it_is_sharded() {
        let mut recipe = seven_billion();
        recipe.dialect = crate::recipe::Dialect::HandbookTrl;
        recipe.spec.parallel.strategy = Strategy::Ddp;
        for (key, size) in [("hidden_size", 1 << 19), ("num_attention_heads", 1 << 12)] {
            let size: u64 = size;
            recipe.spec.model.config.insert(key.to_owned(), size.into());
        }
        for gpus in [1, 8, 128] {
            let request = PlanRequest {
                device_memory: Some(80_000_000_000),
                ..PlanRequest::gpus(gpus)
            };
            let found = only("model-needs-sharding", &recipe, &request);
            assert_eq!(found[0].severity, Severity::Error);
            let message = &found[0].message;
            assert!(message.starts_with("even sharded over"), "{message}");
            assert!(
                message.contains(" TiB a device, 67.1 GiB of 74.5 GiB"),
                "{message}"
            );
            // What would not help is not proposed.
            assert_eq!(
                found[0].help,
                "use larger devices, or split the model (tensor, pipeline)"
            );
            assert!(crate::batch::plan(&recipe, &request).is_err());
            let unknown = PlanRequest::gpus(gpus);
            assert!(only("model-needs-sharding", &recipe, &unknown).is_empty());
        }
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
        let message = &found[0].message;
        assert!(message.starts_with("a single sample needs"), "{message}");
        // One sample, whatever the recipe's micro-batch is.
        recipe.spec.batch.micro = Some(1);
        let one = only("model-needs-sharding", &recipe, &request);
        assert_eq!(&one[0].message, message);
    }
}
