//! A run's lengths in samples: budget, warm-up, evaluation and checkpoint intervals. Only this module
//! converts the steps and epochs of a recipe to samples.
//!
//! A step has the recipe's global batch, even if the batch grows later, so the
//! norm test changes neither the learning rate's schedule nor the end of a run.

use serde::{Deserialize, Serialize};

use crate::recipe::Spec;
use crate::recipe::schema::spec::{BatchSchedule, IntervalRounding, LastBatch};

/// A run's lengths, in samples except where they state steps.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Horizon {
    /// Samples of one epoch that the run trains on; `None` while the data's length is unknown.
    pub epoch_samples: Option<u64>,
    /// Samples that every epoch drops, because they do not fill a batch.
    pub dropped_samples: u64,
    /// Training ends after the first step that reaches this; `None`: the recipe does not state it, or
    /// states epochs of unknown length.
    pub budget_samples: Option<u64>,
    /// Steps of the budget at the base batch.
    pub budget_steps: Option<u64>,
    /// The learning rate rises over these samples.
    pub warmup_samples: Option<u64>,
    /// An evaluation follows the first step that reaches a multiple of this.
    pub eval_every: Option<u64>,
    /// A checkpoint follows the first step that reaches a multiple of this.
    pub checkpoint_every: Option<u64>,
}

/// Computes a recipe's lengths for a global batch of `global` samples (at least 1) and a data set
/// of `data` samples, if known.
///
/// The first limit of the budget that is set counts: samples, then steps, then epochs; with
/// `shortest` the one that the run reaches first. Products saturate at 64 bits.
pub fn horizon(spec: &Spec, global: u64, data: Option<u64>) -> Horizon {
    let in_samples = |steps: u64| steps.saturating_mul(global);
    let dropped_samples = match (spec.batch.last_batch, data) {
        (LastBatch::Drop, Some(samples)) => samples % global,
        _ => 0,
    };
    let epoch_samples = data.map(|samples| samples - dropped_samples);
    let epochs = |count: f64| epoch_samples.map(|samples| share(samples, count));
    let budget = &spec.budget;
    let limits = [
        budget.samples,
        budget.steps.map(in_samples),
        budget.epochs.and_then(epochs),
    ];
    let mut limits = limits.into_iter().flatten();
    let budget_samples = if budget.shortest {
        limits.min()
    } else {
        limits.next()
    };
    let of_budget = |part: Option<f64>| Some(share(budget_samples?, part?));
    let warmup = &spec.learning_rate;
    let warmup_samples = warmup
        .warmup_samples
        .or_else(|| warmup.warmup_steps.map(in_samples))
        // Rounded up to whole steps, as transformers does (`get_warmup_steps`, 5.23.0).
        .or_else(|| match warmup.warmup_ratio {
            Some(ratio) => Some(in_samples(share(budget_samples?.div_ceil(global), ratio))),
            None => Some(0),
        });
    let (evaluation, checkpoint) = (&spec.evaluation, &spec.checkpoint);
    Horizon {
        epoch_samples,
        dropped_samples,
        budget_samples,
        budget_steps: budget_samples.map(|samples| samples.div_ceil(global)),
        warmup_samples,
        eval_every: evaluation
            .every_samples
            .map(|every| round_interval(spec, global, every).unwrap_or(every))
            .or_else(|| evaluation.every_steps.map(in_samples))
            .or_else(|| of_budget(evaluation.every_share))
            .or_else(|| epoch_samples.filter(|_| evaluation.every_epoch)),
        checkpoint_every: checkpoint
            .every_samples
            // Dialects that round the interval write a checkpoint after each evaluation.
            .map(|every| round_interval(spec, global, every).unwrap_or(every))
            .or_else(|| checkpoint.every_steps.map(in_samples))
            .or_else(|| of_budget(checkpoint.every_share))
            .or_else(|| epoch_samples.filter(|_| checkpoint.every_epoch)),
    }
}

/// Upper limit of the samples that a run consumes; `None` if only the data's length limits it.
pub fn most_samples(spec: &Spec, global: u64) -> Option<u64> {
    let budget = horizon(spec, global.max(1), None).budget_samples?;
    Some(most_samples_of(spec, global, budget))
}

/// Upper limit of the samples that a run with this budget consumes. The last step may pass the budget by its batch, which a
/// schedule may have raised to a multiple of the quantum.
pub fn most_samples_of(spec: &Spec, global: u64, budget: u64) -> u64 {
    let largest = match &spec.schedule {
        BatchSchedule::Constant => None,
        BatchSchedule::NormTest(test) => Some(test.max_batch),
        BatchSchedule::Stages { stages } => stages.iter().map(|stage| stage.batch).max(),
        BatchSchedule::Replay { runs } => runs.iter().map(|run| run.batch).max(),
    };
    let largest = largest.unwrap_or(0).max(global);
    budget.saturating_add(largest.saturating_mul(2))
}

/// A recipe's evaluation interval as its dialect rounds it down, samples; `None` if that leaves
/// nothing.
pub(super) fn round_interval(spec: &Spec, global: u64, every: u64) -> Option<u64> {
    let unit = rounding_unit(spec, global);
    Some(every - every % unit).filter(|every| *every > 0)
}

/// Samples to a multiple of which the dialect rounds a recipe's evaluation interval down.
pub(super) fn rounding_unit(spec: &Spec, global: u64) -> u64 {
    match spec.evaluation.rounding {
        IntervalRounding::Reached => 1,
        IntervalRounding::Batch => global,
        IntervalRounding::Pass => (global / spec.batch.accumulation.unwrap_or(1).max(1)).max(1),
    }
}

/// ⌈share × samples⌉, tolerant of the last bits of a decimal share (0.1 × 1280 is 128, not 129).
pub(super) fn share(samples: u64, share: f64) -> u64 {
    let exact = samples as f64 * share;
    let rounded = exact.round();
    if (exact - rounded).abs() <= exact.abs() * 1e-12 {
        rounded as u64
    } else {
        exact.ceil() as u64
    }
}

/// Samples to hold out of `samples` for `data.held_out`: a value below 1 is a share, rounded up to
/// whole samples; else it is a count, truncated to a whole number. The planner counts with this function, and
/// data preparation removes the same number.
pub fn held_out(asked: Option<f64>, samples: u64) -> u64 {
    match asked {
        Some(part) if part < 1.0 => share(samples, part),
        // The cast truncates the fraction and turns NaN into 0.
        Some(count) => count as u64,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::recipe::schema::spec::ReplayRun;

    fn spec() -> Spec {
        Spec::default()
    }

    #[test]
    fn the_last_step_passes_the_budget_by_less_than_the_limit_of_samples() {
        let mut spec = spec();
        assert_eq!(most_samples(&spec, 128), None);
        spec.budget.epochs = Some(2.0);
        assert_eq!(
            most_samples(&spec, 128),
            None,
            "the data may have any length"
        );
        spec.budget.steps = Some(10);
        assert_eq!(most_samples(&spec, 128), Some(1280 + 256));
        let runs = vec![ReplayRun {
            batch: 1000,
            steps: 1,
        }];
        spec.schedule = BatchSchedule::Replay { runs };
        assert_eq!(most_samples(&spec, 128), Some(1280 + 2000));
    }

    /// direct-preference-optimization writes a checkpoint with each evaluation, whatever the plan's batch.
    #[test]
    fn a_checkpoint_follows_each_evaluation() {
        let mut spec = spec();
        spec.evaluation.rounding = IntervalRounding::Batch;
        spec.evaluation.every_samples = Some(20_000);
        spec.checkpoint.every_samples = Some(20_000);
        let at = |global| {
            let horizon = horizon(&spec, global, None);
            (horizon.eval_every, horizon.checkpoint_every)
        };
        assert_eq!(at(64), (Some(19_968), Some(19_968)));
        assert_eq!(at(60), (Some(19_980), Some(19_980)));
    }

    #[test]
    fn steps_become_samples_of_the_global_batch() {
        let mut spec = spec();
        spec.budget.steps = Some(100);
        spec.learning_rate.warmup_steps = Some(10);
        spec.evaluation.every_steps = Some(20);
        spec.checkpoint.every_steps = Some(50);
        let horizon = horizon(&spec, 128, None);
        assert_eq!(horizon.budget_samples, Some(12_800));
        assert_eq!(horizon.budget_steps, Some(100));
        assert_eq!(horizon.warmup_samples, Some(1280));
        assert_eq!(horizon.eval_every, Some(2560));
        assert_eq!(horizon.checkpoint_every, Some(6400));
    }

    #[test]
    fn a_warmup_share_is_rounded_up_to_whole_steps_like_upstream() {
        let mut spec = spec();
        spec.budget.samples = Some(1000);
        spec.learning_rate.warmup_ratio = Some(0.1);
        // 0.1 of ⌈1000/48⌉ = 21 steps is 2.1: 3 steps.
        assert_eq!(horizon(&spec, 48, None).warmup_samples, Some(3 * 48));
        spec.learning_rate.warmup_steps = Some(5);
        assert_eq!(horizon(&spec, 48, None).warmup_samples, Some(5 * 48));
        spec.learning_rate.warmup_samples = Some(7);
        assert_eq!(horizon(&spec, 48, None).warmup_samples, Some(7));
    }

    #[test]
    fn samples_win_over_steps_and_steps_over_epochs() {
        let mut spec = spec();
        spec.budget.epochs = Some(2.0);
        assert_eq!(horizon(&spec, 8, Some(100)).budget_samples, Some(200));
        assert_eq!(horizon(&spec, 8, None).budget_samples, None);
        spec.budget.steps = Some(3);
        assert_eq!(horizon(&spec, 8, Some(100)).budget_samples, Some(24));
        spec.budget.samples = Some(30);
        let lengths = horizon(&spec, 8, Some(100));
        assert_eq!(
            (lengths.budget_samples, lengths.budget_steps),
            (Some(30), Some(4))
        );
    }

    #[test]
    fn dropping_shortens_the_epoch_and_wrapping_does_not() {
        let mut spec = spec();
        spec.budget.epochs = Some(1.0);
        assert_eq!(horizon(&spec, 8, Some(100)).epoch_samples, Some(100));
        spec.batch.last_batch = LastBatch::Drop;
        spec.evaluation.every_epoch = true;
        let lengths = horizon(&spec, 8, Some(100));
        assert_eq!(
            (lengths.epoch_samples, lengths.dropped_samples),
            (Some(96), 4)
        );
        assert_eq!(lengths.budget_samples, Some(96));
        assert_eq!(lengths.eval_every, Some(96));
    }

    #[test]
    fn ratios_are_shares_of_the_budget_and_round_up() {
        let mut spec = spec();
        spec.budget.samples = Some(1280);
        spec.learning_rate.warmup_ratio = Some(0.1);
        assert_eq!(horizon(&spec, 128, None).warmup_samples, Some(128));
        spec.budget.samples = Some(1281);
        spec.evaluation.every_share = Some(0.5);
        let lengths = horizon(&spec, 128, None);
        assert_eq!(
            (lengths.warmup_samples, lengths.eval_every),
            (Some(256), Some(641))
        );
        spec.budget.samples = None;
        assert_eq!(horizon(&spec, 128, None).warmup_samples, None);
    }

    proptest! {
        #[test]
        fn the_lengths_do_not_depend_on_the_split_and_never_overflow(
            global in 1..=u32::MAX as u64, steps in 1..=1_u64 << 53, data in 0..=1_u64 << 53,
        ) {
            let mut spec = spec();
            spec.budget.steps = Some(steps);
            spec.batch.last_batch = LastBatch::Drop;
            let lengths = horizon(&spec, global, Some(data));
            prop_assert_eq!(lengths.budget_samples, Some(steps.saturating_mul(global)));
            prop_assert_eq!(lengths.epoch_samples.map(|n| n % global), Some(0));
        }
    }

    #[test]
    fn shares_are_rounded_up_and_counts_stay_unchanged() {
        assert_eq!(held_out(None, 1000), 0);
        assert_eq!(held_out(Some(0.1), 1280), 128);
        assert_eq!(held_out(Some(0.0004), 1000), 1);
        assert_eq!(held_out(Some(0.0), 1000), 0);
        assert_eq!(held_out(Some(2.9), 1000), 2);
        assert_eq!(held_out(Some(2000.0), 1000), 2000);
        assert_eq!(held_out(Some(f64::NAN), 1000), 0);
        assert_eq!(held_out(Some(-1.0), 1000), 0);
    }
}
