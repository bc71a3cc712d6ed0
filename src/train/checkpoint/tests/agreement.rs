//! Ranks that finish a checkpoint together, over real sockets and with a real engine.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

use super::*;
use crate::comm::Collective;
use crate::comm::solo::Solo;
use crate::comm::tcp::{Greeting, TcpCollective, TcpOptions, connect, host};
use crate::engine::cpu::{CpuEngine, CpuOptions};
use crate::engine::{AdamW, Engine, Measure, MicroBatch};

/// Runs `work` on every rank of a world, a thread each, and gives the results in rank order.
fn on_all<T: Send>(world: usize, work: impl Fn(Arc<TcpCollective>) -> T + Sync) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = |rank| {
        let greeting = Greeting {
            job_uid: "checkpoint".into(),
            generation: 1,
            rank,
            world,
        };
        TcpOptions::new("127.0.0.1", port, greeting)
    };
    thread::scope(|scope| {
        let work = &work;
        let mut listener = Some(listener);
        let start = |rank| {
            let (options, listener) = (options(rank), listener.take());
            scope.spawn(move || {
                let collective = match listener {
                    Some(listener) => host(&options, listener).unwrap(),
                    None => connect(&options).unwrap(),
                };
                let result = work(collective.clone());
                collective.close().unwrap();
                result
            })
        };
        let ranks: Vec<_> = (0..world).map(start).collect();
        let joined = ranks.into_iter().map(|rank| rank.join().unwrap());
        joined.collect()
    })
}

fn finish(
    target: &Target,
    layout: &Layout,
    companions: &[PathBuf],
    world: &dyn Collective,
) -> Result<Committed, CheckpointError> {
    let writer = Writer::begin(target, layout, world.rank(), world.world());
    for unit in 0..layout.units.len() {
        if writer.owns(unit) {
            writer.write_unit(unit, unit_state(layout, unit, target.step));
        }
    }
    let contents = Contents {
        layout,
        samples: target.step * 16,
        state: &loop_state(target.step),
        config: &config().to_json(),
        companions,
    };
    finish_together(writer, target, contents, world)
}

#[test]
fn every_rank_learns_of_the_one_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let target = target(run.path(), 1, 3);
    let results = on_all(3, |world| finish(&target, &layout, &[], &*world).unwrap());
    assert_whole(&results[0], &layout);
    assert!(results.iter().all(|one| *one == results[0]), "{results:?}");
}

#[test]
fn rank_with_a_full_disk_stops_the_checkpoint_for_everyone() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let good = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let next = target(run.path(), 1, 2);
    std::fs::create_dir_all(next.partial()).unwrap();
    let of_rank_1 = next.partial().join("model-00005-of-00005.safetensors");
    std::os::unix::fs::symlink("/dev/full", of_rank_1).unwrap();
    let failures = on_all(3, |world| finish(&next, &layout, &[], &*world).unwrap_err());
    for (rank, failure) in failures.iter().enumerate() {
        let said = failure.to_string();
        assert!(said.contains("no space left on"), "rank {rank}: {said}");
        match failure {
            CheckpointError::NotWritten { .. } => assert_eq!(rank, 1),
            CheckpointError::OtherRank { rank: who, .. } => {
                assert_eq!((rank != 1, *who), (true, 1))
            }
            other => panic!("rank {rank}: {other}"),
        }
    }
    assert!(!next.partial().exists());
    assert_eq!(list(run.path()).unwrap().committed, [good]);
    // And the next attempt at the same step is none the worse for it.
    let again = on_all(3, |world| finish(&next, &layout, &[], &*world).unwrap());
    assert_whole(&again[2], &layout);
}

#[test]
fn coordinator_that_cannot_commit_tells_everyone() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let next = target(run.path(), 1, 1);
    let absent = [run.path().join("tokenizer.json")];
    let failures = on_all(2, |world| {
        finish(&next, &layout, &absent, &*world).unwrap_err()
    });
    assert!(
        matches!(failures[0], CheckpointError::NotWritten { .. }),
        "{}",
        failures[0]
    );
    let said = failures[1].to_string();
    assert!(
        said.starts_with("rank 0 stopped the checkpoint: cannot read "),
        "{said}"
    );
    assert!(!next.partial().exists());
}

fn step(engine: &mut CpuEngine, number: u64) -> f64 {
    let tokens: Vec<u32> = (0..16).map(|i| (i * 7 + number as u32) % 40).collect();
    let targets: Vec<u32> = tokens.iter().map(|token| (token * 3 + 1) % 40).collect();
    let micro = MicroBatch {
        tokens: &tokens,
        targets: &targets,
        batch: 2,
        seq_len: 8,
    };
    engine.reserve(2, 8).unwrap();
    let result = engine.accumulate(micro, Measure::default(), true).unwrap();
    engine.reduce(Measure::default()).unwrap();
    let update = AdamW {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: number,
        gradient_scale: 1.0 / result.targets as f64,
    };
    engine.update(update).unwrap();
    result.loss
}

#[test]
fn engine_restored_from_a_checkpoint_goes_on_as_if_nothing_had_happened() {
    let engine = |seed| CpuEngine::new(config(), CpuOptions::default(), None, seed).unwrap();
    let mut first = engine(1);
    step(&mut first, 1);
    step(&mut first, 2);

    let run = tempfile::tempdir().unwrap();
    let target = target(run.path(), 1, 2);
    let layout = first.layout().clone();
    let writer = Writer::begin(&target, &layout, 0, 1);
    for unit in 0..layout.units.len() {
        let state = first.export(unit, writer.owns(unit)).unwrap();
        writer.write_unit(unit, state.unwrap());
    }
    let contents = Contents {
        layout: &layout,
        samples: 4,
        state: &loop_state(2),
        config: &config().to_json(),
        companions: &[],
    };
    let committed = finish_together(writer, &target, contents, &Solo).unwrap();

    let mut second = engine(2);
    let checkpoint = Checkpoint::open_lazily(&committed.path, Some(committed.checksum)).unwrap();
    checkpoint.restore(&mut second).unwrap();
    for number in 3..6 {
        assert_eq!(step(&mut first, number), step(&mut second, number));
    }
    for unit in 0..layout.units.len() {
        let states = [&mut first, &mut second].map(|engine| engine.export(unit, true).unwrap());
        assert!(states[0] == states[1], "unit {unit}");
    }
}

#[test]
fn engine_of_another_shape_is_not_touched() {
    let run = tempfile::tempdir().unwrap();
    let committed = write(&target(run.path(), 1, 1), &default_layout(), 1).unwrap();
    let other = ModelConfig {
        num_hidden_layers: 2,
        ..config()
    };
    let mut engine = CpuEngine::new(other, CpuOptions::default(), None, 1).unwrap();
    let before = engine.export(0, true).unwrap();
    let checkpoint = Checkpoint::open_lazily(&committed.path, None).unwrap();
    let error = checkpoint.restore(&mut engine).unwrap_err();
    assert!(matches!(error, CheckpointError::Shape { .. }), "{error}");
    assert!(engine.export(0, true).unwrap() == before);
}
