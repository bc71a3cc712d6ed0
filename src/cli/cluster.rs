//! The commands for TrainingJobs on a cluster, and their common options.

pub mod cancel;
pub mod ledger;
pub mod list;
pub mod logs;
mod recipe_source;
pub mod scale;
pub mod show;
pub mod submit;
pub mod suspend;

use std::path::PathBuf;
use std::time::Duration;

use crate::client::{self, ClientError, Cluster, Options};

/// Time for the answer of a cluster that the user has not named.
const SOON: Duration = Duration::from_secs(2);

/// Selects the cluster, with kubectl's options.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Namespace [default: the context's]
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// Context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Path of the kubeconfig [default: $KUBECONFIG, then ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl ClusterArgs {
    /// Whether the command addresses a cluster: an option is set, or kubectl called evenkeel.
    pub fn is_selected(&self) -> bool {
        super::is_kubectl_plugin() || self.flag().is_some()
    }

    /// Whether a cluster is configured, so that a name without a run may be a job's: by a kubeconfig, or in a pod.
    pub fn is_configured(&self) -> bool {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let file = set("HOME").map(|home| PathBuf::from(home).join(".kube/config"));
        set("KUBECONFIG").is_some()
            || file.is_some_and(|file| file.is_file())
            || set("KUBERNETES_SERVICE_HOST").is_some()
    }

    /// Asks a cluster that the user has not named, which must answer soon.
    pub fn soon<T>(
        &self,
        ask: impl AsyncFnOnce(&Cluster) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let asked = self.run(async |cluster| {
            let answer = tokio::time::timeout(SOON, ask(cluster)).await;
            Ok(answer.unwrap_or_else(|_| {
                let message = format!("the cluster does not answer within {} s", SOON.as_secs());
                Err(ClientError::Usage(message))
            }))
        });
        asked.unwrap_or_else(|error| Err(ClientError::Usage(format!("{error:#}"))))
    }

    /// The first option that is set, as the user types it.
    pub fn flag(&self) -> Option<&'static str> {
        let set = [
            ("--namespace", self.namespace.is_some()),
            ("--context", self.context.is_some()),
            ("--kubeconfig", self.kubeconfig.is_some()),
        ];
        super::first_set(&set)
    }

    /// The options that repeat this selection in another command, with a leading space.
    pub fn options(&self) -> String {
        let option = |name: &str, value: Option<String>| {
            value.map_or_else(String::new, |value| format!(" --{name} {value}"))
        };
        let kubeconfig = self.kubeconfig.as_ref().map(|p| p.display().to_string());
        option("namespace", self.namespace.clone())
            + &option("context", self.context.clone())
            + &option("kubeconfig", kubeconfig)
    }

    /// Runs a future with a client of the cluster.
    pub fn run<T>(
        &self,
        work: impl AsyncFnOnce(&Cluster) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let cluster = client::connect(&Options {
                kubeconfig: self.kubeconfig.clone(),
                context: self.context.clone(),
                namespace: self.namespace.clone(),
            })
            .await?;
            work(&cluster).await
        })
    }
}
