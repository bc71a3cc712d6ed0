//! Turns errors of the run's volume into problems for the user who configured it.

use std::path::{Path, PathBuf};

use crate::lifecycle::agent_state::Problem;

/// The mount table, Linux' `proc_pid_mountinfo(5)`.
const MOUNTS: &str = "/proc/self/mountinfo";

/// The problem of a run directory on the container's own disk, which other pods cannot see and
/// which ends with the pod: no volume is mounted at `checkpoint.path`.
pub(super) fn unmounted(run: &Path) -> Option<Problem> {
    // Without a mount table the check passes.
    let mounts = std::fs::read(MOUNTS).ok()?;
    let mounted = mount_of(&String::from_utf8_lossy(&mounts), &resolved(run))?;
    (mounted == Path::new("/")).then(|| missing(run.parent().unwrap_or(run)))
}

fn missing(place: &Path) -> Problem {
    let place = place.display();
    let message = format!(
        "{place} is on the container's own disk, not on a volume; set \
         checkpoint.claim to a claim, or mount a volume at {place} in podTemplate"
    );
    Problem::new("VolumeMissing", message)
}

/// Resolves links in the existing part of the path.
fn resolved(path: &Path) -> PathBuf {
    let mut there = path.ancestors().filter_map(|above| {
        let real = above.canonicalize().ok()?;
        Some(real.join(path.strip_prefix(above).ok()?))
    });
    there.next().unwrap_or_else(|| path.to_path_buf())
}

/// The mount point that contains a path.
fn mount_of(mounts: &str, path: &Path) -> Option<PathBuf> {
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let points = points.map(|point| PathBuf::from(unescaped(point)));
    points
        .filter(|point| path.starts_with(point))
        .max_by_key(|point| point.components().count())
}

/// Decodes a mount point; the table writes blanks and backslashes in octal.
fn unescaped(point: &str) -> String {
    let point = point.replace("\\040", " ").replace("\\011", "\t");
    point.replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;
    use crate::util::durable::FileError;

    fn problem(kind: ErrorKind) -> Problem {
        let path = Path::new("/checkpoints/run");
        FileError::from_io("create", path, 0, Error::from(kind)).into()
    }

    #[test]
    fn every_volume_error_has_a_reason_and_a_remedy() {
        let expected = [
            (ErrorKind::StorageFull, "VolumeFull", "enlarge the claim"),
            (ErrorKind::QuotaExceeded, "VolumeFull", "free space"),
            (
                ErrorKind::ReadOnlyFilesystem,
                "VolumeReadOnly",
                "ReadWriteMany",
            ),
            (ErrorKind::PermissionDenied, "VolumeDenied", "fsGroup"),
            (ErrorKind::NotFound, "VolumeMissing", "checkpoint.path"),
            (ErrorKind::TimedOut, "StartFailed", "timed out"),
        ];
        for (kind, reason, words) in expected {
            let problem = problem(kind);
            assert_eq!(problem.reason, reason);
            assert!(problem.message.contains(words), "{}", problem.message);
            assert!(problem.message.contains("/checkpoints"));
            // The job continues once the volume is repaired.
            assert!(!problem.deterministic);
        }
    }

    /// Mount table of a container, without the mount options.
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
    fn a_path_without_a_volume_is_reported_and_one_on_a_volume_is_not() {
        let missing = missing(Path::new("/checkpoints"));
        assert_eq!(missing.reason, "VolumeMissing");
        assert!(missing.message.starts_with("/checkpoints is on"));
        assert!(!missing.deterministic);
        // Mounted on every Linux.
        assert_eq!(unmounted(Path::new("/proc/run")), None);
    }

    #[test]
    fn a_link_resolves_to_the_volume_of_its_target() {
        let place = tempfile::tempdir().unwrap();
        let link = place.path().join("checkpoints");
        std::os::unix::fs::symlink("/proc", &link).unwrap();
        assert_eq!(
            resolved(&link.join("run/gen-1")),
            Path::new("/proc/run/gen-1")
        );
    }
}
