//! Disks that are full or read-only.

use super::*;
use crate::durable::{FileError, free_space};

const DISK: &str = "EVENKEEL_TEST_DISK";

/// Mounts a file system of `size` on a directory, in a private mount namespace.
fn mount(directory: &Path, options: &str) {
    let status = Command::new("mount")
        .args(["-t", "tmpfs", "-o", options, "tmpfs"])
        .arg(directory)
        .status();
    assert!(status.unwrap().success());
}

/// A file that takes all but `left` bytes of a disk.
fn fill(disk: &Path, left: u64) -> PathBuf {
    let path = disk.join("filler");
    let size = free_space(disk).unwrap() - left;
    if let Err(error) = std::fs::write(&path, vec![1; size as usize]) {
        // A writer took some of it first.
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    }
    path
}

fn assert_full(error: &CheckpointError, last: &Committed) {
    let CheckpointError::NotWritten {
        cause: FileError::NoSpace { needed, .. },
        last: Some(said),
    } = error
    else {
        panic!("{error}");
    };
    assert!(*needed > 0);
    assert_eq!(&**said, last);
}

#[test]
fn full_disk_keeps_the_last_good_checkpoint_and_shows_nothing_of_the_new_one() {
    let Some(disk) = std::env::var_os(DISK).map(PathBuf::from) else {
        let disk = tempfile::tempdir().unwrap();
        let name =
            "disk::full_disk_keeps_the_last_good_checkpoint_and_shows_nothing_of_the_new_one";
        return in_private_mounts(name, DISK, disk.path());
    };
    mount(&disk, "size=8m");
    let run = disk.join("run");
    let layout = default_layout();
    let good = write(&target(&run, 1, 1), &layout, 2).unwrap();
    let still_good = || {
        let history = list(&run).unwrap();
        assert_eq!(history.committed, std::slice::from_ref(&good));
        assert!(history.damaged.is_empty(), "{:?}", history.damaged);
        assert_whole(&good, &layout);
    };

    // Known to be too small before anything is written.
    let filler = fill(&disk, 64 << 10);
    let next = target(&run, 1, 2);
    let error = write_part(&next, &layout, 0, 2).unwrap_err();
    assert_full(&error, &good);
    let said = error
        .to_string()
        .replace(&disk.display().to_string(), "[disk]");
    let numbers = |text: &str| {
        let digits = |word: &str| word.parse::<u64>().is_ok_and(|n| n > 1000);
        let words = text
            .split(' ')
            .map(|word| if digits(word) { "[n]" } else { word });
        words.collect::<Vec<_>>().join(" ")
    };
    insta::assert_snapshot!(numbers(&said), @"no space left on the disk of [disk]/run/gen-1 while writing [disk]/run/gen-1/step-0000002.partial: [n] bytes needed, [n] free; the last good checkpoint is [disk]/run/gen-1/step-0000001 (16 samples)");
    still_good();
    abandon(&next).unwrap();
    std::fs::remove_file(filler).unwrap();

    // Filled by somebody else while it is being written.
    let writer = Writer::begin(&next, &layout, 0, 1);
    writer.write_unit(0, unit_state(&layout, 0, 2));
    while !next
        .partial()
        .join("model-00001-of-00005.safetensors")
        .exists()
    {
        assert!(!writer.is_finished(), "it failed");
        std::thread::yield_now();
    }
    let filler = fill(&disk, 0);
    for unit in 1..layout.units.len() {
        writer.write_unit(unit, unit_state(&layout, unit, 2));
    }
    assert_full(&writer.finish().unwrap_err(), &good);
    still_good();
    std::fs::remove_file(filler).unwrap();

    // Filled between the ranks' files and the coordinator's.
    let parts = [write_part(&next, &layout, 0, 1).unwrap()];
    let filler = fill(&disk, 0);
    assert_full(&commit_parts(&next, &layout, &parts).unwrap_err(), &good);
    assert!(!next.partial().exists(), "the room it took is given back");
    still_good();
    std::fs::remove_file(filler).unwrap();

    // With room again, the same step is written as if nothing had happened.
    let second = write(&next, &layout, 2).unwrap();
    assert_whole(&second, &layout);
    assert_eq!(list(&run).unwrap().committed, [good, second]);
}

#[test]
fn read_only_disk_is_named_and_keeps_the_last_good_checkpoint() {
    let Some(disk) = std::env::var_os(DISK).map(PathBuf::from) else {
        let disk = tempfile::tempdir().unwrap();
        let name = "disk::read_only_disk_is_named_and_keeps_the_last_good_checkpoint";
        return in_private_mounts(name, DISK, disk.path());
    };
    mount(&disk, "size=8m");
    let run = disk.join("run");
    let layout = default_layout();
    let good = write(&target(&run, 1, 1), &layout, 1).unwrap();
    let parts = [write_part(&target(&run, 1, 2), &layout, 0, 1).unwrap()];
    mount(&disk, "remount,ro");

    let written = write(&target(&run, 1, 3), &layout, 1).unwrap_err();
    let committed = commit_parts(&target(&run, 1, 2), &layout, &parts).unwrap_err();
    for error in [written, committed] {
        let said = error.to_string();
        assert!(said.starts_with("cannot "), "{said}");
        assert!(said.contains("Read-only file system"), "{said}");
        let last = format!("the last good checkpoint is {}", good.path.display());
        assert!(said.contains(&last), "{said}");
    }
    assert_eq!(list(&run).unwrap().committed, std::slice::from_ref(&good));
    assert_whole(&good, &layout);
}

#[test]
fn write_that_finds_no_space_is_an_error_on_any_machine() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let good = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let next = target(run.path(), 1, 2);
    std::fs::create_dir_all(next.partial()).unwrap();
    let file = next.partial().join("optimizer-00004-of-00005.safetensors");
    std::os::unix::fs::symlink("/dev/full", file).unwrap();
    assert_full(&write_part(&next, &layout, 0, 1).unwrap_err(), &good);
    assert_eq!(
        list(run.path()).unwrap().committed,
        std::slice::from_ref(&good)
    );
    assert_whole(&good, &layout);
}

#[test]
fn first_checkpoint_that_fails_says_that_there_is_no_earlier_one() {
    let run = tempfile::tempdir().unwrap();
    // No directory can be made under a file, not even by root.
    std::fs::write(run.path().join("gen-1"), "").unwrap();
    let error = write(&target(run.path(), 1, 1), &default_layout(), 1).unwrap_err();
    let said = error.to_string();
    assert!(
        said.ends_with("; there is no earlier checkpoint of this run"),
        "{said}"
    );
}
