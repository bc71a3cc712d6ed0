//! `model-needs-sharding`: the smallest micro-batch fits into a device.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::draft::MOST_GPUS;
use crate::plan::memory::Device;
use crate::recipe::schema::spec::{Model, Strategy};
use crate::recipe::{Dialect, Severity, Spec};

pub(super) const RULE: Rule = Rule {
    id: "model-needs-sharding",
    severity: Severity::Error,
    summary: "weights, gradients and optimiser states, or a single sample, do not fit into a device",
    why: "Full training takes about 16 bytes a parameter before the first activation: 7B \
parameters are 108 GiB. If that does not fit, it must be sharded: FSDP or ZeRO-3 divide all of \
it by the data-parallel ranks; adapters avoid most of it. States that are too large are an error. \
Activations of a single sample that are too large are a warning, because that part of \
the estimate depends most on the implementation. Some recipes of other dialects do not state their \
sharding (the alignment-handbook's state it in the accelerate config that they are launched with). They \
get only a warning as long as the model would fit fully sharded: the estimate counts everything on every \
device, which may not be intended. No estimate offloads to the host. If the devices' memory is not known, \
the rule checks nothing: give `--device-memory`.",
    upstream: "ZeRO (arXiv 1910.02054, section 3.1) for the 16 bytes. Upstream starts and fails with an \
out-of-memory error.",
    wrong: Example {
        flags: "--gpus 8 --device-memory 80GB",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  model: {path: mistralai/Mistral-7B-v0.1, precision: bf16}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8 --device-memory 80GB",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {strategy: fsdp}\n  model: {path: mistralai/Mistral-7B-v0.1, precision: bf16, activation_checkpointing: true}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(split), Some(memory)) = (case.draft.split, case.memory()) else {
        return;
    };
    let ranks = split.ranks;
    if memory.fits(ranks, split.per_device_batch_size) {
        return;
    }
    let sharded_spec = sharded(case.spec());
    let sharded = memory.with(&sharded_spec);
    let states_fit = memory.states_fit(ranks);
    // A recipe in another dialect may state its sharding elsewhere.
    let unstated = case.recipe.dialect != Dialect::Native
        && case.recipe.span("parallel.strategy").is_none()
        && case.spec().parallel.strategy == Strategy::Ddp;
    let mut ways = Vec::new();
    if unstated && sharded.states_fit(ranks) {
        ways.push(
            "state its sharding, `--accelerate FILE` or `evenkeel.parallel.strategy=fsdp`"
                .to_owned(),
        );
    }
    ways.push(how_to_shard(case, &sharded, ranks));
    ways.extend(how_to_save(case, &memory, ranks));
    let help = ways.join(", or ");
    let paths = ["parallel.strategy", "model.path", "model.config"];
    let limit = format!("{} of {} can be used", memory.usable(), memory.available());
    if states_fit {
        let need = memory.needed(ranks, 1);
        let message = format!("a single sample needs about {need} per device; {limit}");
        findings.add(Severity::Warning, &paths, message, help);
        return;
    }
    let what = "weights, gradients and optimiser states";
    if !unstated {
        let need = memory.states(ranks);
        findings.at(
            &paths,
            format!("{what} need about {need} per device; {limit}"),
            help,
        );
    } else if sharded.states_fit(ranks) {
        let need = memory.states(ranks);
        let message = format!("unsharded, {what} need about {need} per device; {limit}");
        findings.add(Severity::Warning, &paths, message, help);
    } else {
        let need = sharded.states(ranks);
        let over = case.count(case.request.gpus);
        let message =
            format!("even sharded over {over}, {what} need about {need} per device; {limit}");
        findings.at(&paths, message, help);
    }
}

/// The recipe, fully sharded over all data-parallel ranks.
fn sharded(spec: &Spec) -> Spec {
    let mut spec = spec.clone();
    spec.parallel.strategy = Strategy::Fsdp;
    spec.parallel.data_shard = None;
    spec
}

/// The number of devices on which it fits fully sharded, as a way out.
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

/// Changes that make it fit on the same devices.
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
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, seven_billion};
    use crate::recipe::Severity;
    use crate::recipe::schema::spec::Strategy;

    #[test]
    fn seven_billion_parameters_do_not_fit_unsharded() {
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
    fn a_dialect_without_stated_sharding_only_gets_a_warning() {
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
        // A smaller micro-batch would not help, so the plan keeps the recipe's.
        let plan = crate::plan::plan(&recipe, &request).unwrap();
        assert_eq!(plan.formula, "8 × 16 × 1 = 128");
    }

    #[test]
    fn a_model_that_fits_under_no_sharding_is_refused() {
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
                message.contains(" TiB per device; 67.1 GiB of 74.5 GiB"),
                "{message}"
            );
            // The help proposes only what helps.
            assert_eq!(
                found[0].help,
                "use larger devices, or split the model (tensor, pipeline)"
            );
            assert!(crate::plan::plan(&recipe, &request).is_err());
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
        // The finding is about one sample, whatever the recipe's micro-batch.
        recipe.spec.batch.per_device_batch_size = Some(1);
        let one = only("model-needs-sharding", &recipe, &request);
        assert_eq!(&one[0].message, message);
    }
}
