//! The controller's decision after a step: plain data for the log, the checkpoint and the metrics.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::estimator::Undefined;

/// The decision after one step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Decision {
    /// The batch of the next step, samples.
    pub next_batch: u64,
    /// r; the test fails, and the batch grows, when r is above `threshold`. `None`: the step ran no test, the
    /// test was undefined, or (printed form only) r is infinite.
    pub ratio: Option<f64>,
    /// η². `None` when the schedule has no test.
    pub threshold: Option<f64>,
    /// B_simple = V/|grad|², samples. `None`: infinite, or no test.
    pub noise_scale: Option<f64>,
    /// T, the batch that the test requires, in samples, before any rounding or limit. `None`: infinite, or no
    /// test.
    pub target: Option<f64>,
    pub reason: Reason,
}

/// Why the next batch has its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The schedule does not use gradients.
    #[default]
    Scheduled,
    /// The test is not due in this step.
    NotDue,
    /// The test was due, but the step was abandoned and measured nothing.
    NotMeasured,
    /// The measurement gives no estimate.
    Undefined(Undefined),
    /// The batch may not grow before the learning rate's warm-up is over.
    WarmingUp,
    /// The test passed: the batch is large enough.
    Enough,
    /// The test failed at the largest batch.
    AtMaximum,
    /// The test failed and the batch grew.
    Grew {
        /// The batch so far, samples.
        from: u64,
        /// The next batch, samples.
        to: u64,
        /// The limit that kept the batch below the target.
        limit: Option<Limit>,
    },
    /// The batch was far larger than the test requires.
    Shrank {
        /// The batch so far, samples.
        from: u64,
        /// The next batch, samples.
        to: u64,
    },
}

/// The limit that keeps a growing batch below its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The growth cap per decision.
    Cap,
    /// The maximum batch of the schedule.
    Maximum,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Scheduled => f.write_str("as scheduled"),
            Reason::NotDue => f.write_str("not due"),
            Reason::NotMeasured => f.write_str("not measured"),
            Reason::Undefined(why) => write!(f, "undefined: {why}"),
            Reason::WarmingUp => f.write_str("warming up"),
            Reason::Enough => f.write_str("large enough"),
            Reason::AtMaximum => f.write_str("too small, at the maximum"),
            Reason::Grew { from, to, limit } => {
                write!(f, "grew ×{}", hundredths(*to, *from))?;
                match limit {
                    Some(Limit::Cap) => f.write_str(" (cap)"),
                    Some(Limit::Maximum) => f.write_str(" (maximum)"),
                    None => Ok(()),
                }
            }
            Reason::Shrank { from, to } => write!(f, "shrank ×{}", hundredths(*to, *from)),
        }
    }
}

/// `to / from` with at most two decimals.
fn hundredths(to: u64, from: u64) -> f64 {
    (to as f64 / from as f64 * 100.0).round() / 100.0
}
