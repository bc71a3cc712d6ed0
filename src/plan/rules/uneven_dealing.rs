//! `uneven-dealing`: the cost of an uneven split, and the trainer that supports it.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::Trainer;
use crate::plan::draft::model_parallel;
use crate::plan::split::Split;
use crate::recipe::Severity;
use crate::recipe::schema::spec::Remainder;

pub(super) const RULE: Rule = Rule {
    id: "uneven-dealing",
    severity: Severity::Error,
    summary: "some ranks run one micro-batch more than others, which only the built-in trainer supports",
    why: "With `--remainder uneven`, Evenkeel distributes whole micro-batches as evenly as possible in a \
world that does not divide the global batch. The batch is exact: the trainer sums losses and gradients \
over all samples and divides once by the target tokens of the whole batch. The cost is time: \
every rank waits for the busiest one. Under sharding the idle ranks join the collectives \
with zeros. The note states the idle share.

Only the built-in trainer does this. Every other trainer runs the same number of micro-batches on each \
rank, that of the busiest, and so trains on a larger batch than planned. A plan for one (a command, \
an external trainer, an objective that the built-in trainer does not have) is refused.",
    upstream: "None: DistributedDataParallel and FSDP average over ranks, which is wrong \
for unequal shares.",
    wrong: Example {
        flags: "--gpus 3 --remainder uneven",
        recipe: native!("  objective: dpo\n  batch: {global: 128, per_device_batch_size: 16}\n"),
    },
    right: Example {
        flags: "--gpus 4 --remainder uneven",
        recipe: native!("  objective: dpo\n  batch: {global: 128, per_device_batch_size: 16}\n"),
    },
    check: Check::Plan(check),
};

/// Why the built-in trainer cannot run the plan, as a half-sentence; `None` if it can. Differences in
/// precision and kernels do not count.
pub(super) fn only_another_trainer(case: &Case<'_>) -> Option<String> {
    let (spec, request) = (case.spec(), case.request);
    if !super::trainer_objective::TRAINED.contains(&spec.objective) {
        return Some(format!("it does not train {}", spec.objective));
    }
    if model_parallel(&spec.parallel).is_some_and(|devices| devices > 1) {
        return Some("it splits no model over devices".to_owned());
    }
    // A command starts another trainer.
    let command = case.recipe.files.command.is_some() && request.trainer != Trainer::BuiltIn;
    (command || super::is_for_another_trainer(case))
        .then(|| "this is a plan for another one".to_owned())
}

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let uneven = |split: &Split| split.remainder == Remainder::Uneven;
    let Some(split) = case.draft.split.filter(uneven) else {
        return;
    };
    // `external-trainer` reports it for an external trainer.
    if case.spec().trainer.is_external() {
        return;
    }
    if let Some(why) = only_another_trainer(case) {
        findings.at(
            &["batch.remainder"],
            format!(
                "micro-batches are dealt unevenly, {}, which only the built-in trainer supports, and {why}",
                split.formula()
            ),
            format!("use {}", case.feasible_near()),
        );
        return;
    }
    let more = split.micro_batches % split.ranks;
    let (most, idle) = (split.accumulation(), 100.0 * split.idle_share());
    findings.add(
        Severity::Note,
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
    use crate::plan::rules::testing::{only, recipe};
    use crate::plan::{PlanRequest, Trainer};
    use crate::recipe::schema::spec::{Objective, Remainder};
    use crate::recipe::{self, Recipe, Severity};

    #[test]
    fn message_states_the_idle_share() {
        let mut recipe = recipe();
        recipe.spec.batch.remainder = Remainder::Uneven;
        let found = only("uneven-dealing", &recipe, &PlanRequest::gpus(3));
        assert_eq!(
            found[0].message,
            "2 of 3 ranks run 3 micro-batches, the others 2: ranks are idle 11 % of the time"
        );
        assert!(only("uneven-dealing", &recipe, &PlanRequest::gpus(4)).is_empty());
    }

    #[test]
    fn uneven_plans_for_other_trainers_are_refused() {
        let mut recipe = recipe();
        recipe.spec.batch.remainder = Remainder::Uneven;
        let finding = |recipe: &Recipe, trainer| {
            let request = PlanRequest {
                trainer,
                ..PlanRequest::gpus(3)
            };
            let found = only("uneven-dealing", recipe, &request).remove(0);
            (found.severity, found.message)
        };
        assert_eq!(finding(&recipe, Trainer::Any).0, Severity::Note);
        let (severity, message) = finding(&recipe, Trainer::External);
        assert_eq!(severity, Severity::Error);
        assert!(
            message.contains("only the built-in trainer supports, and this is a plan for another"),
            "{message}"
        );
        recipe.spec.objective = Objective::Grpo;
        let (severity, message) = finding(&recipe, Trainer::Any);
        assert_eq!(severity, Severity::Error);
        assert!(message.ends_with("it does not train grpo"), "{message}");
        recipe.spec.objective = Objective::Sft;
        recipe.spec.parallel.tensor = 1;
        recipe.spec.parallel.context = 3;
        let request = PlanRequest::gpus(9);
        let found = only("uneven-dealing", &recipe, &request).remove(0);
        assert!(
            found.message.ends_with("no model over devices"),
            "{found:?}"
        );
    }

    #[test]
    fn an_uneven_plan_for_a_command_is_refused() {
        let words = "torchrun --nproc_per_node 4 run_clm.py --per_device_train_batch_size 8 \
                     --output_dir o --do_train";
        let recipe = recipe::read(&recipe::Request {
            command: words.split_whitespace().map(str::to_owned).collect(),
            settings: vec![recipe::Setting {
                flag: "--remainder",
                path: "batch.remainder",
                value: "uneven".to_owned(),
            }],
            ..Default::default()
        })
        .unwrap();
        let found = only("uneven-dealing", &recipe, &PlanRequest::gpus(6));
        assert_eq!(found[0].severity, Severity::Error);
        assert!(found[0].help.starts_with("use "), "{}", found[0].help);
    }
}
