//! What a user may do, and what of Evenkeel a cluster has. A launch needs it; `evenkeel doctor` shows it.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams, PostParams};

use super::{ClientError, Cluster};

/// A verb on a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Right {
    pub verb: &'static str,
    group: &'static str,
    /// Resource, with its subresource after a slash.
    pub resource: &'static str,
    /// In the namespace of the jobs; nodes, and pods where devices are counted, are of the whole cluster.
    pub in_namespace: bool,
    /// Without it this does not work.
    pub gives: &'static str,
}

const fn right(verb: &'static str, resource: &'static str, gives: &'static str) -> Right {
    Right {
        verb,
        group: "",
        resource,
        in_namespace: true,
        gives,
    }
}

const fn of_jobs(verb: &'static str, gives: &'static str) -> Right {
    Right {
        group: "evenkeel.dev",
        ..right(verb, "trainingjobs", gives)
    }
}

/// What `launch --nodes` cannot do without.
pub const NEEDED: [Right; 4] = [
    of_jobs("create", "launch"),
    of_jobs("get", "status"),
    of_jobs("list", "list"),
    of_jobs("watch", "launch without --detach"),
];

/// What single commands and options need.
pub const USEFUL: [Right; 7] = [
    of_jobs("patch", "resize, suspend and resume"),
    of_jobs("delete", "cancel"),
    right("create", "configmaps", "code of a folder without a bucket"),
    right("list", "pods", "logs"),
    right("get", "pods/log", "logs"),
    Right {
        in_namespace: false,
        ..right("list", "nodes", "a launch without --gpus-per-node")
    },
    Right {
        in_namespace: false,
        ..right("list", "pods", "a launch without --gpus-per-node")
    },
];

impl Cluster {
    /// The version of Kubernetes.
    pub async fn version(&self) -> Result<String, ClientError> {
        let version = self.client.apiserver_version().await;
        Ok(version
            .map_err(|error| self.error(None, error))?
            .git_version)
    }

    /// URL of the API server.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Whether the user has a right.
    pub async fn allows(&self, right: &Right) -> Result<bool, ClientError> {
        let (resource, part) = match right.resource.split_once('/') {
            Some((resource, part)) => (resource, Some(part.to_owned())),
            None => (right.resource, None),
        };
        let asked = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(ResourceAttributes {
                    namespace: right.in_namespace.then(|| self.namespace.clone()),
                    verb: Some(right.verb.to_owned()),
                    group: Some(right.group.to_owned()),
                    resource: Some(resource.to_owned()),
                    subresource: part,
                    ..ResourceAttributes::default()
                }),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let reviews: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let answer = reviews.create(&PostParams::default(), &asked).await;
        let answer = answer.map_err(|error| self.error(None, error))?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }

    /// The controllers of this cluster. The user needs the right to list Deployments.
    pub async fn controllers(&self) -> Result<Vec<Controller>, ClientError> {
        let all: Api<Deployment> = Api::all(self.client.clone());
        let named = ListParams::default().labels("app.kubernetes.io/name=evenkeel-controller");
        let found = all.list(&named).await;
        let found = found.map_err(|error| self.error(None, error))?;
        let of = |deployment: Deployment| Controller {
            namespace: deployment.metadata.namespace.unwrap_or_default(),
            version: deployment
                .metadata
                .labels
                .and_then(|mut labels| labels.remove("app.kubernetes.io/version")),
            ready: deployment
                .status
                .and_then(|status| status.ready_replicas)
                .unwrap_or(0),
        };
        Ok(found.items.into_iter().map(of).collect())
    }

    /// Nodes that have an image already, and all nodes. Kubelets list fifty images.
    pub async fn nodes_with(&self, image: &str) -> Result<(usize, usize), ClientError> {
        let nodes = Api::<Node>::all(self.client.clone());
        let nodes = nodes.list(&ListParams::default()).await;
        let nodes = nodes.map_err(|error| self.error(None, error))?.items;
        let has = |node: &&Node| {
            let images = node
                .status
                .iter()
                .flat_map(|status| status.images.iter().flatten());
            let names: BTreeSet<&str> = images
                .flat_map(|image| image.names.iter().flatten())
                .map(String::as_str)
                .collect();
            // Runtimes write out the registry of Docker's hub.
            names.contains(image) || names.contains(format!("docker.io/{image}").as_str())
        };
        Ok((nodes.iter().filter(has).count(), nodes.len()))
    }
}

/// A controller of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    pub namespace: String,
    /// `None`: older than the label that states it.
    pub version: Option<String>,
    /// Replicas that are ready.
    pub ready: i32,
}
