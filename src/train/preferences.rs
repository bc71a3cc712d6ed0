//! The objective of a run over preferences: from the cross-entropies of a micro-batch's tokens to its loss and their
//! weights, and the sums that people watch.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::bits;
use super::sums::Merge;
use crate::data::Collated;
use crate::engine::IGNORE;
use crate::objective::{Judged, Kl, Kto, Likelihood, Orpo, Pair, Said, Sequence, Slope, Step};
use crate::recipe::Spec;
use crate::recipe::schema::spec::{Objective, Preference};
use crate::telemetry::PreferenceRecord;

/// A loss over preferences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    Pair(Pair),
    Orpo(Orpo),
    Kto(Kto, Kl),
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
            likelihood_by_completion: by_completion,
            desirable_weight,
            undesirable_weight,
            kl,
            kl_completions: _,
        } = spec.preference;
        let likelihood = |default: f64, with_prompt| Likelihood {
            weight: likelihood_weight.unwrap_or(default),
            with_prompt: with_prompt && !by_completion,
            by_completion,
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
            Objective::Cpo => Some(Loss::Pair(Pair {
                has_reference: false,
                likelihood: likelihood(1.0, false),
                ..pair
            })),
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
            Objective::Kto => Some(Loss::Kto(
                Kto {
                    beta: beta.unwrap_or(0.1),
                    desirable_weight: desirable_weight.unwrap_or(1.0),
                    undesirable_weight: undesirable_weight.unwrap_or(1.0),
                },
                kl,
            )),
            _ => None,
        }
    }

    /// Whether the loss compares with a reference model.
    pub fn has_reference(&self) -> bool {
        match self {
            Loss::Pair(pair) => pair.has_reference,
            Loss::Orpo(_) => false,
            Loss::Kto(..) => true,
        }
    }

    /// The samples that its KL estimate covers, if it has one.
    pub fn kl(&self) -> Option<Kl> {
        match self {
            Loss::Pair(_) | Loss::Orpo(_) => None,
            Loss::Kto(_, kl) => Some(*kl),
        }
    }

    fn likelihood(&self) -> Likelihood {
        match self {
            Loss::Pair(pair) => pair.likelihood,
            Loss::Orpo(orpo) => orpo.likelihood,
            Loss::Kto(..) => Likelihood::default(),
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

    /// Whether a likelihood is part of the loss whose mean is over the tokens of the global batch.
    pub fn has_likelihood(&self) -> bool {
        let likelihood = self.likelihood();
        likelihood.weight != 0.0 && !likelihood.by_completion
    }

    /// Tokens that the likelihood covers in a micro-batch.
    pub fn likelihood_tokens(&self, targets: &[u32], seq_len: usize) -> u64 {
        let chosen = targets.chunks(seq_len).step_by(2).flatten();
        chosen.filter(|&&target| target != IGNORE).count() as u64
    }

    /// What an evaluation adds up of a micro-batch; the arguments are those of [`judged`]. The likelihood's mean has a
    /// divisor that all micro-batches decide, and that of `step` must be 0.
    pub fn evaluated(
        &self,
        collated: &Collated,
        targets: &[u32],
        losses: &[f64],
        references: &[f64],
        step: Step,
    ) -> EvaluationSums {
        let judged = judged(self, collated, losses, references, step);
        let mut sums = EvaluationSums {
            loss: judged.loss,
            count: collated.samples as u64,
            tokens: targets.iter().filter(|&&target| target != IGNORE).count() as u64,
            preferences: judged.sums,
            ..EvaluationSums::default()
        };
        if self.has_likelihood() {
            let chosen = losses.chunks(collated.seq_len).step_by(2).flatten();
            sums.likelihood = self.likelihood().weight * chosen.sum::<f64>();
            sums.covered = self.likelihood_tokens(targets, collated.seq_len);
        }
        sums
    }
}

/// Sums of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationSums {
    /// Of the cross-entropies of tokens, or of the losses of samples without the likelihood.
    #[serde(with = "bits")]
    loss: f64,
    /// The tokens or samples of which the mean is taken.
    count: u64,
    /// Weighted negative log-likelihoods of the tokens that it covers.
    #[serde(with = "bits")]
    likelihood: f64,
    covered: u64,
    /// Target tokens.
    pub tokens: u64,
    pub preferences: PreferenceSums,
}

impl EvaluationSums {
    /// Of a sum of cross-entropies, whose mean is over `count` tokens or samples.
    pub fn of_tokens(loss: f64, tokens: u64, count: u64) -> EvaluationSums {
        EvaluationSums {
            loss,
            count,
            tokens,
            ..EvaluationSums::default()
        }
    }

    pub fn mean(&self) -> f64 {
        let mean = |sum: f64, count: u64| sum / count.max(1) as f64;
        mean(self.loss, self.count) + mean(self.likelihood, self.covered)
    }
}

impl Merge for EvaluationSums {
    fn merge(&mut self, other: &EvaluationSums) {
        self.loss += other.loss;
        self.count += other.count;
        self.likelihood += other.likelihood;
        self.covered += other.covered;
        self.tokens += other.tokens;
        self.preferences.merge(&other.preferences);
    }
}

/// Sums over completions that are chosen, or over those that are not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionSums {
    pub count: u64,
    /// β · log-ratios.
    #[serde(with = "bits")]
    pub rewards: f64,
    /// Log-probabilities, nats.
    #[serde(with = "bits")]
    pub logps: f64,
}

impl CompletionSums {
    fn merge(&mut self, other: &CompletionSums) {
        self.count += other.count;
        self.rewards += other.rewards;
        self.logps += other.logps;
    }
}

/// Sums over preferences, as TRL's metrics of the same names are means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PreferenceSums {
    pub chosen: CompletionSums,
    pub rejected: CompletionSums,
    /// Pairs, and those whose chosen completion has the larger reward.
    pub pairs: u64,
    pub right: u64,
    /// Of the KL estimate of each sample's step, for a loss with one.
    #[serde(with = "bits")]
    pub kl: f64,
}

impl PreferenceSums {
    /// The means; `None` without completions.
    pub fn record(&self, loss: Option<&Loss>) -> Option<PreferenceRecord> {
        let mean = |sum: f64, count: u64| (count > 0).then(|| sum / count as f64);
        let (chosen, rejected) = (self.chosen, self.rejected);
        let count = chosen.count + rejected.count;
        let kl = loss.is_some_and(|loss| loss.kl().is_some());
        (count > 0).then(|| PreferenceRecord {
            reward_chosen: mean(chosen.rewards, chosen.count),
            reward_rejected: mean(rejected.rewards, rejected.count),
            accuracy: mean(self.right as f64, self.pairs),
            kl: mean(self.kl, count).filter(|_| kl),
            logps_chosen: mean(chosen.logps, chosen.count),
            logps_rejected: mean(rejected.logps, rejected.count),
        })
    }

    pub fn merge(&mut self, other: &PreferenceSums) {
        self.chosen.merge(&other.chosen);
        self.rejected.merge(&other.rejected);
        self.pairs += other.pairs;
        self.right += other.right;
        self.kl += other.kl;
    }
}

/// A micro-batch as its objective judges it.
#[derive(Debug, Default, PartialEq)]
pub struct JudgedBatch {
    /// Sum of the losses of its samples.
    pub loss: f64,
    /// The derivative of that sum by the cross-entropy of each token.
    pub weights: Vec<f32>,
    pub sums: PreferenceSums,
}

impl JudgedBatch {
    /// Adds a sample. Its rows begin with the row `first`, and each holds a chosen completion or another one.
    fn add<const N: usize>(
        &mut self,
        heard: &Heard<'_>,
        first: usize,
        are_chosen: [bool; N],
        judge: impl Fn([Sequence; N]) -> Judged<N>,
    ) {
        let sequences: [Sequence; N] = std::array::from_fn(|i| heard.sequence(first + i));
        let judged = judge(sequences);
        self.loss += judged.loss;
        for (i, is_chosen) in are_chosen.into_iter().enumerate() {
            let Slope { answer, prompt } = judged.slopes[i];
            for cell in heard.cells(first + i) {
                let slope = if heard.is_answer(cell) {
                    answer
                } else {
                    prompt
                };
                // The cross-entropy is the negative log-probability.
                self.weights[cell] = -slope as f32;
            }
            let sums = match is_chosen {
                true => &mut self.sums.chosen,
                false => &mut self.sums.rejected,
            };
            sums.count += 1;
            sums.rewards += judged.rewards[i];
            sums.logps += sequences[i].said.answer;
        }
        if let [of_chosen, of_rejected] = judged.rewards[..] {
            self.sums.pairs += 1;
            self.sums.right += u64::from(of_chosen > of_rejected);
        }
    }
}

/// What the model and its reference say of a micro-batch.
struct Heard<'a> {
    collated: &'a Collated,
    /// The cross-entropy of each token, 0 without a target, `[batch, seq_len]`.
    losses: &'a [f64],
    /// The reference model's sums over the rows' completions, empty without one.
    references: &'a [f64],
}

impl Heard<'_> {
    fn cells(&self, row: usize) -> Range<usize> {
        let seq_len = self.collated.seq_len;
        row * seq_len..(row + 1) * seq_len
    }

    fn is_answer(&self, cell: usize) -> bool {
        self.collated.targets[cell] != IGNORE
    }

    fn sequence(&self, row: usize) -> Sequence {
        let mut said = Said::default();
        for cell in self.cells(row) {
            if self.is_answer(cell) {
                said.answer -= self.losses[cell];
                said.answer_tokens += 1;
            } else {
                said.prompt -= self.losses[cell];
            }
        }
        Sequence {
            said,
            reference: self.references.get(row).copied().unwrap_or(0.0),
        }
    }
}

/// Judges a micro-batch. `losses`: the cross-entropy of each token, 0 without a target, `[batch, seq_len]`; `references`: the
/// reference model's sums over the rows' completions, empty without one.
pub fn judged(
    loss: &Loss,
    collated: &Collated,
    losses: &[f64],
    references: &[f64],
    step: Step,
) -> JudgedBatch {
    const PAIR: [bool; 2] = [true, false];
    let heard = Heard {
        collated,
        losses,
        references,
    };
    let mut batch = JudgedBatch {
        weights: vec![0.0; losses.len()],
        ..JudgedBatch::default()
    };
    for sample in 0..collated.samples {
        match loss {
            Loss::Pair(pair) => batch.add(&heard, 2 * sample, PAIR, |rows| pair.judge(rows, step)),
            Loss::Orpo(orpo) => batch.add(&heard, 2 * sample, PAIR, |rows| orpo.judge(rows, step)),
            Loss::Kto(kto, _) => {
                let is_desirable = collated.labels[sample];
                batch.add(&heard, sample, [is_desirable], |[row]| {
                    kto.judge(row, is_desirable, step)
                });
                batch.sums.kl += step.kl;
            }
        }
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
        let mut rows = Collated::of_rows(&[
            (&[1, 2, 3, 4], &[ignore, 3, 4, 5]),
            (&[1, 2, 6], &[ignore, 6, 7]),
            (&[8, 9], &[9, 5]),
            (&[8, 4, 4], &[4, 4, 5]),
        ]);
        rows.samples = 2;
        rows
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
    fn the_mean_of_an_evaluation_is_over_tokens_or_samples() {
        let of_micro_batches = |counts: [u64; 2]| {
            let mut sums = EvaluationSums::of_tokens(12.0, 5, counts[0]);
            sums.merge(&EvaluationSums::of_tokens(3.0, 1, counts[1]));
            (sums.mean(), sums.tokens)
        };
        assert_eq!(of_micro_batches([5, 1]), (2.5, 6));
        assert_eq!(of_micro_batches([2, 1]), (5.0, 6));
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
        let found = orpo.evaluated(&collated, &targets, &losses, &[], Step::default());
        assert!((found.mean() - expected).abs() < 1e-12);
        assert_eq!(found.tokens, 4 + 2 + 2 + 3);
    }
}
