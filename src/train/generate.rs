//! Texts that a model continues, token by token.

use std::cmp::Ordering;

use crate::engine::{Engine, EngineError};
use crate::util::random::Random;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The most new tokens.
    pub max_tokens: usize,
    /// Divides the logits; 0 takes the most probable token.
    pub temperature: f64,
    /// Of the random numbers.
    pub seed: u64,
}

/// Continues `prompt` until one of the tokens `ends` or the last of `max_tokens`, and passes each new token on; the text
/// ends there if the receiver returns false. Returns the new tokens, without the one that ends them.
///
/// # Errors
/// The prompt is empty, or it and the new tokens are more than the model can have.
pub fn continued(
    engine: &mut dyn Engine,
    prompt: &[u32],
    ends: &[u32],
    sampling: Sampling,
    receive: &mut dyn FnMut(&[u32]) -> bool,
) -> Result<Vec<u32>, EngineError> {
    let mut random = Random::seeded(sampling.seed);
    engine.begin_sequence(prompt.len() + sampling.max_tokens)?;
    let mut tokens = Vec::new();
    let mut logits = engine.append(prompt)?;
    while tokens.len() < sampling.max_tokens {
        let token = chosen(&logits, sampling.temperature, &mut random);
        if ends.contains(&token) {
            break;
        }
        tokens.push(token);
        if !receive(&tokens) || tokens.len() == sampling.max_tokens {
            break;
        }
        logits = engine.append(&[token])?;
    }
    Ok(tokens)
}

/// The most probable token, or one by its probability at a temperature. Of equal logits the first is taken, as in
/// transformers.
fn chosen(logits: &[f32], temperature: f64, random: &mut Random) -> u32 {
    let later_is_less = |a: &(usize, &f32), b: &(usize, &f32)| match a.1.total_cmp(b.1) {
        Ordering::Equal => b.0.cmp(&a.0),
        unequal => unequal,
    };
    let Some((most, largest)) = logits.iter().enumerate().max_by(later_is_less) else {
        return 0;
    };
    if temperature == 0.0 {
        return most as u32;
    }
    let weight = |logit: f32| (f64::from(logit - largest) / temperature).exp();
    let sum: f64 = logits.iter().map(|&logit| weight(logit)).sum();
    let mut left = random.unit() * sum;
    for (token, &logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return token as u32;
        }
    }
    // Rounding has left a remainder.
    most as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ModelConfig;
    use crate::engine::cpu::{CpuEngine, CpuOptions};

    const LOGITS: [f32; 4] = [0.5, 2.0, -1.0, 2.0];

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(chosen(&LOGITS, 0.0, &mut Random::new(&[1])), 1);
    }

    #[test]
    fn tokens_are_as_frequent_as_probable() {
        let mut random = Random::new(&[3]);
        let mut counts = [0u32; 4];
        for _ in 0..20_000 {
            counts[chosen(&LOGITS, 0.5, &mut random) as usize] += 1;
        }
        let weights = LOGITS.map(|logit| (f64::from(logit) / 0.5).exp());
        let sum: f64 = weights.iter().sum();
        for (count, weight) in counts.into_iter().zip(weights) {
            let share = f64::from(count) / 20_000.0;
            assert!((share - weight / sum).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn a_text_ends_at_an_end_token_at_the_receivers_wish_and_at_the_most_tokens() {
        let config = ModelConfig {
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            head_dim: 4,
            vocab_size: 20,
            max_position_embeddings: 16,
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            initializer_range: 0.5,
            ..ModelConfig::default()
        };
        let options = CpuOptions {
            forward_only: true,
            ..CpuOptions::default()
        };
        let mut engine = CpuEngine::new(config, options, None, Some(4)).unwrap();
        let mut greedy = |ends: &[u32], max_tokens, most: usize| {
            let sampling = Sampling {
                max_tokens,
                temperature: 0.0,
                seed: 0,
            };
            continued(&mut engine, &[1, 2, 3], ends, sampling, &mut |tokens| {
                tokens.len() < most
            })
        };
        let all = greedy(&[], 13, usize::MAX).unwrap();
        assert_eq!(all.len(), 13);
        assert_eq!(greedy(&[], 13, 5).unwrap(), all[..5]);
        let end = all[6];
        let before = all.iter().position(|&token| token == end).unwrap();
        assert_eq!(greedy(&[end], 13, usize::MAX).unwrap(), all[..before]);
        // The model has 16 positions.
        let refused = greedy(&[], 14, usize::MAX).unwrap_err().to_string();
        assert!(refused.contains("17"), "{refused}");
    }
}
