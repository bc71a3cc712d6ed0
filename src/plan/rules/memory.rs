//! The memory of devices and ranks.

use super::{Case, Check, Findings, Rule, native};
use crate::plan::draft::{DEFAULT_MICRO, MOST_GPUS};
use crate::plan::memory::{Memory, usable};
use crate::recipe::schema::spec::{Model, Strategy};
use crate::recipe::{Dialect, Severity, Spec};
use crate::util::format::bytes;

pub(super) const RULES: &[&Rule] = &[&MODEL_NEEDS_SHARDING, &START_BATCH_ESTIMATE, &RANK_MEMORY];

const MODEL_NEEDS_SHARDING: Rule = Rule {
    id: "model-needs-sharding",
    severity: Severity::Error,
    summary: "weights, gradients and optimiser states, or a single sample, do not fit into a device",
    text: include_str!("texts/model-needs-sharding.md"),
    wrong: native(
        "--gpus 8 --device-memory 80GB",
        "  batch: {global: 128, per_device_batch_size: 4}\n  model: {path: mistralai/Mistral-7B-v0.1, precision: bf16}\n",
    ),
    right: native(
        "--gpus 8 --device-memory 80GB",
        "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {strategy: fsdp}\n  model: {path: mistralai/Mistral-7B-v0.1, precision: bf16, activation_checkpointing: true}\n",
    ),
    check: Check::Plan(model_needs_sharding),
};

fn model_needs_sharding(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(split), Some((memory, available))) = (case.draft.split, case.memory()) else {
        return;
    };
    let ranks = split.ranks;
    if memory.fits(ranks, split.per_device_batch_size) {
        return;
    }
    let sharded_spec = sharded(case.spec());
    let sharded = memory.with(&sharded_spec);
    // A recipe in another dialect may state its sharding elsewhere, but not to the built-in trainer.
    let unstated = case.recipe.dialect != Dialect::Native
        && !case.request.runner.is_built_in()
        && case.recipe.span("parallel.strategy").is_none()
        && case.spec().parallel.strategy == Strategy::Ddp;
    let mut ways = Vec::new();
    if unstated && sharded.fits(ranks, 0) {
        ways.push(
            "state its sharding, `--accelerate FILE` or `evenkeel.parallel.strategy=fsdp`"
                .to_owned(),
        );
    }
    ways.push(how_to_shard(case, &sharded, ranks));
    ways.extend(how_to_save(case, &memory, ranks));
    let help = ways.join(", or ");
    let paths = ["parallel.strategy", "model.path", "model.config"];
    let what = "weights, gradients and optimiser states";
    let limit = format!("{} of {} can be used", usable(available), bytes(available));
    let states = memory.needed(ranks, 0);
    if memory.fits(ranks, 0) {
        let need = memory.needed(ranks, 1);
        let message = format!("a single sample needs about {need} per device; {limit}");
        findings.warn(&paths, message, help);
    } else if !unstated {
        let message = format!("{what} need about {states} per device; {limit}");
        findings.at(&paths, message, help);
    } else if sharded.fits(ranks, 0) {
        let message = format!("unsharded, {what} need about {states} per device; {limit}");
        findings.warn(&paths, message, help);
    } else {
        let need = sharded.needed(ranks, 0);
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
fn how_to_shard(case: &Case<'_>, sharded: &Memory<'_>, ranks: u64) -> String {
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
fn how_to_save(case: &Case<'_>, memory: &Memory<'_>, ranks: u64) -> Vec<String> {
    let mut ways = Vec::new();
    let mut consider = |way: &str, change: &dyn Fn(&mut Model)| {
        let mut spec = case.spec().clone();
        change(&mut spec.model);
        if spec.model != case.spec().model && memory.with(&spec).fits(ranks, 1) {
            ways.push(way.to_owned());
        }
    };
    consider("train adapters", &|model| model.adapters = true);
    consider("checkpoint activations", &|model| {
        model.activation_checkpointing = true;
    });
    ways
}

const START_BATCH_ESTIMATE: Rule = Rule {
    id: "start-batch-estimate",
    severity: Severity::Warning,
    summary: "the micro-batch is an estimate, not the recipe's",
    text: include_str!("texts/start-batch-estimate.md"),
    wrong: native(
        "--gpus 8 --device-memory 24GB",
        "  objective: sft\n  batch: {global: 128, per_device_batch_size: 16}\n  parallel: {strategy: fsdp}\n  data: {sequence_length: 2048}\n  model:\n    path: mistralai/Mistral-7B-v0.1\n    precision: bf16\n    activation_checkpointing: true\n",
    ),
    right: native(
        "--gpus 8 --device-memory 80GB",
        "  objective: sft\n  batch: {global: 128, per_device_batch_size: 16}\n  parallel: {strategy: fsdp}\n  data: {sequence_length: 2048}\n  model:\n    path: mistralai/Mistral-7B-v0.1\n    precision: bf16\n    activation_checkpointing: true\n",
    ),
    check: Check::Plan(start_batch_estimate),
};

fn start_batch_estimate(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(split) = case.draft.split else {
        return;
    };
    let path = "batch.per_device_batch_size";
    let (per_device_batch_size, formula) = (split.per_device_batch_size, split.formula());
    let stated = case.draft.per_device_batch_size(case.spec());
    let Some((memory, available)) = case.memory() else {
        if stated.is_none() && !case.request.estimate {
            findings.note(
                &[path, "batch.global"],
                format!(
                    "no key that is read states a micro-batch, and the devices' memory is not known: {per_device_batch_size} is the \
                     largest that divides the batch up to {DEFAULT_MICRO}"
                ),
                format!(
                    "state {}, or give `--device-memory` and a model whose shape is known",
                    case.key(path)
                ),
            );
        }
        return;
    };
    // `model-needs-sharding` covers this case.
    if !memory.fits(split.ranks, per_device_batch_size) {
        return;
    }
    let needed = memory.needed(split.ranks, per_device_batch_size);
    let usable = usable(available);
    if case.request.estimate {
        let stated = case.spec().batch.per_device_batch_size;
        let stated = stated.map_or(String::new(), |stated| format!(" (stated: {stated})"));
        findings.note(
            &[path],
            format!(
                "{per_device_batch_size} is the largest micro-batch that fits, by estimate: {needed} of \
                 {usable}{stated}"
            ),
            format!(
                "`--emit` writes it; an out-of-memory error leads to the next smaller one and keeps {formula}"
            ),
        );
    } else if let (Some(unlimited), Some(stated)) = (case.draft.unlimited, stated) {
        let unlimited = unlimited.per_device_batch_size;
        findings.at(
            &[path],
            format!(
                "micro-batch {unlimited} (stated: {stated}) needs about {} per device; {usable} of {} can be used: \
                 {per_device_batch_size} fits, by estimate",
                memory.needed(split.ranks, unlimited),
                bytes(available),
            ),
            format!("no action needed: accumulation makes up the rest, {formula}"),
        );
    } else if stated.is_none() {
        findings.note(
            &[path, "batch.global"],
            format!(
                "no key that is read states a micro-batch: {per_device_batch_size} is the largest that fits, by estimate ({needed} \
                 of {usable})"
            ),
            format!("state {} to choose another", case.key(path)),
        );
    }
}

const RANK_MEMORY: Rule = Rule {
    id: "rank-memory",
    severity: Severity::Error,
    summary: "weights, gradients and optimiser states do not fit into the memory of a rank",
    text: include_str!("texts/rank-memory.md"),
    wrong: native(
        "",
        "  # launched with --rank-memory 8GiB\n  batch: {global: 128, per_device_batch_size: 4}\n  model: {path: meta-llama/Llama-3.2-1B}\n",
    ),
    right: native(
        "",
        "  # launched with --rank-memory 8GiB --procs 4\n  batch: {global: 128, per_device_batch_size: 4}\n  model: {path: meta-llama/Llama-3.2-1B}\n  parallel: {strategy: fsdp}\n",
    ),
    check: Check::Trainer(rank_memory),
};

fn rank_memory(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(limit), Some(ranks), Some(memory)) = (
        case.request.runner.rank_memory(),
        case.draft.data_parallel_size,
        Memory::of(case.spec(), case.recipe.dialect, case.request),
    ) else {
        return;
    };
    let needed = memory.before_samples(ranks);
    if needed <= limit {
        return micro_batch_within(case, findings, &memory, limit);
    }
    let spec = sharded(case.spec());
    let all = memory.with(&spec);
    let enough = (1..=MOST_GPUS).find(|&ranks| all.before_samples(ranks) <= limit);
    let shard = enough.map(|enough| match case.spec().parallel.strategy {
        Strategy::Ddp => format!(
            "shard them ({}) over at least {}, ",
            case.set("parallel.strategy", "fsdp"),
            case.count(enough)
        ),
        _ => format!("use at least {}, ", case.count(enough)),
    });
    findings.at(
        &["parallel.strategy", "model.config", "model.path"],
        format!(
            "weights, gradients and optimiser states need {} a rank, and a rank may use {}",
            bytes(needed),
            bytes(limit)
        ),
        format!(
            "{}raise `--rank-memory`, or train a smaller model",
            shard.unwrap_or_default()
        ),
    );
}

/// Warns where the ranks will find that the micro-batch does not fit.
fn micro_batch_within(
    case: &Case<'_>,
    findings: &mut Findings<'_>,
    memory: &Memory<'_>,
    limit: u64,
) {
    let Some(split) = case.draft.split else {
        return;
    };
    let micro_batch = split.per_device_batch_size;
    if memory.estimate(split.ranks, micro_batch).total > limit {
        findings.warn(
            &["batch.per_device_batch_size"],
            format!(
                "micro-batch {micro_batch} needs {} a rank, and a rank may use {}",
                memory.needed(split.ranks, micro_batch),
                bytes(limit)
            ),
            format!(
                "no action needed: the ranks take the largest that fits and keep the global batch of {}",
                split.batch()
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{limited, only, recipe, seven_billion};
    use crate::plan::{AskedRunner, DeviceKind, PlanRequest, Runner, plan};
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
        // The built-in trainer would run it unsharded.
        let runner = Runner::of(&recipe.spec, AskedRunner::BuiltIn, DeviceKind::Cuda, None);
        let launched = PlanRequest {
            runner,
            ..request.clone()
        };
        let found = only("model-needs-sharding", &recipe, &launched);
        assert_eq!(found[0].severity, Severity::Error);
        assert!(found[0].help.starts_with("shard it (`fsdp`, ZeRO-3)"));
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
        assert_eq!(plan.formula, "8 × 1 × 16 = 128");
        assert_eq!(
            plan.facts.adjusted[0].reason,
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
        assert_eq!(plan.facts.diagnostics[0].rule, "start-batch-estimate");
    }

    #[test]
    fn states_beyond_the_memory_of_a_rank_are_refused_with_the_way_out() {
        let mut recipe = recipe();
        // 1 235 814 400 parameters.
        recipe.spec.model.path = Some("meta-llama/Llama-3.2-1B".to_owned());
        let mut message = |strategy, ranks, gibibytes: u64| {
            recipe.spec.parallel.strategy = strategy;
            let request = PlanRequest {
                gpus: ranks,
                ..limited(Some(gibibytes << 30))
            };
            let found = only("rank-memory", &recipe, &request);
            let refused = found.iter().find(|d| d.is_error());
            refused.map(|d| format!("{}; {}", d.message, d.help))
        };
        assert_eq!(message(Strategy::Ddp, 4, 19), None);
        assert_eq!(message(Strategy::Fsdp, 4, 8), None);
        insta::assert_snapshot!(message(Strategy::Ddp, 4, 8).unwrap());
        insta::assert_snapshot!(message(Strategy::Fsdp, 4, 4).unwrap());
        // The states fit, the micro-batch does not.
        let found = only("rank-memory", &recipe, &limited(Some(20 << 30)));
        assert_eq!(found[0].severity, Severity::Warning);
        assert!(
            found[0].message.starts_with("micro-batch 16 needs "),
            "{found:?}"
        );
    }
}
