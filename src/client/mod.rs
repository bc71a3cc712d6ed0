//! Client commands for TrainingJobs: create, list, follow and change them from a command line.
//! [`crate::operator`] is the controller. The commands need no rights beyond the user's.

pub mod access;
pub mod change;
pub mod code;
mod connect;
mod event_reader;
mod follow;
mod free;
mod logs;

pub use connect::{Cluster, Options, connect};
pub use follow::{End, follow};
pub use free::{Free, free};
pub use logs::{rank, training};

use kube::core::Status;

use crate::api::LONGEST_NAME;

/// Failure of a client command.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig names no usable cluster.
    #[error(
        "no cluster is configured: {0}; `kubectl config get-contexts` lists contexts, choose one with \
        --context or --kubeconfig"
    )]
    Configuration(String),
    /// The API server does not answer.
    #[error("cannot reach the cluster at {url}: {message}; `evenkeel doctor --cluster` checks it")]
    Unreachable {
        /// URL of the API server.
        url: String,
        message: String,
    },
    /// The CRD is not installed.
    #[error(
        "this cluster has no TrainingJob CRD; install the controller first \
         (`helm install evenkeel charts/evenkeel -n evenkeel-system --create-namespace`)"
    )]
    NotInstalled,
    /// The job does not exist.
    #[error(
        "TrainingJob {name} does not exist in namespace {namespace}; `evenkeel list -n {namespace}` \
        lists its jobs, choose another namespace with --namespace"
    )]
    NoJob { name: String, namespace: String },
    /// The API server refused the request.
    #[error("the cluster refuses the request: {0}")]
    Refused(String),
    /// Invalid request on the command line.
    #[error("{0}")]
    Usage(String),
}

impl ClientError {
    /// Whether the cluster has answered that it has no such job, or no TrainingJobs at all.
    pub fn is_no_job(&self) -> bool {
        matches!(self, ClientError::NoJob { .. } | ClientError::NotInstalled)
    }
}

/// Whether a 404 is about an object. One for an unknown kind has no details of an object.
fn names_an_object(status: &Status) -> bool {
    let details = status.details.as_ref();
    details.is_some_and(|details| !details.name.is_empty())
}

/// A valid Kubernetes name (RFC 1035 label) derived from a recipe's name; `None` if it has no valid
/// character.
pub fn name_of(recipe: &str) -> Option<String> {
    // A name of this form starts with a letter.
    let digit = |c: &char| c.is_ascii_digit();
    let first = recipe.chars().find(char::is_ascii_alphanumeric);
    let mut name = if first.as_ref().is_some_and(digit) {
        "job-".to_owned()
    } else {
        String::new()
    };
    for char in recipe.chars().map(|c| c.to_ascii_lowercase()) {
        match char {
            'a'..='z' | '0'..='9' => name.push(char),
            _ if name.ends_with('-') || name.is_empty() => {}
            _ => name.push('-'),
        }
    }
    name.truncate(LONGEST_NAME);
    let name = name.trim_end_matches('-');
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_labels() {
        let name = |recipe: &str| name_of(recipe);
        assert_eq!(name("first"), Some("first".into()));
        assert_eq!(
            name("Zephyr_7B.beta (SFT)"),
            Some("zephyr-7b-beta-sft".into())
        );
        assert_eq!(name("--x"), Some("x".into()));
        assert_eq!(name("7b-dpo"), Some("job-7b-dpo".into()));
        assert_eq!(name("…"), None);
        assert_eq!(
            name(&"ab".repeat(60)).map(|name| name.len()),
            Some(LONGEST_NAME)
        );
    }
}
