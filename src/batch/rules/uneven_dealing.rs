//! `uneven-dealing`: what uneven dealing costs.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::spec::Remainder;

pub(super) const RULE: Rule = Rule {
    id: "uneven-dealing",
    severity: Severity::Note,
    summary: "some ranks run one micro-batch more than the others",
    why: "With `--remainder uneven`, worlds that do not divide the global batch get whole \
micro-batches dealt as evenly as they come. The batch is exact: losses and gradients are summed \
over all samples and divided once by the whole batch's target tokens. What is lost is time, since \
every rank waits for the busiest one; under sharding the idle ranks join the collectives with \
nothing to add. The note says how large that share is.",
    upstream: "None: DistributedDataParallel and FSDP average over ranks, which is wrong \
for unequal shares.",
    wrong: Example {
        flags: "--gpus 3 --remainder uneven",
        recipe: native!("  batch: {global: 128, micro: 16}\n"),
    },
    right: Example {
        flags: "--gpus 4 --remainder uneven",
        recipe: native!("  batch: {global: 128, micro: 16}\n"),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(split) = case
        .draft
        .split
        .filter(|s| s.remainder == Remainder::Uneven)
    else {
        return;
    };
    let more = split.micro_batches % split.ranks;
    let (most, idle) = (split.accumulation(), 100.0 * split.idle_share());
    findings.at(
        &["batch.remainder"],
        format!(
            "{more} of {} ranks run {most} micro-batches, the others {}: ranks are idle {idle:.0} % \
             of the time",
            split.ranks,
            most - 1,
        ),
        format!("the batch is exact; no rank is idle at {}", case.feasible_near()),
    );
}

#[cfg(test)]
mod tests {
    use crate::batch::PlanRequest;
    use crate::batch::rules::testing::{only, recipe};
    use crate::recipe::spec::Remainder;

    #[test]
    fn says_how_long_ranks_wait() {
        let mut recipe = recipe();
        recipe.spec.batch.remainder = Remainder::Uneven;
        let found = only("uneven-dealing", &recipe, &PlanRequest::gpus(3));
        assert_eq!(
            found[0].message,
            "2 of 3 ranks run 3 micro-batches, the others 2: ranks are idle 11 % of the time"
        );
        assert!(only("uneven-dealing", &recipe, &PlanRequest::gpus(4)).is_empty());
    }
}
