//! AdamW (Loshchilov and Hutter, 2019), in the order of operations of PyTorch's `torch.optim.AdamW`.

use rayon::prelude::*;

use super::{vector::CHUNK, vectorised};
use crate::engine::{AdamW, Unit};

/// One step on the elements `offset..offset + parameters.len()` of `unit`; the four slices are equally long.
/// Elements beyond the unit's end (a shard's padding) do not change.
pub fn update(
    unit: &Unit,
    offset: usize,
    parameters: &mut [f32],
    gradient: &[f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    step: &AdamW,
) {
    let end = offset + parameters.len();
    for parameter in &unit.parameters {
        let range = parameter.range();
        let (from, to) = (range.start.max(offset), range.end.min(end));
        if from >= to {
            continue;
        }
        let part = from - offset..to - offset;
        let factors = Factors::new(step, parameter.decay);
        parameters[part.clone()]
            .par_chunks_mut(CHUNK)
            .zip(gradient[part.clone()].par_chunks(CHUNK))
            .zip(exp_avg[part.clone()].par_chunks_mut(CHUNK))
            .zip(exp_avg_sq[part].par_chunks_mut(CHUNK))
            .for_each(|(((p, g), m), v)| {
                vectorised(
                    #[inline(always)]
                    || factors.apply(p, g, m, v),
                )
            });
    }
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
    /// `decay`: whether weight decay applies.
    pub fn new(step: &AdamW, decay: bool) -> Factors {
        let weight_decay = if decay { step.weight_decay } else { 0.0 };
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
    use crate::engine::Parameter;

    fn unit(len: usize) -> Unit {
        let parameter = |offset, shape: Vec<usize>, decay| Parameter {
            name: String::new(),
            shape,
            offset,
            decay,
        };
        Unit {
            name: String::new(),
            parameters: vec![
                parameter(0, vec![5], false),
                parameter(5, vec![len - 5, 1], true),
            ],
            len,
        }
    }

    const STEP: AdamW = AdamW {
        learning_rate: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 1,
        gradient_scale: 0.5,
    };

    #[test]
    fn the_first_step_moves_by_the_learning_rate_and_decays_matrices_only() {
        let unit = unit(40);
        let mut p = vec![2.0; 40];
        let g: Vec<f32> = (0..40)
            .map(|i| if i % 2 == 0 { 3.0 } else { -3.0 })
            .collect();
        let (mut m, mut v) = (vec![0.0; 40], vec![0.0; 40]);
        update(&unit, 0, &mut p, &g, &mut m, &mut v, &STEP);
        for i in 0..40 {
            // After one step the bias-corrected update is the gradient's sign.
            let decayed = if i < 5 { 2.0 } else { 2.0 * (1.0 - 0.001) };
            let expected = decayed - 0.01 * g[i].signum();
            assert!((p[i] - expected).abs() < 1e-6, "{i}: {} {expected}", p[i]);
            assert!((m[i] - 0.1 * 0.5 * g[i]).abs() < 1e-6);
            assert!((v[i] - 0.05 * 2.25).abs() < 1e-6);
        }
    }

    #[test]
    fn shards_are_updated_as_the_whole_unit() {
        let unit = unit(100);
        let g: Vec<f32> = (0..100).map(|i| (i as f32).sin()).collect();
        let state = || (vec![1.0; 100], vec![0.1; 100], vec![0.2; 100]);
        let (mut p, mut m, mut v) = state();
        update(&unit, 0, &mut p, &g, &mut m, &mut v, &STEP);

        let (mut ps, mut ms, mut vs) = state();
        // Two shards of 52, the second padded by 4.
        for shards in [&mut ps, &mut ms, &mut vs] {
            shards.resize(104, 7.0);
        }
        let mut gs = g.clone();
        gs.resize(104, 0.0);
        for offset in [0, 52] {
            let part = offset..offset + 52;
            update(
                &unit,
                offset,
                &mut ps[part.clone()],
                &gs[part.clone()],
                &mut ms[part.clone()],
                &mut vs[part],
                &STEP,
            );
        }
        assert_eq!(p, ps[..100]);
        assert_eq!(m, ms[..100]);
        assert_eq!(v, vs[..100]);
        assert_eq!(ps[100..], [7.0; 4]);
    }
}
