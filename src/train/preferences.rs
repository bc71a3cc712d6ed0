//! The objective of a run over preferences: from the cross-entropies of a micro-batch's tokens to its loss and their
//! weights, and the sums that people watch.

use serde::{Deserialize, Serialize};

use super::bits;
use crate::data::Collated;
use crate::engine::IGNORE;
use crate::objective::{Judged, Likelihood, Orpo, Pair, Said, Sequence, Slope, Step};
use crate::recipe::Spec;
use crate::recipe::schema::spec::{Objective, Preference};
use crate::telemetry::PreferenceRecord;

/// A loss over pairs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    Pair(Pair),
    Orpo(Orpo),
}

impl Loss {
    /// The loss of a recipe; `None` for language modelling and SFT, whose tokens have their weights before the forward pass.
    pub fn of(spec: &Spec) -> Option<Loss> {
        let Preference {
            loss,
            beta,
            label_smoothing,
            reference_free,
            by_token,
            target_margin,
            likelihood_weight,
        } = spec.preference.clone();
        let likelihood = |default: f64, with_prompt| Likelihood {
            weight: likelihood_weight.unwrap_or(default),
            with_prompt,
        };
        let pair = Pair {
            loss,
            beta: beta.unwrap_or(0.1),
            label_smoothing,
            has_reference: !reference_free,
            by_token: by_token.unwrap_or(false),
            target_margin: 0.0,
            likelihood: likelihood(0.0, false),
        };
        match spec.objective {
            Objective::Dpo => Some(Loss::Pair(pair)),
            Objective::Simpo => Some(Loss::Pair(Pair {
                beta: beta.unwrap_or(2.0),
                has_reference: false,
                by_token: by_token.unwrap_or(true),
                target_margin: target_margin.unwrap_or(0.25),
                ..pair
            })),
            Objective::Orpo => Some(Loss::Orpo(Orpo {
                weight: beta.unwrap_or(0.1),
                likelihood: likelihood(1.0, true),
            })),
            _ => None,
        }
    }

    /// Whether the loss compares with a reference model.
    pub fn has_reference(&self) -> bool {
        matches!(self, Loss::Pair(pair) if pair.has_reference)
    }

    fn likelihood(&self) -> Likelihood {
        match self {
            Loss::Pair(pair) => pair.likelihood,
            Loss::Orpo(orpo) => orpo.likelihood,
        }
    }

    /// Whether the chosen rows' prompts have targets.
    fn has_prompts(&self) -> bool {
        self.has_likelihood() && self.likelihood().with_prompt
    }

    /// The targets of a micro-batch: those of the completions, and of the prompts that the likelihood covers.
    pub fn targets(&self, collated: &Collated) -> Vec<u32> {
        let mut targets = collated.targets.clone();
        if self.has_prompts() {
            for row in (0..collated.batch).step_by(2) {
                let (tokens, _) = collated.row(row);
                let targets = &mut targets[row * collated.seq_len..];
                for (target, &next) in targets.iter_mut().zip(&tokens[1..]) {
                    if *target == IGNORE {
                        *target = next;
                    }
                }
            }
        }
        targets
    }

    /// Whether the chosen completions' likelihood is part of the loss.
    pub fn has_likelihood(&self) -> bool {
        self.likelihood().weight != 0.0
    }

    /// Tokens that the likelihood covers in a micro-batch.
    pub fn likelihood_tokens(&self, targets: &[u32], seq_len: usize) -> u64 {
        let chosen = targets.chunks(seq_len).step_by(2).flatten();
        chosen.filter(|&&target| target != IGNORE).count() as u64
    }

    /// What an evaluation adds up of a micro-batch; the arguments are those of [`judged`].
    pub fn evaluated(
        &self,
        collated: &Collated,
        targets: &[u32],
        losses: &[f64],
        references: &[f64],
    ) -> EvaluationSums {
        // The likelihood's mean has another divisor, which all micro-batches decide.
        let step = Step {
            samples_per_token: 0.0,
            kl: 0.0,
        };
        let judged = judged(self, collated, losses, references, step);
        let chosen = losses.chunks(collated.seq_len).step_by(2).flatten();
        EvaluationSums {
            loss: judged.loss,
            count: judged.sums.pairs,
            likelihood: self.likelihood().weight * chosen.sum::<f64>(),
            covered: self.likelihood_tokens(targets, collated.seq_len),
            tokens: targets.iter().filter(|&&target| target != IGNORE).count() as u64,
        }
    }

    fn judge(&self, sequences: [Sequence; 2], step: Step) -> Judged<2> {
        match self {
            Loss::Pair(pair) => pair.judge(sequences, step),
            Loss::Orpo(orpo) => orpo.judge(sequences, step),
        }
    }
}

/// Sums of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationSums {
    /// Of the cross-entropies of tokens, or of the losses of pairs without the likelihood.
    #[serde(with = "bits")]
    loss: f64,
    /// Of these tokens or pairs.
    count: u64,
    /// Weighted negative log-likelihoods of the tokens that it covers.
    #[serde(with = "bits")]
    likelihood: f64,
    covered: u64,
    /// Target tokens.
    pub tokens: u64,
}

impl EvaluationSums {
    pub fn of_tokens(loss: f64, tokens: u64) -> EvaluationSums {
        EvaluationSums {
            loss,
            count: tokens,
            tokens,
            ..EvaluationSums::default()
        }
    }

    pub fn merge(&mut self, other: &EvaluationSums) {
        self.loss += other.loss;
        self.count += other.count;
        self.likelihood += other.likelihood;
        self.covered += other.covered;
        self.tokens += other.tokens;
    }

    /// The mean loss.
    pub fn mean(&self) -> f64 {
        let mean = |sum: f64, count: u64| sum / count.max(1) as f64;
        mean(self.loss, self.count) + mean(self.likelihood, self.covered)
    }
}

/// Sums over pairs, as TRL's metrics of the same names are means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PairSums {
    pub pairs: u64,
    /// β · log-ratio of the chosen and of the rejected completions.
    #[serde(with = "bits")]
    pub chosen: f64,
    #[serde(with = "bits")]
    pub rejected: f64,
    /// Pairs whose chosen completion has the larger reward.
    pub right: u64,
    /// Log-probabilities of the completions, nats.
    #[serde(with = "bits")]
    pub chosen_logps: f64,
    #[serde(with = "bits")]
    pub rejected_logps: f64,
}

impl PairSums {
    /// The means; `None` without pairs.
    pub fn record(&self) -> Option<PreferenceRecord> {
        let mean = |sum: f64| sum / self.pairs as f64;
        (self.pairs > 0).then(|| PreferenceRecord {
            reward_chosen: mean(self.chosen),
            reward_rejected: mean(self.rejected),
            accuracy: mean(self.right as f64),
            logps_chosen: mean(self.chosen_logps),
            logps_rejected: mean(self.rejected_logps),
        })
    }

    pub fn merge(&mut self, other: &PairSums) {
        let PairSums {
            pairs,
            chosen,
            rejected,
            right,
            chosen_logps,
            rejected_logps,
        } = other;
        self.pairs += pairs;
        self.chosen += chosen;
        self.rejected += rejected;
        self.right += right;
        self.chosen_logps += chosen_logps;
        self.rejected_logps += rejected_logps;
    }
}

/// A micro-batch as its objective judges it.
#[derive(Debug, Default, PartialEq)]
pub struct JudgedBatch {
    /// Sum of the losses of its samples.
    pub loss: f64,
    /// The derivative of that sum by the cross-entropy of each token.
    pub weights: Vec<f32>,
    pub sums: PairSums,
}

/// Judges a micro-batch of pairs. `losses`: the cross-entropy of each token, 0 without a target, `[batch, seq_len]`;
/// `references`: the reference model's sums over the rows' completions, empty without one.
pub fn judged(
    loss: &Loss,
    collated: &Collated,
    losses: &[f64],
    references: &[f64],
    step: Step,
) -> JudgedBatch {
    let seq_len = collated.seq_len;
    let is_answer = |cell: usize| collated.targets[cell] != IGNORE;
    let said = |row: usize| {
        let mut said = Said::default();
        let cells = row * seq_len..(row + 1) * seq_len;
        for (cell, loss) in cells.clone().zip(&losses[cells]) {
            if is_answer(cell) {
                said.answer -= loss;
                said.answer_tokens += 1;
            } else {
                said.prompt -= loss;
            }
        }
        said
    };
    let mut batch = JudgedBatch {
        weights: vec![0.0; losses.len()],
        ..JudgedBatch::default()
    };
    for chosen in (0..collated.batch).step_by(2) {
        let rows = [chosen, chosen + 1];
        let sequences = rows.map(|row| Sequence {
            said: said(row),
            reference: references.get(row).copied().unwrap_or(0.0),
        });
        let Judged {
            loss,
            slopes,
            rewards: [of_chosen, of_rejected],
        } = loss.judge(sequences, step);
        batch.loss += loss;
        for (row, Slope { answer, prompt }) in rows.into_iter().zip(slopes) {
            let cells = row * seq_len..(row + 1) * seq_len;
            for cell in cells {
                let slope = if is_answer(cell) { answer } else { prompt };
                // The cross-entropy is the negative log-probability.
                batch.weights[cell] = -slope as f32;
            }
        }
        batch.sums.merge(&PairSums {
            pairs: 1,
            chosen: of_chosen,
            rejected: of_rejected,
            right: u64::from(of_chosen > of_rejected),
            chosen_logps: sequences[0].said.answer,
            rejected_logps: sequences[1].said.answer,
        });
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::PairLoss;

    /// Two pairs of rows of four columns; the first row's prompt has two tokens.
    fn collated() -> Collated {
        let ignore = IGNORE;
        Collated::of_rows(&[
            (&[1, 2, 3, 4], &[ignore, 3, 4, 5]),
            (&[1, 2, 6], &[ignore, 6, 7]),
            (&[8, 9], &[9, 5]),
            (&[8, 4, 4], &[4, 4, 5]),
        ])
    }

    fn spec(objective: Objective, preference: Preference) -> Spec {
        Spec {
            objective,
            preference,
            ..Spec::default()
        }
    }

    #[test]
    fn the_weights_are_the_derivatives_of_the_loss_by_each_token() {
        let collated = collated();
        let orpo = Loss::of(&spec(Objective::Orpo, Preference::default())).unwrap();
        let dpo = Preference {
            loss: PairLoss::Ipo,
            by_token: Some(true),
            likelihood_weight: Some(0.3),
            ..Preference::default()
        };
        let dpo = Loss::of(&spec(Objective::Dpo, dpo)).unwrap();
        let step = Step {
            samples_per_token: 0.2,
            kl: 0.0,
        };
        for loss in [orpo, dpo] {
            let targets = loss.targets(&collated);
            let value = |cell: usize| 0.3 + 0.1 * (cell as f64 * 1.7).sin();
            let losses: Vec<f64> = (0..16)
                .map(|cell| {
                    if targets[cell] == IGNORE {
                        0.0
                    } else {
                        value(cell)
                    }
                })
                .collect();
            let references = [-1.0, -0.8, -0.5, -1.2];
            let of = |losses: &[f64]| judged(&loss, &collated, losses, &references, step);
            let found = of(&losses);
            assert_eq!(found.sums.pairs, 2);
            for cell in (0..16).filter(|&cell| targets[cell] != IGNORE) {
                let moved = |by: f64| {
                    let mut moved = losses.clone();
                    moved[cell] += by;
                    of(&moved).loss
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let apart = (f64::from(found.weights[cell]) - difference).abs();
                assert!(apart < 1e-6, "{cell}: {} {difference}", found.weights[cell]);
            }
        }
    }

    #[test]
    fn an_evaluation_has_the_loss_of_a_step_over_the_same_pairs() {
        let collated = collated();
        let orpo = Loss::of(&spec(Objective::Orpo, Preference::default())).unwrap();
        let targets = orpo.targets(&collated);
        let losses: Vec<f64> = (targets.iter())
            .map(|&target| if target == IGNORE { 0.0 } else { 0.4 })
            .collect();
        let covered = orpo.likelihood_tokens(&targets, collated.seq_len);
        // The prompt of the first chosen row, and all of both.
        assert_eq!(covered, 4 + 2);
        let step = Step {
            samples_per_token: 2.0 / covered as f64,
            kl: 0.0,
        };
        let expected = judged(&orpo, &collated, &losses, &[], step).loss / 2.0;
        let found = orpo.evaluated(&collated, &targets, &losses, &[]);
        assert!((found.mean() - expected).abs() < 1e-12);
        assert_eq!(found.tokens, 4 + 2 + 2 + 3);
    }
}
