//! Failure of a reconciliation.

use super::conditions::Refusal;
use crate::api::condition::ConditionReason;

/// Failure of a reconciliation; it is retried after a pause.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// The API server refused the request or did not answer.
    #[error("{0}")]
    Api(#[from] kube::Error),
    /// `podTemplate` does not give a valid pod.
    #[error("spec.podTemplate does not give a valid pod: {0}")]
    Template(#[from] serde_json::Error),
    /// An object that the job does not own has the name of one of its objects.
    #[error(
        "{0} exists and does not belong to this TrainingJob; delete it, or create the job with another name"
    )]
    NameTaken(String),
    /// The name becomes free without an action of the user: its object is owned by this job and being deleted, or is
    /// left of an earlier job of the same name.
    #[error("{0} is being deleted")]
    Leaving(String),
    /// A defect of the controller, which this job has met.
    #[error("the reconciliation panicked: {0}")]
    Panicked(String),
    /// The installed CRD lacks fields of the status.
    #[error(
        "the TrainingJob CRD in this cluster does not match this controller; apply the CRD of its release (charts/evenkeel/crds, Helm does not upgrade CRDs): {0}"
    )]
    Definition(Box<kube::core::Status>),
}

impl ReconcileError {
    /// Whether an object has changed since the controller read it.
    pub fn is_conflict(&self) -> bool {
        matches!(self, ReconcileError::Api(kube::Error::Api(status)) if status.is_conflict())
    }

    /// Whether the API server refuses the object that was to be created.
    pub fn is_refusal(&self) -> bool {
        let blocked = self.blocked();
        blocked.is_some_and(|blocked| blocked.reason == ConditionReason::Refused)
    }

    /// What keeps the job from the objects that were to be created; `None` for errors that a retry may solve.
    pub fn blocked(&self) -> Option<Refusal> {
        let (reason, message) = match self {
            ReconcileError::Template(_) => (ConditionReason::Refused, self.to_string()),
            ReconcileError::NameTaken(_) => (ConditionReason::NameTaken, self.to_string()),
            ReconcileError::Api(kube::Error::Api(status)) => {
                let asks =
                    (400..500).contains(&status.code) && ![408, 409, 429].contains(&status.code);
                let text: String = status.message.chars().take(500).collect();
                let message = format!("the API server refuses the objects of the job: {text}");
                (ConditionReason::Refused, asks.then_some(message)?)
            }
            _ => return None,
        };
        Some(Refusal { reason, message })
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn only_errors_that_no_retry_solves_block_a_job() {
        let api = |code: u16| {
            let status = Status::failure(&"x".repeat(600), "Reason").with_code(code);
            ReconcileError::Api(kube::Error::Api(status.boxed()))
        };
        for code in [400, 403, 404, 422] {
            let error = api(code);
            assert!(error.is_refusal(), "{code}");
            let Refusal { reason, message } = error.blocked().unwrap();
            assert_eq!(reason, ConditionReason::Refused);
            let shown = "the API server refuses the objects of the job: ".len() + 500;
            assert_eq!(message.len(), shown, "a long answer is truncated");
        }
        for code in [408, 409, 429, 500, 503] {
            assert_eq!(api(code).blocked(), None, "{code}");
        }
        assert_eq!(ReconcileError::Leaving("Pod `x`".into()).blocked(), None);
        let taken = ReconcileError::NameTaken("Pod `x`".into());
        let reason = taken.blocked().map(|blocked| blocked.reason);
        assert_eq!(reason, Some(ConditionReason::NameTaken));
        assert!(!taken.is_refusal());
        let invalid = serde_json::from_str::<u8>("-").unwrap_err();
        assert!(ReconcileError::Template(invalid).is_refusal());
    }
}
