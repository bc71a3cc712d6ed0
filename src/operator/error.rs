//! Failure of a reconciliation.

use super::apply::ApplyError;

/// Failure of a reconciliation; it is retried after a pause.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// Failed to apply an object.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The API server refused the request or did not answer.
    #[error("{0}")]
    Api(#[from] kube::Error),
    /// The installed CRD lacks fields of the status.
    #[error(
        "the TrainingJob CRD in this cluster does not match this controller; apply the CRD of its release (charts/evenkeel/crds, Helm does not upgrade CRDs): {0}"
    )]
    Definition(Box<kube::core::Status>),
}

impl ReconcileError {
    /// Whether an object has changed since the controller read it.
    pub fn is_conflict(&self) -> bool {
        let (ReconcileError::Api(error) | ReconcileError::Apply(ApplyError::Api(error))) = self
        else {
            return false;
        };
        matches!(error, kube::Error::Api(status) if status.is_conflict())
    }
}
