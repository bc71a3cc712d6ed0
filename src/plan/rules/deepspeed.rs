//! The batch of a DeepSpeed config.

use super::{Case, Check, Findings, Rule, file, nearest};
use crate::plan::draft::ranks;
use crate::plan::elastic::make;
use crate::recipe::schema::spec::ElasticVersion;
use crate::recipe::{Dialect, Severity};

pub(super) const RULES: &[&Rule] = &[&DEEPSPEED_BATCH_TRIPLE, &DEEPSPEED_ELASTIC_BATCH];

const DEEPSPEED_BATCH_TRIPLE: Rule = Rule {
    id: "deepspeed-batch-triple",
    severity: Severity::Error,
    summary: "DeepSpeed's train batch is not micro-batch × accumulation × world",
    text: include_str!("texts/deepspeed-batch-triple.md"),
    wrong: file(
        "--gpus 3",
        "{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 2}\n",
    ),
    right: file(
        "--gpus 4",
        "{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 2}\n",
    ),
    check: Check::Plan(deepspeed_batch_triple),
};

fn deepspeed_batch_triple(case: &Case<'_>, findings: &mut Findings<'_>) {
    let batch = &case.spec().batch;
    if case.recipe.dialect != Dialect::Deepspeed || batch.elastic.is_some() {
        return;
    }
    // Without a train batch, the batch follows the world.
    let (Some(world), Some(global)) = (case.draft.data_parallel_size, batch.global) else {
        return;
    };
    let (per_device_batch_size, accumulation) =
        match (batch.per_device_batch_size, batch.accumulation) {
            (Some(per_device_batch_size), Some(accumulation)) => {
                (per_device_batch_size, accumulation)
            }
            (Some(per_device_batch_size), None) => (
                per_device_batch_size,
                global / per_device_batch_size / world,
            ),
            (None, accumulation) => {
                let accumulation = accumulation.unwrap_or(1);
                (global / world / accumulation, accumulation)
            }
        };
    let product = u128::from(per_device_batch_size) * u128::from(accumulation) * u128::from(world);
    if product == u128::from(global) {
        return;
    }
    let paths = [
        "batch.global",
        "batch.per_device_batch_size",
        "batch.accumulation",
    ];
    let message = format!(
        "as written, DeepSpeed refuses a world of {world}: {global} ≠ {per_device_batch_size} × {accumulation} × \
         {world} = {product}"
    );
    match case.draft.split {
        Some(split) => {
            let numbers = split.formula();
            let help = format!("use the plan's numbers, {numbers}; `--emit recipe` writes them");
            findings.warn(&paths, message, help);
        }
        None => findings.at(&paths, message, format!("use {}", case.feasible_near())),
    }
}

const DEEPSPEED_ELASTIC_BATCH: Rule = Rule {
    id: "deepspeed-elastic-batch",
    severity: Severity::Error,
    summary: "DeepSpeed's elasticity trains with another batch than its maximum, or refuses this world",
    text: include_str!("texts/deepspeed-elastic-batch.md"),
    wrong: file(
        "--gpus 7",
        "{\"zero_optimization\": {\"stage\": 2}, \"elasticity\": {\"enabled\": true, \
\"max_train_batch_size\": 128, \"micro_batch_sizes\": [1, 2, 4, 8, 16], \"version\": 0.1}}\n",
    ),
    right: file(
        "--gpus 8",
        "{\"zero_optimization\": {\"stage\": 2}, \"train_batch_size\": 128, \
\"train_micro_batch_size_per_gpu\": 16}\n",
    ),
    check: Check::Plan(deepspeed_elastic_batch),
};

fn deepspeed_elastic_batch(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let (Some(elastic), Some(world)) = (&spec.batch.elastic, case.draft.data_parallel_size) else {
        return;
    };
    let paths = ["batch.elastic.max_batch", "batch.elastic.micro_batches"];
    let limit = format!("{} {}", case.key(paths[0]), elastic.max_batch);
    let made = match make(elastic, world) {
        Ok(made) => made,
        Err(impossible) => {
            let help = "use micro-batches that fit into the maximum batch";
            findings.at(&paths, impossible, help);
            return;
        }
    };
    let batch = made.batch;
    if batch == 0 {
        findings.at(
            &paths,
            format!(
                "DeepSpeed's elasticity makes a batch of 0 out of {limit} in a world of {world}"
            ),
            "raise the maximum batch to at least the smallest micro-batch × the data-parallel size",
        );
        return;
    }
    if made.per_device_batch_size.is_none() {
        let help = match nearest(&made.valid, world).as_str() {
            "" => "use other bounds: elasticity refuses every world".to_owned(),
            near => format!("use a data-parallel size of {near}"),
        };
        findings.at(
            &paths,
            format!("DeepSpeed's elasticity refuses a world of {world} for its batch of {batch}"),
            help,
        );
        return;
    }
    let own = spec.batch.gpus.and_then(|gpus| ranks(gpus, &spec.parallel));
    let at_home = own.and_then(|ranks| Some(make(elastic, ranks).ok()?.batch));
    if elastic.version == ElasticVersion::V02
        && let Some(before) = at_home.filter(|before| *before != batch)
    {
        let key = case.key("batch.global");
        findings.warn(
            &paths,
            format!("DeepSpeed would train with {batch} samples a step in this world, and with {before} in the recipe's"),
            format!("set `elasticity.enabled` to false and set {key}: the plan keeps {before}"),
        );
    } else if batch != elastic.max_batch {
        findings.warn(
            &paths,
            format!("DeepSpeed makes a batch of {batch} out of {limit}"),
            format!("ignore this if {batch} is intended; otherwise set the batch and remove `elasticity`"),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{only, recipe};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::schema::spec::{Elastic, ElasticVersion};
    use crate::recipe::{Dialect, Recipe, Severity};

    fn config(
        global: u64,
        per_device_batch_size: Option<u64>,
        accumulation: Option<u64>,
    ) -> Recipe {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Deepspeed;
        recipe.spec.batch.global = Some(global);
        recipe.spec.batch.per_device_batch_size = per_device_batch_size;
        recipe.spec.batch.accumulation = accumulation;
        recipe
    }

    fn found(recipe: &Recipe, gpus: u64) -> Option<(Severity, String)> {
        let found = only("deepspeed-batch-triple", recipe, &PlanRequest::gpus(gpus));
        let first = found.into_iter().next()?;
        Some((first.severity, first.message))
    }

    #[test]
    fn missing_numbers_are_derived_by_floor_and_the_product_is_asserted() {
        let by_micro = config(32, Some(2), None);
        for gpus in [1, 2, 4, 8, 16] {
            assert_eq!(found(&by_micro, gpus), None, "{gpus}");
        }
        let (severity, message) = found(&by_micro, 3).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(message.ends_with("32 ≠ 2 × 5 × 3 = 30"), "{message}");
        let by_accumulation = config(32, None, Some(1));
        let (_, message) = found(&by_accumulation, 6).unwrap();
        assert!(message.ends_with("32 ≠ 5 × 1 × 6 = 30"), "{message}");
        let plan = plan(&by_accumulation, &PlanRequest::gpus(4)).unwrap();
        assert_eq!(plan.formula, "4 × 8 × 1 = 32");
    }

    #[test]
    fn a_world_that_other_numbers_fit_only_warns() {
        let (severity, message) = found(&config(32, Some(2), None), 32).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(message.ends_with("32 ≠ 2 × 0 × 32 = 0"), "{message}");
    }

    fn elastic(version: ElasticVersion) -> Recipe {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Deepspeed;
        recipe.spec.batch.global = None;
        recipe.spec.batch.per_device_batch_size = None;
        recipe.spec.batch.elastic = Some(Elastic {
            max_batch: 128,
            micro_batches: vec![1, 2, 4, 8, 16],
            version,
            ..Elastic::default()
        });
        recipe
    }

    fn elastic_found(recipe: &Recipe, gpus: u64) -> Option<(Severity, String)> {
        let found = only("deepspeed-elastic-batch", recipe, &PlanRequest::gpus(gpus));
        let first = found.into_iter().next()?;
        Some((
            first.severity,
            format!("{} ({})", first.message, first.help),
        ))
    }

    #[test]
    fn the_batch_is_120_and_the_plan_keeps_it() {
        let recipe = elastic(ElasticVersion::V01);
        let (severity, message) = elastic_found(&recipe, 6).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(message.contains("a batch of 120 out of"), "{message}");
        let plan = plan(&recipe, &PlanRequest::gpus(6)).unwrap();
        // The largest micro-batch of the list that divides 120 / 6 = 20.
        assert_eq!(plan.formula, "6 × 4 × 5 = 120");
    }

    #[test]
    fn a_batch_of_0_is_an_error() {
        let mut recipe = elastic(ElasticVersion::V02);
        let elastic = recipe.spec.batch.elastic.as_mut().unwrap();
        (elastic.max_batch, elastic.micro_batches) = (1, vec![1]);
        let (severity, message) = elastic_found(&recipe, 8).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(message.contains("a batch of 0 out of"), "{message}");
        assert!(plan(&recipe, &PlanRequest::gpus(8)).is_err());
    }

    #[test]
    fn a_world_outside_of_the_list_is_refused_with_the_nearest_sizes() {
        let (severity, message) = elastic_found(&elastic(ElasticVersion::V01), 7).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(message.ends_with("of 5, 6, 8 or 10)"), "{message}");
    }

    #[test]
    fn version_0_2_changes_its_batch_with_the_world() {
        let mut recipe = elastic(ElasticVersion::V02);
        recipe.spec.batch.gpus = Some(8);
        let (severity, message) = elastic_found(&recipe, 7).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(
            message.contains("126 samples a step in this world, and with 120"),
            "{message}"
        );
        assert!(
            elastic_found(&recipe, 8)
                .unwrap()
                .1
                .contains("a batch of 120")
        );
    }
}
