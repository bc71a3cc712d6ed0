//! Selects cluster and namespace like kubectl.

use std::error::Error;
use std::path::PathBuf;

use kube::api::Api;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use super::{ClientError, names_an_object};
use crate::api::TrainingJob;
use crate::util::causes::innermost;

/// Cluster options of the command line.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Kubeconfig; by default `$KUBECONFIG`, then `~/.kube/config`, then the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Context in the kubeconfig; by default the current one.
    pub context: Option<String>,
    /// By default the namespace of the context.
    pub namespace: Option<String>,
}

/// A cluster and the selected namespace.
#[derive(Clone)]
pub struct Cluster {
    /// Client of its API server.
    pub client: Client,
    pub namespace: String,
    /// URL of the API server, for messages.
    pub(super) url: String,
}

impl Cluster {
    /// API of the TrainingJobs in the namespace.
    pub fn jobs(&self) -> Api<TrainingJob> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub async fn job(&self, name: &str) -> Result<TrainingJob, ClientError> {
        let found = self.jobs().get(name).await;
        found.map_err(|error| self.error(Some(name), error))
    }

    /// Converts an error of the API; `job` is the requested job, if any.
    pub fn error(&self, job: Option<&str>, error: kube::Error) -> ClientError {
        let kube::Error::Api(status) = error else {
            return ClientError::Unreachable {
                url: self.url.clone(),
                message: innermost(&error),
            };
        };
        match (status.code, job) {
            (404, _) if !names_an_object(&status) => ClientError::NotInstalled,
            (404, Some(name)) => ClientError::NoJob {
                name: name.to_owned(),
                namespace: self.namespace.clone(),
            },
            _ => ClientError::Refused(status.message.clone()),
        }
    }
}

/// Reads the kubeconfig; does not connect yet.
pub async fn connect(options: &Options) -> Result<Cluster, ClientError> {
    let chosen = KubeConfigOptions {
        context: options.context.clone(),
        ..KubeConfigOptions::default()
    };
    let opened = async {
        let config = match (&options.kubeconfig, &options.context) {
            (Some(path), _) => {
                let file = Kubeconfig::read_from(path)?;
                Config::from_custom_kubeconfig(file, &chosen).await?
            }
            (None, Some(_)) => Config::from_kubeconfig(&chosen).await?,
            (None, None) => Config::infer().await?,
        };
        let namespace = options.namespace.as_ref();
        let namespace = namespace.unwrap_or(&config.default_namespace).clone();
        let url = config.cluster_url.to_string();
        Ok(Cluster {
            client: Client::try_from(config)?,
            namespace,
            url: url.trim_end_matches('/').to_owned(),
        })
    };
    let opened: Result<Cluster, Box<dyn Error + Send + Sync>> = opened.await;
    opened.map_err(|error| ClientError::Configuration(innermost(error.as_ref())))
}
