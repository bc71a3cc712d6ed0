//! The user's side of a cluster: TrainingJobs made, found, followed and changed from a command line.
//! What the controller does with them is in [`crate::operator`]; here nobody needs more rights than
//! the user has.

pub mod change;
mod connect;
mod follow;
mod free;
mod job;
mod logs;

pub use connect::{Cluster, Options, connect};
pub use follow::{End, follow};
pub use free::{Free, free};
pub use job::{Wanted, name_of, training_job};
pub use logs::{rank, training};

use std::borrow::Cow;

use kube::core::Status;

/// Why a cluster did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig does not lead to a cluster.
    #[error(
        "no cluster to talk to: {0}; `kubectl config get-contexts` shows what there is, --context \
         and --kubeconfig choose"
    )]
    Configuration(String),
    /// There is no answer.
    #[error("cannot reach the cluster at {url}: {why}")]
    Unreachable {
        /// The API server.
        url: String,
        /// In words.
        why: String,
    },
    /// The API server knows no TrainingJobs.
    #[error(
        "this cluster knows no TrainingJobs: install the controller first \
         (`helm install evenkeel charts/evenkeel -n evenkeel-system --create-namespace`)"
    )]
    NotInstalled,
    /// There is no job of that name.
    #[error(
        "there is no TrainingJob {name} in namespace {namespace}: `evenkeel list -n {namespace}` \
         shows those there are, --namespace looks elsewhere"
    )]
    NoJob {
        /// The name.
        name: String,
        /// Where it was looked for.
        namespace: String,
    },
    /// The API server says no.
    #[error("the cluster says no: {0}")]
    Refused(String),
    /// The command line asks for what cannot be.
    #[error("{0}")]
    Usage(String),
}

impl ClientError {
    /// What an error of the API means, where `job` of a namespace was asked for.
    fn of(cluster: &Cluster, job: Option<&str>, error: kube::Error) -> ClientError {
        let kube::Error::Api(status) = error else {
            return ClientError::Unreachable {
                url: cluster.url.clone(),
                why: root(&error).into_owned(),
            };
        };
        match (status.code, job) {
            (404, _) if !names_an_object(&status) => ClientError::NotInstalled,
            (404, Some(name)) => ClientError::NoJob {
                name: name.to_owned(),
                namespace: cluster.namespace.clone(),
            },
            _ => ClientError::Refused(status.message.clone()),
        }
    }
}

/// A 404 for a kind that the API server does not know has no details about an object.
fn names_an_object(status: &Status) -> bool {
    let details = status.details.as_ref();
    details.is_some_and(|details| !details.name.is_empty())
}

/// The innermost cause: what wraps it only repeats that something failed.
fn root(error: &(dyn std::error::Error + 'static)) -> Cow<'static, str> {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string().into()
}
