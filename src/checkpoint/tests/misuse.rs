//! Parts that do not make a checkpoint.

use super::*;

fn misuse(error: CheckpointError) -> String {
    match error {
        CheckpointError::Misuse(message) => message,
        other => panic!("{other}"),
    }
}

#[test]
fn a_unit_that_was_never_handed_over_fails_the_part() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let writer = Writer::begin(&target(run.path(), 1, 1), &layout, 1, 2);
    writer.write_unit(1, unit_state(&layout, 1, 1));
    let message = misuse(writer.finish().unwrap_err());
    assert_eq!(
        message,
        "rank 1 was never handed the states of 1 of its units"
    );
}

#[test]
fn units_handed_over_twice_or_of_other_lengths_are_refused() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let refusal = |units: &[(usize, UnitState)]| {
        let writer = Writer::begin(&target(run.path(), 1, 1), &layout, 0, 2);
        for (unit, state) in units {
            writer.write_unit(*unit, state.clone());
        }
        misuse(writer.finish().unwrap_err())
    };
    let first = unit_state(&layout, 0, 1);
    let twice = refusal(&[(0, first.clone()), (0, first.clone())]);
    assert!(
        twice.starts_with("unit 0 of 5 was handed to rank 0"),
        "{twice}"
    );
    let beyond = refusal(&[(6, UnitState::default())]);
    assert!(
        beyond.starts_with("unit 6 of 5 was handed to rank 0"),
        "{beyond}"
    );
    let short = UnitState {
        exp_avg: Vec::new(),
        ..first
    };
    assert_eq!(
        refusal(&[(0, short)]),
        "unit `embed` has 640 elements and its state [640, 0, 640]"
    );
}

#[test]
fn units_of_other_ranks_are_dropped() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let target = target(run.path(), 1, 1);
    let part = |rank| {
        let writer = Writer::begin(&target, &layout, rank, 2);
        // An engine may export a unit that the rank does not request.
        for unit in 0..layout.units.len() {
            writer.write_unit(unit, unit_state(&layout, unit, 1));
        }
        writer.finish().unwrap()
    };
    let parts = [part(0), part(1)];
    assert_eq!((parts[0].files.len(), parts[1].files.len()), (6, 4));
    let committed = commit_parts(&target, &layout, &parts).unwrap();
    assert_whole(&committed, &layout);
}

#[test]
fn parts_of_another_step_generation_or_world_are_not_committed() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let now = target(run.path(), 2, 5);
    let part = |target: &Target, rank, world| write_part(target, &layout, rank, world).unwrap();
    let zombie = target(run.path(), 1, 5);
    let stale = target(run.path(), 2, 4);
    for parts in [
        vec![],
        vec![part(&now, 0, 2)],
        vec![part(&now, 1, 2), part(&now, 0, 2)],
        vec![part(&now, 0, 2), part(&zombie, 1, 2)],
        vec![part(&now, 0, 2), part(&stale, 1, 2)],
    ] {
        misuse(commit_parts(&now, &layout, &parts).unwrap_err());
        assert!(list(run.path()).unwrap().committed.is_empty());
    }
}

#[test]
fn files_invisible_to_the_coordinator_are_not_committed() {
    let here = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let own = target(here.path(), 1, 1);
    let parts = [
        write_part(&own, &layout, 0, 2).unwrap(),
        write_part(&target(elsewhere.path(), 1, 1), &layout, 1, 2).unwrap(),
    ];
    let message = misuse(commit_parts(&own, &layout, &parts).unwrap_err());
    assert!(
        message.contains("model-00002-of-00005.safetensors is missing"),
        "{message}"
    );
    assert!(message.contains("share the run's directory"), "{message}");
}

#[test]
fn a_committed_step_is_not_overwritten() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let good = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let message = misuse(write(&target(run.path(), 1, 1), &layout, 1).unwrap_err());
    assert!(message.ends_with("is there already"), "{message}");
    assert_whole(&good, &layout);
}
