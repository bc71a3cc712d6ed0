//! Failure of a reconciliation.

use super::conditions::Refusal;
use crate::api::condition::ConditionReason;

/// Message of a server-side apply with a field that the CRD lacks. Its code is 500, so only the message
/// distinguishes it from other failures (structured-merge-diff v6, `typed/helpers.go`).
const UNDECLARED: &str = "not declared in schema";
/// Message of a write beyond etcd's limit of a request, 1.5 MiB (etcd v3.6, `api/v3rpc/rpctypes/error.go`); its code is 500.
const TOO_LARGE: &str = "request is too large";

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
    /// The API server refuses the status, and will refuse it again.
    #[error("the API server refuses the status of the job: {0}")]
    Status(Box<kube::core::Status>),
    /// The installed CRD lacks fields of the status.
    #[error(
        "the TrainingJob CRD in this cluster does not match this controller; apply the CRD of its release (charts/evenkeel/crds, Helm does not upgrade CRDs): {0}"
    )]
    Definition(Box<kube::core::Status>),
}

impl ReconcileError {
    /// The failure of writing a status.
    pub fn of_status(error: kube::Error) -> ReconcileError {
        match error {
            kube::Error::Api(said) if said.message.contains(UNDECLARED) => {
                ReconcileError::Definition(said)
            }
            // Of a deleted job it is not found.
            kube::Error::Api(said)
                if is_final(said.code) && said.code != 404 || said.message.contains(TOO_LARGE) =>
            {
                ReconcileError::Status(said)
            }
            other => other.into(),
        }
    }

    /// Whether no repetition writes this status.
    pub fn is_of_status(&self) -> bool {
        matches!(
            self,
            ReconcileError::Status(_) | ReconcileError::Definition(_)
        )
    }

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
                let asks = is_final(status.code);
                let text: String = status.message.chars().take(500).collect();
                let message = format!("the API server refuses the objects of the job: {text}");
                (ConditionReason::Refused, asks.then_some(message)?)
            }
            _ => return None,
        };
        Some(Refusal { reason, message })
    }
}

/// Whether the answer with this code is the same the next time.
fn is_final(code: u16) -> bool {
    (400..500).contains(&code) && ![408, 409, 429].contains(&code)
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
