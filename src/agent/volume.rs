//! What is wrong with the run's volume, as a problem for whoever mounted it.

use std::path::{Path, PathBuf};

use crate::durable::FileError;
use crate::job::agent_state::Problem;

/// An error of the run's volume as a problem of the pod, with a way out.
pub(super) fn volume_problem(error: &FileError) -> Problem {
    use std::io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem};
    let kind = match error {
        FileError::Io { source, .. } => Some(source.kind()),
        _ => None,
    };
    let (reason, what) = match kind {
        _ if matches!(error, FileError::NoSpace { .. }) => (
            "VolumeFull",
            "the checkpoint volume is full: make room or grow the claim",
        ),
        Some(ReadOnlyFilesystem) => (
            "VolumeReadOnly",
            "the checkpoint volume is read-only: mount it ReadWriteMany",
        ),
        Some(PermissionDenied) => (
            "VolumeDenied",
            "the checkpoint volume refuses this user: set securityContext.fsGroup in podTemplate, or the volume's permissions",
        ),
        Some(NotFound) => (
            "VolumeMissing",
            "the checkpoint volume is not there: mount a claim at checkpoint.path",
        ),
        _ => ("StartFailed", "ranks cannot be started"),
    };
    Problem {
        reason: reason.into(),
        message: format!("{error}; {what}"),
        deterministic: false,
    }
}

/// Where a container's mounts are told, Linux' `proc_pid_mountinfo(5)`.
const MOUNTS: &str = "/proc/self/mountinfo";

/// The problem of a run's directory that would be made on the container's own disk, where no other
/// pod sees it and nothing outlives the pod: nothing is mounted at `checkpoint.path`.
pub(super) fn unmounted(run: &Path) -> Option<Problem> {
    // Where mounts are not told, nothing is known against this one.
    let mounts = std::fs::read(MOUNTS).ok()?;
    let mounted = mount_of(&String::from_utf8_lossy(&mounts), &resolved(run))?;
    (mounted == Path::new("/")).then(|| missing(run.parent().unwrap_or(run)))
}

fn missing(place: &Path) -> Problem {
    let place = place.display();
    Problem {
        reason: "VolumeMissing".into(),
        message: format!(
            "{place} is on the container's own disk, no volume is mounted there: name a claim in \
             checkpoint.claim, or mount a volume at {place} in podTemplate"
        ),
        deterministic: false,
    }
}

/// Where the path leads, as far as it is there.
fn resolved(path: &Path) -> PathBuf {
    let mut there = path.ancestors().filter_map(|above| {
        let real = above.canonicalize().ok()?;
        Some(real.join(path.strip_prefix(above).ok()?))
    });
    there.next().unwrap_or_else(|| path.to_path_buf())
}

/// The mount point that a path is below.
fn mount_of(mounts: &str, path: &Path) -> Option<PathBuf> {
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let points = points.map(|point| PathBuf::from(unescaped(point)));
    points
        .filter(|point| path.starts_with(point))
        .max_by_key(|point| point.components().count())
}

/// A mount point as it is called: blanks and backslashes are written in octal.
fn unescaped(point: &str) -> String {
    [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ]
    .iter()
    .fold(point.to_owned(), |point, (code, character)| {
        point.replace(code, character)
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    fn problem(kind: ErrorKind) -> Problem {
        let path = Path::new("/checkpoints/run");
        volume_problem(&FileError::from_io("create", path, 0, Error::from(kind)))
    }

    #[test]
    fn every_error_of_the_volume_has_its_reason_and_a_way_out() {
        let told = [
            (ErrorKind::StorageFull, "VolumeFull", "grow the claim"),
            (ErrorKind::QuotaExceeded, "VolumeFull", "make room"),
            (
                ErrorKind::ReadOnlyFilesystem,
                "VolumeReadOnly",
                "ReadWriteMany",
            ),
            (ErrorKind::PermissionDenied, "VolumeDenied", "fsGroup"),
            (ErrorKind::NotFound, "VolumeMissing", "checkpoint.path"),
            (ErrorKind::TimedOut, "StartFailed", "timed out"),
        ];
        for (kind, reason, words) in told {
            let problem = problem(kind);
            assert_eq!(problem.reason, reason);
            assert!(problem.message.contains(words), "{}", problem.message);
            assert!(problem.message.contains("/checkpoints"));
            // Whoever mends the volume finds the job where it was.
            assert!(!problem.deterministic);
        }
    }

    /// A container's, but for the options.
    const CONTAINER: &str = "\
        603 537 0:55 / / rw,relatime - overlay overlay rw\n\
        604 603 0:58 / /proc rw,nosuid - proc proc rw\n\
        611 603 0:60 / /dev/shm rw - tmpfs shm rw\n\
        615 603 8:1 /var/lib/kubelet/x /checkpoints rw - ext4 /dev/sda1 rw\n\
        616 603 8:1 /var/lib/kubelet/y /with\\040blank rw - ext4 /dev/sda1 rw\n";

    #[test]
    fn a_directory_belongs_to_the_innermost_mount() {
        let mount = |path: &str| mount_of(CONTAINER, Path::new(path)).unwrap();
        assert_eq!(mount("/checkpoints/run-1/gen-2"), Path::new("/checkpoints"));
        assert_eq!(mount("/checkpoints"), Path::new("/checkpoints"));
        assert_eq!(mount("/with blank/run"), Path::new("/with blank"));
        assert_eq!(mount("/checkpoints-of-mine/run"), Path::new("/"));
        assert_eq!(mount_of("", Path::new("/checkpoints")), None);
    }

    #[test]
    fn a_place_without_a_volume_is_named_and_one_with_a_volume_is_not() {
        let missing = missing(Path::new("/checkpoints"));
        assert_eq!(missing.reason, "VolumeMissing");
        assert!(missing.message.starts_with("/checkpoints is on"));
        assert!(!missing.deterministic);
        // What is mounted on every Linux, and holds no files of ours.
        assert_eq!(unmounted(Path::new("/proc/run")), None);
    }

    #[test]
    fn a_link_leads_to_the_volume_behind_it() {
        let place = tempfile::tempdir().unwrap();
        let link = place.path().join("checkpoints");
        std::os::unix::fs::symlink("/proc", &link).unwrap();
        assert_eq!(
            resolved(&link.join("run/gen-1")),
            Path::new("/proc/run/gen-1")
        );
    }
}
