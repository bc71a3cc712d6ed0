//! Gradients in fixed point: the same bits in every world, sharding, order of samples and number of threads.

use super::worlds::{SEQ_LEN, SHARDED, deal};
use super::*;
use crate::comm::Collective;
use crate::comm::tcp::tests::on_all;

const SAMPLES: usize = 7;
const MICRO_BATCHES: Measure = Measure {
    micro_batches: true,
    worker: false,
    coordinates: false,
};

/// The bits of a step: of each sample's loss and squared norm, in their order, of the norm, and of the weights afterwards.
type Bits = (Vec<[u64; 2]>, Vec<u64>, Vec<Vec<u32>>);

/// How a rank trains.
#[derive(Clone, Copy)]
struct Way<'a> {
    config: &'a ModelConfig,
    adapters: Option<&'a Adapters>,
    strategy: Strategy,
    threads: usize,
    /// Samples backwards within a rank.
    reversed: bool,
    in_fixed_point: bool,
    activation_checkpointing: bool,
}

impl<'a> Way<'a> {
    fn of(config: &'a ModelConfig) -> Way<'a> {
        Way {
            config,
            adapters: None,
            strategy: Strategy::Replicated,
            threads: 1,
            reversed: false,
            in_fixed_point: true,
            activation_checkpointing: false,
        }
    }
}

/// Trains three steps of single samples.
fn train(way: Way<'_>, world: Option<World>) -> Bits {
    let options = CpuOptions {
        threads: Some(way.threads),
        strategy: way.strategy,
        measure: MICRO_BATCHES,
        adapters: way.adapters.cloned(),
        in_fixed_point: way.in_fixed_point,
        activation_checkpointing: way.activation_checkpointing,
        ..CpuOptions::default()
    };
    let (own, size) = world
        .as_ref()
        .map_or((0, 1), |world| (world.rank(), world.world()));
    let mut engine = CpuEngine::new(way.config.clone(), options, world.clone(), Some(5)).unwrap();
    engine.reserve(1, SEQ_LEN).unwrap();
    let dealt = deal(SAMPLES, size);
    let first: usize = dealt[..own].iter().sum();
    let samples = Batch::of_vocabulary(24, 3 * SAMPLES, SEQ_LEN);
    let (mut of_samples, mut norms) = (Vec::new(), Vec::new());
    for step in 0..3 {
        let mut rows: Vec<usize> = (first..first + dealt[own]).collect();
        if way.reversed {
            rows.reverse();
        }
        let mut seen = vec![[0; 2]; SAMPLES];
        for index in 0..dealt[0] {
            let Some(&row) = rows.get(index) else {
                engine.join(index + 1 == dealt[0]).unwrap();
                continue;
            };
            let at = step * SAMPLES + row;
            let dropout = [at as u64];
            let micro_batch = MicroBatch {
                dropout: &dropout,
                ..samples.part(at, at + 1)
            };
            let last = index + 1 == rows.len();
            let got = engine.accumulate(micro_batch, MICRO_BATCHES, last).unwrap();
            seen[row] = [got.loss.to_bits(), got.squared_norm.unwrap().to_bits()];
        }
        of_samples.extend(seen);
        let Reduced { squared_norm, .. } = engine.reduce(MICRO_BATCHES).unwrap();
        norms.push(squared_norm.to_bits());
        let update = AdamW {
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            vector_decay: 0.0,
            step: step as u64 + 1,
            gradient_scale: 1.0 / squared_norm.sqrt(),
        };
        engine.update(update).unwrap();
    }
    let units = 0..engine.layout().units.len();
    let weights = units.map(|unit| {
        let state = engine.export(unit, true).unwrap().unwrap();
        let all = [state.parameters, state.exp_avg, state.exp_avg_sq].concat();
        all.iter().map(|x| x.to_bits()).collect()
    });
    (of_samples, norms, weights.collect())
}

/// The parts of all ranks together: each has the samples that it walked.
fn together(ranks: Vec<Bits>) -> Bits {
    let mut ranks = ranks.into_iter();
    let mut all = ranks.next().unwrap();
    for (of_samples, norms, weights) in ranks {
        for (all, own) in all.0.iter_mut().zip(of_samples) {
            if own != [0; 2] {
                *all = own;
            }
        }
        assert_eq!(norms, all.1);
        assert!(weights == all.2);
    }
    all
}

/// Whether every world has the bits of one process.
fn worlds_agree(way: Way<'_>) -> bool {
    let alone = train(
        Way {
            strategy: Strategy::Replicated,
            ..way
        },
        None,
    );
    (2..=4).all(|world| {
        let threads = way.threads;
        together(on_all(world, |world| {
            // Ranks of a machine share its threads.
            let way = Way {
                threads: threads + world.rank() % 2,
                ..way
            };
            train(way, Some(world))
        })) == alone
    })
}

#[test]
fn every_world_sharding_and_family_has_the_bits_of_one_process() {
    for config in [config(), tied(), with_vectors(), plain()] {
        for strategy in [Strategy::Replicated, SHARDED] {
            let way = Way {
                strategy,
                ..Way::of(&config)
            };
            assert!(worlds_agree(way), "{strategy:?} {config:?}");
        }
    }
}

/// The planted change: with sums in f32 the worlds differ.
#[test]
fn sums_in_f32_depend_on_the_world() {
    let config = config();
    for strategy in [Strategy::Replicated, SHARDED] {
        let way = Way {
            strategy,
            in_fixed_point: false,
            ..Way::of(&config)
        };
        assert!(!worlds_agree(way), "{strategy:?}");
    }
}

#[test]
fn the_order_of_samples_threads_and_checkpointing_of_activations_change_no_bit() {
    let config = config();
    let expected = train(Way::of(&config), None);
    for way in [
        Way {
            reversed: true,
            ..Way::of(&config)
        },
        Way {
            threads: 3,
            ..Way::of(&config)
        },
        Way {
            activation_checkpointing: true,
            ..Way::of(&config)
        },
    ] {
        assert!(train(way, None) == expected);
    }
    // In f32 the order changes bits.
    let in_f32 = |reversed| {
        let way = Way {
            reversed,
            in_fixed_point: false,
            ..Way::of(&config)
        };
        train(way, None).2
    };
    assert!(in_f32(true) != in_f32(false));
}

#[test]
fn adapters_with_dropout_have_the_same_bits_in_every_world() {
    let adapters = Adapters {
        rank: 2,
        alpha: 8.0,
        rank_stabilized: false,
        dropout: 0.25,
        modules: Vec::new(),
        saved: vec!["lm_head".to_owned()],
        is_quantised: false,
        is_nested: false,
        seed: 5,
    };
    let config = config();
    for strategy in [Strategy::Replicated, SHARDED] {
        let way = Way {
            strategy,
            adapters: Some(&adapters),
            ..Way::of(&config)
        };
        assert!(worlds_agree(way), "{strategy:?}");
    }
}

#[test]
fn the_sums_are_those_of_f32_up_to_rounding() {
    let config = config();
    let [fixed, plain] = [true, false].map(|in_fixed_point| {
        let way = Way {
            in_fixed_point,
            ..Way::of(&config)
        };
        train(way, None)
            .1
            .into_iter()
            .map(f64::from_bits)
            .collect::<Vec<f64>>()
    });
    for (fixed, plain) in fixed.iter().zip(&plain) {
        assert!((fixed - plain).abs() < 1e-5 * plain, "{fixed} {plain}");
    }
}

/// On every rank, whichever sample has it, and the step can be discarded.
#[test]
fn a_gradient_that_is_not_finite_makes_the_norm_infinite_on_every_rank() {
    for strategy in [Strategy::Replicated, SHARDED] {
        let norms = on_all(2, |world| {
            let rank = world.rank();
            let options = CpuOptions {
                threads: Some(1),
                strategy,
                in_fixed_point: true,
                ..CpuOptions::default()
            };
            let mut engine = CpuEngine::new(config(), options, Some(world), Some(5)).unwrap();
            let batch = Batch::new(1, SEQ_LEN);
            let mut norm_of = |weight: f32| {
                let tokens = batch.tokens.len();
                let weigh: Weigh<'_> = Box::new(move |_| vec![weight; tokens]);
                let loss = BatchLoss::Weighed(1, weigh);
                let micro_batch = batch.micro_batch();
                engine
                    .accumulate_loss(micro_batch, loss, NOTHING, true)
                    .unwrap();
                let norm = engine.reduce(NOTHING).unwrap().squared_norm;
                engine.discard();
                norm
            };
            let finite = norm_of(1.0);
            let wrong = norm_of(if rank == 1 { f32::NAN } else { 1.0 });
            let too_large = norm_of(if rank == 0 { 1e9 } else { 1.0 });
            (finite, wrong, too_large, norm_of(1.0))
        });
        for (finite, wrong, too_large, again) in norms {
            assert!(finite.is_finite() && finite > 0.0);
            assert_eq!((wrong, too_large), (f64::INFINITY, f64::INFINITY));
            assert_eq!(again, finite);
        }
    }
}

#[test]
fn measurements_with_other_sums_are_refused() {
    let options = CpuOptions {
        measure: EVERYTHING,
        in_fixed_point: true,
        ..CpuOptions::default()
    };
    let mut engine = engine_with(config(), options);
    let batch = Batch::new(1, SEQ_LEN);
    let refused = engine.accumulate(batch.micro_batch(), EVERYTHING, true);
    insta::assert_snapshot!(refused.unwrap_err(), @"gradients in fixed point are measured by micro-batch only");
}
