//! Losses of the margin between a chosen and a rejected answer: DPO, CPO and SimPO.
//!
//! δ = s(chosen) − s(rejected) − γ/β, where s is a sum of log-probabilities, or a mean over the answer's tokens, relative to
//! the reference model or not.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Judged, Likelihood, Sequence, Slope, Step, log_sigmoid, sigmoid};

/// The loss of a margin δ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PairLoss {
    /// −(1 − ε) log σ(βδ) − ε log σ(−βδ): Rafailov et al., 2023 (eq. 7); with a label smoothing ε cDPO (Mitchell, 2023).
    #[default]
    Sigmoid,
    /// (−(1 − ε) log σ(βδ) + ε log σ(−βδ)) / (1 − 2ε): Chowdhury et al., 2024 (rDPO).
    Robust,
    /// max(0, 1 − βδ): Zhao et al., 2023, normalised (TRL).
    Hinge,
    /// (δ − 1/(2β))²: Azar et al., 2023 (eq. 17).
    Ipo,
}

/// A loss over pairs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    pub loss: PairLoss,
    pub beta: f64,
    /// ε, below 0.5.
    pub label_smoothing: f64,
    /// The score is relative to the reference model.
    pub has_reference: bool,
    /// The score is a mean over the answer's own tokens.
    pub by_token: bool,
    /// γ/β: the margin that SimPO wants (Meng et al., 2024, eq. 6).
    pub target_margin: f64,
    pub likelihood: Likelihood,
}

impl Pair {
    /// Judges a chosen and a rejected sequence.
    pub fn judge(&self, sequences: [Sequence; 2], step: Step) -> Judged<2> {
        let sums = sequences.map(|sequence| match self.has_reference {
            true => sequence.log_ratio(),
            false => sequence.said.answer,
        });
        let counts = sequences.map(|sequence| match self.by_token {
            true => sequence.said.tokens(),
            false => 1.0,
        });
        let margin = sums[0] / counts[0] - sums[1] / counts[1] - self.target_margin;
        let (loss, slope) = self.of_margin(margin);
        let (likelihood, of_likelihood) = self.likelihood.of(sequences[0].said, step);
        Judged {
            loss: loss + likelihood,
            slopes: [
                Slope {
                    answer: slope / counts[0] + of_likelihood.answer,
                    prompt: of_likelihood.prompt,
                },
                Slope {
                    answer: -slope / counts[1],
                    prompt: 0.0,
                },
            ],
            // TRL's rewards are those of sums where there is a reference model.
            rewards: match self.has_reference {
                true => sums.map(|sum| self.beta * sum),
                false => [0, 1].map(|i| self.beta * sums[i] / counts[i]),
            },
        }
    }

    /// The loss of a margin and its derivative.
    fn of_margin(&self, margin: f64) -> (f64, f64) {
        let (beta, smoothing) = (self.beta, self.label_smoothing);
        let x = beta * margin;
        let kept = (1.0 - smoothing) * log_sigmoid(x);
        let flipped = smoothing * log_sigmoid(-x);
        let (by_kept, by_flipped) = (
            (1.0 - smoothing) * beta * sigmoid(-x),
            -smoothing * beta * sigmoid(x),
        );
        match self.loss {
            PairLoss::Sigmoid => (-kept - flipped, -by_kept - by_flipped),
            PairLoss::Robust => {
                let scale = 1.0 - 2.0 * smoothing;
                ((flipped - kept) / scale, (by_flipped - by_kept) / scale)
            }
            PairLoss::Hinge if x < 1.0 => (1.0 - x, -beta),
            PairLoss::Hinge => (0.0, 0.0),
            PairLoss::Ipo => {
                let from_target = margin - 1.0 / (2.0 * beta);
                (from_target.powi(2), 2.0 * from_target)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{STEP, sequence, slopes_agree};
    use super::*;

    const DPO: Pair = Pair {
        loss: PairLoss::Sigmoid,
        beta: 0.1,
        label_smoothing: 0.0,
        has_reference: true,
        by_token: false,
        target_margin: 0.0,
        likelihood: Likelihood {
            weight: 0.0,
            with_prompt: false,
            by_completion: false,
        },
    };

    /// modelscope/ms-swift #10167.
    #[test]
    fn a_margin_of_6_at_a_beta_of_a_tenth() {
        for (loss, value, slope) in [
            (PairLoss::Sigmoid, 0.437488, -0.035434),
            (PairLoss::Hinge, 0.4, -0.1),
            (PairLoss::Ipo, 1.0, 2.0),
        ] {
            let found = Pair { loss, ..DPO }.of_margin(6.0);
            assert!((found.0 - value).abs() < 1e-6, "{loss:?}: {found:?}");
            assert!((found.1 - slope).abs() < 1e-6, "{loss:?}: {found:?}");
        }
    }

    #[test]
    fn the_start_weights_are_their_own_reference() {
        let chosen = sequence(-12.0, 5, 0.0, -12.0);
        let judged = DPO.judge([chosen, sequence(-30.0, 9, 0.0, -30.0)], STEP);
        assert_eq!(judged.rewards, [0.0, 0.0]);
        assert!((judged.loss - std::f64::consts::LN_2).abs() < 1e-15);
    }

    /// modelscope/ms-swift #9925: each side has its own number of tokens.
    #[test]
    fn ipo_by_token_divides_each_side_by_its_own_tokens() {
        let ipo = Pair {
            loss: PairLoss::Ipo,
            by_token: true,
            ..DPO
        };
        let pair = [
            sequence(-10.0, 5, 0.0, -15.0),
            sequence(-30.0, 10, 0.0, -20.0),
        ];
        let found = ipo.judge(pair, STEP).loss;
        assert!(
            (found - (1.0f64 + 1.0 - 5.0).powi(2)).abs() < 1e-12,
            "{found}"
        );
    }

    #[test]
    fn slopes_are_the_derivatives() {
        let pair = [
            sequence(-12.5, 5, -7.0, -13.0),
            sequence(-30.0, 9, -7.5, -28.0),
        ];
        let likelihood = Likelihood {
            weight: 0.7,
            with_prompt: true,
            by_completion: false,
        };
        for loss in [
            PairLoss::Sigmoid,
            PairLoss::Robust,
            PairLoss::Hinge,
            PairLoss::Ipo,
        ] {
            for (has_reference, by_token) in [(true, false), (true, true), (false, true)] {
                let objective = Pair {
                    loss,
                    beta: 0.3,
                    label_smoothing: 0.1,
                    has_reference,
                    by_token,
                    target_margin: 0.5,
                    likelihood,
                };
                slopes_agree(pair, |pair| objective.judge(pair, STEP));
            }
        }
    }
}
