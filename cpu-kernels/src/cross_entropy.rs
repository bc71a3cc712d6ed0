//! Softmax and cross-entropy over rows of logits, in place.

use rayon::prelude::*;

use super::exp::{exp_and_sum, max};
use super::vectorised;

/// Returns Σ over rows of −ln softmax(logits)[target]; overwrites the logits `[n, vocabulary]`.
pub fn forward(logits: &mut [f32], targets: &[u32], vocabulary: usize) -> f64 {
    rows(logits, targets, vocabulary, |_, _, _| {})
}

/// As [`forward`], and replaces the logits by the gradient of that sum.
pub fn forward_backward(logits: &mut [f32], targets: &[u32], vocabulary: usize) -> f64 {
    rows(
        logits,
        targets,
        vocabulary,
        #[inline(always)]
        |exponentials, target, sum| {
            let inverse = 1.0 / sum;
            for p in exponentials.iter_mut() {
                *p *= inverse;
            }
            exponentials[target] -= 1.0;
        },
    )
}

/// The sum of the rows' losses. `finish` gets each row's exponentials, its target and the sum of the exponentials.
fn rows(
    logits: &mut [f32],
    targets: &[u32],
    vocabulary: usize,
    finish: impl Fn(&mut [f32], usize, f32) + Sync,
) -> f64 {
    let losses: Vec<f64> = logits
        .par_chunks_exact_mut(vocabulary)
        .zip(targets)
        .map(|(logits, &target)| {
            vectorised(
                #[inline(always)]
                || {
                    let target = target as usize;
                    let shift = max(logits);
                    let chosen = logits[target];
                    let sum = exp_and_sum(logits, shift);
                    finish(logits, target, sum);
                    f64::from(sum).ln() + (f64::from(shift) - f64::from(chosen))
                },
            )
        })
        .collect();
    losses.iter().sum()
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
        let sum = forward_backward(&mut gradient, &targets, vocabulary);
        assert_eq!(sum, forward(&mut logits.clone(), &targets, vocabulary));
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
        assert!((forward_backward(&mut logits, &[1], 3) - 2e4).abs() < 1e-3);
        for finish in [forward, forward_backward] {
            assert!(finish(&mut [0.0, f32::NAN, 1.0], &[0], 3).is_nan());
            assert!(finish(&mut [0.0, f32::INFINITY, 1.0], &[0], 3).is_nan());
        }
    }
}
