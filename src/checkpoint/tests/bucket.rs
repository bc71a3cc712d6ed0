//! Checkpoints in a bucket in memory.

use std::path::Path;

use super::*;
use crate::bucket::tests::in_memory;
use crate::bucket::{Bucket, Cause};

/// A checkpoint of a world whose ranks have their own disks; returns the coordinator's result.
fn save(
    bucket: &Bucket,
    disks: &[&Path],
    generation: u64,
    step: u64,
) -> Result<Committed, CheckpointError> {
    let layout = layout(&config());
    let targets: Vec<Target> = disks
        .iter()
        .map(|disk| Target {
            bucket: Some(bucket.clone()),
            ..target(disk, generation, step)
        })
        .collect();
    let parts = targets.iter().enumerate().map(|(rank, target)| {
        let writer = Writer::begin(target, &layout, rank, targets.len());
        for unit in 0..layout.units.len() {
            writer.write_unit(unit, unit_state(&layout, unit, step));
        }
        writer.finish()
    });
    let parts: Result<Vec<_>, _> = parts.collect();
    let contents = Contents {
        layout: &layout,
        samples: 8 * step,
        state: &serde_json::json!({"step": step}),
        config: &serde_json::json!({}),
        companions: &[],
        chat_template: None,
    };
    commit(&targets[0], &parts?, contents)
}

fn disks<const N: usize>() -> [tempfile::TempDir; N] {
    std::array::from_fn(|_| tempfile::tempdir().unwrap())
}

fn path(committed: &Committed, disk: &Path) -> String {
    committed
        .path
        .strip_prefix(disk)
        .unwrap()
        .display()
        .to_string()
}

#[test]
fn ranks_with_their_own_disks_make_one_checkpoint_that_any_disk_receives() {
    let bucket = in_memory();
    let [one, two, other] = disks();
    let committed = save(&bucket, &[one.path(), two.path()], 1, 4).unwrap();
    let path = path(&committed, one.path());
    let fetched =
        |disk: &Path| bucket_copy::fetch(&bucket, disk, &path, committed.checksum).unwrap();
    let whole = fetched(other.path());
    // The disks of the writers keep what they have.
    for disk in [&one, &two] {
        let completed = fetched(disk.path());
        assert!(0 < completed && completed < whole);
        assert_eq!(fetched(disk.path()), 0);
    }
    for disk in [&one, &two, &other] {
        Checkpoint::open(&disk.path().join(&path), Some(committed.checksum)).unwrap();
    }
    let newest = |generation| bucket_copy::newest(&bucket, generation).unwrap();
    assert_eq!((newest(1).unwrap().samples, newest(2)), (32, None));
    // One whose manifest is damaged does not hide the others.
    bucket
        .put("gen-1/step-9999999/manifest.json", b"{".to_vec())
        .unwrap();
    assert_eq!(newest(1).unwrap().samples, 32);
}

#[test]
fn a_damaged_copy_is_replaced_and_a_damaged_object_is_refused() {
    let bucket = in_memory();
    let [disk, other] = disks();
    let committed = save(&bucket, &[disk.path()], 1, 4).unwrap();
    let path = path(&committed, disk.path());
    let fetch = |disk: &Path| bucket_copy::fetch(&bucket, disk, &path, committed.checksum);
    let weights = disk
        .path()
        .join(&path)
        .join("model-00001-of-00005.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, &bytes).unwrap();
    assert_eq!(fetch(disk.path()).unwrap(), bytes.len() as u64);
    Checkpoint::open(&disk.path().join(&path), Some(committed.checksum)).unwrap();
    bucket
        .put(&format!("{path}/model-00001-of-00005.safetensors"), bytes)
        .unwrap();
    let error = fetch(other.path()).unwrap_err().to_string();
    assert!(
        error.contains("the object is not what was written"),
        "{error}"
    );
    assert!(!other.path().join(&path).join("manifest.json").exists());
    bucket.delete(&format!("{path}/manifest.json")).unwrap();
    let error = fetch(other.path()).unwrap_err().to_string();
    assert!(error.contains("the object does not exist"), "{error}");
}

#[test]
fn a_bucket_lists_its_checkpoints_as_a_directory_does() {
    let bucket = in_memory();
    let [disk] = disks();
    for (generation, step) in [(2, 8), (1, 4), (10, 12)] {
        save(&bucket, &[disk.path()], generation, step).unwrap();
    }
    // Begun, withdrawn, and damaged.
    let weights = "gen-10/step-0000016/model-00001-of-00005.safetensors";
    bucket.put(weights, vec![1]).unwrap();
    for (key, manifest) in [("gen-2/step-0000010", ""), ("gen-2/step-0000009", "{")] {
        let key = format!("{key}/manifest.json");
        bucket.put(&key, manifest.as_bytes().to_vec()).unwrap();
    }
    let found = bucket_copy::list(&bucket).unwrap();
    let paths = |committed: &[Committed]| -> Vec<String> {
        let paths = committed.iter().map(|it| it.path.display().to_string());
        paths.collect()
    };
    let expected = [
        "gen-1/step-0000004",
        "gen-2/step-0000008",
        "gen-10/step-0000012",
    ];
    assert_eq!(paths(&found.committed), expected);
    let here = list(disk.path()).unwrap().committed;
    let same = |one: &Committed, other: &Committed| {
        (one.step, one.samples, one.checksum) == (other.step, other.samples, other.checksum)
    };
    let listed = here.iter().zip(&found.committed);
    assert!(listed.into_iter().all(|(here, there)| same(here, there)));
    assert_eq!(found.damaged.len(), 1);

    let newest = &found.committed[2];
    let verify = || bucket_copy::verify(&bucket, expected[2], newest.checksum);
    verify().unwrap();
    let key = format!("{}/config.json", expected[2]);
    let bytes = bucket.require(&key).unwrap().len();
    bucket.put(&key, vec![b' '; bytes]).unwrap();
    match verify().unwrap_err() {
        CheckpointError::Bucket(error) => assert_eq!(error.cause, Cause::Damaged),
        error => panic!("{error}"),
    }
}

#[test]
fn of_two_ranks_that_commit_one_step_the_first_wins() {
    let bucket = in_memory();
    let [one, two] = disks();
    let first = save(&bucket, &[one.path()], 1, 4).unwrap();
    // Another world writes the same units, but another manifest.
    let [three] = disks();
    let error = save(&bucket, &[two.path(), three.path()], 1, 4).unwrap_err();
    match error {
        CheckpointError::Bucket(error) => assert_eq!(error.cause, Cause::Taken),
        error => panic!("{error}"),
    }
    let [reader] = disks();
    let path = path(&first, one.path());
    bucket_copy::fetch(&bucket, reader.path(), &path, first.checksum).unwrap();
}

#[test]
fn old_and_abandoned_checkpoints_leave_the_bucket() {
    let bucket = in_memory();
    let [disk] = disks();
    for (generation, step) in [(1, 2), (1, 4), (2, 6), (2, 8), (3, 10)] {
        save(&bucket, &[disk.path()], generation, step).unwrap();
    }
    bucket
        .put(
            "gen-1/step-0000005/model-00001-of-00005.safetensors",
            vec![1],
        )
        .unwrap();
    bucket
        .put(
            "gen-2/step-0000009/model-00001-of-00005.safetensors",
            vec![1],
        )
        .unwrap();
    bucket.put("gen-1/record.json", vec![1]).unwrap();
    let left = |keep, start| {
        let newest = "gen-2/step-0000008";
        bucket_copy::retain(&bucket, keep, newest, start).unwrap();
        checkpoint_dirs(&bucket)
    };
    let all = [
        "gen-1/step-0000002",
        "gen-1/step-0000004",
        "gen-2/step-0000006",
        "gen-2/step-0000008",
        "gen-2/step-0000009",
        "gen-3/step-0000010",
    ];
    assert_eq!(left(None, None), all);
    // The running generation reads its start; later checkpoints and unfinished ones of a running generation stay.
    assert_eq!(
        left(Some(2), Some("gen-1/step-0000002")),
        [all[0], all[2], all[3], all[4], all[5]]
    );
    assert_eq!(left(Some(1), None), [all[3], all[4], all[5]]);
    assert!(bucket.get("gen-1/record.json").unwrap().is_some());
    remove_copies(
        disk.path(),
        "gen-2/step-0000008",
        Some("gen-1/step-0000004"),
    )
    .unwrap();
    let copies = list(disk.path()).unwrap().committed;
    let copies: Vec<_> = copies
        .iter()
        .map(|copy| (copy.generation, copy.step))
        .collect();
    assert_eq!(copies, [(1, 4), (2, 8), (3, 10)]);
}

fn checkpoint_dirs(bucket: &Bucket) -> Vec<String> {
    let keys = bucket
        .list("")
        .unwrap()
        .into_iter()
        .map(|object| object.key);
    let mut paths: Vec<String> = keys
        .filter(|key| key.contains("/step-"))
        .map(|key| key.rsplit_once('/').unwrap().0.to_owned())
        .collect();
    paths.dedup();
    paths
}
