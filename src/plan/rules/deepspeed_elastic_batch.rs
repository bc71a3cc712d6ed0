//! `deepspeed-elastic-batch`: the batch that DeepSpeed's elasticity derives from its bounds.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::draft::ranks;
use crate::plan::elastic::make;
use crate::recipe::Severity;
use crate::recipe::schema::spec::ElasticVersion;

pub(super) const RULE: Rule = Rule {
    id: "deepspeed-elastic-batch",
    severity: Severity::Error,
    summary: "DeepSpeed's elasticity trains with another batch than its maximum, or refuses this world",
    why: "Elasticity takes a maximum batch and a list of micro-batches, and chooses a batch that many \
numbers of GPUs divide. The chosen batch is seldom the maximum: 128 with micro-batches of 1, 2, 4, 8 and \
16 gives 120. Version 0.1 keeps that batch in the worlds of its list and refuses all others. Version 0.2 \
works in whole nodes. Outside of its list it chooses another batch for the world that it finds, so the \
batch changes with the world.

A refused world is an error. A batch below the maximum, or one that changes with the world, is a \
warning: set `train_batch_size` and switch `elasticity` off, and Evenkeel keeps exactly that batch in \
every world that divides it.",
    upstream: "DeepSpeed edaa722, `elasticity/elasticity.py` (`compute_elastic_config`, \
`get_best_candidates`), `elasticity/config.py`, `runtime/config.py`.",
    wrong: Example {
        flags: "--gpus 7",
        recipe: "{\"zero_optimization\": {\"stage\": 2}, \"elasticity\": {\"enabled\": true, \
\"max_train_batch_size\": 128, \"micro_batch_sizes\": [1, 2, 4, 8, 16], \"version\": 0.1}}\n",
    },
    right: Example {
        flags: "--gpus 8",
        recipe: "{\"zero_optimization\": {\"stage\": 2}, \"train_batch_size\": 128, \
\"train_micro_batch_size_per_gpu\": 16}\n",
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(elastic) = &case.spec().batch.elastic else {
        return;
    };
    let Some(world) = case.draft.data_parallel_size else {
        return;
    };
    let limit = "batch.elastic.max_batch";
    let paths = [limit, "batch.elastic.micro_batches"];
    let made = match make(elastic, world) {
        Ok(made) => made,
        Err(impossible) => {
            let help = "use micro-batches that fit into the maximum batch";
            findings.at(&paths, impossible.to_string(), help);
            return;
        }
    };
    let batch = made.batch;
    if batch == 0 {
        findings.at(
            &paths,
            format!(
                "DeepSpeed's elasticity makes a batch of 0 out of {} {} in a world of {world}",
                case.key(limit),
                elastic.max_batch
            ),
            "raise the maximum batch to at least the smallest micro-batch × the data-parallel size",
        );
        return;
    }
    if made.per_device_batch_size.is_none() {
        findings.at(
            &paths,
            format!("DeepSpeed's elasticity refuses a world of {world} for its batch of {batch}"),
            match near(&made.valid, world).as_str() {
                "" => "use other bounds: elasticity refuses every world".to_owned(),
                near => format!("use a data-parallel size of {near}"),
            },
        );
        return;
    }
    let written_for = case.spec().batch.gpus;
    let own = written_for.and_then(|gpus| ranks(gpus, &case.spec().parallel));
    let at_home = own.and_then(|ranks| Some(make(elastic, ranks).ok()?.batch));
    if elastic.version == ElasticVersion::V02
        && let Some(before) = at_home.filter(|before| *before != batch)
    {
        findings.add(
            Severity::Warning,
            &paths,
            format!("DeepSpeed would train with {batch} samples a step in this world, and with {before} in the recipe's"),
            format!("set `elasticity.enabled` to false and set {}: the plan keeps {before}", case.key("batch.global")),
        );
    } else if batch != elastic.max_batch {
        findings.add(
            Severity::Warning,
            &paths,
            format!(
                "DeepSpeed makes a batch of {batch} out of {} {}",
                case.key(limit),
                elastic.max_batch
            ),
            format!("ignore this if {batch} is intended; otherwise set the batch and remove `elasticity`"),
        );
    }
}

/// The allowed sizes nearest to a world, two on each side.
fn near(valid: &[u64], world: u64) -> String {
    let at = valid.partition_point(|&size| size < world);
    let near = &valid[at.saturating_sub(2)..(at + 2).min(valid.len())];
    let words: Vec<String> = near.iter().map(u64::to_string).collect();
    match words.as_slice() {
        [some @ .., last] if !some.is_empty() => format!("{} or {last}", some.join(", ")),
        words => words.concat(),
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{only, recipe};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::schema::spec::{Elastic, ElasticVersion};
    use crate::recipe::{Dialect, Recipe, Severity};

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

    fn found(recipe: &Recipe, gpus: u64) -> Option<(Severity, String)> {
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
        let (severity, message) = found(&recipe, 6).unwrap();
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
        let (severity, message) = found(&recipe, 8).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(message.contains("a batch of 0 out of"), "{message}");
        assert!(plan(&recipe, &PlanRequest::gpus(8)).is_err());
    }

    #[test]
    fn a_world_outside_of_the_list_is_refused_with_the_nearest_sizes() {
        let (severity, message) = found(&elastic(ElasticVersion::V01), 7).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(message.ends_with("of 5, 6, 8 or 10)"), "{message}");
    }

    #[test]
    fn version_0_2_changes_its_batch_with_the_world() {
        let mut recipe = elastic(ElasticVersion::V02);
        recipe.spec.batch.gpus = Some(8);
        let (severity, message) = found(&recipe, 7).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(
            message.contains("126 samples a step in this world, and with 120"),
            "{message}"
        );
        assert!(found(&recipe, 8).unwrap().1.contains("a batch of 120"));
    }
}
