//! The world: the product of its axes, and the worlds that a recipe allows.

use super::{Case, Check, Findings, Rule, file, multiples, native};
use crate::plan::arithmetic::product;
use crate::plan::draft::{axes, model_parallel, ranks};
use crate::recipe::schema::spec::Strategy;
use crate::recipe::{Dialect, Severity};

pub(super) const RULES: &[&Rule] = &[
    &PARALLELISM_PRODUCT,
    &ELASTICITY_BOUNDS,
    &IDLE_SPARES,
    &ONE_MACHINE,
];

const PARALLELISM_PRODUCT: Rule = Rule {
    id: "parallelism-product",
    severity: Severity::Error,
    summary: "tensor, pipeline, context, sequence and data-parallel sizes do not multiply to the number of devices",
    text: include_str!("texts/parallelism-product.md"),
    wrong: native(
        "--gpus 6",
        "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {tensor: 4}\n",
    ),
    right: native(
        "--gpus 8",
        "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {tensor: 4}\n",
    ),
    check: Check::Plan(parallelism_product),
};

fn parallelism_product(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (parallel, gpus) = (&case.spec().parallel, case.request.gpus);
    let written = axes(parallel).into_iter().filter(|(_, size)| *size != 1);
    let (paths, sizes): (Vec<String>, Vec<String>) = written
        .map(|(axis, size)| {
            let path = format!("parallel.{axis}");
            let size = format!("{} {size}", case.key(&path));
            (path, size)
        })
        .unzip();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let sizes = sizes.join(" × ");
    let Some(one_copy) = model_parallel(parallel) else {
        let message = format!("{sizes} is not a valid number of devices");
        findings.at(&paths, message, "use smaller sizes, from 1");
        return;
    };
    if gpus == 0 {
        let message = format!("a plan for {}", case.count(0));
        findings.at(&[], message, "ask for at least 1");
        return;
    }
    let mut wrong_count = |gpus: u64, paths: &[&str], what: &str| {
        findings.at(
            paths,
            format!("{gpus} {what} are not a multiple of {sizes} = {one_copy}"),
            format!("use {}, or other sizes", multiples(one_copy, gpus)),
        );
    };
    if case.draft.data_parallel_size.is_none() {
        wrong_count(gpus, &paths, &case.request.runner.device().noun(gpus));
    }
    if let Some(stated) = case.spec().batch.gpus
        && stated != gpus
        && ranks(stated, parallel).is_none()
    {
        wrong_count(stated, &["batch.gpus"], "GPUs of the recipe");
    }
    check_data_parallel(case, findings);
    if case.recipe.dialect != Dialect::Native {
        check_combinations(case, findings);
    }
}

/// Refuses the combinations of axes that accelerate refuses.
fn check_combinations(case: &Case<'_>, findings: &mut Findings<'_>) {
    let parallel = &case.spec().parallel;
    let (context, sequence) = (parallel.context, parallel.sequence);
    if context > 1 && sequence > 1 {
        findings.at(
            &["parallel.sequence", "parallel.context"],
            format!(
                "context-parallel size {context} and sequence-parallel size {sequence} exclude each other"
            ),
            "set one of them to 1",
        );
    }
    let replicas = parallel.data_replicate.unwrap_or(1);
    let split = parallel.tensor > 1 || context > 1;
    if split && replicas > 1 && parallel.data_shard.unwrap_or(1) == 1 {
        let shards = case.key("parallel.data_shard");
        findings.at(
            &["parallel.data_replicate"],
            format!("{replicas} unsharded replicas cannot be combined with tensor or context parallelism"),
            format!("shard them: give {shards} instead"),
        );
    }
}

/// Checks stated replicas and shards against the stated GPUs.
fn check_data_parallel(case: &Case<'_>, findings: &mut Findings<'_>) {
    let parallel = &case.spec().parallel;
    if parallel.data_replicate.is_none() && parallel.data_shard.is_none() {
        return;
    }
    // DeepSpeed creates the groups of its sequence parallelism, and accelerate does not check them.
    if parallel.sequence > 1 && case.recipe.dialect != Dialect::Native {
        return;
    }
    let replicas = parallel.data_replicate.unwrap_or(1);
    let shards = parallel.data_shard.unwrap_or(1);
    let here = case.draft.data_parallel_size;
    let (what, ranks) = match (case.draft.recipe_ranks, here) {
        (Some(ranks), _) => ("of the recipe", ranks),
        (None, Some(ranks)) => ("of this world", ranks),
        (None, None) => return,
    };
    let paths = ["parallel.data_shard", "parallel.data_replicate"];
    let make = |ranks| {
        let (shards, replicas) = (case.key(paths[0]), case.key(paths[1]));
        format!("make {replicas} × {shards} equal to {ranks}")
    };
    if product(&[replicas, shards]) != Some(ranks) {
        findings.at(
            &paths,
            format!(
                "{replicas} data-parallel replicas × {shards} shards are not the {ranks} data-parallel ranks {what}"
            ),
            make(ranks),
        );
    } else if let Some(now) = here.filter(|&now| now != ranks) {
        findings.warn(
            &paths,
            format!(
                "{replicas} replicas × {shards} shards fit the recipe's {ranks} data-parallel ranks, not the {now} \
                 of this world"
            ),
            make(now),
        );
    }
}

const ELASTICITY_BOUNDS: Rule = Rule {
    id: "elasticity-bounds",
    severity: Severity::Error,
    summary: "the world is outside of the recipe's elasticity bounds",
    text: include_str!("texts/elasticity-bounds.md"),
    wrong: native(
        "--gpus 16",
        "  batch: {global: 128, per_device_batch_size: 4}\n  elasticity: {min: 2, max: 8}\n",
    ),
    right: native(
        "--gpus 8",
        "  batch: {global: 128, per_device_batch_size: 4}\n  elasticity: {min: 2, max: 8}\n",
    ),
    check: Check::Plan(elasticity_bounds),
};

fn elasticity_bounds(case: &Case<'_>, findings: &mut Findings<'_>) {
    let elasticity = &case.spec().elasticity;
    let gpus = case.request.gpus;
    let (min, max) = (
        elasticity.min.unwrap_or(1),
        elasticity.max.unwrap_or(u64::MAX),
    );
    let paths = ["elasticity.min", "elasticity.max"];
    let [lower, upper] = paths.map(|path| case.key(path));
    let count = case.count(gpus);
    if min > max {
        let message = format!("{lower} {min} is above {upper} {max}");
        findings.at(&paths, message, "swap them");
    } else if gpus < min {
        let message = format!("{count} are fewer than {lower} {min}");
        let help = format!("ask for {min} or more, or lower it");
        findings.at(&paths[..1], message, help);
    } else if gpus > max {
        let message = format!("{count} are more than {upper} {max}");
        let help = format!("ask for {max} or fewer, or raise it");
        findings.at(&paths[1..], message, help);
    }
}

const IDLE_SPARES: Rule = Rule {
    id: "idle-spares",
    severity: Severity::Warning,
    summary: "no process can stand by for the ranks of this recipe",
    text: include_str!("texts/idle-spares.md"),
    wrong: native(
        "--gpus 8",
        "  batch: {global: 128, per_device_batch_size: 4}\n  elasticity: {spares: 1}\n  parallel: {strategy: fsdp}\n",
    ),
    right: native(
        "--gpus 8",
        "  batch: {global: 128, per_device_batch_size: 4}\n  elasticity: {spares: 1}\n",
    ),
    check: Check::Plan(idle_spares),
};

fn idle_spares(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let why = if spec.trainer.is_external() || case.request.runner.is_external() {
        "an external trainer starts with all of its ranks"
    } else if spec.parallel.strategy != Strategy::Ddp {
        "a rank of a sharded model has a part of it only"
    } else if !spec.objective.is_likelihood() {
        "a loss over preferences agrees on its reference at the start"
    } else {
        return;
    };
    let path = "elasticity.spares";
    if spec.elasticity.spares > 0 {
        let message = format!("{} has no effect: {why}", case.key(path));
        findings.at(&[path], message, "remove it");
    }
}

const ONE_MACHINE: Rule = Rule {
    id: "one-machine",
    severity: Severity::Error,
    summary: "upstream trains on the GPUs of one machine only",
    text: include_str!("texts/one-machine.md"),
    wrong: file(
        "--nodes 2 --gpus-per-node 4 --dialect dpo",
        "trainer: FSDPTrainer\nbatch_size: 64\ngradient_accumulation_steps: 2\neval_batch_size: 32\n",
    ),
    right: file(
        "--nodes 1 --gpus-per-node 8 --dialect dpo",
        "trainer: FSDPTrainer\nbatch_size: 64\ngradient_accumulation_steps: 2\neval_batch_size: 32\n",
    ),
    check: Check::Plan(one_machine),
};

fn one_machine(case: &Case<'_>, findings: &mut Findings<'_>) {
    if let Some(nodes) = case.request.nodes()
        && nodes > 1
        && !case.request.runner.is_built_in()
        && case.recipe.dialect == Dialect::Dpo
    {
        let each = case.request.gpus / nodes;
        findings.at(
            &["parallel.strategy", "parallel.one_process"],
            format!(
                "upstream starts a process for every GPU of one machine: {nodes} machines would train \
                 {nodes} separate models, on {} each",
                case.count(each)
            ),
            format!("plan for one: `--gpus {each}`"),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::{Dialect, Severity};

    #[test]
    fn a_remainder_is_refused_with_the_counts_around_it() {
        let mut recipe = recipe();
        recipe.spec.parallel.tensor = 2;
        recipe.spec.parallel.pipeline = 2;
        let found = only("parallelism-product", &recipe, &PlanRequest::gpus(6));
        assert_eq!(
            found[0].message,
            "6 GPUs are not a multiple of `parallel.tensor` 2 × `parallel.pipeline` 2 = 4"
        );
        assert_eq!(found[0].help, "use 4 or 8, or other sizes");
        assert!(only("parallelism-product", &recipe, &PlanRequest::gpus(8)).is_empty());
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let mut recipe = recipe();
        let parallel = &mut recipe.spec.parallel;
        (parallel.tensor, parallel.pipeline) = (1 << 20, 1 << 20);
        (parallel.context, parallel.sequence) = (1 << 20, 1 << 20);
        let found = only("parallelism-product", &recipe, &PlanRequest::gpus(8));
        assert!(
            found[0]
                .message
                .contains("is not a valid number of devices")
        );
    }

    #[test]
    fn replicas_times_shards_are_the_data_parallel_ranks() {
        let mut recipe = recipe();
        recipe.spec.batch.gpus = Some(8);
        recipe.spec.parallel.tensor = 2;
        recipe.spec.parallel.data_replicate = Some(2);
        recipe.spec.parallel.data_shard = Some(2);
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("parallelism-product", recipe, &PlanRequest::gpus(gpus))
        };
        assert!(of(&recipe, 8).is_empty());
        assert_eq!(of(&recipe, 16)[0].severity, Severity::Warning);
        recipe.spec.parallel.data_shard = Some(4);
        assert_eq!(of(&recipe, 8)[0].severity, Severity::Error);
    }

    #[test]
    fn axes_that_exclude_each_other_are_refused() {
        let mut recipe = crate::plan::rules::testing::recipe();
        recipe.dialect = crate::recipe::Dialect::Accelerate;
        recipe.spec.parallel.context = 2;
        recipe.spec.parallel.sequence = 2;
        let of = |recipe: &crate::recipe::Recipe| {
            only("parallelism-product", recipe, &PlanRequest::gpus(8))
        };
        assert!(of(&recipe)[0].message.ends_with("exclude each other"));
        recipe.spec.parallel.sequence = 1;
        recipe.spec.parallel.data_replicate = Some(4);
        assert!(of(&recipe)[0].message.starts_with("4 unsharded replicas"));
        recipe.spec.parallel.data_replicate = Some(2);
        recipe.spec.parallel.data_shard = Some(2);
        assert!(of(&recipe).is_empty());
    }

    #[test]
    fn worlds_outside_are_refused() {
        let mut recipe = recipe();
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            let found = only("elasticity-bounds", recipe, &PlanRequest::gpus(gpus));
            found.first().map(|d| d.message.clone()).unwrap_or_default()
        };
        recipe.spec.elasticity.min = Some(2);
        recipe.spec.elasticity.max = Some(8);
        assert!(of(&recipe, 1).contains("fewer than"));
        assert_eq!(of(&recipe, 4), "");
        assert!(of(&recipe, 16).contains("more than"));
        recipe.spec.elasticity.min = Some(9);
        assert!(of(&recipe, 8).contains("above"));
    }

    #[test]
    fn several_machines_are_refused_where_upstream_uses_one() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Dpo;
        let of = |recipe: &crate::recipe::Recipe, gpus_per_node| {
            let request = PlanRequest {
                gpus_per_node,
                ..PlanRequest::gpus(16)
            };
            only("one-machine", recipe, &request)
        };
        assert!(of(&recipe, None).is_empty() && of(&recipe, Some(16)).is_empty());
        assert_eq!(
            of(&recipe, Some(8))[0].message,
            "upstream starts a process for every GPU of one machine: 2 machines would train 2 \
             separate models, on 8 GPUs each"
        );
        recipe.dialect = Dialect::Halos;
        assert!(of(&recipe, Some(8)).is_empty());
    }
}
