//! `elasticity-bounds`: the recipe's elasticity allows the requested world.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "elasticity-bounds",
    severity: Severity::Error,
    summary: "the world is outside of the recipe's elasticity bounds",
    why: "`elasticity.min` and `elasticity.max` bound every world of a run, including the first. The norm \
test chooses batches that split in these worlds; outside of the bounds they need not split.",
    upstream: "None: the key exists only in Evenkeel.",
    wrong: Example {
        flags: "--gpus 16",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  elasticity: {min: 2, max: 8}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  elasticity: {min: 2, max: 8}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let elasticity = &case.spec().elasticity;
    let gpus = case.request.gpus;
    let (min, max) = (
        elasticity.min.unwrap_or(1),
        elasticity.max.unwrap_or(u64::MAX),
    );
    let paths = ["elasticity.min", "elasticity.max"];
    if min > max {
        findings.at(
            &paths,
            format!(
                "{} {min} is above {} {max}",
                case.key(paths[0]),
                case.key(paths[1])
            ),
            "swap them",
        );
    } else if gpus < min {
        findings.at(
            &paths[..1],
            format!(
                "{} are fewer than {} {min}",
                case.count(gpus),
                case.key(paths[0])
            ),
            format!("ask for {min} or more, or lower it"),
        );
    } else if gpus > max {
        findings.at(
            &paths[1..],
            format!(
                "{} are more than {} {max}",
                case.count(gpus),
                case.key(paths[1])
            ),
            format!("ask for {max} or fewer, or raise it"),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};

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
}
