//! The norm test's decision: from one step's sums to the next batch, with its guards.

use serde::{Deserialize, Serialize};

use super::coordinate::CoordinateTest;
use super::decision::{Decision, Limit, Reason};
use super::estimator::{Estimate, Sums, Undefined};
use super::settings::Conditions;
use crate::recipe::schema::spec::{Estimator, Groups, NormTest};

/// The settings, and the state kept from step to step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Tester {
    pub(super) settings: NormTest,
    smoothed: Smoothed,
}

/// Exponential means of V and |grad|². Neither depends on the batch, so both may be averaged while the batch
/// grows; A, C, r and T may not.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct Smoothed {
    variance: f64,
    gradient: f64,
    /// 1 − decay^k after k updates: divisor of the means, which removes the influence of their initial zeros.
    weight: f64,
}

impl Smoothed {
    fn update(&mut self, new: Estimate, decay: f64) -> Estimate {
        let mean = |old: f64, new: f64| decay * old + (1.0 - decay) * new;
        self.variance = mean(self.variance, new.variance);
        self.gradient = mean(self.gradient, new.gradient);
        self.weight = mean(self.weight, 1.0);
        Estimate {
            variance: self.variance / self.weight,
            gradient: self.gradient / self.weight,
        }
    }
}

impl Tester {
    pub(super) fn new(settings: NormTest) -> Self {
        Tester {
            settings,
            smoothed: Smoothed::default(),
        }
    }

    /// The largest batch: the maximum rounded down to the quantum, and at least the base batch, which is a
    /// multiple itself.
    pub(super) fn max_batch(&self, quantum: u64) -> u64 {
        self.settings.max_batch - self.settings.max_batch % quantum
    }

    /// η², the limit of r.
    pub(super) fn threshold(&self) -> f64 {
        self.settings.eta * self.settings.eta
    }

    pub(super) fn requested_groups(&self, step: u64, batch: u64, quantum: u64) -> Option<Groups> {
        let printed = self.settings.estimator == Estimator::Paper;
        let settled = printed && batch >= self.max_batch(quantum);
        let due = step.is_multiple_of(self.settings.interval) && !settled;
        due.then(|| self.settings.measured_groups())
    }

    pub(super) fn coordinate_test(&self, step: u64) -> Option<CoordinateTest> {
        let interval = self.settings.coordinate_interval;
        (interval > 0 && step.is_multiple_of(interval)).then(|| CoordinateTest {
            groups: self.settings.measured_groups(),
            threshold: self.threshold(),
        })
    }

    /// Runs the test on a step of `batch` samples.
    pub(super) fn decide(
        &mut self,
        batch: u64,
        conditions: &Conditions,
        warming_up: bool,
        sums: &Sums,
    ) -> Result<Decision, Undefined> {
        match self.settings.estimator {
            Estimator::Unbiased => self.guarded(batch, conditions, warming_up, sums),
            Estimator::Paper => self.printed(batch, conditions, sums),
        }
    }

    /// The unbiased test: r from the smoothed estimates, T = b·r/η², every guard.
    fn guarded(
        &mut self,
        batch: u64,
        conditions: &Conditions,
        warming_up: bool,
        sums: &Sums,
    ) -> Result<Decision, Undefined> {
        let estimate = self.smoothed.update(sums.unbiased()?, self.settings.ema);
        let ratio = estimate.ratio(batch);
        let target = batch as f64 * ratio / self.threshold();
        let (next_batch, reason) = if warming_up && self.settings.after_warmup {
            (batch, Reason::WarmingUp)
        } else if ratio > self.threshold() {
            self.grow(batch, target, conditions.quantum)
        } else {
            self.shrink(batch, target, conditions)
        };
        Ok(Decision {
            next_batch,
            ratio: finite(ratio),
            threshold: Some(self.threshold()),
            noise_scale: estimate.noise_scale(),
            target: finite(target),
            reason,
        })
    }

    fn grow(&self, batch: u64, target: f64, quantum: u64) -> (u64, Reason) {
        let max = self.max_batch(quantum);
        if batch >= max {
            return (batch, Reason::AtMaximum);
        }
        let mut next = round_up(target, quantum);
        let mut limit = None;
        if let Some(cap) = self.settings.growth_cap {
            // At least one quantum: otherwise a small cap never allows a small batch to grow.
            let most = round_down(batch as f64 * cap, quantum).max(batch.saturating_add(quantum));
            if next > most {
                next = most;
                limit = Some(Limit::Cap);
            }
        }
        if next > max {
            next = max;
            limit = Some(Limit::Maximum);
        }
        let (from, to) = (batch, next);
        (next, Reason::Grew { from, to, limit })
    }

    /// The batch is large enough: keeps it, unless it may shrink and is far too large.
    fn shrink(&self, batch: u64, target: f64, conditions: &Conditions) -> (u64, Reason) {
        let next = round_up(target, conditions.quantum).max(conditions.base_batch);
        let far = target < self.settings.hysteresis * batch as f64;
        if self.settings.shrink && far && next < batch {
            let (from, to) = (batch, next);
            (next, Reason::Shrank { from, to })
        } else {
            (batch, Reason::Enough)
        }
    }

    /// The paper's algorithm: if T > b then micro = ⌈T/(J·M)⌉ and b = J·M·micro. M is the accumulation at the
    /// base batch, so J·M is its number of micro-batches. One addition keeps every world exact: J·M·micro is
    /// rounded up to the next multiple of the quantum. In the paper's own runs the quantum divides J·M and
    /// rounding changes nothing.
    fn printed(
        &mut self,
        batch: u64,
        conditions: &Conditions,
        sums: &Sums,
    ) -> Result<Decision, Undefined> {
        let printed = sums.printed()?;
        let target = printed.target(self.settings.eta);
        let max = self.max_batch(conditions.quantum);
        let (next_batch, reason) = if target <= batch as f64 {
            (batch, Reason::Enough)
        } else if batch >= max {
            (batch, Reason::AtMaximum)
        } else {
            let micro_batches = conditions.base_batch / conditions.micro_batch;
            let printed_batch = round_up(target, micro_batches);
            let next = round_up(printed_batch as f64, conditions.quantum).min(max);
            let reason = Reason::Grew {
                from: batch,
                to: next,
                limit: (printed_batch > max).then_some(Limit::Maximum),
            };
            (next, reason)
        };
        Ok(Decision {
            next_batch,
            ratio: finite(printed.ratio(batch)),
            threshold: Some(self.threshold()),
            noise_scale: sums.unbiased()?.noise_scale(),
            target: finite(target),
            reason,
        })
    }
}

fn finite(value: f64) -> Option<f64> {
    Some(value).filter(|value| value.is_finite())
}

/// The smallest multiple of `quantum` that is at least `samples`; the largest multiple that fits a u64 when
/// `samples` is infinite.
fn round_up(samples: f64, quantum: u64) -> u64 {
    // A float-to-integer cast saturates.
    let multiples = (samples / quantum as f64).ceil() as u64;
    multiples.min(u64::MAX / quantum) * quantum
}

/// The largest multiple of `quantum` that is at most `samples`.
fn round_down(samples: f64, quantum: u64) -> u64 {
    let multiples = (samples / quantum as f64).floor() as u64;
    multiples.min(u64::MAX / quantum) * quantum
}
