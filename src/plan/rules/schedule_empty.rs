//! `schedule-empty`: a fixed schedule has at least one entry.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::BatchSchedule;

pub(super) const RULE: Rule = Rule {
    id: "schedule-empty",
    severity: Severity::Error,
    summary: "a stage-wise or replayed schedule without stages or runs",
    why: "Such a schedule lists batches, so it needs at least one stage or run. \
`kind: constant` is the schedule that keeps the recipe's global batch.",
    upstream: "None: the key exists only in Evenkeel.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule: {kind: stages, stages: []}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 4}\n  schedule: {kind: constant}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let empty = match &case.spec().schedule {
        BatchSchedule::Stages { stages } => stages.is_empty().then_some("schedule.stages"),
        BatchSchedule::Replay { runs } => runs.is_empty().then_some("schedule.runs"),
        BatchSchedule::Constant | BatchSchedule::NormTest(_) => None,
    };
    if let Some(path) = empty {
        findings.at(
            &[path, "schedule"],
            format!("{} is empty", case.key(path)),
            format!(
                "name at least one, or use {}",
                case.set("schedule", "constant")
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::schema::spec::{BatchSchedule, ReplayRun};

    #[test]
    fn an_empty_replay_is_refused() {
        let mut recipe = recipe();
        recipe.spec.schedule = BatchSchedule::Replay { runs: Vec::new() };
        assert_eq!(
            only("schedule-empty", &recipe, &PlanRequest::gpus(4)).len(),
            1
        );
        let runs = vec![ReplayRun {
            batch: 128,
            steps: 1,
        }];
        recipe.spec.schedule = BatchSchedule::Replay { runs };
        assert!(only("schedule-empty", &recipe, &PlanRequest::gpus(4)).is_empty());
    }
}
