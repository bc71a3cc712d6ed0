//! Retention of checkpoints.

use super::*;

fn steps(run: &Path) -> Vec<(u64, u64)> {
    let history = list(run).unwrap();
    assert!(history.damaged.is_empty(), "{:?}", history.damaged);
    let place = |one: Committed| (one.generation, one.step);
    history.committed.into_iter().map(place).collect()
}

fn run_with(checkpoints: &[(u64, u64)]) -> tempfile::TempDir {
    let run = tempfile::tempdir().unwrap();
    for &(generation, step) in checkpoints {
        write(&target(run.path(), generation, step), &default_layout(), 1).unwrap();
    }
    run
}

#[test]
fn the_newest_checkpoint_is_that_of_the_highest_generation() {
    // Generation 1 was fenced off at step 10 and still wrote step 30.
    let run = run_with(&[(1, 10), (1, 30), (2, 20), (10, 25)]);
    assert_eq!(steps(run.path()), [(1, 10), (1, 30), (2, 20), (10, 25)]);
    let newest = latest(run.path()).unwrap().unwrap();
    assert_eq!(
        (newest.generation, newest.step, newest.samples),
        (10, 25, 400)
    );
}

#[test]
fn a_run_without_checkpoints_or_directory_has_no_newest_one() {
    let run = run_with(&[]);
    assert_eq!(latest(run.path()).unwrap(), None);
    assert_eq!(latest(&run.path().join("nowhere")).unwrap(), None);
}

#[test]
fn the_oldest_are_removed_and_referenced_ones_stay() {
    let run = run_with(&[(1, 10), (1, 20), (2, 30), (2, 40)]);
    let at = |generation, step| target(run.path(), generation, step).directory();
    let start = at(1, 10);
    let removed = retain_in_run(run.path(), 2, &at(2, 40), Some(&start)).unwrap();
    assert_eq!(removed, [at(1, 20)]);
    assert_eq!(steps(run.path()), [(1, 10), (2, 30), (2, 40)]);
    assert!(
        retain_in_run(run.path(), 9, &at(2, 40), None)
            .unwrap()
            .is_empty()
    );
}

#[test]
fn an_outdated_reference_removes_nothing_newer() {
    let run = run_with(&[(1, 10), (1, 20), (2, 30), (2, 40)]);
    let at = |generation, step| target(run.path(), generation, step).directory();
    let removed = retain_in_run(run.path(), 1, &at(1, 20), None).unwrap();
    assert_eq!(removed, [at(1, 10)]);
    assert!(
        retain_in_run(run.path(), 1, &at(1, 99), None)
            .unwrap()
            .is_empty(),
        "a pin that is not there keeps everything"
    );
    assert_eq!(steps(run.path()), [(1, 20), (2, 30), (2, 40)]);
}

#[test]
fn the_newest_stays_even_if_none_is_to_be_kept() {
    let run = run_with(&[(1, 10), (1, 20)]);
    let newest = target(run.path(), 1, 20).directory();
    retain_in_run(run.path(), 0, &newest, None).unwrap();
    assert_eq!(steps(run.path()), [(1, 20)]);
    assert!(!target(run.path(), 1, 10).partial().exists());
}
