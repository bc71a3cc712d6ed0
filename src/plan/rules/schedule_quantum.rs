//! `schedule-quantum`: every batch of a fixed schedule can be split in every allowed world.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::BatchSchedule;

pub(super) const RULE: Rule = Rule {
    id: "schedule-quantum",
    severity: Severity::Error,
    summary: "a batch of the schedule is not a multiple of the quantum",
    why: "A run may use every world that its elasticity allows, and every batch of its \
schedule must split in each of them. The quantum is the least common multiple of world × micro-batch \
over those worlds; it divides the base batch. Without `elasticity` every count that splits the base \
batch is allowed, and the quantum is the base batch itself; bounds give a finer quantum.",
    upstream: "None: the key exists only in Evenkeel. arXiv 2412.21124 rounds its batches up to multiples \
of workers × accumulation.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule:\n    kind: stages\n    stages: [{share: 0.5, batch: 256}, {share: 0.5, batch: 400}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  elasticity: {min: 4, max: 4}\n  schedule:\n    kind: stages\n    stages: [{share: 0.5, batch: 256}, {share: 0.5, batch: 400}]\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(quantum) = case.draft.quantum else {
        return;
    };
    let batches: Vec<(String, u64)> = match &case.spec().schedule {
        BatchSchedule::Stages { stages } => {
            let each = stages.iter().enumerate();
            each.map(|(i, stage)| (format!("schedule.stages.{i}"), stage.batch))
                .collect()
        }
        BatchSchedule::Replay { runs } => {
            let each = runs.iter().enumerate();
            each.map(|(i, run)| (format!("schedule.runs.{i}"), run.batch))
                .collect()
        }
        BatchSchedule::Constant | BatchSchedule::NormTest(_) => return,
    };
    for (path, batch) in batches {
        if batch > 0 && batch.is_multiple_of(quantum) {
            continue;
        }
        let below = batch - batch % quantum;
        let near = match below {
            0 => format!("{quantum}"),
            below => format!("{below} or {}", below.saturating_add(quantum)),
        };
        findings.at(
            &[&format!("{path}.batch"), &path, "schedule"],
            format!(
                "batch {batch} of {} is not a multiple of the quantum {quantum}, which every \
                 allowed world splits",
                case.key(&path)
            ),
            format!(
                "use {near}, a smaller {}, or narrow {} and {}",
                case.key("batch.per_device_batch_size"),
                case.key("elasticity.min"),
                case.key("elasticity.max")
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::schema::spec::{BatchSchedule, Stage};

    #[test]
    fn every_wrong_batch_is_named_and_bounds_give_a_finer_quantum() {
        let mut recipe = recipe();
        let stage = |share, batch| Stage { share, batch };
        recipe.spec.schedule = BatchSchedule::Stages {
            stages: vec![stage(0.2, 128), stage(0.2, 192), stage(0.6, 64)],
        };
        let of = |recipe: &crate::recipe::Recipe| {
            only("schedule-quantum", recipe, &PlanRequest::gpus(4))
        };
        let found = of(&recipe);
        assert_eq!(found.len(), 2);
        assert!(
            found[0].help.starts_with("use 128 or 256"),
            "{}",
            found[0].help
        );
        recipe.spec.elasticity.min = Some(4);
        recipe.spec.elasticity.max = Some(4);
        assert!(of(&recipe).is_empty());
    }
}
