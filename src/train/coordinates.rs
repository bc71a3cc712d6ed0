//! Counts the coordinate-wise test of a step on all ranks together.

use super::TrainError;
use super::message::exchange;
use crate::comm::Collective;
use crate::engine::Engine;
use crate::norm::{CoordinateTest, Coordinates, GroupSums};
use crate::telemetry::CoordinateTestRecord;

/// The share of coordinates that pass in a step with these groups, which are the same on every rank.
/// Collective; called between the engine's reduction and its update.
pub fn count(
    test: CoordinateTest,
    groups: &GroupSums,
    engine: &mut dyn Engine,
    world: &dyn Collective,
) -> Result<CoordinateTestRecord, TrainError> {
    let bound = match test.bound(groups) {
        Ok(bound) => bound,
        Err(why) => {
            return Ok(CoordinateTestRecord {
                share: None,
                undefined: Some(why.to_string()),
            });
        }
    };
    let mut counted = Coordinates::default();
    engine.coordinates(&mut |weighted, summed| counted.merge(&bound.count(weighted, summed)))?;
    let mut all = Coordinates::default();
    for part in exchange(world, &counted)? {
        all.merge(&part);
    }
    Ok(CoordinateTestRecord {
        share: all.share(),
        undefined: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::solo::Solo;
    use crate::engine::cpu::{CpuEngine, CpuOptions};
    use crate::engine::{Measure, MicroBatch, ModelConfig};
    use crate::recipe::schema::spec::Groups;

    const MEASURE: Measure = Measure {
        micro_batches: true,
        worker: false,
        coordinates: true,
    };

    /// The record of a step of `micro_batches` micro-batches with the same tokens.
    fn record(micro_batches: u64, eta: f64) -> CoordinateTestRecord {
        let config = ModelConfig {
            hidden_size: 8,
            intermediate_size: 8,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            head_dim: 4,
            vocab_size: 16,
            max_position_embeddings: 8,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            tie_word_embeddings: false,
            initializer_range: 0.1,
            sliding_window: None,
        };
        let options = CpuOptions {
            threads: Some(1),
            measure: MEASURE,
            ..CpuOptions::default()
        };
        let mut engine = CpuEngine::new(config, options, None, Some(1)).unwrap();
        let mut groups = GroupSums::default();
        for index in 1..=micro_batches {
            let micro_batch = MicroBatch {
                tokens: &[1, 2, 3, 4],
                targets: &[2, 3, 4, 5],
                batch: 1,
                seq_len: 4,
            };
            let last = index == micro_batches;
            let done = engine.accumulate(micro_batch, MEASURE, last).unwrap();
            groups.add(done.squared_norm.unwrap(), done.targets);
        }
        engine.reduce(MEASURE).unwrap();
        let test = CoordinateTest {
            groups: Groups::MicroBatches,
            threshold: eta * eta,
        };
        count(test, &groups, &mut engine, &Solo).unwrap()
    }

    #[test]
    fn groups_without_any_difference_pass_in_every_coordinate() {
        assert_eq!(record(3, 0.1).share, Some(1.0));
    }

    #[test]
    fn one_group_is_undefined_with_a_reason_in_the_record() {
        let record = record(1, 0.1);
        assert_eq!(record.share, None);
        assert_eq!(
            record.undefined.as_deref(),
            Some(
                "one group has no variance; the test needs two workers or micro-batches in a step"
            )
        );
    }
}
