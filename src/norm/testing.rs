//! Synthetic Gaussian gradients of known mean and variance, for the tests of this module.

use crate::util::random;

use super::estimator::{GroupSums, Sums};

/// Uniform numbers, and normal deviates by Box and Muller.
pub struct Random(random::Random);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(random::Random::seeded(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A uniform number in (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// Gradients of single units: independent, normal around `mean` (the same in every coordinate)
/// with standard deviation `sigma` in every coordinate.
pub struct Gradients {
    pub dimensions: usize,
    pub mean: f64,
    pub sigma: f64,
    pub random: Random,
}

impl Gradients {
    /// The true V in units.
    pub fn variance(&self) -> f64 {
        self.dimensions as f64 * self.sigma * self.sigma
    }

    pub fn squared_gradient(&self) -> f64 {
        self.dimensions as f64 * self.mean * self.mean
    }

    /// Gradient of the summed loss of a group of `units`.
    fn group(&mut self, units: u64) -> Vec<f64> {
        let n = units as f64;
        (0..self.dimensions)
            .map(|_| n * self.mean + n.sqrt() * self.sigma * self.random.normal())
            .collect()
    }

    /// One step whose groups hold `groups[i]` units each: the ranks' sums, ‖whole gradient‖², and the
    /// gradients.
    pub fn step(&mut self, groups: &[u64]) -> (GroupSums, f64, Vec<Vec<f64>>) {
        let drawn: Vec<Vec<f64>> = groups.iter().map(|&n| self.group(n)).collect();
        let mut local = GroupSums::default();
        let mut whole = vec![0.0; self.dimensions];
        for (gradient, &units) in drawn.iter().zip(groups) {
            local.add(squared_norm(gradient), units);
            for (sum, g) in whole.iter_mut().zip(gradient) {
                *sum += g;
            }
        }
        (local, squared_norm(&whole), drawn)
    }

    /// One step with samples as units.
    pub fn sums(&mut self, groups: &[u64]) -> Sums {
        let (local, squared_norm, _) = self.step(groups);
        local.sums(squared_norm, groups.iter().sum())
    }
}

pub fn squared_norm(vector: &[f64]) -> f64 {
    vector.iter().map(|x| x * x).sum()
}

/// Mean and standard error of the mean.
pub fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let spread = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, (spread / n).sqrt())
}
