//! Ranks that finish a checkpoint together over real sockets.

use super::*;
use crate::comm::Collective;

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
        chat_template: None,
    };
    finish_together(writer, target, contents, world)
}

#[test]
fn every_rank_receives_the_same_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let target = target(run.path(), 1, 3);
    let results = on_all(3, |world| finish(&target, &layout, &[], &*world).unwrap());
    assert_whole(&results[0], &layout);
    assert!(results.iter().all(|one| *one == results[0]), "{results:?}");
}

#[test]
fn a_rank_with_a_full_disk_stops_the_checkpoint_on_all_ranks() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let good = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let next = target(run.path(), 1, 2);
    std::fs::create_dir_all(next.partial()).unwrap();
    let of_rank_1 = next.partial().join("model-00005-of-00005.safetensors");
    std::os::unix::fs::symlink("/dev/full", of_rank_1).unwrap();
    let failures = on_all(3, |world| finish(&next, &layout, &[], &*world).unwrap_err());
    for (rank, failure) in failures.iter().enumerate() {
        let message = failure.to_string();
        assert!(
            message.contains("no space left on"),
            "rank {rank}: {message}"
        );
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
    // The next attempt at the same step succeeds.
    let again = on_all(3, |world| finish(&next, &layout, &[], &*world).unwrap());
    assert_whole(&again[2], &layout);
}

#[test]
fn a_coordinator_that_cannot_commit_reports_it_to_every_rank() {
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
    let message = failures[1].to_string();
    assert!(
        message.starts_with("rank 0 stopped the checkpoint: cannot read "),
        "{message}"
    );
    assert!(!next.partial().exists());
}
