//! Softmax and cross-entropy over rows of logits, in place.

use rayon::prelude::*;

use super::exp::{exp_and_sum, max};
use super::vectorised;

/// The loss of each row, −ln softmax(logits)[target]; overwrites the logits `[n, vocabulary]`.
pub fn forward(logits: &mut [f32], targets: &[u32], vocabulary: usize) -> Vec<f64> {
    rows(logits, targets, vocabulary, |_, _, _, _| {})
}

/// As [`forward`], and replaces the logits by the gradient of the losses' sum.
pub fn forward_backward(logits: &mut [f32], targets: &[u32], vocabulary: usize) -> Vec<f64> {
    rows(
        logits,
        targets,
        vocabulary,
        #[inline(always)]
        |exponentials, _, target, sum| probabilities(exponentials, target, sum, 1.0),
    )
}

/// As [`forward_backward`], with the losses' sum weighted by row.
pub fn forward_backward_weighted(
    logits: &mut [f32],
    targets: &[u32],
    weights: &[f32],
    vocabulary: usize,
) -> Vec<f64> {
    rows(
        logits,
        targets,
        vocabulary,
        #[inline(always)]
        |exponentials, row, target, sum| {
            probabilities(exponentials, target, sum, weights[row]);
        },
    )
}

/// From a row's exponentials to weight · (softmax − the target's unit vector).
#[inline(always)]
fn probabilities(exponentials: &mut [f32], target: usize, sum: f32, weight: f32) {
    let inverse = weight / sum;
    for p in exponentials.iter_mut() {
        *p *= inverse;
    }
    exponentials[target] -= weight;
}

/// The rows' losses. `finish` gets each row's exponentials, its number, its target and the sum of the exponentials.
fn rows(
    logits: &mut [f32],
    targets: &[u32],
    vocabulary: usize,
    finish: impl Fn(&mut [f32], usize, usize, f32) + Sync,
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
                    let chosen = logits[target];
                    let sum = exp_and_sum(logits, shift);
                    finish(logits, row, target, sum);
                    f64::from(sum).ln() + (f64::from(shift) - f64::from(chosen))
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
        let losses = forward_backward(&mut gradient, &targets, vocabulary);
        assert_eq!(losses, forward(&mut logits.clone(), &targets, vocabulary));
        let weights = [0.5, -2.0, 0.0];
        let mut weighted = logits.clone();
        let same = forward_backward_weighted(&mut weighted, &targets, &weights, vocabulary);
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

    #[test]
    fn large_logits_do_not_overflow_and_nan_propagates() {
        let mut logits = vec![1e4, -1e4, 0.0];
        assert!((forward_backward(&mut logits, &[1], 3)[0] - 2e4).abs() < 1e-3);
        for finish in [forward, forward_backward] {
            assert!(finish(&mut [0.0, f32::NAN, 1.0], &[0], 3)[0].is_nan());
            assert!(finish(&mut [0.0, f32::INFINITY, 1.0], &[0], 3)[0].is_nan());
        }
    }
}
