//! Ranks that finish a checkpoint together, over real sockets.

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
