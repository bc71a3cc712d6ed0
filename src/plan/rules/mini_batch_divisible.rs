//! `mini-batch-divisible`: PPO's mini-batches divide a device's share.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::Objective;

/// Samples that whitening needs in a mini-batch.
const WHITENED: u64 = 8;

pub(super) const RULE: Rule = Rule {
    id: "mini-batch-divisible",
    severity: Severity::Error,
    summary: "PPO's mini-batches do not divide the samples of one device",
    why: "PPO generates a batch and trains on it in `num_mini_batches` parts. Each device cuts its \
share, micro-batch × accumulation, so in every world that share must be a multiple of the number of \
parts.",
    upstream: "TRL f2cd577, `experimental/ppo/ppo_trainer.py` (`exact_div`): raises when \
per-device batch × accumulation is not a multiple of num_mini_batches, and asserts 8 samples in each \
where `whiten_rewards` is on.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  objective: ppo\n  batch: {global: 64, per_device_batch_size: 8}\n  generation: {num_mini_batches: 3}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  objective: ppo\n  batch: {global: 64, per_device_batch_size: 8}\n  generation: {num_mini_batches: 4}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let (Some(parts), Some(split)) = (spec.generation.num_mini_batches, case.draft.split) else {
        return;
    };
    let share = split.per_device_batch_size * split.accumulation();
    if spec.objective != Objective::Ppo || parts == 0 {
        return;
    }
    let part = share / parts;
    if share.is_multiple_of(parts) && spec.generation.whiten_rewards && part < WHITENED {
        findings.at(
            &["generation.whiten_rewards", "generation.num_mini_batches"],
            format!("{share} / {parts} = {part} samples in a device's mini-batch are too few for whitening, which needs {WHITENED}"),
            "use fewer mini-batches or devices, or set `whiten_rewards` to false",
        );
    }
    if !share.is_multiple_of(parts) {
        findings.at(
            &["generation.num_mini_batches"],
            format!(
                "{parts} mini-batches do not divide the {} × {} = {share} samples of a device",
                split.per_device_batch_size,
                split.accumulation()
            ),
            format!("use a divisor of {share}, or another world"),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::schema::spec::Objective;

    #[test]
    fn whitening_needs_eight_samples() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Ppo;
        recipe.spec.generation.num_mini_batches = Some(2);
        recipe.spec.generation.whiten_rewards = true;
        let of = |gpus| only("mini-batch-divisible", &recipe, &PlanRequest::gpus(gpus));
        assert!(of(8).is_empty());
        assert!(of(16)[0].message.starts_with("8 / 2 = 4 samples"));
    }

    #[test]
    fn mini_batches_divide_a_devices_share() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Ppo;
        recipe.spec.generation.num_mini_batches = Some(4);
        let of = |gpus| only("mini-batch-divisible", &recipe, &PlanRequest::gpus(gpus));
        assert!(of(8).is_empty());
        assert!(of(32).is_empty());
        assert!(
            of(64)[0]
                .message
                .contains("4 mini-batches do not divide the 2 × 1 = 2 samples")
        );
    }
}
