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
//! dealing). Everything is f64, because A − C is a small difference of large numbers.

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
mod tests;
