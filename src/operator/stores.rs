//! Caches of what the API server has: nodes, and the pods that are not over. Fields that nobody here
//! reads are dropped when they arrive, so that a large cluster fits into little memory.

use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::Api;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};

use super::build::JOB_LABEL;
use crate::job::api::TrainingJob;

/// The caches.
pub struct Stores {
    /// All nodes.
    pub nodes: Store<Node>,
    /// All pods; those of others only for the devices that they hold.
    pub pods: Store<Pod>,
}

/// Which jobs to look at again.
pub enum Touched {
    /// One.
    Job(ObjectRef<TrainingJob>),
    /// All: the pool changed.
    All,
}

/// Starts the caches. The streams drive them, and say which jobs to look at again; both must be
/// polled.
pub fn start(
    client: &Client,
) -> (
    Arc<Stores>,
    impl Stream<Item = Touched> + Send + 'static,
    impl Stream<Item = Touched> + Send + 'static,
) {
    let (pods, pod_writer) = reflector::store();
    let (nodes, node_writer) = reflector::store();
    let config = || watcher::Config::default();
    let pod_stream = watcher(Api::<Pod>::all(client.clone()), config())
        .default_backoff()
        .modify(slim_pod)
        .reflect(pod_writer)
        .touched_objects()
        .filter_map(|pod| async move { Some(touched(&pod.ok()?)) });
    let node_stream = watcher(Api::<Node>::all(client.clone()), config())
        .default_backoff()
        .modify(slim_node)
        .reflect(node_writer)
        .touched_objects()
        .filter_map(|node| async move { node.ok().map(|_| Touched::All) });
    (Arc::new(Stores { nodes, pods }), pod_stream, node_stream)
}

impl Stores {
    /// Waits until both have been listed once.
    pub async fn ready(&self) {
        // A writer that is gone ends the controller elsewhere.
        let _ = tokio::join!(self.nodes.wait_until_ready(), self.pods.wait_until_ready());
    }

    /// The pods of a job.
    pub fn pods_of(&self, namespace: &str, job: &str) -> Vec<Arc<Pod>> {
        let pods = self.pods.state().into_iter();
        pods.filter(|pod| {
            pod.metadata.namespace.as_deref() == Some(namespace)
                && pod.labels().get(JOB_LABEL).is_some_and(|of| of == job)
        })
        .collect()
    }
}

fn touched(pod: &Pod) -> Touched {
    match (pod.labels().get(JOB_LABEL), pod.namespace()) {
        (Some(job), Some(namespace)) => Touched::Job(ObjectRef::new(job).within(&namespace)),
        // Somebody else's pod may have taken or given back devices.
        _ => Touched::All,
    }
}

fn slim_pod(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
    pod.metadata.annotations = None;
    if let Some(spec) = &mut pod.spec {
        spec.volumes = None;
        spec.affinity = None;
        spec.tolerations = None;
        for container in spec
            .containers
            .iter_mut()
            .chain(spec.init_containers.iter_mut().flatten())
        {
            container.env = None;
            container.args = None;
            container.command = None;
            container.volume_mounts = None;
            container.startup_probe = None;
            container.liveness_probe = None;
            container.readiness_probe = None;
        }
    }
}

fn slim_node(node: &mut Node) {
    node.metadata.managed_fields = None;
    node.metadata.annotations = None;
    if let Some(status) = &mut node.status {
        status.images = None;
        status.volumes_in_use = None;
    }
}

/// How long bursts of changes of the pool are gathered before all jobs are looked at again.
pub const GATHER: Duration = Duration::from_millis(200);
