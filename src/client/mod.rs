//! Client commands for TrainingJobs: create, list, follow and change them from a command line.
//! [`crate::operator`] is the controller. The commands need no rights beyond the user's.

pub mod change;
pub mod code;
mod connect;
mod event_reader;
mod follow;
mod free;
mod job;
mod logs;

pub use connect::{Cluster, Options, connect};
pub use follow::{End, follow};
pub use free::{Free, free};
pub use job::{LaunchOptions, name_of, training_job};
pub use logs::{rank, training};

use std::borrow::Cow;

use kube::core::Status;

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
    #[error("cannot reach the cluster at {url}: {message}")]
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
    /// Converts an error of the API; `job` is the requested job, if any.
    fn of(cluster: &Cluster, job: Option<&str>, error: kube::Error) -> ClientError {
        let kube::Error::Api(status) = error else {
            return ClientError::Unreachable {
                url: cluster.url.clone(),
                message: root(&error).into_owned(),
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

/// Whether a 404 is about an object. One for an unknown kind has no details of an object.
fn names_an_object(status: &Status) -> bool {
    let details = status.details.as_ref();
    details.is_some_and(|details| !details.name.is_empty())
}

/// The innermost cause; the wrapping errors only repeat that something failed.
fn root(error: &(dyn std::error::Error + 'static)) -> Cow<'static, str> {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string().into()
}
