//! Seeded initial weights.
//!
//! Every element is a pure function of (seed, tensor name, index), so that the initial weights depend neither
//! on the world nor on the sharding. Matrices are normal with σ = `initializer_range`, norms scale by one and biases are
//! zero, as in transformers. In GPT-2 the layers that add to the residual stream have a σ of `initializer_range` /
//! √(2 × layers).

use crate::util::random::nth;
use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Family, Kind, ModelConfig, NormKind, Role, Unit};

/// Elements that one thread fills at a time.
const CHUNK: usize = 1 << 15;

/// Fills `out` with the elements `offset..offset + out.len()` of `unit`.
pub fn fill(unit: &Unit, config: &ModelConfig, seed: u64, offset: usize, out: &mut [f32]) {
    let end = offset + out.len();
    for parameter in &unit.parameters {
        let range = parameter.range();
        let (from, to) = (range.start.max(offset), range.end.min(end));
        if from >= to {
            continue;
        }
        let part = &mut out[from - offset..to - offset];
        let constant = match parameter.role.kind() {
            // The model begins as without adapters.
            Kind::Matrix if parameter.role == Role::AdapterB => Some(0.0),
            Kind::Matrix => None,
            Kind::Norm if config.norm == NormKind::RmsPlusOne => Some(0.0),
            Kind::Norm => Some(1.0),
            Kind::Bias => Some(0.0),
        };
        if let Some(constant) = constant {
            part.fill(constant);
            continue;
        }
        let sigma = match (config.family, parameter.role) {
            (Family::Gpt2, Role::Output | Role::Down) => {
                f64::from(config.initializer_range) / (2.0 * config.num_hidden_layers as f64).sqrt()
            }
            _ => f64::from(config.initializer_range),
        };
        let key = xxh3_64_with_seed(parameter.name.as_bytes(), seed);
        // PEFT's `kaiming_uniform_(a=sqrt(5))`.
        let bound = 1.0 / (parameter.inputs() as f64).sqrt();
        let draw = |index| match parameter.role {
            Role::AdapterA => uniform(key, index) * bound,
            _ => normal(key, index) * sigma,
        };
        let first = (from - range.start) as u64;
        part.par_chunks_mut(CHUNK)
            .enumerate()
            .for_each(|(chunk, values)| {
                let first = first + (chunk * CHUNK) as u64;
                for (index, value) in (first..).zip(values) {
                    *value = draw(index) as f32;
                }
            });
    }
}

/// The `index`-th number of a stream, uniform between −1 and 1.
fn uniform(key: u64, index: u64) -> f64 {
    (nth(key, index) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

/// The `index`-th standard normal of a stream (Box and Muller, 1958).
fn normal(key: u64, index: u64) -> f64 {
    let bits = nth(key, index);
    // Two uniform numbers of 32 bits; the first one is never 0.
    let radius = ((bits >> 32) as f64 + 0.5) / 4_294_967_296.0;
    let angle = (bits & 0xffff_ffff) as f64 / 4_294_967_296.0;
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Order, Parameter};

    fn unit() -> Unit {
        let parameter = |name: &str, shape: Vec<usize>, offset, role| Parameter {
            name: name.to_owned(),
            role,
            shape,
            offset,
            order: Order::Native,
        };
        Unit {
            name: "block-00".to_owned(),
            parameters: vec![
                parameter("norm", vec![7], 0, Role::InputNorm),
                parameter("a", vec![200, 300], 7, Role::Query),
                parameter("b", vec![200, 300], 60_007, Role::Key),
            ],
            len: 120_007,
        }
    }

    #[test]
    fn any_part_equals_the_same_part_of_the_whole() {
        let unit = unit();
        let mut whole = vec![0.0; unit.len];
        fill(&unit, &ModelConfig::default(), 3, 0, &mut whole);
        for (offset, len) in [(0, 10), (5, 60_100), (60_006, 3), (119_000, 1007)] {
            let mut part = vec![0.0; len];
            fill(&unit, &ModelConfig::default(), 3, offset, &mut part);
            assert_eq!(part, whole[offset..offset + len]);
        }
    }

    #[test]
    fn moments_match_the_normal_distribution() {
        let unit = unit();
        let mut whole = vec![0.0; unit.len];
        fill(&unit, &ModelConfig::default(), 3, 0, &mut whole);
        assert!(whole[..7].iter().all(|&w| w == 1.0));
        let a = &whole[7..60_007];
        let moment = |p: i32| {
            a.iter()
                .map(|&w| (f64::from(w) / 0.02).powi(p))
                .sum::<f64>()
                / 6e4
        };
        // Standard errors: 0.004, 0.006, 0.04.
        assert!(moment(1).abs() < 0.02, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.03, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.2, "{}", moment(4));
    }

    #[test]
    fn seeds_and_names_give_different_weights() {
        let unit = unit();
        let (mut one, mut two) = (vec![0.0; unit.len], vec![0.0; unit.len]);
        fill(&unit, &ModelConfig::default(), 3, 0, &mut one);
        fill(&unit, &ModelConfig::default(), 4, 0, &mut two);
        assert_ne!(one[7], two[7]);
        assert_ne!(one[7..60_007], one[60_007..]);
    }
}
