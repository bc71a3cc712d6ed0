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
