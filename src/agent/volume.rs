//! What errors of the run's volume mean to whoever mounted it.

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

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};
    use std::path::Path;

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
}
