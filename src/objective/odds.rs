//! ORPO: the odds of the chosen answer against those of the rejected one, and the likelihood of the chosen one
//! (Hong et al., 2024, eqs. 4, 6 and 7).

use super::{Judged, Likelihood, Sequence, Slope, Step, log_sigmoid, sigmoid};

/// −λ log σ(log odds(chosen) − log odds(rejected)) + the negative log-likelihood of the chosen sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Orpo {
    /// λ; TRL's `beta`.
    pub weight: f64,
    pub likelihood: Likelihood,
}

impl Orpo {
    /// Judges a chosen and a rejected sequence.
    pub fn judge(&self, sequences: [Sequence; 2], step: Step) -> Judged<2> {
        let means = sequences.map(|sequence| sequence.said.mean());
        let [chosen, rejected] = means.map(log_odds);
        let margin = chosen.0 - rejected.0;
        let slope = -self.weight * sigmoid(-margin);
        let (likelihood, of_likelihood) = self.likelihood.of(sequences[0].said, step);
        let [of_chosen, of_rejected] = sequences.map(|sequence| slope / sequence.said.tokens());
        Judged {
            loss: likelihood - self.weight * log_sigmoid(margin),
            slopes: [
                Slope {
                    answer: of_chosen * chosen.1 + of_likelihood.answer,
                    prompt: of_likelihood.prompt,
                },
                Slope {
                    answer: -of_rejected * rejected.1,
                    prompt: 0.0,
                },
            ],
            rewards: means.map(|mean| self.weight * mean),
        }
    }
}

/// log(p / (1 − p)) of a mean log-probability log p, and its derivative by log p: 1 / (1 − p). A mean that rounding has made
/// 0 counts as the largest f32 below it, so that both are finite.
fn log_odds(mean: f64) -> (f64, f64) {
    let mean = mean.min(-f64::from(f32::EPSILON));
    let complement = -mean.exp_m1();
    (mean - complement.ln(), 1.0 / complement)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{STEP, sequence, slopes_agree};
    use super::*;

    const ORPO: Orpo = Orpo {
        weight: 0.1,
        likelihood: Likelihood {
            weight: 1.0,
            with_prompt: true,
            by_completion: false,
        },
    };

    #[test]
    fn the_loss_is_that_of_the_paper() {
        let pair = [sequence(-2.0, 4, -3.0, 0.0), sequence(-6.0, 3, -3.0, 0.0)];
        let odds = |log_p: f64| log_p.exp() / (1.0 - log_p.exp());
        let ratio = odds(-0.5) / odds(-2.0);
        let expected = -0.1 * (1.0 / (1.0 + 1.0 / ratio)).ln() + 0.25 * 5.0;
        let found = ORPO.judge(pair, STEP).loss;
        assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
    }

    /// HALOs 61b9ee6, `ORPOTrainer`: both terms are means over the tokens of each completion.
    #[test]
    fn the_likelihood_of_each_completion_is_a_mean_over_its_tokens() {
        let halos = Orpo {
            weight: 0.25,
            likelihood: Likelihood {
                weight: 1.0,
                with_prompt: false,
                by_completion: true,
            },
        };
        let pair = [sequence(-2.0, 4, -3.0, 0.0), sequence(-6.0, 3, -3.0, 0.0)];
        let log_odds = |log_p: f64| log_p - (1.0 - log_p.exp()).ln();
        let margin = log_odds(-0.5) - log_odds(-2.0);
        let expected = 0.5 + 0.25 * (1.0 + (-margin).exp()).ln();
        let found = halos.judge(pair, STEP).loss;
        assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
        slopes_agree(pair, |pair| halos.judge(pair, STEP));
    }

    /// huggingface/trl #4763.
    #[test]
    fn probabilities_near_1_are_finite() {
        for answer in [0.0, -1e-9, -1e-7, -1e-5, -1e-3] {
            let pair = [sequence(answer, 4, -3.0, 0.0), sequence(-6.0, 3, 0.0, 0.0)];
            let judged = ORPO.judge(pair, STEP);
            assert!(judged.loss.is_finite(), "{judged:?}");
            let slopes = judged.slopes.map(|slope| slope.answer);
            assert!(slopes.iter().all(|slope| slope.is_finite()), "{judged:?}");
        }
    }

    #[test]
    fn slopes_are_the_derivatives() {
        for chosen in [-9.0, -0.4] {
            let pair = [
                sequence(chosen, 5, -7.0, 0.0),
                sequence(-30.0, 9, -7.5, 0.0),
            ];
            slopes_agree(pair, |pair| ORPO.judge(pair, STEP));
        }
    }
}
