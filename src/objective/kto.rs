//! KTO (Ethayarajh et al., 2024, eqs. 7 and 8): single answers with a label, against the mean KL of the batch.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Judged, Sequence, Slope, Step, sigmoid};

/// Which samples of a step an estimate of the KL covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kl {
    /// The global batch, so that the loss does not depend on the world.
    #[default]
    Global,
    /// The micro-batches that all ranks run at the same time, as in TRL; mismatched pairs are made within each of them.
    MicroBatch,
}

/// The sample of a block whose completion a mismatched row has with the prompt of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KlCompletions {
    /// The one before it, and for the first the last (TRL).
    #[default]
    Previous,
    /// The one after it, and for the last the first (HALOs).
    Next,
}

/// λ (1 − σ(±β (log-ratio − KL))).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kto {
    pub beta: f64,
    /// λ of desirable answers.
    pub desirable_weight: f64,
    /// λ of undesirable ones.
    pub undesirable_weight: f64,
}

impl Kto {
    /// Judges an answer that is desirable or not. The KL estimate has no gradient.
    pub fn judge(&self, sequence: Sequence, is_desirable: bool, step: Step) -> Judged<1> {
        let log_ratio = sequence.log_ratio();
        let (sign, weight) = match is_desirable {
            true => (1.0, self.desirable_weight),
            false => (-1.0, self.undesirable_weight),
        };
        let x = sign * self.beta * (log_ratio - step.kl);
        Judged {
            loss: weight * sigmoid(-x),
            slopes: [Slope {
                answer: -weight * sign * self.beta * sigmoid(x) * sigmoid(-x),
                prompt: 0.0,
            }],
            rewards: [self.beta * log_ratio],
        }
    }
}

/// The position whose completion a position's prompt has in the KL estimate, within a block of positions.
pub fn mismatched(position: u64, block: u64, completions: KlCompletions) -> u64 {
    let place = position % block;
    let other = match completions {
        KlCompletions::Previous => place + block - 1,
        KlCompletions::Next => place + 1,
    };
    position - place + other % block
}

/// The KL estimate of a batch, nats: the mean log-ratio of its mismatched sequences (prompts with the answers of other rows),
/// at least 0. The mean is one over all of them, however micro-batches and ranks share them.
pub fn mean_kl(log_ratios: f64, sequences: u64) -> f64 {
    (log_ratios / sequences.max(1) as f64).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{STEP, sequence, slopes_agree};
    use super::*;

    const KTO: Kto = Kto {
        beta: 0.1,
        desirable_weight: 1.0,
        undesirable_weight: 1.5,
    };

    #[test]
    fn answers_are_judged_against_the_kl() {
        let at_kl = sequence(-9.7, 4, 0.0, -10.0);
        assert!((KTO.judge(at_kl, true, STEP).loss - 0.5).abs() < 1e-12);
        assert!((KTO.judge(at_kl, false, STEP).loss - 0.75).abs() < 1e-12);
        let better = sequence(-5.0, 4, 0.0, -10.0);
        let expected = 1.0 - 1.0 / (1.0 + (-0.47f64).exp());
        assert!((KTO.judge(better, true, STEP).loss - expected).abs() < 1e-12);
        assert!(KTO.judge(better, false, STEP).loss > 0.75);
    }

    /// PKU-Alignment/align-anything #215: means of 2, 8, 4 and 6 over micro-batches of equal size.
    #[test]
    fn the_kl_is_a_mean_over_the_whole_batch() {
        let sums = [2.0, 8.0, 4.0, 6.0].map(|mean| 2.0 * mean);
        assert_eq!(mean_kl(sums.into_iter().sum(), 8), 5.0);
        assert_eq!(mean_kl(-1.0, 1), 0.0);
        assert_eq!(mean_kl(0.0, 0), 0.0);
    }

    #[test]
    fn completions_move_on_by_one_within_a_block() {
        use KlCompletions::{Next, Previous};
        let of = |block, way| (8..16).map(move |position| mismatched(position, block, way));
        assert!(of(4, Previous).eq([11, 8, 9, 10, 15, 12, 13, 14]));
        assert!(of(8, Previous).eq([15, 8, 9, 10, 11, 12, 13, 14]));
        assert!(of(4, Next).eq([9, 10, 11, 8, 13, 14, 15, 12]));
        // A single row has no pair.
        assert!(of(1, Previous).eq(8..16));
        assert!(of(1, Next).eq(8..16));
    }

    #[test]
    fn slopes_are_the_derivatives() {
        for is_desirable in [true, false] {
            slopes_agree([sequence(-9.0, 4, -2.0, -10.0)], |[sequence]| {
                KTO.judge(sequence, is_desirable, STEP)
            });
        }
    }
}
