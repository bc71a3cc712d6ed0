//! The norm test on real gradients: the CPU engine, a synthetic language, ranks over TCP.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

use evenkeel::comm::World;
use evenkeel::comm::tcp::{Greeting, TcpOptions, connect, host};
use evenkeel::data::Language;
use evenkeel::engine::cpu::{CpuEngine, CpuOptions};
use evenkeel::engine::{Engine, IGNORE, Measure, MicroBatch, ModelConfig, Strategy};
use evenkeel::norm::{GroupSums, Sums};
use evenkeel::recipe::spec::Synthetic;
use evenkeel::samples::micro_batches;
use evenkeel::util::key::Key;

const SEQ_LEN: usize = 16;
const MICRO: u64 = 2;

/// A measurement that full sharding supports with several micro-batches a step.
const MICRO_BATCHES: Measure = Measure {
    micro_batches: true,
    worker: false,
    coordinates: false,
};
const EVERYTHING: Measure = Measure {
    micro_batches: true,
    worker: true,
    coordinates: false,
};

fn engine(strategy: Strategy, world: Option<World>) -> CpuEngine {
    let config = ModelConfig {
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        vocab_size: 64,
        max_position_embeddings: SEQ_LEN,
        norm_eps: 1e-5,
        tie_word_embeddings: true,
        initializer_range: 0.1,
        ..ModelConfig::default()
    };
    let options = CpuOptions {
        threads: Some(1),
        strategy,
        measure: EVERYTHING,
        ..CpuOptions::default()
    };
    CpuEngine::new(config, options, world, Some(3)).unwrap()
}

/// Rows of the language. Each row has up to `masked` targets without loss, at its start.
struct Data {
    language: Language,
    masked: fn(u64) -> usize,
}

impl Data {
    fn new(masked: fn(u64) -> usize) -> Self {
        let settings = Synthetic {
            vocabulary: 64,
            branching: 4,
            ..Synthetic::default()
        };
        Data {
            language: Language::new(&settings, "synthetic").unwrap(),
            masked,
        }
    }

    /// Tokens and targets of a micro-batch, `[rows, SEQ_LEN]`.
    fn rows(&self, positions: std::ops::Range<u64>) -> (Vec<u32>, Vec<u32>) {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for position in positions {
            let row = self.language.sample(position, SEQ_LEN + 1);
            let masked = (self.masked)(position);
            tokens.extend_from_slice(&row[..SEQ_LEN]);
            targets.extend(
                row[1..]
                    .iter()
                    .enumerate()
                    .map(|(i, &target)| if i < masked { IGNORE } else { target }),
            );
        }
        (tokens, targets)
    }
}

/// Measurements of one rank in a step: with micro-batches as groups, with the rank as the only
/// group, and the norm of the global gradient.
struct Measured {
    micro_batches: GroupSums,
    worker: GroupSums,
    squared_norm: f64,
}

/// One rank's part of a step.
fn step(
    engine: &mut CpuEngine,
    measure: Measure,
    data: &Data,
    (start, hands): (u64, &[u64]),
    rank: usize,
) -> Measured {
    let most = hands.iter().max().copied().unwrap_or(0);
    let mut measured = Measured {
        micro_batches: GroupSums::default(),
        worker: GroupSums::default(),
        squared_norm: 0.0,
    };
    let mut targets_seen = 0;
    let mine: Vec<_> = micro_batches(start, MICRO, hands, rank).collect();
    for i in 0..most as usize {
        let last = i + 1 == most as usize;
        let Some(positions) = mine.get(i).cloned() else {
            engine.join(last).unwrap();
            continue;
        };
        let (tokens, targets) = data.rows(positions);
        let micro_batch = MicroBatch {
            tokens: &tokens,
            targets: &targets,
            batch: MICRO as usize,
            seq_len: SEQ_LEN,
            ..MicroBatch::default()
        };
        let done = engine.accumulate(micro_batch, measure, last).unwrap();
        measured
            .micro_batches
            .add(done.squared_norm.unwrap(), done.targets);
        targets_seen += done.targets;
    }
    let reduced = engine.reduce(measure).unwrap();
    engine.discard();
    measured
        .worker
        .add(reduced.local_squared_norm.unwrap_or(0.0), targets_seen);
    measured.squared_norm = reduced.squared_norm;
    measured
}

/// Runs a step on one rank per entry of `hands`; returns the sums over micro-batches and over
/// workers.
fn world_step(strategy: Strategy, measure: Measure, data: &Data, hands: &[u64]) -> (Sums, Sums) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut listener = Some(listener);
    let key = Key::random().unwrap();
    let measured: Vec<Measured> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..hands.len())
            .map(|rank| {
                let greeting = Greeting {
                    rank,
                    world: hands.len(),
                };
                let options = TcpOptions::new("127.0.0.1", port, greeting, key.clone());
                let listener = listener.take();
                scope.spawn(move || {
                    let world: World = match listener {
                        Some(listener) => host(&options, listener).unwrap(),
                        None => connect(&options).unwrap(),
                    };
                    let mut engine = engine(strategy, Some(Arc::clone(&world)));
                    let measured = step(&mut engine, measure, data, (0, hands), rank);
                    world.exchange(b"done").unwrap();
                    measured
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let (mut micro_batches, mut workers) = (GroupSums::default(), GroupSums::default());
    for rank in &measured {
        micro_batches.merge(&rank.micro_batches);
        workers.merge(&rank.worker);
        assert_eq!(rank.squared_norm, measured[0].squared_norm);
    }
    let batch = hands.iter().sum::<u64>() * MICRO;
    let total = measured[0].squared_norm;
    (micro_batches.sums(total, batch), workers.sums(total, batch))
}

fn assert_close(what: &str, a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-5, "{what}: {a} and {b}");
}

fn assert_same(what: &str, a: Sums, b: Sums) {
    assert_eq!((a.groups, a.batch), (b.groups, b.batch), "{what}");
    assert_close(&format!("{what}: A"), a.weighted, b.weighted);
    assert_close(&format!("{what}: C"), a.total, b.total);
    let (a, b) = (a.unbiased().unwrap(), b.unbiased().unwrap());
    assert_close(&format!("{what}: V"), a.variance, b.variance);
}

/// The same step in one process, once with micro-batches as groups, once with the sums of each
/// worker's micro-batches.
fn one_process(data: &Data, hands: &[u64]) -> (Sums, Sums) {
    let all: u64 = hands.iter().sum();
    let mut engine = engine(Strategy::Replicated, None);
    let whole = step(&mut engine, EVERYTHING, data, (0, &[all]), 0);
    let mut workers = GroupSums::default();
    for (hand, &count) in hands.iter().enumerate() {
        // A worker's gradient comes from its micro-batches alone, run as a separate step.
        let first = micro_batches(0, MICRO, hands, hand).next().unwrap().start;
        let alone = step(&mut engine, EVERYTHING, data, (first, &[count]), 0);
        workers.add(alone.squared_norm, alone.micro_batches.units);
    }
    (
        whole.micro_batches.sums(whole.squared_norm, all * MICRO),
        workers.sums(whole.squared_norm, all * MICRO),
    )
}

#[test]
fn ranks_measure_what_one_process_measures() {
    let masked = Data::new(|position| (position % 5) as usize * 3);
    let unsharded = Strategy::Sharded {
        unsharded_accumulation: true,
    };
    let sharded = Strategy::Sharded {
        unsharded_accumulation: false,
    };
    for hands in [&[2, 2][..], &[3, 1], &[2, 2, 1]] {
        let (micro_batches, workers) = one_process(&masked, hands);
        for strategy in [Strategy::Replicated, unsharded] {
            let what = format!("{strategy:?} {hands:?}");
            let measured = world_step(strategy, EVERYTHING, &masked, hands);
            assert_same(&format!("{what}, micro-batches"), measured.0, micro_batches);
            assert_same(&format!("{what}, workers"), measured.1, workers);
        }
        let (of_micro_batches, _) = world_step(sharded, MICRO_BATCHES, &masked, hands);
        let what = format!("{sharded:?} {hands:?}, micro-batches");
        assert_same(&what, of_micro_batches, micro_batches);
    }
}

#[test]
fn the_estimates_do_not_depend_on_the_batch_or_the_groups() {
    // The factor b/(G − 1) makes V a property of the data; without it the values would depend on
    // the batch size.
    let data = Data::new(|_| 0);
    let mut engine = engine(Strategy::Replicated, None);
    let mut estimate = |micro_batches: u64| {
        let (mut variance, mut gradient) = (0.0, 0.0);
        let steps = 512 / micro_batches;
        for i in 0..steps {
            let start = i * micro_batches * MICRO;
            let measured = step(
                &mut engine,
                MICRO_BATCHES,
                &data,
                (start, &[micro_batches]),
                0,
            );
            let sums = measured
                .micro_batches
                .sums(measured.squared_norm, micro_batches * MICRO);
            let estimate = sums.unbiased().unwrap();
            variance += estimate.variance / steps as f64;
            gradient += estimate.gradient / steps as f64;
        }
        (variance, gradient)
    };
    let (variance, gradient) = estimate(512);
    for micro_batches in [2, 8, 64] {
        let (v, g) = estimate(micro_batches);
        assert!(
            (v / variance - 1.0).abs() < 0.1 && (g / gradient - 1.0).abs() < 0.1,
            "{micro_batches} micro-batches: V {v}, |grad|² {g}; 512: {variance}, {gradient}"
        );
    }
}
