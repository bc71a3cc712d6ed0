//! The coordinate-wise test (the paper's Theorem 1, for Adam), as a diagnostic: the share of coordinates d
//! whose variance is small enough, Var_d/b ≤ η²·ḡ_d². It does not change the batch.
//!
//! A coordinate that no sample touches (the embedding of a token that does not occur) has neither variance
//! nor gradient, and passes.

use serde::{Deserialize, Serialize};

use super::estimator::{GroupSums, Undefined};
use crate::recipe::schema::spec::Groups;

/// A coordinate-wise test that is due.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoordinateTest {
    /// The unit of a group.
    pub groups: Groups,
    pub threshold: f64,
}

/// The test on the groups of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoordinateBound {
    /// N, the number of target tokens.
    units: f64,
    /// 1 + η²·(G − 1).
    factor: f64,
}

/// Coordinates counted so far; ranks that hold different parts add theirs up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Coordinates {
    pub passing: u64,
    pub total: u64,
}

impl CoordinateTest {
    /// The test on a step with these groups.
    pub fn bound(&self, groups: &GroupSums) -> Result<CoordinateBound, Undefined> {
        if groups.groups < 2 {
            return Err(Undefined::OneGroup);
        }
        Ok(CoordinateBound {
            units: groups.units as f64,
            factor: 1.0 + self.threshold * (groups.groups - 1) as f64,
        })
    }
}

impl CoordinateBound {
    /// Counts a range of coordinates. `weighted[d]` is Σ_i G_{i,d}²/n_i over the groups of the step,
    /// `summed[d]` the gradient of the step's summed loss; both are equally long.
    pub fn count(&self, weighted: &[f32], summed: &[f32]) -> Coordinates {
        // With A_d = weighted/N and C_d = (summed/N)², the unbiased Var_d/b is
        // (A_d − C_d)/(G − 1), so a coordinate passes when A_d ≤ (1 + η²(G−1))·C_d.
        let passes = |&(&weighted, &summed): &(&f32, &f32)| {
            let summed = f64::from(summed);
            f64::from(weighted) <= self.factor * (summed * summed / self.units)
        };
        Coordinates {
            passing: weighted.iter().zip(summed).filter(passes).count() as u64,
            total: weighted.len() as u64,
        }
    }
}

impl Coordinates {
    /// Adds the coordinates that another rank counted.
    pub fn merge(&mut self, other: &Coordinates) {
        self.passing += other.passing;
        self.total += other.total;
    }

    /// Share of coordinates that pass; `None` before any is counted.
    pub fn share(&self) -> Option<f64> {
        (self.total > 0).then(|| self.passing as f64 / self.total as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(eta: f64, groups: u64) -> Result<CoordinateBound, Undefined> {
        let test = CoordinateTest {
            groups: Groups::MicroBatches,
            threshold: eta * eta,
        };
        test.bound(&GroupSums {
            weighted: 0.0,
            units: 2 * groups,
            groups,
        })
    }

    /// Two groups of two tokens each, summed gradients 2·g_i: per coordinate Var_d/b is
    /// (g_1 − g_2)²/4 and ḡ_d the mean.
    fn two_groups(first: &[f32], second: &[f32], eta: f64) -> Coordinates {
        let pairs = || first.iter().zip(second);
        let weighted: Vec<f32> = pairs()
            .map(|(a, b)| (4.0 * a * a + 4.0 * b * b) / 2.0)
            .collect();
        let summed: Vec<f32> = pairs().map(|(a, b)| 2.0 * (a + b)).collect();
        bound(eta, 2).unwrap().count(&weighted, &summed)
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
    fn parts_add_up_to_the_whole() {
        let mut left = two_groups(&[1.0, 3.0], &[1.0, 1.0], 0.6);
        left.merge(&two_groups(&[3.0], &[-1.0], 0.6));
        assert_eq!(left, two_groups(&[1.0, 3.0, 3.0], &[1.0, 1.0, -1.0], 0.6));
        assert_eq!(left.share(), Some(2.0 / 3.0));
        assert_eq!(Coordinates::default().share(), None);
    }

    #[test]
    fn one_group_is_undefined() {
        assert_eq!(bound(0.5, 1), Err(Undefined::OneGroup));
    }
}
