//! The frequencies of the rotary position embedding (Su et al., 2021).
//!
//! Source: transformers 5.24.0 `modeling_rope_utils.py`.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use super::ModelConfig;

/// How a family changes the frequencies for longer sequences. The default is not at all.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "rope_type")]
pub enum RopeScaling {
    #[default]
    Default,
    /// All frequencies are divided.
    Linear { factor: f32 },
    /// Llama 3.1: low frequencies are divided, high ones stay, and those between are interpolated.
    Llama3 {
        factor: f32,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are low frequencies.
        low_freq_factor: f32,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are high frequencies.
        high_freq_factor: f32,
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// Why the numbers are not usable.
    pub(super) fn flaw(self) -> Option<String> {
        let factor = match self {
            RopeScaling::Default => return None,
            RopeScaling::Linear { factor } => factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                // The conditions are written so that they refuse NaN.
                if !(low > 0.0 && low < high && high.is_finite()) || original == 0 {
                    return Some(format!(
                        "the RoPE scaling has low_freq_factor {low}, high_freq_factor {high} and \
                         original_max_position_embeddings {original}; they must be above 0, and the first below the second"
                    ));
                }
                factor
            }
        };
        let usable = factor >= 1.0 && factor.is_finite();
        (!usable)
            .then(|| format!("the factor of the RoPE scaling is {factor}, it must be at least 1"))
    }

    fn scaled(self, frequency: f64) -> f64 {
        match self {
            RopeScaling::Default => frequency,
            RopeScaling::Linear { factor } => frequency / f64::from(factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let [factor, low, high] =
                    [factor, low_freq_factor, high_freq_factor].map(f64::from);
                // Periods of the frequency in the original context.
                let periods = original_max_position_embeddings as f64 * frequency / TAU;
                let share = ((periods - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - share) * frequency / factor + share * frequency
            }
        }
    }
}

impl ModelConfig {
    /// The angle between two neighbouring positions of each of the pairs of a head that rotate, radians.
    pub(in crate::engine) fn frequencies(&self) -> Vec<f32> {
        let theta = f64::from(self.rope_theta);
        let rotary = self.rotary_dim();
        let exponent = |pair: usize| (2 * pair) as f64 / rotary as f64;
        let frequency = |pair| 1.0 / theta.powf(exponent(pair));
        let pairs = 0..rotary / 2;
        pairs
            .map(|pair| self.rope_scaling.scaled(frequency(pair)) as f32)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `inv_freq` of `LlamaRotaryEmbedding` for Llama 3.2's settings with heads of 64.
    #[test]
    fn llama3_scales_only_low_frequencies() {
        let config = ModelConfig {
            head_dim: 64,
            rope_theta: 500_000.0,
            rope_scaling: RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            },
            ..ModelConfig::default()
        };
        let found = config.frequencies();
        for (pair, expected) in [
            (0, 1.0),
            (5, 0.128_687_38),
            (14, 0.003_211_446),
            (16, 0.000_429_556_7),
            (17, 9.708_286e-5),
            (20, 8.570_256e-6),
            (31, 9.418_306e-8),
        ] {
            let error = (found[pair] - expected).abs() / expected;
            assert!(error < 1e-5, "{pair}: {} {expected}", found[pair]);
        }
    }
}
