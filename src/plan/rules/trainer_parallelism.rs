//! `trainer-parallelism`: the built-in trainer is data-parallel.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "trainer-parallelism",
    severity: Severity::Error,
    summary: "the built-in trainer has no tensor, pipeline, context or sequence parallelism",
    why: "A plan counts all axes, for recipes that another trainer runs. The built-in trainer is \
data-parallel, replicated or sharded, and cannot split a model along these axes.",
    upstream: "None: it concerns Evenkeel's built-in trainer.",
    wrong: Example {
        flags: "",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {tensor: 4}\n"
        ),
    },
    right: Example {
        flags: "",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {strategy: fsdp}\n"
        ),
    },
    check: Check::Trainer(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let parallel = &case.spec().parallel;
    for (axis, size) in [
        ("tensor", parallel.tensor),
        ("pipeline", parallel.pipeline),
        ("context", parallel.context),
        ("sequence", parallel.sequence),
    ] {
        if size > 1 {
            let path = format!("parallel.{axis}");
            findings.at(
                &[&path],
                format!(
                    "the built-in trainer has no {axis} parallelism, {} is {size}",
                    case.key(&path)
                ),
                format!(
                    "set it to 1 ({} shards instead), or plan only",
                    case.set("parallel.strategy", "fsdp")
                ),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{launched, recipe};

    #[test]
    fn every_axis_is_refused_by_name() {
        let mut recipe = recipe();
        recipe.spec.parallel.tensor = 2;
        recipe.spec.parallel.context = 2;
        assert_eq!(launched("trainer-parallelism", &recipe).len(), 2);
    }
}
