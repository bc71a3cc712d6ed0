//! Objectives over preferences: from what a model says of sequences to a loss, and to its derivative by each sum of
//! log-probabilities. The engines do the rest. No file here knows engines, files or processes.
//!
//! Language modelling and SFT are no objectives in this sense: the weight of each token is known before the forward pass.

mod kto;
mod odds;
mod pair;

use serde::{Deserialize, Serialize};

pub use kto::{Kl, KlCompletions, Kto, mean_kl, mismatched};
pub use odds::Orpo;
pub use pair::{Pair, PairLoss};

/// What a model says of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Said {
    /// Sum of the log-probabilities of the answer's tokens, nats.
    pub answer: f64,
    /// Number of these tokens, the end-of-sequence token included.
    pub answer_tokens: u64,
    /// Sum of the log-probabilities of the prompt's tokens, nats; 0 where no loss covers them.
    pub prompt: f64,
}

impl Said {
    /// The mean log-probability of the answer's tokens, nats.
    fn mean(self) -> f64 {
        self.answer / self.tokens()
    }

    fn tokens(self) -> f64 {
        self.answer_tokens.max(1) as f64
    }
}

/// The derivative of a loss by the sums of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Slope {
    pub answer: f64,
    pub prompt: f64,
}

/// What the model said of a sequence, and what the reference model says of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sequence {
    pub said: Said,
    /// The reference model's sum over the answer's tokens, nats; 0 for losses without a reference.
    pub reference: f64,
}

impl Sequence {
    /// log π(y|x) − log π_ref(y|x), nats.
    fn log_ratio(self) -> f64 {
        self.said.answer - self.reference
    }
}

/// The loss of one sample. The loss of a step is the mean over the samples of its global batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Judged<const N: usize> {
    pub loss: f64,
    /// By each sequence.
    pub slopes: [Slope; N],
    /// β · log-ratio of each sequence, or β · its score without a reference model, as TRL reports it.
    pub rewards: [f64; N],
}

/// What samples of a step have in common.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Step {
    /// Samples of the global batch ÷ tokens that the negative log-likelihood covers in it, so that its mean is one over the
    /// tokens of the global batch.
    pub samples_per_token: f64,
    /// The step's KL estimate, nats; KTO only.
    pub kl: f64,
}

/// The weight α of the chosen sequence's negative log-likelihood, a mean over tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Likelihood {
    pub weight: f64,
    /// It covers the prompt too, as in ORPO.
    pub with_prompt: bool,
    /// The mean is over the tokens of each completion, and not over those of the global batch.
    pub by_completion: bool,
}

impl Likelihood {
    /// The loss and its derivative by the sums of a chosen sequence.
    fn of(self, chosen: Said, step: Step) -> (f64, Slope) {
        let per_token = if self.by_completion {
            1.0 / chosen.tokens()
        } else {
            step.samples_per_token
        };
        let factor = self.weight * per_token;
        let prompt = if self.with_prompt { chosen.prompt } else { 0.0 };
        let slope = Slope {
            answer: -factor,
            prompt: if self.with_prompt { -factor } else { 0.0 },
        };
        (-factor * (chosen.answer + prompt), slope)
    }
}

/// log σ(x), without overflow.
fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    log_sigmoid(x).exp()
}

#[cfg(test)]
mod testing {
    use super::*;

    pub const STEP: Step = Step {
        samples_per_token: 0.25,
        kl: 0.3,
    };

    pub fn sequence(answer: f64, answer_tokens: u64, prompt: f64, reference: f64) -> Sequence {
        Sequence {
            said: Said {
                answer,
                answer_tokens,
                prompt,
            },
            reference,
        }
    }

    /// Compares the slopes with central differences of the loss.
    #[track_caller]
    pub fn slopes_agree<const N: usize>(
        sequences: [Sequence; N],
        judge: impl Fn([Sequence; N]) -> Judged<N>,
    ) {
        const BY: f64 = 1e-5;
        let slopes = judge(sequences).slopes;
        for (i, slope) in slopes.into_iter().enumerate() {
            let moved = |answer, prompt| {
                let mut moved = sequences;
                moved[i].said.answer += answer;
                moved[i].said.prompt += prompt;
                judge(moved).loss
            };
            let by_answer = (moved(BY, 0.0) - moved(-BY, 0.0)) / (2.0 * BY);
            let by_prompt = (moved(0.0, BY) - moved(0.0, -BY)) / (2.0 * BY);
            for (name, slope, difference) in [
                ("answer", slope.answer, by_answer),
                ("prompt", slope.prompt, by_prompt),
            ] {
                let apart = (slope - difference).abs();
                assert!(
                    apart < 1e-7 + 1e-6 * difference.abs(),
                    "sequence {i} by {name}: {slope}, not {difference}"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_sigmoid_is_finite_and_exact() {
        for (x, expected) in [
            (0.0, -std::f64::consts::LN_2),
            (2.0, -(1.0 + (-2f64).exp()).ln()),
            (-800.0, -800.0),
            (800.0, 0.0),
        ] {
            assert!((log_sigmoid(x) - expected).abs() < 1e-12, "{x}");
        }
        assert!((sigmoid(1.5) + sigmoid(-1.5) - 1.0).abs() < 1e-15);
    }
}
