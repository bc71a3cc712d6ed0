//! Checkpoints of a real engine.

use super::*;
use crate::comm::solo::Solo;
use crate::engine::cpu::{CpuEngine, CpuOptions};
use crate::engine::{AdamW, Engine, Measure, MicroBatch, Strategy};

/// A language in which each token determines the next one; 2 rows of 8.
fn tokens(number: u64) -> (Vec<u32>, Vec<u32>) {
    let tokens: Vec<u32> = (0..16).map(|i| (i * 7 + number as u32) % 40).collect();
    let targets = tokens.iter().map(|token| (token * 3 + 1) % 40).collect();
    (tokens, targets)
}

fn step(engine: &mut CpuEngine, number: u64) -> f64 {
    let (tokens, targets) = tokens(number);
    let micro_batch = MicroBatch {
        tokens: &tokens,
        targets: &targets,
        batch: 2,
        seq_len: 8,
        ..MicroBatch::default()
    };
    engine.reserve(2, 8).unwrap();
    let result = engine
        .accumulate(micro_batch, Measure::default(), true)
        .unwrap();
    engine.reduce(Measure::default()).unwrap();
    let update = AdamW {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        vector_decay: 0.0,
        step: number,
        gradient_scale: 1.0 / result.targets as f64,
    };
    engine.update(update).unwrap();
    result.loss
}

/// Writes a checkpoint; every rank calls it.
fn checkpoint(
    engine: &mut CpuEngine,
    world: &dyn Collective,
    target: &Target,
    state: &Value,
) -> Committed {
    let layout = engine.layout().clone();
    let writer = Writer::begin(target, &layout, world.rank(), world.world());
    for unit in 0..layout.units.len() {
        if let Some(state) = engine.export(unit, writer.owns(unit)).unwrap() {
            writer.write_unit(unit, state);
        }
    }
    let contents = Contents {
        layout: &layout,
        samples: 2 * target.step,
        state,
        config: &config().to_json(),
        companions: &[],
        chat_template: None,
    };
    finish_together(writer, target, contents, world).unwrap()
}

#[test]
fn an_engine_restored_from_a_checkpoint_continues_bit_for_bit() {
    let engine = |seed| CpuEngine::new(config(), CpuOptions::default(), None, seed).unwrap();
    let mut first = engine(Some(1));
    step(&mut first, 1);
    step(&mut first, 2);

    let run = tempfile::tempdir().unwrap();
    let committed = checkpoint(&mut first, &Solo, &target(run.path(), 1, 2), &loop_state(2));

    let mut second = engine(None);
    let checkpoint = Checkpoint::open_lazily(&committed.path, Some(committed.checksum)).unwrap();
    checkpoint.restore(&mut second).unwrap();
    for number in 3..6 {
        assert_eq!(step(&mut first, number), step(&mut second, number));
    }
    for unit in 0..first.layout().units.len() {
        let states = [&mut first, &mut second].map(|engine| engine.export(unit, true).unwrap());
        assert!(states[0] == states[1], "unit {unit}");
    }
}

#[test]
fn a_sharded_worlds_checkpoint_loads_in_any_other_world() {
    let strategy = Strategy::Sharded {
        unsharded_accumulation: false,
    };
    let sharded = CpuOptions {
        threads: Some(1),
        strategy,
        ..CpuOptions::default()
    };
    let run = tempfile::tempdir().unwrap();
    let target = target(run.path(), 1, 2);
    let written = on_all(3, |world| {
        let mut engine =
            CpuEngine::new(config(), sharded.clone(), Some(world.clone()), Some(1)).unwrap();
        step(&mut engine, 1);
        step(&mut engine, 2);
        checkpoint(&mut engine, &*world, &target, &loop_state(2))
    });
    let units = default_layout().units.len();
    let restored = |options: CpuOptions, world: Arc<TcpCollective>, seed: u64| -> Vec<UnitState> {
        let mut engine = CpuEngine::new(config(), options, Some(world), Some(seed)).unwrap();
        let pinned = Some(written[0].checksum);
        let checkpoint = Checkpoint::open_lazily(&written[0].path, pinned).unwrap();
        checkpoint.restore(&mut engine).unwrap();
        let mut export = |unit| engine.export(unit, true).unwrap().unwrap();
        (0..units).map(&mut export).collect()
    };
    let alone = Checkpoint::open(&written[0].path, None).unwrap();
    let by_one_rank = tempfile::tempdir().unwrap();
    let mut engine = CpuEngine::new(config(), CpuOptions::default(), None, None).unwrap();
    alone.restore(&mut engine).unwrap();
    let target_of_one = super::target(by_one_rank.path(), 4, 9);
    let again = checkpoint(&mut engine, &Solo, &target_of_one, &loop_state(9));
    let weights = |committed: &Committed| {
        let checkpoint = Checkpoint::open_lazily(&committed.path, None).unwrap();
        checkpoint.weights_checksum().unwrap()
    };
    assert_ne!(again.checksum, written[0].checksum);
    assert_eq!(weights(&again), weights(&written[0]));
    step(&mut engine, 3);
    let target_of_one = super::target(by_one_rank.path(), 4, 10);
    let later = checkpoint(&mut engine, &Solo, &target_of_one, &loop_state(10));
    assert_ne!(weights(&later), weights(&again));
    let held: Vec<UnitState> = (0..units).map(|u| alone.load_unit(u).unwrap()).collect();
    assert!(
        held.iter()
            .all(|unit| unit.exp_avg_sq.iter().any(|&v| v > 0.0))
    );
    for (world, options) in [
        (2, sharded.clone()),
        (4, sharded),
        (2, CpuOptions::default()),
    ] {
        for states in on_all(world, |ranks| {
            restored(options.clone(), ranks, world as u64)
        }) {
            assert!(states == held, "world {world}, {options:?}");
        }
    }
}

#[test]
fn an_engine_of_another_shape_is_not_changed() {
    let run = tempfile::tempdir().unwrap();
    let committed = write(&target(run.path(), 1, 1), &default_layout(), 1).unwrap();
    let other = ModelConfig {
        num_hidden_layers: 2,
        ..config()
    };
    let mut engine = CpuEngine::new(other, CpuOptions::default(), None, Some(1)).unwrap();
    let before = engine.export(0, true).unwrap();
    let checkpoint = Checkpoint::open_lazily(&committed.path, None).unwrap();
    let error = checkpoint.restore(&mut engine).unwrap_err();
    assert!(matches!(error, CheckpointError::Shape { .. }), "{error}");
    assert!(engine.export(0, true).unwrap() == before);
}

/// `tests/reference/transformers_weights.py` compares the loss in the state with the loss that transformers
/// computes from the weights.
#[test]
#[ignore = "writes a checkpoint into $EVENKEEL_REFERENCE for a script"]
fn checkpoint_for_transformers() {
    let run = PathBuf::from(std::env::var_os("EVENKEEL_REFERENCE").expect("a directory"));
    let mut engine = CpuEngine::new(config(), CpuOptions::default(), None, Some(1)).unwrap();
    step(&mut engine, 1);
    step(&mut engine, 2);
    let (tokens, targets) = tokens(9);
    let micro_batch = MicroBatch {
        tokens: &tokens,
        targets: &targets,
        batch: 2,
        seq_len: 8,
        ..MicroBatch::default()
    };
    let (loss, _) = engine.evaluate(micro_batch).unwrap();
    let rows = |cells: &[u32]| cells.chunks(8).map(<[u32]>::to_vec).collect::<Vec<_>>();
    let state = json!({ "tokens": rows(&tokens), "targets": rows(&targets), "loss": loss });
    let committed = checkpoint(&mut engine, &Solo, &target(&run, 1, 2), &state);
    println!("{}", committed.path.display());
}
