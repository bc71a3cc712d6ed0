//! The coordinate-wise test (the paper's Theorem 1, for Adam), as a diagnostic: the share of
//! coordinates d whose variance is small enough, Var_d/b ≤ η²·ḡ_d². It does not steer.

use serde::{Deserialize, Serialize};

/// Coordinates counted so far; ranks that hold different shards add theirs up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Coordinates {
    /// Coordinates that pass.
    pub passing: u64,
    /// Coordinates in all.
    pub total: u64,
}

impl Coordinates {
    /// Counts a stretch of coordinates. `weighted[d]` is Σ_i G_{i,d}²/n_i over the `groups` groups
    /// of the step, `summed[d]` the gradient of the step's summed loss, `units` its target tokens
    /// N; both slices have the same length. Fewer than two groups count nothing.
    pub fn add(&mut self, weighted: &[f32], summed: &[f32], units: u64, groups: u64, eta: f64) {
        if groups < 2 || units == 0 {
            return;
        }
        let units = units as f64;
        // With A_d = weighted/N and C_d = (summed/N)², the unbiased Var_d/b is
        // (A_d − C_d)/(G − 1), so a coordinate passes when A_d ≤ (1 + η²(G−1))·C_d.
        let bound = 1.0 + eta * eta * (groups - 1) as f64;
        self.passing += weighted
            .iter()
            .zip(summed)
            .filter(|&(&a, &g)| f64::from(a) <= bound * (f64::from(g) * f64::from(g) / units))
            .count() as u64;
        self.total += weighted.len() as u64;
    }

    /// Adds what another shard counted.
    pub fn merge(&mut self, other: &Coordinates) {
        self.passing += other.passing;
        self.total += other.total;
    }

    /// The share that passes; `None` before anything was counted.
    pub fn share(&self) -> Option<f64> {
        (self.total > 0).then(|| self.passing as f64 / self.total as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two groups of two tokens each, summed gradients 2·g_i: per coordinate Var_d/b is
    /// (g_1 − g_2)²/4 and ḡ_d the mean.
    fn two_groups(first: &[f32], second: &[f32], eta: f64) -> Coordinates {
        let weighted: Vec<f32> = first
            .iter()
            .zip(second)
            .map(|(a, b)| (4.0 * a * a + 4.0 * b * b) / 2.0)
            .collect();
        let summed: Vec<f32> = first
            .iter()
            .zip(second)
            .map(|(a, b)| 2.0 * (a + b))
            .collect();
        let mut coordinates = Coordinates::default();
        coordinates.add(&weighted, &summed, 4, 2, eta);
        coordinates
    }

    #[test]
    fn a_coordinate_passes_when_its_noise_is_below_eta_of_its_gradient() {
        // |g_1 − g_2|/2 over |ḡ|: 0, 0.5, 2.
        let counted = two_groups(&[1.0, 3.0, 3.0], &[1.0, 1.0, -1.0], 0.6);
        assert_eq!((counted.passing, counted.total), (2, 3));
        let stricter = two_groups(&[1.0, 3.0, 3.0], &[1.0, 1.0, -1.0], 0.4);
        assert_eq!(stricter.passing, 1);
    }

    #[test]
    fn shards_add_up_to_the_whole() {
        let mut left = two_groups(&[1.0, 3.0], &[1.0, 1.0], 0.6);
        left.merge(&two_groups(&[3.0], &[-1.0], 0.6));
        assert_eq!(left, two_groups(&[1.0, 3.0, 3.0], &[1.0, 1.0, -1.0], 0.6));
        assert_eq!(left.share(), Some(2.0 / 3.0));
    }

    #[test]
    fn one_group_counts_nothing() {
        let mut coordinates = Coordinates::default();
        coordinates.add(&[1.0], &[1.0], 1, 1, 0.5);
        assert_eq!(coordinates.share(), None);
    }
}
