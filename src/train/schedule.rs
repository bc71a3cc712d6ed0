//! The learning rate as a pure function of the samples consumed.
//!
//! At a constant batch it equals the rate that transformers 5.23 computes per step (`optimization.py`:
//! linear, cosine, cosine with a minimum, constant with warm-up, inverse square root), with step = samples /
//! batch. Because it counts samples, a growing batch follows the same curve, only faster.

use crate::recipe::schema::spec::{LearningRate, LearningRateShape};

/// Upstream's time scale of `inverse_sqrt` without a warm-up, in steps.
const INVERSE_SQRT_STEPS: u64 = 10_000;

/// The learning rate of a run. [`crate::plan::Horizon`] computes its counts.
#[derive(Debug, Clone, PartialEq)]
pub struct LearningRateSchedule {
    pub recipe: LearningRate,
    /// Samples of the warm-up.
    pub warmup: u64,
    /// Samples of the whole run.
    pub budget: u64,
    /// The base global batch, samples.
    pub base_batch: u64,
}

impl LearningRateSchedule {
    /// Whether a step that starts after `samples` samples is still in the warm-up.
    pub fn warming_up(&self, samples: u64) -> bool {
        samples < self.warmup
    }

    /// The learning rate of a step that starts after `samples` samples. The first step of a warm-up has rate
    /// 0, as in transformers, or that of `warmup_start`.
    pub fn at(&self, samples: u64) -> f64 {
        self.recipe.peak * self.share(samples)
    }

    /// The learning rate as a share of the peak.
    fn share(&self, samples: u64) -> f64 {
        if self.warming_up(samples) {
            let start = self.recipe.warmup_start;
            return start + (1.0 - start) * (samples as f64 / self.warmup as f64);
        }
        let after = (samples - self.warmup) as f64;
        let length = self.budget.saturating_sub(self.warmup).max(1) as f64;
        let progress = (after / length).min(1.0);
        let floor = self.recipe.floor;
        let above_floor = |share: f64| floor + (1.0 - floor) * share;
        match self.recipe.shape {
            LearningRateShape::Constant => 1.0,
            LearningRateShape::Linear => above_floor(1.0 - progress),
            LearningRateShape::Cosine => {
                above_floor(0.5 * (1.0 + (std::f64::consts::PI * progress).cos()))
            }
            LearningRateShape::InverseSqrt => {
                let scale = if self.warmup > 0 {
                    self.warmup
                } else {
                    self.base_batch.saturating_mul(INVERSE_SQRT_STEPS)
                } as f64;
                (scale / (after + scale)).sqrt().max(floor)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BATCH: u64 = 48;

    /// transformers' `lr_lambda(step)`, written from its formulas.
    fn upstream(shape: LearningRateShape, step: u64, warmup: u64, total: u64, floor: f64) -> f64 {
        let (step, warmup, total) = (step as f64, warmup as f64, total as f64);
        if step < warmup {
            return step / warmup.max(1.0);
        }
        match shape {
            LearningRateShape::Linear => ((total - step) / (total - warmup).max(1.0)).max(0.0),
            LearningRateShape::Cosine => {
                let progress = (step - warmup) / (total - warmup).max(1.0);
                let factor = 0.5 * (1.0 + (std::f64::consts::PI * 0.5 * 2.0 * progress).cos());
                (factor * (1.0 - floor) + floor).max(0.0)
            }
            LearningRateShape::Constant => 1.0,
            LearningRateShape::InverseSqrt => {
                let timescale = if warmup > 0.0 { warmup } else { 10_000.0 };
                let shift = timescale - warmup;
                1.0 / ((step + shift) / timescale).sqrt()
            }
        }
    }

    fn recipe(shape: LearningRateShape) -> LearningRate {
        LearningRate {
            peak: 4e-4,
            shape,
            ..LearningRate::default()
        }
    }

    fn schedule(
        recipe: LearningRate,
        warmup: u64,
        budget: u64,
        base_batch: u64,
    ) -> LearningRateSchedule {
        LearningRateSchedule {
            recipe,
            warmup,
            budget,
            base_batch,
        }
    }

    #[test]
    fn constant_batches_have_upstreams_rate_at_every_step() {
        for (shape, floor) in [
            (LearningRateShape::Linear, 0.0),
            (LearningRateShape::Cosine, 0.0),
            (LearningRateShape::Cosine, 0.1),
            (LearningRateShape::Constant, 0.0),
            (LearningRateShape::InverseSqrt, 0.0),
        ] {
            for (warmup, total) in [(0, 100), (7, 100), (100, 100), (150, 100)] {
                let schedule = schedule(
                    LearningRate {
                        floor,
                        ..recipe(shape)
                    },
                    warmup * BATCH,
                    total * BATCH,
                    BATCH,
                );
                for step in 0..total {
                    let ours = schedule.at(step * BATCH);
                    let theirs = 4e-4 * upstream(shape, step, warmup, total, floor);
                    assert!(
                        (ours - theirs).abs() <= 1e-15,
                        "{shape:?}, warm-up {warmup}, step {step}: {ours}, upstream {theirs}"
                    );
                }
            }
        }
    }

    #[test]
    fn cosine_over_samples_gives_the_papers_rates() {
        // 4e-4 down to 4e-5 by cosine over 2 M samples, with a warm-up of 20 k samples.
        let schedule = schedule(
            LearningRate {
                floor: 0.1,
                ..recipe(LearningRateShape::Cosine)
            },
            20_000,
            2_000_000,
            256,
        );
        assert_eq!(schedule.at(0), 0.0);
        assert!((schedule.at(10_000) - 2e-4).abs() < 1e-18);
        assert!(schedule.warming_up(19_999) && !schedule.warming_up(20_000));
        assert_eq!(schedule.at(20_000), 4e-4);
        assert!((schedule.at(1_010_000) - 2.2e-4).abs() < 1e-18);
        assert!((schedule.at(2_000_000) - 4e-5).abs() < 1e-18);
    }

    fn any_schedule() -> impl Strategy<Value = LearningRateSchedule> {
        let shape = prop::sample::select(vec![
            LearningRateShape::Cosine,
            LearningRateShape::Linear,
            LearningRateShape::Constant,
            LearningRateShape::InverseSqrt,
        ]);
        let share = || 0.0..=1.0f64;
        (shape, share(), share(), 0..2000u64, 0..2000u64, 1..100u64).prop_map(
            |(shape, floor, warmup_start, warmup, budget, batch)| {
                let recipe = LearningRate {
                    peak: 1.0,
                    shape,
                    floor,
                    warmup_start,
                    ..LearningRate::default()
                };
                schedule(recipe, warmup, budget, batch)
            },
        )
    }

    proptest! {
        #[test]
        fn the_rate_rises_to_the_peak_then_falls_and_never_leaves_its_bounds(
            schedule in any_schedule(), samples in prop::collection::vec(0..5000u64, 2..40),
        ) {
            let mut samples = samples;
            samples.sort_unstable();
            let warmup = schedule.warmup;
            prop_assert_eq!(schedule.at(warmup), 1.0);
            for pair in samples.windows(2) {
                let (a, b) = (schedule.at(pair[0]), schedule.at(pair[1]));
                prop_assert!((0.0..=1.0).contains(&a));
                if pair[1] <= warmup {
                    prop_assert!(a <= b);
                } else if pair[0] >= warmup {
                    prop_assert!(a >= b && b >= schedule.recipe.floor.min(1.0) - 1e-12);
                }
            }
        }
    }
}
