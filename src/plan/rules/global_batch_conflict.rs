//! `global-batch-conflict`: a stated global batch agrees with the recipe's other numbers.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::overrides::COMMAND_LINE;

pub(super) const RULE: Rule = Rule {
    id: "global-batch-conflict",
    severity: Severity::Error,
    summary: "the stated global batch is not the product of the recipe's numbers",
    why: "A recipe that states its global batch, its micro-batch, its accumulation and its GPUs \
states the batch twice. When the two differ, one of them is a mistake, and no reader can know \
which. A global batch on the command line counts, with a warning; in a file it is an error.",
    upstream: "DeepSpeed edaa722, `runtime/config.py`: refuses a train batch that is not micro-batch \
× accumulation × world.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 16, accumulation: 1, gpus: 8}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 256, per_device_batch_size: 16, accumulation: 2, gpus: 8}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    // The launch has resolved this for a run; from then on only the run's own batch counts.
    if case.request.is_of_a_run() {
        return;
    }
    let batch = &case.spec().batch;
    let (Some(global), Some(product), Some(accumulation)) =
        (batch.global, case.draft.recipe_product, batch.accumulation)
    else {
        return;
    };
    if u128::from(global) == product {
        return;
    }
    let sources = &case.recipe.sources;
    let typed = case
        .recipe
        .span("batch.global")
        .and_then(|span| sources.get(span.file))
        .is_some_and(|file| file.path.as_os_str() == COMMAND_LINE);
    let message = format!(
        "{} is {global}, but the recipe's numbers give {} × {} × {accumulation} = {product}",
        case.key("batch.global"),
        case.draft.recipe_ranks.unwrap_or(1),
        batch.per_device_batch_size.unwrap_or(1),
    );
    if typed {
        let help = format!("{global} counts; remove it to keep {product}");
        findings.add(Severity::Warning, &["batch.global"], message, help);
    } else {
        let help = format!(
            "remove {} or {}, or make them agree",
            case.key("batch.accumulation"),
            case.key("batch.global")
        );
        findings.at(&["batch.global"], message, help);
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe, wrote};
    use crate::recipe::Severity;

    #[test]
    fn a_file_that_contradicts_itself_is_refused_and_the_command_line_wins() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(256);
        recipe.spec.batch.accumulation = Some(1);
        recipe.spec.batch.gpus = Some(8);
        let of = |recipe: &crate::recipe::Recipe| {
            only("global-batch-conflict", recipe, &PlanRequest::gpus(8))
        };
        assert_eq!(of(&recipe)[0].severity, Severity::Error);
        assert_eq!(
            of(&recipe)[0].message,
            "`batch.global` is 256, but the recipe's numbers give 8 × 16 × 1 = 128"
        );
        wrote(
            &mut recipe,
            "command line",
            "batch.global",
            "--global-batch-size",
        );
        assert_eq!(of(&recipe)[0].severity, Severity::Warning);
        recipe.spec.batch.global = Some(128);
        assert!(of(&recipe).is_empty());
    }

    #[test]
    fn a_started_run_is_not_checked_again() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(256);
        recipe.spec.batch.accumulation = Some(1);
        recipe.spec.batch.gpus = Some(8);
        let request = PlanRequest {
            global_batch_size: Some(256),
            ..PlanRequest::gpus(8)
        };
        assert!(only("global-batch-conflict", &recipe, &request).is_empty());
    }
}
