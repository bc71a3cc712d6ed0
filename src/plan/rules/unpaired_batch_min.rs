//! `unpaired-batch-min`: losses on unpaired feedback get more than one sample.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::schema::spec::Objective;
use crate::recipe::{Dialect, Severity};

/// Objectives for which HALOs loads unpaired feedback.
const UNPAIRED: [Objective; 3] = [Objective::Kto, Objective::Ppo, Objective::Grpo];

pub(super) const RULE: Rule = Rule {
    id: "unpaired-batch-min",
    severity: Severity::Error,
    summary: "a loss on unpaired feedback needs more than one sample over all devices",
    why: "HALOs pairs every prompt with the next sample's answer, to estimate how far the policy has \
moved. With one sample over all devices there is no next sample, and its loader raises. It counts \
the samples of one accumulation step: micro-batch × ranks.",
    upstream: "HALOs 4831988, `train/dataloader.py` (`UnpairedPreferenceDataLoader`, which KTO, PPO and \
GRPO use): raises \"can't use batch size of 1\" when microbatch_size × num_processes is 1 or less. 61b9ee6 \
raises on a batch of 1.",
    wrong: Example {
        flags: "--gpus 1 --dialect halos --dialect-version head",
        recipe: "model: {batch_size: 2, gradient_accumulation_steps: 2, eval_batch_size: 2}\nloss: {trainer: KTOTrainer, dataloader: UnpairedPreferenceDataLoader}\n",
    },
    right: Example {
        flags: "--gpus 2 --dialect halos --dialect-version head",
        recipe: "model: {batch_size: 8, gradient_accumulation_steps: 2, eval_batch_size: 8}\nloss: {trainer: KTOTrainer, dataloader: UnpairedPreferenceDataLoader}\n",
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let Some(split) = case.draft.split else {
        return;
    };
    let together = split.ranks * split.per_device_batch_size;
    if case.recipe.dialect != Dialect::Halos || !UNPAIRED.contains(&spec.objective) || together > 1
    {
        return;
    }
    findings.at(
        &["batch.global", "batch.accumulation"],
        format!(
            "{} needs more than one sample in an accumulation step: {} steps of 1, {}",
            spec.objective,
            split.micro_batches,
            split.formula()
        ),
        format!(
            "use 2 or more data-parallel ranks, raise {}, or lower {}",
            case.key("batch.global"),
            case.key("batch.accumulation")
        ),
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Dialect;
    use crate::recipe::schema::spec::{Division, Objective};

    #[test]
    fn one_sample_over_all_devices_is_refused_for_unpaired_losses() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Halos;
        recipe.spec.batch.global = Some(4);
        recipe.spec.batch.per_device_batch_size = None;
        recipe.spec.batch.accumulation = Some(4);
        recipe.spec.batch.division = Division::Exact;
        let mut of = |objective, gpus| {
            recipe.spec.objective = objective;
            only("unpaired-batch-min", &recipe, &PlanRequest::gpus(gpus)).len()
        };
        for objective in [Objective::Kto, Objective::Ppo, Objective::Grpo] {
            assert_eq!(of(objective, 1), 1);
            assert_eq!(of(objective, 2), 0);
        }
        assert_eq!(of(Objective::Dpo, 1), 0);
        recipe.dialect = Dialect::HandbookTrl;
        recipe.spec.objective = Objective::Kto;
        assert!(only("unpaired-batch-min", &recipe, &PlanRequest::gpus(1)).is_empty());
    }
}
