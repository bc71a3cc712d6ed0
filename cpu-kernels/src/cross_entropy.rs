//! Softmax and cross-entropy over rows of logits, in place.

use rayon::prelude::*;

use super::exp::{exp_and_sum, max};
use super::vectorised;

/// What a target token adds to the loss, with p = softmax(logits)\[target\].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum TokenLoss {
    /// −ln p.
    #[default]
    CrossEntropy,
    /// The cross-entropy with a target of which this share ε is spread evenly over the vocabulary: −(1 − ε) ln p − ε · the
    /// mean of ln softmax(logits) (transformers' `LabelSmoother`).
    Smoothed(f32),
    /// −p ln p, in which the factor p has no gradient (dynamic fine-tuning, arXiv 2508.05629; TRL's `dft_loss`).
    Dft,
}

/// The loss of each row; overwrites the logits `[n, vocabulary]`.
pub fn forward(
    logits: &mut [f32],
    targets: &[u32],
    vocabulary: usize,
    loss: TokenLoss,
) -> Vec<f64> {
    rows(logits, targets, vocabulary, loss, |_, _, _, _, _| {})
}

/// As [`forward`], and replaces the logits by the gradient of the losses' sum, weighted by row if there are `weights`.
pub fn forward_backward(
    logits: &mut [f32],
    targets: &[u32],
    weights: Option<&[f32]>,
    vocabulary: usize,
    loss: TokenLoss,
) -> Vec<f64> {
    rows(
        logits,
        targets,
        vocabulary,
        loss,
        #[inline(always)]
        |exponentials, row, target, sum, factor| {
            let weight = factor * weights.map_or(1.0, |weights| weights[row]);
            let smoothing = match loss {
                TokenLoss::Smoothed(smoothing) => smoothing,
                TokenLoss::CrossEntropy | TokenLoss::Dft => 0.0,
            };
            let (inverse, spread) = (weight / sum, weight * smoothing / exponentials.len() as f32);
            for p in exponentials.iter_mut() {
                *p = *p * inverse - spread;
            }
            exponentials[target] -= weight * (1.0 - smoothing);
        },
    )
}

/// The rows' losses. `finish` gets each row's exponentials, its number, its target, the sum of the exponentials and the
/// factor of its cross-entropy.
fn rows(
    logits: &mut [f32],
    targets: &[u32],
    vocabulary: usize,
    loss: TokenLoss,
    finish: impl Fn(&mut [f32], usize, usize, f32, f32) + Sync,
) -> Vec<f64> {
    logits
        .par_chunks_exact_mut(vocabulary)
        .zip(targets)
        .enumerate()
        .map(|(row, (logits, &target))| {
            vectorised(
                #[inline(always)]
                || {
                    let target = target as usize;
                    let shift = max(logits);
                    let mut wanted = f64::from(logits[target]);
                    if let TokenLoss::Smoothed(smoothing) = loss {
                        let total: f64 = logits.iter().map(|&x| f64::from(x)).sum();
                        let smoothing = f64::from(smoothing);
                        wanted =
                            (1.0 - smoothing) * wanted + smoothing * total / logits.len() as f64;
                    }
                    let sum = exp_and_sum(logits, shift);
                    let factor = match loss {
                        TokenLoss::Dft => logits[target] / sum,
                        TokenLoss::CrossEntropy | TokenLoss::Smoothed(_) => 1.0,
                    };
                    finish(logits, row, target, sum, factor);
                    f64::from(factor) * (f64::from(sum).ln() + (f64::from(shift) - wanted))
                },
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_and_gradient_match_the_definition() {
        let vocabulary = 37;
        let targets = [0, 36, 5];
        let logits: Vec<f32> = (0..3 * vocabulary)
            .map(|i| (i as f32).sin() * 9.0)
            .collect();
        let mut gradient = logits.clone();
        let plain = TokenLoss::CrossEntropy;
        let losses = forward_backward(&mut gradient, &targets, None, vocabulary, plain);
        let same = forward(&mut logits.clone(), &targets, vocabulary, plain);
        assert_eq!(losses, same);
        let weights = [0.5, -2.0, 0.0];
        let mut weighted = logits.clone();
        let same = forward_backward(&mut weighted, &targets, Some(&weights), vocabulary, plain);
        assert_eq!(same, losses);
        for (i, (weighted, gradient)) in weighted.iter().zip(&gradient).enumerate() {
            let expected = weights[i / vocabulary] * gradient;
            assert!((weighted - expected).abs() < 1e-6, "{weighted} {expected}");
        }
        let sum: f64 = losses.iter().sum();
        let mut expected = 0.0;
        for (row, &target) in targets.iter().enumerate() {
            let logits = &logits[row * vocabulary..][..vocabulary];
            let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            expected += total.ln() - f64::from(logits[target as usize]);
            for (i, &x) in logits.iter().enumerate() {
                let p = f64::from(x).exp() / total - f64::from(i == target as usize);
                let got = f64::from(gradient[row * vocabulary + i]);
                assert!((got - p).abs() < 1e-6, "{got} {p}");
            }
        }
        assert!((sum - expected).abs() < 1e-5 * expected);
    }

    /// `F.cross_entropy(label_smoothing=0.2)`, and −p ln p with p detached, by PyTorch 2.15 in f64.
    #[test]
    fn smoothed_and_dft_losses_are_pytorchs() {
        let logits = [0.5, -1.0, 2.0, 0.25];
        let agree = |loss, expected: f64, gradient: [f32; 4]| {
            let mut found = logits;
            let value = forward_backward(&mut found, &[3], Some(&[2.0]), 4, loss)[0];
            assert!((value - expected).abs() < 1e-6, "{value} {expected}");
            for (found, expected) in found.iter().zip(gradient) {
                assert!((found - 2.0 * expected).abs() < 1e-6, "{found} {expected}");
            }
            let value = forward(&mut logits.clone(), &[3], 4, loss)[0];
            assert!((value - expected).abs() < 1e-6, "{value} {expected}");
        };
        let gradient = [0.104_234_8, -0.015_585_6, 0.641_232_5, -0.729_881_8];
        agree(TokenLoss::Smoothed(0.2), 2.081_778_998_448, gradient);
        let gradient = [0.018_526_4, 0.004_133_8, 0.083_029_6, -0.105_689_8];
        agree(TokenLoss::Dft, 0.254_563_984_331, gradient);
    }

    #[test]
    fn large_logits_do_not_overflow_and_nan_propagates() {
        let mut logits = vec![1e4, -1e4, 0.0];
        let plain = TokenLoss::CrossEntropy;
        assert!((forward_backward(&mut logits, &[1], None, 3, plain)[0] - 2e4).abs() < 1e-3);
        for loss in [plain, TokenLoss::Smoothed(0.1), TokenLoss::Dft] {
            for wrong in [f32::NAN, f32::INFINITY] {
                let logits = [0.0, wrong, 1.0];
                assert!(forward(&mut logits.clone(), &[0], 3, loss)[0].is_nan());
                assert!(forward_backward(&mut logits.clone(), &[0], None, 3, loss)[0].is_nan());
            }
        }
    }
}
