//! From squared norms to the gradient's variance: the unbiased estimator and the printed one.
//!
//! The norm test (Byrd et al. 2012; Lau et al., arXiv 2412.21124) asks whether the variance of the
//! batch gradient is small against its squared length. Two scalars suffice instead of the gradients.
//! With G groups, where group i holds n_i of the N units and contributes h_i to ḡ = Σ h_i, these are
//!
//! ```text
//! A = Σ (N/n_i)·‖h_i‖²        C = ‖ḡ‖²
//! ```
//!
//! A unit is the divisor of the loss: a target token under token weighting.
//! Weighting by N/n_i keeps the estimates unbiased when groups differ (masked answers, uneven
//! dealing), if the noise of a group's mean gradient falls as 1/n_i. Tokens of one answer depend on each other, so that it
//! falls more slowly in long answers: those of 1 to 22 tokens, one in a group, measured V 6 to 8 % low. Everything is f64, because A − C is a small difference of large numbers.

use serde::{Deserialize, Serialize};

/// Largest relative amount by which A may lie below C and still count as rounding: norms are sums over
/// millions of f32 products. A ≥ C holds exactly (Cauchy–Schwarz), so a larger amount means that the norms
/// were not measured on one scale.
const ROUNDING: f64 = 1e-3;

/// Sums that each rank fills in and that are added over the ranks: the groups' share of the norm test's
/// scalars.
///
/// The gradients are those of *summed* losses, as engines report them, so that no rank needs to know N before
/// the end of the step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct GroupSums {
    /// Σ ‖G_i‖² / n_i, G_i the gradient of group i's summed loss.
    pub weighted: f64,
    /// Σ n_i, target tokens.
    pub units: u64,
    /// Groups with at least one unit.
    pub groups: u64,
}

impl GroupSums {
    /// Adds a group: ‖gradient of its summed loss‖² and its target tokens. A group without target
    /// tokens has no gradient and does not count.
    pub fn add(&mut self, squared_norm: f64, units: u64) {
        if units > 0 {
            self.weighted += squared_norm / units as f64;
            self.units += units;
            self.groups += 1;
        }
    }

    /// Adds the sums of another rank.
    pub fn merge(&mut self, other: &GroupSums) {
        self.weighted += other.weighted;
        self.units += other.units;
        self.groups += other.groups;
    }

    /// A and C of a step of `batch` samples. `squared_norm` is that of the whole summed gradient, before
    /// scaling and clipping. Without any unit both are NaN, which the estimators refuse as
    /// [`Undefined::NotFinite`].
    pub fn sums(&self, squared_norm: f64, batch: u64) -> Sums {
        let units = self.units as f64;
        Sums {
            groups: self.groups,
            weighted: self.weighted / units,
            total: squared_norm / units / units,
            batch,
        }
    }
}

/// The measurement of one step for the norm test.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sums {
    /// G, the groups with at least one unit.
    pub groups: u64,
    /// A = Σ (N/n_i)·‖h_i‖².
    pub weighted: f64,
    /// C = ‖ḡ‖², ḡ the gradient of the mean loss, before clipping.
    pub total: f64,
    /// b, the step's global batch in samples.
    pub batch: u64,
}

/// Why a step gives no estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Undefined {
    /// A variance needs two groups.
    #[error("one group has no variance; the test needs two workers or micro-batches in a step")]
    OneGroup,
    /// A NaN or an infinity among the norms.
    #[error("a gradient norm is not finite")]
    NotFinite,
    /// Every gradient is zero.
    #[error("the gradient is zero")]
    ZeroGradient,
    /// A lies below C by more than rounding.
    #[error("the groups' norms are too small for the batch gradient's: not measured on one scale")]
    Inconsistent,
}

impl Sums {
    /// G − 1 and A − C ≥ 0, if both estimators can use them.
    fn spread(&self) -> Result<(f64, f64), Undefined> {
        if !self.weighted.is_finite() || !self.total.is_finite() {
            return Err(Undefined::NotFinite);
        }
        if self.groups < 2 {
            return Err(Undefined::OneGroup);
        }
        if self.weighted <= 0.0 {
            return Err(Undefined::ZeroGradient);
        }
        let spread = self.weighted - self.total;
        if spread < -ROUNDING * self.total {
            return Err(Undefined::Inconsistent);
        }
        Ok(((self.groups - 1) as f64, spread.max(0.0)))
    }

    /// The unbiased estimates of V and |grad|²:
    /// V = b(A−C)/(G−1) and |grad|² = (G·C−A)/(G−1).
    pub fn unbiased(&self) -> Result<Estimate, Undefined> {
        let (others, spread) = self.spread()?;
        Ok(Estimate {
            variance: self.batch as f64 * spread / others,
            // G·C − A = (G−1)·C − (A−C), which cancels less.
            gradient: self.total - spread / others,
        })
    }

    /// The paper's variance, (1/J)·Σ_j ‖g_j − ḡ‖² = A − C, workers as groups. With unequal
    /// workers 1/J becomes n_j/N, the weight that worker j has in ḡ.
    pub fn printed(&self) -> Result<Printed, Undefined> {
        let (_, spread) = self.spread()?;
        Ok(Printed {
            variance: spread,
            squared_norm: self.total,
        })
    }
}

/// V and |grad|², of one step or smoothed over several. Neither depends on the batch, so these two may be
/// averaged over steps, and no other quantity may.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// V, the trace of the covariance of one sample's gradient.
    pub variance: f64,
    /// |grad|², the squared length of the true gradient. A single step's estimate is negative when
    /// noise dominates.
    pub gradient: f64,
}

impl Estimate {
    /// r = V/(b·|grad|² + V) at a batch of `batch` samples: the share of ‖ḡ‖² that is noise. 1 when
    /// no gradient can be told from the noise. From one step's estimate at that step's own batch it
    /// is (A−C)/((G−1)·C), held at 1.
    pub fn ratio(&self, batch: u64) -> f64 {
        if self.gradient <= 0.0 {
            return 1.0;
        }
        self.variance / (batch as f64 * self.gradient + self.variance)
    }

    /// B_simple = V/|grad|², samples (McCandlish et al., arXiv 1812.06162). `None`: infinite.
    pub fn noise_scale(&self) -> Option<f64> {
        (self.gradient > 0.0).then(|| self.variance / self.gradient)
    }
}

/// The paper's form of the test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Printed {
    /// ‖Var‖₁, summed over all coordinates.
    pub variance: f64,
    /// ‖ḡ‖² of the batch gradient.
    pub squared_norm: f64,
}

impl Printed {
    /// ‖Var‖₁/(b·‖ḡ‖²): T is above the batch exactly when this is above η².
    pub fn ratio(&self, batch: u64) -> f64 {
        self.variance / (batch as f64 * self.squared_norm)
    }

    /// T = ⌈‖Var‖₁/(η²‖ḡ‖²)⌉, samples; infinite when ‖ḡ‖² is 0.
    pub fn target(&self, eta: f64) -> f64 {
        (self.variance / (eta * eta * self.squared_norm)).ceil()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::norm::testing::{Gradients, Random, mean_and_error, squared_norm};

    fn gradients(seed: u64) -> Gradients {
        Gradients {
            dimensions: 32,
            mean: 0.1,
            sigma: 0.23,
            random: Random::new(seed),
        }
    }

    /// Asserts that `values` average to `truth` within 4.5 standard errors, and that the standard error is small.
    fn assert_recovers(what: &str, values: &[f64], truth: f64) {
        let (mean, error) = mean_and_error(values);
        assert!(
            error < 0.03 * truth,
            "{what}: too few draws, {error} of {truth}"
        );
        assert!(
            (mean - truth).abs() < 4.5 * error,
            "{what}: {mean} ± {error}, true {truth}"
        );
    }

    fn assert_unbiased(what: &str, groups: &[u64], seed: u64) {
        let mut gradients = gradients(seed);
        let draws = 40_000 / groups.len();
        let estimates: Vec<Estimate> = (0..draws)
            .map(|_| gradients.sums(groups).unbiased().unwrap())
            .collect();
        let variances: Vec<f64> = estimates.iter().map(|e| e.variance).collect();
        let squares: Vec<f64> = estimates.iter().map(|e| e.gradient).collect();
        assert_recovers(&format!("{what}: V"), &variances, gradients.variance());
        assert_recovers(
            &format!("{what}: |grad|²"),
            &squares,
            gradients.squared_gradient(),
        );
    }

    #[test]
    fn variance_and_gradient_are_recovered_from_equal_groups() {
        for groups in [2, 3, 4, 8, 16, 64] {
            assert_unbiased(&format!("{groups} × 8"), &vec![8; groups], groups as u64);
        }
    }

    #[test]
    fn variance_and_gradient_are_recovered_from_unequal_groups() {
        assert_unbiased("3/3/2", &[3, 3, 2], 1);
        assert_unbiased("1/15", &[1, 15], 2);
        let uneven: Vec<u64> = (0..64).map(|i| 1 + (i * i) % 13).collect();
        assert_unbiased("64 uneven", &uneven, 3);
    }

    #[test]
    fn unweighted_groups_of_3_3_2_overstate_the_variance_and_weighted_ones_do_not() {
        // Without the weights, E[V] is V·(b/(G−1))·(mean(1/n_i) − 1/N) = V·4·(7/18 − 1/8) = 19/18·V:
        // 1.788 for 1.690 in the design's simulation, 1.058, against 1.056.
        let mut gradients = gradients(4);
        let (mut weighted, mut unweighted) = (Vec::new(), Vec::new());
        for _ in 0..20_000 {
            let (local, total, drawn) = gradients.step(&[3, 3, 2]);
            let sums = local.sums(total, 8);
            let mean_square = drawn
                .iter()
                .zip([3.0, 3.0, 2.0])
                .map(|(g, n)| squared_norm(g) / (n * n))
                .sum::<f64>()
                / 3.0;
            weighted.push(sums.unbiased().unwrap().variance);
            unweighted.push(8.0 / 2.0 * (mean_square - sums.total));
        }
        let truth = gradients.variance();
        assert_recovers("weighted", &weighted, truth);
        assert_recovers("unweighted", &unweighted, truth * 19.0 / 18.0);
        let (mean, error) = mean_and_error(&unweighted);
        assert!(mean - truth > 10.0 * error, "the bias must be visible here");
    }

    #[test]
    fn variance_is_per_sample_when_units_are_tokens() {
        // 8 groups of 2 samples with 50 target tokens each: V of a sample is V of a token / 50, since
        // a sample's gradient is the mean over its tokens.
        let mut gradients = gradients(5);
        let variances: Vec<f64> = (0..4000)
            .map(|_| {
                let (local, total, _) = gradients.step(&[100; 8]);
                local.sums(total, 16).unbiased().unwrap().variance
            })
            .collect();
        assert_recovers("V per sample", &variances, gradients.variance() / 50.0);
    }

    #[test]
    fn two_groups_by_hand() {
        // Summed gradients (6, 0) over 3 units and (0, 2) over 1: g_1 = (2, 0), g_2 = (0, 2),
        // ḡ = (1.5, 0.5); A = (3·4 + 1·4)/4 = 4, C = 2.5.
        let mut local = GroupSums::default();
        local.add(36.0, 3);
        local.add(4.0, 1);
        let sums = local.sums(40.0, 4);
        assert_eq!((sums.weighted, sums.total, sums.groups), (4.0, 2.5, 2));
        let estimate = sums.unbiased().unwrap();
        assert_eq!((estimate.variance, estimate.gradient), (6.0, 1.0));
        assert_eq!(estimate.ratio(4), 0.6);
        assert_eq!(estimate.noise_scale(), Some(6.0));
        let printed = sums.printed().unwrap();
        assert_eq!(printed.variance, 1.5);
        assert_eq!(printed.target(0.5), 3.0);
    }

    #[test]
    fn ranks_add_up_to_one_process() {
        let (mut whole, mut left, mut right) = Default::default();
        let fill = |sums: &mut GroupSums, groups: &[(f64, u64)]| {
            for &(squared_norm, units) in groups {
                sums.add(squared_norm, units);
            }
        };
        fill(&mut whole, &[(36.0, 3), (4.0, 1), (9.0, 2)]);
        fill(&mut left, &[(36.0, 3)]);
        fill(&mut right, &[(4.0, 1), (9.0, 2)]);
        left.merge(&right);
        assert_eq!(left, whole);
    }

    #[test]
    fn a_group_without_target_tokens_does_not_count() {
        let mut local = GroupSums::default();
        local.add(36.0, 3);
        local.add(0.0, 0);
        assert_eq!(local.groups, 1);
        assert_eq!(
            local.sums(36.0, 2).unbiased(),
            Err(Undefined::OneGroup),
            "masked answers must not turn one group into two"
        );
    }

    #[test]
    fn the_printed_test_agrees_at_eta_times_the_root_of_b_over_j_minus_1() {
        for (workers, per_worker) in [(2u64, 16u64), (4, 64), (8, 4)] {
            let mut gradients = gradients(workers);
            let batch = workers * per_worker;
            for eta in [0.05, 0.15, 0.3] {
                let portable = eta * (batch as f64 / (workers - 1) as f64).sqrt();
                for _ in 0..200 {
                    let sums = gradients.sums(&vec![per_worker; workers as usize]);
                    let printed = sums.printed().unwrap();
                    let raw = (sums.weighted - sums.total) / ((workers - 1) as f64 * sums.total);
                    let target = batch as f64 * raw / (portable * portable);
                    assert_eq!(printed.target(eta), target.ceil());
                    assert_eq!(
                        printed.target(eta) > batch as f64,
                        raw > portable * portable
                    );
                    assert_eq!(printed.ratio(batch) > eta * eta, raw > portable * portable);
                }
            }
        }
    }

    #[test]
    fn pure_noise_gives_the_printed_form_a_target_of_j_minus_1_over_eta_squared() {
        for workers in [2u64, 4, 8] {
            let mut gradients = gradients(workers);
            gradients.mean = 0.0;
            let (mut variance, mut square, mut above) = (0.0, 0.0, 0);
            for _ in 0..4000 {
                let printed = gradients
                    .sums(&vec![16; workers as usize])
                    .printed()
                    .unwrap();
                variance += printed.variance;
                square += printed.squared_norm;
                above += u64::from(printed.target(1.0) > (workers - 1) as f64);
            }
            // The ratio of the means; single draws lie above it about half of the time.
            let ratio = variance / square;
            assert!((ratio / (workers - 1) as f64 - 1.0).abs() < 0.03, "{ratio}");
            assert!((1200..2800).contains(&above), "{above} of 4000");
        }
    }

    #[test]
    fn pure_noise_makes_the_unbiased_ratio_one() {
        let mut gradients = gradients(6);
        gradients.mean = 0.0;
        let mut infinite = 0;
        for _ in 0..1000 {
            let estimate = gradients.sums(&[16; 4]).unbiased().unwrap();
            assert!(estimate.ratio(64) > 0.2);
            infinite += u64::from(estimate.ratio(64) == 1.0 && estimate.noise_scale().is_none());
        }
        assert!((300..700).contains(&infinite), "{infinite} of 1000");
    }

    #[test]
    fn cancellation_below_zero_is_zero_variance() {
        let sums = Sums {
            groups: 4,
            weighted: 1.0 - 1e-6,
            total: 1.0,
            batch: 8,
        };
        let estimate = sums.unbiased().unwrap();
        assert_eq!((estimate.variance, estimate.ratio(8)), (0.0, 0.0));
        assert_eq!(sums.printed().unwrap().target(0.1), 0.0);
    }

    #[test]
    fn norms_on_two_scales_are_refused() {
        // An average in place of a sum: the groups' norms are 4² too small.
        let mut local = GroupSums::default();
        for _ in 0..4 {
            local.add(100.0 / 16.0, 10);
        }
        assert_eq!(
            local.sums(1600.0, 4).unbiased(),
            Err(Undefined::Inconsistent)
        );
    }

    #[test]
    fn a_vanishing_batch_gradient_is_all_noise() {
        let sums = Sums {
            groups: 2,
            weighted: 1.0,
            total: 0.0,
            batch: 8,
        };
        let estimate = sums.unbiased().unwrap();
        assert_eq!(estimate.ratio(8), 1.0);
        assert_eq!(estimate.noise_scale(), None);
        assert_eq!(sums.printed().unwrap().target(0.1), f64::INFINITY);
    }

    #[test]
    fn an_undefined_estimate_states_its_reason() {
        let sums = |groups, weighted, total| Sums {
            groups,
            weighted,
            total,
            batch: 8,
        };
        let cases = [
            (sums(1, 1.0, 1.0), Undefined::OneGroup),
            (sums(4, f64::NAN, 1.0), Undefined::NotFinite),
            (sums(4, 1.0, f64::INFINITY), Undefined::NotFinite),
            (sums(4, 0.0, 0.0), Undefined::ZeroGradient),
            (GroupSums::default().sums(0.0, 8), Undefined::NotFinite),
        ];
        for (sums, why) in cases {
            assert_eq!(sums.unbiased(), Err(why));
            assert_eq!(sums.printed(), Err(why));
        }
    }
}
