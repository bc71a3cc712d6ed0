//! The learning rate as a pure function of the samples consumed.
//!
//! At a constant batch it equals the rate that transformers 5.23 computes per step (`optimization.py`:
//! linear, cosine, cosine with a minimum, constant with warm-up, inverse square root), with step = samples /
//! batch. Because it counts samples, a growing batch follows the same curve, only faster.

use crate::recipe::spec::{LearningRate, LearningRateShape};

/// Upstream's time scale of `inverse_sqrt` without a warm-up, in steps.
const INVERSE_SQRT_STEPS: u64 = 10_000;

/// The learning rate of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRateSchedule {
    peak: f64,
    floor: f64,
    shape: LearningRateShape,
    warmup: u64,
    budget: u64,
    base_batch: u64,
}

impl LearningRateSchedule {
    /// The schedule of a recipe over `budget` samples, of which the first `warmup` are its warm-up, at a base
    /// global batch of `base_batch` samples. [`crate::batch::Horizon`] computes both counts.
    pub fn new(recipe: &LearningRate, warmup: u64, budget: u64, base_batch: u64) -> Self {
        LearningRateSchedule {
            peak: recipe.peak,
            floor: recipe.floor,
            shape: recipe.shape,
            warmup,
            budget,
            base_batch,
        }
    }

    /// The length of the warm-up, samples.
    pub fn warmup_samples(&self) -> u64 {
        self.warmup
    }

    /// Whether a step that starts after `samples` samples is still in the warm-up.
    pub fn warming_up(&self, samples: u64) -> bool {
        samples < self.warmup
    }

    /// The learning rate of a step that starts after `samples` samples. The first step of a warm-up has rate
    /// 0, as upstream.
    pub fn at(&self, samples: u64) -> f64 {
        self.peak * self.share(samples)
    }

    /// The learning rate as a share of the peak.
    fn share(&self, samples: u64) -> f64 {
        if self.warming_up(samples) {
            return samples as f64 / self.warmup as f64;
        }
        let after = (samples - self.warmup) as f64;
        let length = self.budget.saturating_sub(self.warmup).max(1) as f64;
        let progress = (after / length).min(1.0);
        let above_floor = |share: f64| self.floor + (1.0 - self.floor) * share;
        match self.shape {
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
                (scale / (after + scale)).sqrt().max(self.floor)
            }
        }
    }
}

#[cfg(test)]
mod tests;
