//! Several ranks, as threads over real sockets: every world and strategy trains the same weights as one
//! process.

use std::sync::{Arc, Barrier};

use super::*;
use crate::comm::tcp::tests::on_all;
use crate::comm::{Collective, CommError, tcp};

pub(super) const SHARDED: Strategy = Strategy::Sharded {
    unsharded_accumulation: false,
};
pub(super) const ACCUMULATES_UNSHARDED: Strategy = Strategy::Sharded {
    unsharded_accumulation: true,
};

pub(super) const SEQ_LEN: usize = 12;

/// A model, and the adapters that are trained in its place.
type Model<'a> = (&'a ModelConfig, Option<&'a Adapters>);

fn rank(config: &ModelConfig, strategy: Strategy, world: Option<World>) -> CpuEngine {
    rank_of((config, None), strategy, world)
}

fn rank_of((config, adapters): Model<'_>, strategy: Strategy, world: Option<World>) -> CpuEngine {
    let options = CpuOptions {
        threads: Some(1),
        strategy,
        measure: EVERYTHING,
        adapters: adapters.cloned(),
        ..CpuOptions::default()
    };
    CpuEngine::new(config.clone(), options, world, Some(5)).unwrap()
}

/// The micro-batches of each rank, as a plan deals them.
pub(super) fn deal(micro_batches: usize, world: usize) -> Vec<usize> {
    let more = |rank| usize::from(rank < micro_batches % world);
    (0..world)
        .map(|rank| micro_batches / world + more(rank))
        .collect()
}

/// The measurements of a step, in f64.
#[derive(Debug, Clone, Copy)]
struct Step {
    loss: f64,
    squared_norm: f64,
    /// Σ ‖gradient of a micro-batch‖² over all micro-batches.
    of_micro_batches: f64,
}

/// Trains; returns every step and the weights.
fn train(
    model: Model<'_>,
    strategy: Strategy,
    world: Option<World>,
    (steps, micro_batches): (usize, usize),
) -> (Vec<Step>, Vec<UnitState>) {
    let mut engine = rank_of(model, strategy, world.clone());
    let (own, size) = world
        .as_ref()
        .map_or((0, 1), |world| (world.rank(), world.world()));
    let dealt = deal(micro_batches, size);
    let first: usize = dealt[..own].iter().sum();
    // Tokens that every model has.
    let samples = Batch::of_vocabulary(24, steps * micro_batches, SEQ_LEN);
    let measure = Measure {
        micro_batches: true,
        worker: false,
        coordinates: false,
    };
    let mut seen = Vec::new();
    for step in 0..steps {
        let mut sums = [0.0; 3];
        for index in 0..dealt[0] {
            let last = index + 1 == dealt[own];
            if index >= dealt[own] {
                engine.join(index + 1 == dealt[0]).unwrap();
                continue;
            }
            let row = step * micro_batches + first + index;
            let got = engine
                .accumulate(samples.part(row, row + 1), measure, last)
                .unwrap();
            sums[0] += got.loss;
            sums[1] += got.targets as f64;
            sums[2] += got.squared_norm.unwrap();
        }
        if let Some(world) = &world {
            let message: Vec<u8> = sums
                .iter()
                .flat_map(|sum: &f64| sum.to_le_bytes())
                .collect();
            sums = [0.0; 3];
            for message in world.exchange(&message).unwrap() {
                for (sum, bytes) in sums.iter_mut().zip(message.chunks(8)) {
                    *sum += f64::from_le_bytes(bytes.try_into().unwrap());
                }
            }
        }
        let [loss, targets, of_micro_batches] = sums;
        let Reduced { squared_norm, .. } = engine.reduce(NOTHING).unwrap();
        let clipping = (1.0 / (squared_norm.sqrt() / targets)).min(1.0);
        engine
            .update(AdamW {
                learning_rate: 1e-3,
                beta1: 0.9,
                beta2: 0.95,
                epsilon: 1e-8,
                weight_decay: 0.1,
                vector_decay: 0.0,
                step: step as u64 + 1,
                gradient_scale: clipping / targets,
            })
            .unwrap();
        seen.push(Step {
            loss: loss / targets,
            squared_norm,
            of_micro_batches,
        });
    }
    let units = 0..engine.layout().units.len();
    let weights = units.map(|unit| engine.export(unit, true).unwrap().unwrap());
    (seen, weights.collect())
}

fn assert_same(one: &(Vec<Step>, Vec<UnitState>), other: &(Vec<Step>, Vec<UnitState>)) {
    let close = |what: &str, step: usize, a: f64, b: f64| {
        assert!(
            (a - b).abs() <= 1e-5 * a.abs(),
            "{what} of step {step}: {a} {b}"
        );
    };
    for (step, (one, other)) in one.0.iter().zip(&other.0).enumerate() {
        close("loss", step, one.loss, other.loss);
        close(
            "norm",
            step,
            one.squared_norm.sqrt(),
            other.squared_norm.sqrt(),
        );
        let (one, other) = (one.of_micro_batches, other.of_micro_batches);
        close("micro-batches' norm", step, one.sqrt(), other.sqrt());
    }
    let vectors = |state: &[UnitState], part: fn(&UnitState) -> &Vec<f32>| {
        state
            .iter()
            .map(|unit| part(unit).clone())
            .collect::<Vec<_>>()
    };
    for part in [
        (|unit| &unit.parameters) as fn(&UnitState) -> &Vec<f32>,
        |unit| &unit.exp_avg,
        |unit| &unit.exp_avg_sq,
    ] {
        // Relative to the unit's largest element.
        assert_close(&vectors(&one.1, part), &vectors(&other.1, part), 1e-5);
    }
}

/// Trains in worlds of several sizes, evenly dealt and not, and compares with one process.
fn check_worlds(config: &ModelConfig, strategy: Strategy, steps: usize) {
    check_worlds_of((config, None), strategy, steps);
}

fn check_worlds_of(model: Model<'_>, strategy: Strategy, steps: usize) {
    for (micro_batches, worlds) in [(6, &[1, 2, 3, 4][..]), (7, &[2, 3]), (4, &[4])] {
        let work = (steps, micro_batches);
        let alone = train(model, Strategy::Replicated, None, work);
        for &world in worlds {
            for result in on_all(world, |world| train(model, strategy, Some(world), work)) {
                assert_same(&alone, &result);
            }
        }
    }
}

#[test]
fn replicas_train_the_same_weights_as_one_process() {
    check_worlds(&config(), Strategy::Replicated, 50);
    check_worlds(&tied(), Strategy::Replicated, 10);
}

#[test]
fn adapters_train_the_same_in_every_world_and_strategy() {
    let adapters = Adapters {
        rank: 2,
        alpha: 8.0,
        rank_stabilized: false,
        dropout: 0.0,
        modules: Vec::new(),
        saved: Vec::new(),
        is_quantised: false,
        is_nested: false,
        seed: 5,
    };
    let with_whole_modules = Adapters {
        saved: ["lm_head", "embed_tokens", "norm"]
            .map(str::to_owned)
            .to_vec(),
        ..adapters.clone()
    };
    for strategy in [Strategy::Replicated, SHARDED, ACCUMULATES_UNSHARDED] {
        check_worlds_of((&config(), Some(&adapters)), strategy, 10);
        check_worlds_of((&config(), Some(&with_whole_modules)), strategy, 5);
        check_worlds_of((&tied(), Some(&adapters)), strategy, 5);
    }
}

#[test]
fn shards_train_the_same_weights_as_one_process() {
    check_worlds(&config(), SHARDED, 50);
    check_worlds(&tied(), SHARDED, 50);
}

#[test]
fn unsharded_accumulation_trains_the_same_weights() {
    check_worlds(&config(), ACCUMULATES_UNSHARDED, 10);
    check_worlds(&tied(), ACCUMULATES_UNSHARDED, 10);
}

#[test]
fn every_family_trains_the_same_in_every_world_and_strategy() {
    let work = (3, 5);
    for config in reference::configs() {
        let alone = train((&config, None), Strategy::Replicated, None, work);
        for strategy in [Strategy::Replicated, SHARDED, ACCUMULATES_UNSHARDED] {
            for result in on_all(2, |world| {
                train((&config, None), strategy, Some(world), work)
            }) {
                assert_same(&alone, &result);
            }
        }
    }
}

/// ‖this rank's gradient‖² of one step of `micro_batches` micro-batches.
fn workers_norm(
    strategy: Strategy,
    world: Arc<tcp::TcpCollective>,
    micro_batches: usize,
) -> Result<f64, EngineError> {
    let own = world.rank();
    let mut engine = rank(&config(), strategy, Some(world));
    let samples = Batch::new(6, SEQ_LEN);
    let mut micro_batches_norm = 0.0;
    for index in 0..micro_batches {
        let row = own * micro_batches + index;
        let micro_batch = samples.part(row, row + 1);
        let got = engine.accumulate(micro_batch, EVERYTHING, index + 1 == micro_batches)?;
        micro_batches_norm = got.squared_norm.unwrap();
    }
    let reduced = engine.reduce(EVERYTHING)?;
    let norm = reduced.local_squared_norm.unwrap();
    if micro_batches == 1 {
        // The same squares, added in another order where vectors are shorter.
        assert!((norm / micro_batches_norm - 1.0).abs() < 1e-12);
    }
    Ok(norm)
}

#[test]
fn a_workers_norm_equals_that_of_its_unsharded_gradient() {
    let norms = |strategy, micro_batches| {
        on_all(2, |world| {
            workers_norm(strategy, world, micro_batches).unwrap()
        })
    };
    let close = |one: Vec<f64>, other: Vec<f64>| {
        for (one, other) in one.iter().zip(other) {
            assert!((one - other).abs() <= 1e-6 * one, "{one} {other}");
        }
    };
    close(norms(Strategy::Replicated, 1), norms(SHARDED, 1));
    close(
        norms(Strategy::Replicated, 1),
        norms(ACCUMULATES_UNSHARDED, 1),
    );
    close(
        norms(Strategy::Replicated, 3),
        norms(ACCUMULATES_UNSHARDED, 3),
    );
}

#[test]
fn an_unavailable_workers_norm_is_refused_with_the_reason() {
    let errors = on_all(2, |world| {
        let error = workers_norm(SHARDED, world.clone(), 2)
            .unwrap_err()
            .to_string();
        world.close().unwrap();
        error
    });
    assert_eq!(
        errors[0],
        "the norm of a rank's accumulated gradient does not exist under full sharding with more \
         than one micro-batch a step: measure micro-batches, or accumulate unsharded"
    );
}

#[test]
fn memory_shrinks_with_the_world() {
    let config = ModelConfig {
        num_hidden_layers: 16,
        ..config()
    };
    let alone = rank(&config, Strategy::Replicated, None);
    let parameters = 4 * alone.layout().len();
    let largest = 4 * alone.layout().largest_unit() as u64;
    assert!(alone.memory().0 >= 4 * parameters);
    let held = |strategy, world| {
        let memory = on_all(world, |world| {
            rank(&config, strategy, Some(world)).memory().0
        });
        *memory.iter().max().unwrap()
    };
    let mut before = alone.memory().0;
    for world in 2..=4 {
        let sharded = held(SHARDED, world);
        // Four vectors in shards; two whole units, their gradients and the shards of those.
        let size = world as u64;
        let expected = 4 * parameters / size + 4 * largest + 2 * largest / size;
        // Every buffer is padded to a multiple of the world size.
        let padding = 4 * size * (4 * 18 + 6);
        assert!(
            sharded <= expected + padding,
            "{world}: {sharded} {expected}"
        );
        assert!(sharded < before);
        before = sharded;
    }
    // The memory of an unsharded gradient.
    let whole = held(ACCUMULATES_UNSHARDED, 4);
    assert!(whole > before && whole < before + parameters + 1000);
}

#[test]
fn a_state_of_one_world_loads_in_any_other() {
    for config in [config(), tied(), with_vectors(), plain()] {
        let (_, expected) = train((&config, None), Strategy::Replicated, None, (3, 6));
        for (strategy, world) in [(SHARDED, 3), (SHARDED, 4), (Strategy::Replicated, 2)] {
            on_all(world, |world| {
                let own = world.rank();
                let mut engine = rank(&config, strategy, Some(world));
                for (unit, state) in expected.iter().enumerate() {
                    engine.import(unit, state).unwrap();
                }
                for (unit, state) in expected.iter().enumerate() {
                    // One rank receives the state, the others take part.
                    let got = engine.export(unit, own == 1).unwrap();
                    assert_eq!(got.as_ref(), (own == 1).then_some(state));
                }
            });
        }
    }
}

#[test]
fn shards_evaluate_like_one_process_also_in_the_middle_of_a_step() {
    for config in [config(), tied(), with_vectors(), plain()] {
        let samples = Batch::new(5, SEQ_LEN);
        let mut alone = rank(&config, Strategy::Replicated, None);
        let expected: Vec<_> = (0..5)
            .map(|row| alone.evaluate(samples.part(row, row + 1)).unwrap())
            .collect();
        on_all(3, |world| {
            let own = world.rank();
            let mut engine = rank(&config, SHARDED, Some(world));
            engine
                .accumulate(samples.part(own, own + 1), NOTHING, false)
                .unwrap();
            for round in 0..2 {
                match round * 3 + own {
                    5 => engine.join_evaluation().unwrap(),
                    row => {
                        let (loss, targets) = engine.evaluate(samples.part(row, row + 1)).unwrap();
                        assert_eq!((loss, targets), expected[row]);
                    }
                }
            }
            engine
                .accumulate(samples.part(own, own + 1), NOTHING, true)
                .unwrap();
            assert!(engine.reduce(NOTHING).unwrap().squared_norm > 0.0);
        });
    }
}

#[test]
fn a_discarded_step_leaves_no_trace_in_shards() {
    let samples = Batch::new(4, SEQ_LEN);
    for strategy in [SHARDED, ACCUMULATES_UNSHARDED] {
        on_all(2, |world| {
            let own = world.rank();
            let mut engine = rank(&config(), strategy, Some(world));
            let mut norm = |rows: &[usize]| {
                for (index, row) in rows.iter().enumerate() {
                    let row = row + 2 * own;
                    let last = index + 1 == rows.len();
                    engine
                        .accumulate(samples.part(row, row + 1), NOTHING, last)
                        .unwrap();
                }
                let norm = engine.reduce(NOTHING).unwrap().squared_norm;
                engine.discard();
                norm
            };
            let expected = norm(&[0, 1]);
            norm(&[1]);
            norm(&[]);
            assert_eq!(norm(&[0, 1]), expected);
        });
    }
}

#[test]
fn a_rank_that_aborts_ends_the_walk_of_the_others() {
    // No rank stops while another one is still in the previous step.
    let stepped = Barrier::new(3);
    on_all(3, |world| {
        let own = world.rank();
        let mut engine = rank(&config(), SHARDED, Some(world.clone()));
        let samples = Batch::new(3, SEQ_LEN);
        let mut step = || {
            engine.accumulate(samples.part(own, own + 1), NOTHING, true)?;
            engine.reduce(NOTHING)
        };
        step().unwrap();
        stepped.wait();
        if own == 1 {
            world.abort("out of memory");
        }
        let error = step().unwrap_err();
        let stopped = matches!(
            &error,
            EngineError::Comm(CommError::Aborted { rank: 1, .. })
        );
        assert!(stopped, "{error}");
        engine.discard();
    });
}
