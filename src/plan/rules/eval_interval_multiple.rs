//! `eval-interval-multiple`: the evaluation interval is a multiple of the global batch.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::horizon::{round_interval, rounding_unit};
use crate::recipe::Severity;
use crate::recipe::schema::spec::BatchSchedule;

pub(super) const RULE: Rule = Rule {
    id: "eval-interval-multiple",
    severity: Severity::Error,
    summary: "the evaluation interval is not a multiple of the global batch",
    why: "The trainer checks an interval in samples after every step, so an evaluation runs at the first \
step that reaches a multiple of it. With an interval that is no multiple of the global batch, \
evaluations are late by varying amounts (a note). With an interval below the batch, every step ends with \
an evaluation, which is rarely intended. With a schedule that changes the batch, no interval is always a \
multiple, so the rule checks only the second case.

HALOs and direct-preference-optimization round the interval down to a multiple of the batch; a warning \
names both numbers. If the result is 0, upstream divides by zero at its first step: an error.",
    upstream: "HALOs 4831988, `launch.py` (`main`) and direct-preference-optimization f8b8c0f, `train.py` (`main`): \
floor `eval_every` to a multiple of the batch, to 0 when it is smaller; `trainers.py` (`train`) then \
takes the samples modulo 0.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  evaluation: {every_samples: 100, rounding: batch}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!("  batch: {global: 128, per_device_batch_size: 16}\n  evaluation: {every_samples: 1024}\n"),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(every), Some(global)) = (
        case.spec().evaluation.every_samples,
        case.draft.global_batch_size,
    ) else {
        return;
    };
    let (paths, key) = (
        ["evaluation.every_samples"],
        case.key("evaluation.every_samples"),
    );
    let unit = rounding_unit(case.spec(), global);
    if every % unit != 0 {
        match round_interval(case.spec(), global, every) {
            None => findings.at(
                &paths,
                format!(
                    "{key} {every} is less than a batch of {unit}: upstream rounds it down to 0, \
                     and fails at the first step"
                ),
                format!("use {unit} or a multiple of it"),
            ),
            Some(rounded) => findings.add(
                Severity::Warning,
                &paths,
                format!(
                    "{key} {every} is not a multiple of the batch {unit}: upstream rounds it down \
                     to {rounded}"
                ),
                format!("use {rounded} or {}", rounded + unit),
            ),
        }
        return;
    }
    let above = every.next_multiple_of(global);
    if every < global {
        findings.add(
            Severity::Warning,
            &paths,
            format!("{key} {every} is less than one global batch of {global}: every step ends with an evaluation"),
            format!("use {global} or a multiple of it"),
        );
    } else if above != every && case.spec().schedule == BatchSchedule::Constant {
        findings.add(
            Severity::Note,
            &paths,
            format!(
                "{key} {every} is not a multiple of the global batch {global}: the first evaluation \
                 comes after {above} samples"
            ),
            format!("use {} or {above}", above - global),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Severity;
    use crate::recipe::schema::spec::IntervalRounding;

    #[test]
    fn intervals_between_steps_are_noted() {
        let mut recipe = recipe();
        let mut of = |every| {
            recipe.spec.evaluation.every_samples = Some(every);
            let found = only("eval-interval-multiple", &recipe, &PlanRequest::gpus(8));
            found.first().map(|d| d.help.clone())
        };
        assert_eq!(of(1024), None);
        assert_eq!(of(1000).as_deref(), Some("use 896 or 1024"));
        assert_eq!(of(100).as_deref(), Some("use 128 or a multiple of it"));
    }

    #[test]
    fn an_interval_that_rounds_down_to_zero_is_refused() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(64);
        recipe.spec.batch.accumulation = Some(4);
        let mut of = |every, rounding| {
            recipe.spec.evaluation.every_samples = Some(every);
            recipe.spec.evaluation.rounding = rounding;
            let found = only("eval-interval-multiple", &recipe, &PlanRequest::gpus(4));
            found.first().map(|d| (d.severity, d.message.clone()))
        };
        let (severity, message) = of(20_000, IntervalRounding::Batch).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(
            message.ends_with("upstream rounds it down to 19968"),
            "{message}"
        );
        let (severity, _) = of(32, IntervalRounding::Batch).unwrap();
        assert_eq!(severity, Severity::Error);
        // One accumulation step has 16 samples; evaluations after every step only warn.
        assert_eq!(of(32, IntervalRounding::Pass).unwrap().0, Severity::Warning);
    }
}
