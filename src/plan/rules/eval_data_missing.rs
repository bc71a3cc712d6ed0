//! `eval-data-missing`: requested evaluations have data.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "eval-data-missing",
    severity: Severity::Error,
    summary: "the recipe requests evaluations but names no evaluation data",
    why: "An interval requests evaluations. They run on the sources of `data.evaluation`, or on samples \
that `data.held_out` takes from the training data. With neither, a run of days would end without one \
evaluation. Hold samples out, name a source, or request no evaluations. A recipe without training data \
gets no finding.",
    upstream: "transformers 5.23.0, `trainer.py`: raises when `eval_strategy` is not `no` and there \
is no `eval_dataset`. alignment-handbook 925acdf, `scripts/sft.py`: without `test_split_size` there \
is no split `test`, and the script exits with a KeyError.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data:\n    train: [{path: synthetic}]\n  evaluation: {every_samples: 12800}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data:\n    train: [{path: synthetic}]\n    held_out: 512\n  evaluation: {every_samples: 12800}\n"
        ),
    },
    check: Check::PlanWarning(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let data = &spec.data;
    // The synthetic language has no evaluation sources.
    let sources = !data.evaluation.is_empty() && data.synthetic().is_none();
    let intervals = spec.evaluation.intervals();
    let Some(asked) = intervals.first() else {
        return;
    };
    if data.train.is_empty() || sources || data.held_out.is_some() {
        return;
    }
    findings.at(
        &intervals,
        format!(
            "{} requests evaluations, but there are no evaluation data",
            case.key(asked)
        ),
        format!(
            "hold samples out ({}), name sources in {}, or remove {}",
            case.set("data.held_out", "0.01"),
            case.key("data.evaluation"),
            case.key(asked)
        ),
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{launched, only, recipe};
    use crate::recipe::schema::spec::DataSource;
    use crate::recipe::{Dialect, Severity};

    fn source(path: &str) -> DataSource {
        DataSource {
            path: path.to_owned(),
            ..DataSource::default()
        }
    }

    #[test]
    fn evaluations_without_data_are_reported_and_not_launched() {
        let rule = "eval-data-missing";
        let mut recipe = recipe();
        recipe.spec.evaluation.every_samples = Some(1280);
        assert!(launched(rule, &recipe).is_empty(), "no data at all");
        recipe.spec.data.train = vec![source("a.jsonl")];
        let planned = only(rule, &recipe, &PlanRequest::gpus(1));
        assert_eq!(planned[0].severity, Severity::Warning);
        assert_eq!(launched(rule, &recipe)[0].severity, Severity::Error);
        recipe.spec.data.held_out = Some(0.01);
        assert!(launched(rule, &recipe).is_empty());
        recipe.spec.data.held_out = None;
        recipe.spec.data.evaluation = vec![source("b.jsonl")];
        assert!(launched(rule, &recipe).is_empty());
        recipe.spec.data.train = vec![source("synthetic")];
        assert_eq!(launched(rule, &recipe).len(), 1, "a language has no files");
        recipe.spec.evaluation.every_samples = None;
        assert!(launched(rule, &recipe).is_empty());
        recipe.spec.evaluation.every_epoch = true;
        recipe.dialect = Dialect::HandbookTrl;
        let found = launched(rule, &recipe);
        assert!(
            found[0].help.contains("`evenkeel.data.held_out=0.01`"),
            "{}",
            found[0].help
        );
    }
}
