//! AdamW (Loshchilov and Hutter, 2019), in the order of operations of PyTorch's `torch.optim.AdamW`, and RMSprop, which is
//! AdamW without its first moment, bias correction and decay.

use rayon::prelude::*;

use super::{vector::CHUNK, vectorised};

/// Parameters of one AdamW step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// β₁, decay of the first moment.
    pub beta1: f64,
    /// β₂, decay of the second moment.
    pub beta2: f64,
    /// ε, added to the denominator.
    pub epsilon: f64,
    /// Decoupled weight decay of matrices, relative to the learning rate.
    pub weight_decay: f64,
    /// The same of vectors: norms and biases.
    pub vector_decay: f64,
    /// Steps taken including this one, for the bias correction.
    pub step: u64,
    /// Factor of the summed gradient: 1/N target tokens × clipping.
    pub gradient_scale: f64,
}

impl AdamW {
    /// A step of `torch.optim.RMSprop` with its defaults: α 0.99, ε 1e-8, no momentum.
    pub fn rmsprop(learning_rate: f64, gradient_scale: f64) -> AdamW {
        AdamW {
            learning_rate,
            beta1: 0.0,
            beta2: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.0,
            vector_decay: 0.0,
            // The bias corrections are 1 after many steps.
            step: u64::MAX,
            gradient_scale,
        }
    }
}

/// One step on parameters that all decay, or all do not; the slices are equally long.
pub fn update(
    factors: &Factors,
    parameters: &mut [f32],
    gradient: &[f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
) {
    parameters
        .par_chunks_mut(CHUNK)
        .zip(gradient.par_chunks(CHUNK))
        .zip(exp_avg.par_chunks_mut(CHUNK))
        .zip(exp_avg_sq.par_chunks_mut(CHUNK))
        .for_each(|(((p, g), m), v)| {
            vectorised(
                #[inline(always)]
                || factors.apply(p, g, m, v),
            )
        });
}

/// The scalars of one step.
pub struct Factors {
    gradient_scale: f32,
    keep: f32,
    beta1: f32,
    beta2: f32,
    step_size: f32,
    inverse_root_correction2: f32,
    epsilon: f32,
}

impl Factors {
    /// `are_matrices`: which of the two weight decays applies.
    pub fn new(step: &AdamW, are_matrices: bool) -> Factors {
        let weight_decay = match are_matrices {
            true => step.weight_decay,
            false => step.vector_decay,
        };
        let steps = step.step as f64;
        let correction1 = 1.0 - step.beta1.powf(steps);
        let correction2 = 1.0 - step.beta2.powf(steps);
        Factors {
            gradient_scale: step.gradient_scale as f32,
            keep: (1.0 - step.learning_rate * weight_decay) as f32,
            beta1: step.beta1 as f32,
            beta2: step.beta2 as f32,
            step_size: (step.learning_rate / correction1) as f32,
            inverse_root_correction2: (1.0 / correction2.sqrt()) as f32,
            epsilon: step.epsilon as f32,
        }
    }

    /// The scalars in the order of the structure in `adamw.cu`.
    pub fn values(&self) -> [f32; 7] {
        [
            self.gradient_scale,
            self.keep,
            self.beta1,
            self.beta2,
            self.step_size,
            self.inverse_root_correction2,
            self.epsilon,
        ]
    }

    #[inline(always)]
    fn apply(&self, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * self.gradient_scale;
            *m += (1.0 - self.beta1) * (g - *m);
            *v = self.beta2 * *v + (1.0 - self.beta2) * (g * g);
            let denominator = v.sqrt() * self.inverse_root_correction2 + self.epsilon;
            *p = self.keep * *p - self.step_size * (*m / denominator);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_moves_by_the_learning_rate_and_decays_on_request() {
        let step = AdamW {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            vector_decay: 0.0,
            step: 1,
            gradient_scale: 0.5,
        };
        let g: Vec<f32> = (0..40)
            .map(|i| if i % 2 == 0 { 3.0 } else { -3.0 })
            .collect();
        for (decay, decayed) in [(false, 2.0), (true, 2.0 * (1.0 - 0.001))] {
            let (mut p, mut m, mut v) = (vec![2.0; 40], vec![0.0; 40], vec![0.0; 40]);
            update(&Factors::new(&step, decay), &mut p, &g, &mut m, &mut v);
            for i in 0..40 {
                // After one step the bias-corrected update is the gradient's sign.
                let expected = decayed - 0.01 * g[i].signum();
                assert!((p[i] - expected).abs() < 1e-6, "{i}: {} {expected}", p[i]);
                assert!((m[i] - 0.1 * 0.5 * g[i]).abs() < 1e-6);
                assert!((v[i] - 0.05 * 2.25).abs() < 1e-6);
            }
        }
    }

    /// `torch.optim.RMSprop([2.0], lr=0.01)` with the gradients 3, −1 and 0.5 (PyTorch 2.15, f64).
    #[test]
    fn rmsprop_is_pytorchs() {
        let (mut p, mut m, mut v) = (vec![2.0; 8], vec![0.0; 8], vec![0.0; 8]);
        let factors = Factors::new(&AdamW::rmsprop(0.01, 1.0), true);
        for (gradient, expected) in [(3.0, 1.9), (-1.0, 1.931_766), (0.5, 1.916_002_6)] {
            update(&factors, &mut p, &[gradient; 8], &mut m, &mut v);
            assert!((p[0] - expected).abs() < 1e-6, "{} {expected}", p[0]);
        }
    }
}
