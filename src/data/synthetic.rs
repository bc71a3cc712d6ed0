//! The synthetic language: a seeded Markov source of known entropy, so that the lowest possible loss of a run
//! is known in advance.
//!
//! Every one of the V words has `branching` successors with probabilities proportional to 1, 1/2, 1/3, …, in
//! an order that is specific to the word. The successors come from permutations of the vocabulary, so every
//! word is also the successor of `branching` others and no word is rare. The first permutation is one cycle
//! through all words, so every word is reachable from every other and the stationary distribution is unique.
//! A sample starts with a word drawn from that distribution. Hence every later token costs the best possible
//! model exactly the entropy rate H = −Σ π(s) Σ p(t|s) ln p(t|s) on average. The first token is context only,
//! never a target.

use crate::recipe::schema::spec::Synthetic;

use super::error::DataError;
use super::record::Fault;
use crate::util::random::Random;

/// Allowed number of words.
const VOCABULARY: std::ops::RangeInclusive<u64> = 4..=65_536;

/// A language: transition probabilities, their stationary distribution and their entropies.
#[derive(Debug, Clone)]
pub struct Language {
    vocabulary: usize,
    branching: usize,
    seed: u64,
    /// Successors of every word, `[vocabulary, branching]`.
    successors: Vec<u32>,
    /// Probabilities of the successors, `[vocabulary, branching]`.
    probabilities: Vec<f64>,
    /// Stationary probability of every word: its long-run frequency.
    pub stationary: Vec<f64>,
    /// Cumulative sums of `stationary`.
    cumulative: Vec<f64>,
    /// The entropy rate H in nats per token: the floor of the mean loss over target tokens.
    pub entropy: f64,
    /// The entropy of single words in nats: the loss of a model that ignores the context.
    pub unigram_entropy: f64,
}

impl Language {
    /// Builds the language, or returns why it is not worth learning: its entropy rate H must be at most half
    /// of ln V, and the entropy of its single words at least 1.5 H. `key` is the recipe's path of the source,
    /// for messages.
    pub fn new(settings: &Synthetic, key: &str) -> Result<Language, DataError> {
        let refused = |fault: Fault| DataError::Setting {
            key: key.to_owned(),
            problem: fault.problem,
            help: fault.help,
        };
        let weights = Language::check(settings).map_err(|(_, fault)| refused(fault))?;
        let language = Language::build(settings.vocabulary as usize, &weights, settings.seed);
        if language.unigram_entropy < 1.5 * language.entropy {
            return Err(refused(Fault::new(
                format!(
                    "the entropy of single words, {:.3}, is below 1.5 × the entropy rate {:.3}",
                    language.unigram_entropy, language.entropy
                ),
                "choose fewer successors (synthetic.branching), more words or another seed",
            )));
        }
        Ok(language)
    }

    /// The checks of [`Language::new`] that do not need the language: the ranges and the entropy rate.
    /// Returns the probabilities of every word's successors, largest first, or the fault and the setting that is its
    /// likeliest cause.
    pub(super) fn check(settings: &Synthetic) -> Result<Vec<f64>, (&'static str, Fault)> {
        let Synthetic {
            vocabulary,
            branching,
            samples,
            seed: _,
        } = *settings;
        let refuse = |key, problem: String, help: &str| Err((key, Fault::new(problem, help)));
        if !VOCABULARY.contains(&vocabulary) {
            return refuse(
                "vocabulary",
                format!("a synthetic language of {vocabulary} words"),
                "choose a vocabulary of 4 to 65536",
            );
        }
        if samples == 0 {
            return refuse(
                "samples",
                "a synthetic language of 0 samples".to_string(),
                "set synthetic.samples to at least 1",
            );
        }
        let limit = 0.5 * (vocabulary as f64).ln();
        let weights = successor_probabilities(branching.min(vocabulary));
        let entropy = entropy(&weights);
        if branching < 2 || entropy > limit {
            return refuse(
                "branching",
                format!(
                    "{branching} successors of each of {vocabulary} words make an entropy of \
                     {entropy:.3} nats per token; a language worth learning has more than 0 and at \
                     most half of ln {vocabulary}, {limit:.3}"
                ),
                "choose another synthetic.branching (at least 2) or a larger synthetic.vocabulary",
            );
        }
        Ok(weights)
    }

    fn build(vocabulary: usize, weights: &[f64], seed: u64) -> Language {
        let branching = weights.len();
        let mut random = Random::new(&[seed, vocabulary as u64, branching as u64]);
        let mut successors = vec![0u32; vocabulary * branching];
        let mut order: Vec<u32> = (0..vocabulary as u32).collect();
        random.shuffle(&mut order);
        for (i, &word) in order.iter().enumerate() {
            successors[word as usize * branching] = order[(i + 1) % vocabulary];
        }
        for column in 1..branching {
            random.shuffle(&mut order);
            separate(&mut order, &successors, column, branching, &mut random);
            for (word, &successor) in order.iter().enumerate() {
                successors[word * branching + column] = successor;
            }
        }
        let mut probabilities = Vec::with_capacity(vocabulary * branching);
        for _ in 0..vocabulary {
            let start = probabilities.len();
            probabilities.extend_from_slice(weights);
            random.shuffle(&mut probabilities[start..]);
        }
        let stationary = stationary(&successors, &probabilities, branching);
        let entropy = stationary
            .iter()
            .zip(probabilities.chunks(branching))
            .map(|(weight, row)| weight * entropy(row))
            .sum();
        let unigram_entropy = self::entropy(&stationary);
        let cumulative = stationary
            .iter()
            .scan(0.0, |sum, p| {
                *sum += p;
                Some(*sum)
            })
            .collect();
        Language {
            vocabulary,
            branching,
            seed,
            successors,
            probabilities,
            stationary,
            cumulative,
            entropy,
            unigram_entropy,
        }
    }

    /// The probability that `next` follows `word`; 0 for words outside of the language.
    pub fn probability(&self, word: u32, next: u32) -> f64 {
        self.row(word as usize)
            .find(|(successor, _)| *successor == next)
            .map_or(0.0, |(_, probability)| probability)
    }

    /// The sample with this index, `tokens` ids long: a pure function of (language, index).
    pub fn sample(&self, index: u64, tokens: usize) -> Vec<u32> {
        // The stream's own key separates samples from the language's construction.
        const SAMPLES: u64 = 0x7361_6d70_6c65;
        let mut random = Random::new(&[self.seed, SAMPLES, index]);
        let u = random.unit();
        let first = self.cumulative.partition_point(|&sum| sum <= u);
        let mut word = first.min(self.vocabulary - 1) as u32;
        let mut sample = Vec::with_capacity(tokens);
        while sample.len() < tokens {
            sample.push(word);
            let mut left = random.unit();
            for (successor, probability) in self.row(word as usize) {
                word = successor;
                left -= probability;
                if left < 0.0 {
                    break;
                }
            }
        }
        sample
    }

    /// The successors of a word with their probabilities; none of a word outside of the language.
    fn row(&self, word: usize) -> impl Iterator<Item = (u32, f64)> {
        let start = word.saturating_mul(self.branching);
        let row = start..start.saturating_add(self.branching);
        let successors = self.successors.get(row.clone()).unwrap_or_default();
        let probabilities = self.probabilities.get(row).unwrap_or_default();
        std::iter::zip(successors.iter().copied(), probabilities.iter().copied())
    }
}

/// Normalised probabilities 1, 1/2, 1/3, …
fn successor_probabilities(branching: u64) -> Vec<f64> {
    let sum: f64 = (1..=branching).map(|rank| 1.0 / rank as f64).sum();
    (1..=branching)
        .map(|rank| 1.0 / rank as f64 / sum)
        .collect()
}

/// The entropy −Σ p ln p, in nats.
fn entropy(probabilities: &[f64]) -> f64 {
    probabilities
        .iter()
        .filter(|&&p| p > 0.0)
        .fold(0.0, |sum, p| sum - p * p.ln())
}

/// Swaps entries of the permutation until no word gets a successor that it already has in the columns before
/// `column`. At most √V words conflict, so nearly every swap helps.
fn separate(
    order: &mut [u32],
    successors: &[u32],
    column: usize,
    branching: usize,
    random: &mut Random,
) {
    let has = |word: usize, successor: u32| {
        successors[word * branching..word * branching + column].contains(&successor)
    };
    for word in 0..order.len() {
        while has(word, order[word]) {
            let other = random.below(order.len() as u64) as usize;
            if !has(word, order[other]) && !has(other, order[word]) {
                order.swap(word, other);
            }
        }
    }
}

/// The stationary distribution by power iteration on ½(I + P), which has the same distribution and also
/// converges if P is periodic.
fn stationary(successors: &[u32], probabilities: &[f64], branching: usize) -> Vec<f64> {
    const ITERATIONS: usize = 100_000;
    let vocabulary = successors.len() / branching;
    let mut now = vec![1.0 / vocabulary as f64; vocabulary];
    let mut next = vec![0.0; vocabulary];
    for _ in 0..ITERATIONS {
        for (to, &from) in next.iter_mut().zip(&now) {
            *to = 0.5 * from;
        }
        for (word, &mass) in now.iter().enumerate() {
            let row = word * branching..(word + 1) * branching;
            for (&successor, &p) in successors[row.clone()].iter().zip(&probabilities[row]) {
                next[successor as usize] += 0.5 * mass * p;
            }
        }
        let sum: f64 = next.iter().sum();
        let mut change: f64 = 0.0;
        for (to, &from) in next.iter_mut().zip(&now) {
            *to /= sum;
            change += (*to - from).abs();
        }
        std::mem::swap(&mut now, &mut next);
        if change < 1e-14 {
            break;
        }
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    fn language(vocabulary: u64, branching: u64, seed: u64) -> Language {
        let settings = Synthetic {
            vocabulary,
            branching,
            samples: 1,
            seed,
        };
        Language::new(&settings, "data.train.0").unwrap()
    }

    #[test]
    fn languages_of_many_sizes_are_worth_learning() {
        for (vocabulary, branching) in [
            (4, 2),
            (16, 3),
            (64, 4),
            (64, 8),
            (256, 8),
            (512, 16),
            (4096, 32),
        ] {
            for seed in 0..3 {
                let language = language(vocabulary, branching, seed);
                let (h, unigram) = (language.entropy, language.unigram_entropy);
                assert!(h > 0.0 && h <= 0.5 * (vocabulary as f64).ln());
                assert!(unigram >= 1.5 * h);
                assert!(unigram <= (vocabulary as f64).ln() + 1e-12);
            }
        }
    }

    #[test]
    fn probabilities_add_up_and_the_stationary_distribution_is_invariant() {
        let language = language(128, 6, 3);
        let mut next = vec![0.0; 128];
        for word in 0..128u32 {
            let row: Vec<f64> = (0..128).map(|to| language.probability(word, to)).collect();
            assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            assert_eq!(row.iter().filter(|&&p| p > 0.0).count(), 6);
            for (to, p) in next.iter_mut().zip(&row) {
                *to += language.stationary[word as usize] * p;
            }
        }
        for (after, before) in next.iter().zip(&language.stationary) {
            assert!((after - before).abs() < 1e-12);
        }
        // Broad: no word is too rare to learn, and none dominates.
        let stationary = &language.stationary;
        assert!(
            stationary
                .iter()
                .all(|&p| p > 0.1 / 128.0 && p < 10.0 / 128.0)
        );
    }

    #[test]
    fn entropy_is_the_closed_form_of_the_successor_probabilities() {
        // Every row holds the same probabilities, so the weighted sum over rows equals their entropy.
        let expected = entropy(&successor_probabilities(8));
        assert!((language(256, 8, 0).entropy - expected).abs() < 1e-12);
    }

    #[test]
    fn samples_cost_the_entropy_rate() {
        let language = language(64, 6, 1);
        let (mut cost, mut pairs) = (0.0, 0u32);
        let mut counts = vec![0u32; 64 * 64];
        for index in 0..4_000 {
            let sample = language.sample(index, 65);
            for pair in sample.windows(2) {
                let p = language.probability(pair[0], pair[1]);
                assert!(p > 0.0, "{pair:?} cannot follow one another");
                cost -= p.ln();
                pairs += 1;
                counts[pair[0] as usize * 64 + pair[1] as usize] += 1;
            }
        }
        // The standard deviation of the mean is about 0.002.
        assert!((cost / f64::from(pairs) - language.entropy).abs() < 0.01);

        // The estimate of a reader who knows only the text, not the probabilities.
        let (mut conditional, mut unigram) = (0.0, 0.0);
        for (word, row) in counts.chunks(64).enumerate() {
            let total = f64::from(row.iter().sum::<u32>());
            let share = total / f64::from(pairs);
            assert!((share - language.stationary[word]).abs() < 0.2 * language.stationary[word]);
            unigram -= share * share.ln();
            let row: Vec<f64> = row.iter().map(|&n| f64::from(n) / total).collect();
            conditional += share * entropy(&row);
        }
        assert!((conditional - language.entropy).abs() < 0.01);
        assert!((unigram - language.unigram_entropy).abs() < 0.01);
    }

    #[test]
    fn samples_are_pure_functions_of_seed_and_index() {
        let one = language(256, 8, 5);
        let again = language(256, 8, 5);
        assert_eq!(one.sample(17, 33), again.sample(17, 33));
        // A longer sample has the same beginning: the length is not part of the language.
        assert_eq!(one.sample(17, 33), one.sample(17, 65)[..33]);
        assert_ne!(one.sample(17, 33), one.sample(18, 33));
    }

    #[test]
    fn seeds_give_different_languages() {
        let (one, other) = (language(256, 8, 0), language(256, 8, 1));
        assert_ne!(one.successors, other.successors);
        let sample = one.sample(0, 1000);
        let possible = sample
            .windows(2)
            .filter(|pair| other.probability(pair[0], pair[1]) > 0.0)
            .count();
        assert!(possible < 100, "{possible} of 999");
    }

    #[test]
    fn languages_not_worth_learning_are_refused() {
        let refuse = |vocabulary, branching, samples| {
            let settings = Synthetic {
                vocabulary,
                branching,
                samples,
                seed: 0,
            };
            Language::new(&settings, "data.train.0.synthetic")
                .unwrap_err()
                .to_string()
        };
        insta::assert_snapshot!(
            [
                refuse(3, 2, 1),
                refuse(1 << 40, 2, 1),
                refuse(256, 8, 0),
                refuse(256, 1, 1),
                refuse(256, 0, 1),
                refuse(256, 64, 1),
                refuse(16, u64::MAX, 1),
            ]
            .join("\n")
        );
    }
}
