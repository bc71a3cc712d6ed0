//! Selects cluster and namespace like kubectl.

use std::path::PathBuf;

use kube::api::Api;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use super::{ClientError, root};
use crate::api::TrainingJob;

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
        ClientError::of(self, job, error)
    }
}

/// Reads the kubeconfig; does not connect yet.
pub async fn connect(options: &Options) -> Result<Cluster, ClientError> {
    let chosen = KubeConfigOptions {
        context: options.context.clone(),
        ..KubeConfigOptions::default()
    };
    let unusable = |error: &(dyn std::error::Error + 'static)| {
        ClientError::Configuration(root(error).into_owned())
    };
    let config = match (&options.kubeconfig, &options.context) {
        (Some(path), _) => {
            let file = Kubeconfig::read_from(path).map_err(|error| unusable(&error))?;
            let read = Config::from_custom_kubeconfig(file, &chosen).await;
            read.map_err(|error| unusable(&error))?
        }
        (None, Some(_)) => {
            let read = Config::from_kubeconfig(&chosen).await;
            read.map_err(|error| unusable(&error))?
        }
        (None, None) => Config::infer().await.map_err(|error| unusable(&error))?,
    };
    let url = config.cluster_url.to_string();
    let namespace = options.namespace.clone();
    let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config).map_err(|error| unusable(&error))?;
    Ok(Cluster {
        client,
        namespace,
        url: url.trim_end_matches('/').to_owned(),
    })
}
