//! Full and read-only disks.

use super::*;
use crate::util::durable::{FileError, free_space};

const DISK: &str = "EVENKEEL_TEST_DISK";

/// Mounts a file system of `size` on a directory, in a private mount namespace.
fn mount(directory: &Path, options: &str) {
    let status = Command::new("mount")
        .args(["-t", "tmpfs", "-o", options, "tmpfs"])
        .arg(directory)
        .status();
    assert!(status.unwrap().success());
}

/// A file that fills a disk except for `left` bytes.
fn fill(disk: &Path, left: u64) -> PathBuf {
    let path = disk.join("filler");
    let size = free_space(disk).unwrap() - left;
    if let Err(error) = std::fs::write(&path, vec![1; size as usize]) {
        // A writer used some of the space first.
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    }
    path
}

fn assert_full(error: &CheckpointError, last: &Committed) {
    let CheckpointError::NotWritten {
        cause: FileError::NoSpace { needed, .. },
        last: Some(message),
    } = error
    else {
        panic!("{error}");
    };
    assert!(*needed > 0);
    assert_eq!(&**message, last);
}

#[test]
fn a_full_disk_keeps_the_last_good_checkpoint_and_hides_the_new_one() {
    let Some(disk) = std::env::var_os(DISK).map(PathBuf::from) else {
        let disk = tempfile::tempdir().unwrap();
        let name = "disk::a_full_disk_keeps_the_last_good_checkpoint_and_hides_the_new_one";
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

    // The disk is known to be too small before anything is written.
    let filler = fill(&disk, 64 << 10);
    let next = target(&run, 1, 2);
    let error = write_part(&next, &layout, 0, 2).unwrap_err();
    assert_full(&error, &good);
    let message = error
        .to_string()
        .replace(&disk.display().to_string(), "[disk]");
    let numbers = |text: &str| {
        let digits = |word: &str| word.parse::<f64>().is_ok();
        let words = text
            .split(' ')
            .map(|word| if digits(word) { "[n]" } else { word });
        words.collect::<Vec<_>>().join(" ")
    };
    insta::assert_snapshot!(numbers(&message), @"no space left on the disk of [disk]/run/gen-1 while writing [disk]/run/gen-1/step-0000002.partial: [n] KiB needed, [n] KiB free; the last good checkpoint is [disk]/run/gen-1/step-0000001 (16 samples)");
    still_good();
    abandon(&next).unwrap();
    std::fs::remove_file(filler).unwrap();

    // Filled by another process during the write.
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
    assert!(!next.partial().exists(), "its space is freed");
    still_good();
    std::fs::remove_file(filler).unwrap();

    // With free space, the same step is written normally.
    let second = write(&next, &layout, 2).unwrap();
    assert_whole(&second, &layout);
    assert_eq!(list(&run).unwrap().committed, [good, second]);
}

#[test]
fn a_read_only_disk_is_an_error_and_keeps_the_last_good_checkpoint() {
    let Some(disk) = std::env::var_os(DISK).map(PathBuf::from) else {
        let disk = tempfile::tempdir().unwrap();
        let name = "disk::a_read_only_disk_is_an_error_and_keeps_the_last_good_checkpoint";
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
        let message = error.to_string();
        assert!(message.starts_with("cannot "), "{message}");
        assert!(message.contains("Read-only file system"), "{message}");
        let last = format!("the last good checkpoint is {}", good.path.display());
        assert!(message.contains(&last), "{message}");
    }
    assert_eq!(list(&run).unwrap().committed, std::slice::from_ref(&good));
    assert_whole(&good, &layout);
}

#[test]
fn a_write_without_space_is_an_error_on_any_machine() {
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
fn failure_of_the_first_checkpoint_reports_that_there_is_no_earlier_one() {
    let run = tempfile::tempdir().unwrap();
    // Even root cannot create a directory under a file.
    std::fs::write(run.path().join("gen-1"), "").unwrap();
    let error = write(&target(run.path(), 1, 1), &default_layout(), 1).unwrap_err();
    let message = error.to_string();
    assert!(
        message.ends_with("; there is no earlier checkpoint of this run"),
        "{message}"
    );
}
