//! The coordinate-wise test's sums, compared with separately computed gradients of the groups.

use super::worlds::{ACCUMULATES_UNSHARDED, SEQ_LEN, SHARDED, deal};
use super::*;
use crate::comm::Collective;
use crate::comm::tcp::tests::on_all;

const OF_MICRO_BATCHES: Measure = Measure {
    micro_batches: true,
    worker: false,
    coordinates: true,
};
const OF_WORKERS: Measure = Measure {
    micro_batches: false,
    worker: true,
    coordinates: true,
};

/// (Σ G²/n, Σ G) of every coordinate, by unit.
type Sums = Vec<(Vec<f32>, Vec<f32>)>;

/// Rows of unequal numbers of targets; the third has none.
fn samples() -> Batch {
    let mut samples = Batch::new(7, SEQ_LEN);
    samples.targets[2 * SEQ_LEN..3 * SEQ_LEN].fill(IGNORE);
    samples
}

fn rank(
    config: &ModelConfig,
    strategy: Strategy,
    measure: Measure,
    world: Option<World>,
) -> CpuEngine {
    let options = CpuOptions {
        threads: Some(1),
        strategy,
        measure,
        ..CpuOptions::default()
    };
    CpuEngine::new(config.clone(), options, world, Some(5)).unwrap()
}

/// The gradients of the groups, computed separately; each group is a run of rows.
fn direct(config: &ModelConfig, groups: &[usize]) -> Sums {
    let mut engine = rank(config, Strategy::Replicated, NOTHING, None);
    let samples = samples();
    let units = &engine.layout().units;
    let mut sums: Sums = units
        .iter()
        .map(|unit| (vec![0.0; unit.len], vec![0.0; unit.len]))
        .collect();
    let mut row = 0;
    for &rows in groups {
        let mut targets = 0;
        for _ in 0..rows {
            let got = engine.accumulate(samples.part(row, row + 1), NOTHING, false);
            targets += got.unwrap().targets;
            row += 1;
        }
        for ((weighted, summed), gradient) in sums.iter_mut().zip(take_gradient(&mut engine)) {
            for (d, g) in gradient.into_iter().enumerate() {
                weighted[d] += g * g / targets.max(1) as f32;
                summed[d] += g;
            }
        }
    }
    sums
}

/// Runs a step of a rank's rows, with `most` walks in total; returns its part of the coordinates.
fn step(
    engine: &mut CpuEngine,
    measure: Measure,
    rows: std::ops::Range<usize>,
    most: usize,
) -> Result<Sums, EngineError> {
    let samples = samples();
    for row in rows.clone() {
        let last = row + 1 == rows.end;
        engine.accumulate(samples.part(row, row + 1), measure, last)?;
    }
    for walk in rows.len()..most {
        engine.join(walk + 1 == most)?;
    }
    engine.reduce(measure)?;
    let mut sums = Sums::new();
    engine.coordinates(&mut |weighted, summed| sums.push((weighted.to_vec(), summed.to_vec())))?;
    engine.discard();
    Ok(sums)
}

/// The same for a whole world. It runs two steps, so that the first must leave no trace.
fn together(config: &ModelConfig, strategy: Strategy, measure: Measure, hands: &[usize]) -> Sums {
    let parts = on_all(hands.len(), |world| {
        let own = world.rank();
        let first: usize = hands[..own].iter().sum();
        let rows = first..first + hands[own];
        let mut engine = rank(config, strategy, measure, Some(world));
        step(&mut engine, measure, rows.clone(), hands[0]).unwrap();
        step(&mut engine, measure, rows, hands[0]).unwrap()
    });
    let mut whole = parts[0].clone();
    for part in &parts[1..] {
        for ((weighted, summed), part) in whole.iter_mut().zip(part) {
            weighted.extend(&part.0);
            summed.extend(&part.1);
        }
    }
    whole
}

fn assert_same(one: &Sums, other: &Sums) {
    let [one, other] = [one, other].map(|sums| sums.iter().cloned().unzip());
    let ((one, one_summed), (other, other_summed)): ((Vec<_>, Vec<_>), (Vec<_>, Vec<_>)) =
        (one, other);
    assert_close(&one, &other, 1e-5);
    assert_close(&one_summed, &other_summed, 1e-5);
}

#[test]
fn every_world_and_strategy_sums_the_squares_of_micro_batches() {
    for config in [config(), tied()] {
        let expected = direct(&config, &[1; 7]);
        let mut alone = rank(&config, Strategy::Replicated, OF_MICRO_BATCHES, None);
        let sums = step(&mut alone, OF_MICRO_BATCHES, 0..7, 7).unwrap();
        assert_same(&expected, &sums);
        for strategy in [Strategy::Replicated, SHARDED, ACCUMULATES_UNSHARDED] {
            for world in [2, 3] {
                let sums = together(&config, strategy, OF_MICRO_BATCHES, &deal(7, world));
                assert_same(&expected, &sums);
            }
        }
    }
}

#[test]
fn every_strategy_sums_the_squares_of_workers() {
    for config in [config(), tied()] {
        for hands in [&[4, 3][..], &[3, 2, 2]] {
            let expected = direct(&config, hands);
            for strategy in [Strategy::Replicated, ACCUMULATES_UNSHARDED] {
                assert_same(&expected, &together(&config, strategy, OF_WORKERS, hands));
            }
        }
        // A single micro-batch is a worker's whole gradient.
        let expected = direct(&config, &[1, 1]);
        assert_same(&expected, &together(&config, SHARDED, OF_WORKERS, &[1, 1]));
    }
}

#[test]
fn measuring_changes_no_bit_of_the_weights() {
    for config in [config(), tied()] {
        for measure in [OF_MICRO_BATCHES, OF_WORKERS] {
            let gradient = |strategy, world: Option<World>, measured| {
                let mut engine = rank(&config, strategy, measure, world);
                let batch = samples();
                for row in 3..7 {
                    let micro_batch = batch.part(row, row + 1);
                    engine.accumulate(micro_batch, measured, row == 6).unwrap();
                }
                engine.reduce(measured).unwrap();
                engine.update(REVEAL).unwrap();
                let units = 0..engine.layout().units.len();
                let state = units.map(|unit| engine.export(unit, true).unwrap().unwrap());
                state.map(|state| state.exp_avg).collect::<Vec<_>>()
            };
            let alone = |measured| gradient(Strategy::Replicated, None, measured);
            assert_eq!(alone(NOTHING), alone(measure));
            on_all(2, |world| {
                let world = || Some(world.clone() as World);
                for strategy in [Strategy::Replicated, ACCUMULATES_UNSHARDED] {
                    let unmeasured = gradient(strategy, world(), NOTHING);
                    assert_eq!(unmeasured, gradient(strategy, world(), measure));
                }
            });
        }
    }
}

#[test]
fn the_vector_is_allocated_only_where_coordinates_are_measured() {
    let held = |coordinates| {
        let measure = Measure {
            coordinates,
            ..EVERYTHING
        };
        rank(&config(), Strategy::Replicated, measure, None)
            .memory()
            .0
    };
    let parameters = 4 * layout(&config()).len();
    assert_eq!(held(true), held(false) + parameters);
}

#[test]
fn coordinates_that_were_not_measured_are_refused() {
    let batch = Batch::new(1, SEQ_LEN);
    let mut plain = engine(config());
    let error = plain.accumulate(batch.micro_batch(), OF_MICRO_BATCHES, true);
    let no_memory = "the engine has no memory for this measurement; create it with the measurement";
    assert_eq!(error.unwrap_err().to_string(), no_memory);

    let mut engine = rank(&config(), Strategy::Replicated, OF_MICRO_BATCHES, None);
    engine
        .accumulate(batch.micro_batch(), NOTHING, true)
        .unwrap();
    engine.reduce(NOTHING).unwrap();
    let error = engine.coordinates(&mut |_, _| {});
    let not_measured =
        "coordinates are available only in a step that measures them, from an engine made for it";
    assert_eq!(error.unwrap_err().to_string(), not_measured);
}

#[test]
fn worker_groups_are_refused_under_sharding() {
    on_all(2, |world| {
        let mut engine = rank(&config(), SHARDED, OF_WORKERS, Some(world.clone()));
        let batch = Batch::new(2, SEQ_LEN);
        let measure = Measure {
            worker: false,
            ..OF_WORKERS
        };
        engine.accumulate(batch.part(0, 1), measure, false).unwrap();
        let error = engine.accumulate(batch.part(1, 2), measure, true);
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("accumulate unsharded")
        );
        world.close().unwrap();
    });
}
