//! `parallelism-product`: the product of all parallel sizes is the number of devices.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::arithmetic::product;
use crate::plan::draft::{model_parallel, ranks};
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "parallelism-product",
    severity: Severity::Error,
    summary: "tensor, pipeline, context, sequence and data-parallel sizes do not multiply to the number of devices",
    why: "A device belongs to exactly one rank of every axis, so the number of devices is the \
product of all sizes. The data-parallel size is the number of devices divided by the other sizes. \
A remainder means idle devices or a world that cannot be built.",
    upstream: "accelerate 16cb6eb, `parallelism_config.py` (`_validate_accelerator`): raises when \
dp_replicate × dp_shard × tp × cp × sp is not num_processes (not with DeepSpeed's sequence \
parallelism). It also raises on combinations of axes that exclude each other. `utils/launch.py` starts \
num_processes // num_machines on each machine, without the remainder. transformers 5.23.0, `trainer.py`: world // \
(tp × cp × sp), floored, not divided by pipeline stages.",
    wrong: Example {
        flags: "--gpus 6",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {tensor: 4}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {tensor: 4}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let parallel = &case.spec().parallel;
    let axes = [
        ("tensor", parallel.tensor),
        ("pipeline", parallel.pipeline),
        ("context", parallel.context),
        ("sequence", parallel.sequence),
    ];
    let written: Vec<(String, u64)> = axes
        .into_iter()
        .filter(|(_, size)| *size != 1)
        .map(|(axis, size)| (format!("parallel.{axis}"), size))
        .collect();
    let paths: Vec<&str> = written.iter().map(|(path, _)| path.as_str()).collect();
    let sizes: Vec<String> = written
        .iter()
        .map(|(path, size)| format!("{} {size}", case.key(path)))
        .collect();
    let sizes = sizes.join(" × ");
    let Some(one_copy) = model_parallel(parallel) else {
        let message = format!("{sizes} is not a valid number of devices");
        findings.at(&paths, message, "use smaller sizes, from 1");
        return;
    };
    let mut wrong_count = |gpus: u64, paths: &[&str], what: &str| {
        let below = gpus - gpus % one_copy;
        let near = match below {
            0 => format!("{one_copy}"),
            below => format!("{below} or {}", below.saturating_add(one_copy)),
        };
        findings.at(
            paths,
            format!("{gpus} {what} are not a multiple of {sizes} = {one_copy}"),
            format!("use {near}, or other sizes"),
        );
    };
    if case.request.gpus == 0 {
        findings.at(
            &[],
            format!("a plan for {}", case.count(0)),
            "ask for at least 1",
        );
        return;
    }
    if case.draft.data_parallel_size.is_none() {
        let devices = case.request.devices.name(case.request.gpus);
        wrong_count(case.request.gpus, &paths, &devices);
    }
    if let Some(gpus) = case.spec().batch.gpus
        && gpus != case.request.gpus
        && ranks(gpus, parallel).is_none()
    {
        wrong_count(gpus, &["batch.gpus"], "GPUs of the recipe");
    }
    check_data_parallel(case, findings);
    if case.recipe.dialect != Dialect::Native {
        check_combinations(case, findings);
    }
}

/// Refuses the combinations of axes that accelerate refuses.
fn check_combinations(case: &Case<'_>, findings: &mut Findings<'_>) {
    let parallel = &case.spec().parallel;
    if parallel.context > 1 && parallel.sequence > 1 {
        findings.at(
            &["parallel.sequence", "parallel.context"],
            format!(
                "context-parallel size {} and sequence-parallel size {} exclude each other",
                parallel.context, parallel.sequence
            ),
            "set one of them to 1",
        );
    }
    let replicas = parallel.data_replicate.unwrap_or(1);
    let split = parallel.tensor > 1 || parallel.context > 1;
    if split && replicas > 1 && parallel.data_shard.unwrap_or(1) == 1 {
        findings.at(
            &["parallel.data_replicate"],
            format!("{replicas} unsharded replicas cannot be combined with tensor or context parallelism"),
            format!("shard them: give {} instead", case.key("parallel.data_shard")),
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
    let stated = [
        parallel.data_replicate.unwrap_or(1),
        parallel.data_shard.unwrap_or(1),
    ];
    let paths = ["parallel.data_shard", "parallel.data_replicate"];
    let (what, ranks) = match (case.draft.recipe_ranks, case.draft.data_parallel_size) {
        (Some(ranks), _) => ("of the recipe", ranks),
        (None, Some(ranks)) => ("of this world", ranks),
        (None, None) => return,
    };
    if product(&stated) != Some(ranks) {
        findings.at(
            &paths,
            format!(
                "{} data-parallel replicas × {} shards are not the {ranks} data-parallel ranks \
                 {what}",
                stated[0], stated[1]
            ),
            format!(
                "make {} × {} equal to {ranks}",
                case.key(paths[1]),
                case.key(paths[0])
            ),
        );
    } else if let Some(now) = case.draft.data_parallel_size.filter(|&now| now != ranks) {
        findings.add(
            Severity::Warning,
            &paths,
            format!(
                "{} replicas × {} shards fit the recipe's {ranks} data-parallel ranks, not the \
                 {now} of this world",
                stated[0], stated[1]
            ),
            format!(
                "make {} × {} equal to {now}",
                case.key(paths[1]),
                case.key(paths[0])
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Severity;

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
}
