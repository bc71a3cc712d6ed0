//! The commands for TrainingJobs on a cluster, and the options that all of them have.

pub mod cancel;
mod carry;
pub mod list;
pub mod logs;
pub mod scale;
pub mod show;
pub mod submit;
pub mod suspend;

use std::path::PathBuf;

use crate::client::{self, Cluster, Options};

/// Which cluster, as kubectl is told.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// The namespace [default: the context's]
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// The kubeconfig's context [default: the current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The kubeconfig [default: $KUBECONFIG, then ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl ClusterArgs {
    /// Whether a cluster is meant: one of the options was given, or kubectl has called us.
    pub fn meant(&self) -> bool {
        super::is_kubectl_plugin()
            || self.namespace.is_some()
            || self.context.is_some()
            || self.kubeconfig.is_some()
    }

    /// What makes another command speak of the same place, with a space before it.
    pub fn again(&self) -> String {
        let option = |name: &str, value: Option<String>| {
            value.map_or_else(String::new, |value| format!(" --{name} {value}"))
        };
        let kubeconfig = self.kubeconfig.as_ref().map(|p| p.display().to_string());
        option("namespace", self.namespace.clone())
            + &option("context", self.context.clone())
            + &option("kubeconfig", kubeconfig)
    }

    /// Does something on the cluster.
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
