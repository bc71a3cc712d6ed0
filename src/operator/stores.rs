//! Caches of jobs, nodes and pods. Unused fields are dropped on arrival, so that a large cluster
//! needs little memory. Changes that do not affect a job or the pool cause no reconciliation.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::Api;
use kube::core::NamespaceResourceScope;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, Resource, ResourceExt};
use tokio::sync::mpsc::UnboundedSender;

use super::ownership::controlling_job;
use super::unreadable::{Filter, Seen};
use crate::api::guarded::GuardedJob;
use crate::api::{RecipeSource, TrainingJob};
use crate::inventory::kubernetes::device_names;
use crate::operator::pod_index::PodIndex;

/// Jobs in a response to a list. The client holds a response three times, and a job has up to 1.5 MiB.
const JOBS_PER_PAGE: u32 = 5;
/// Pods in a response to a list; most have about 10 KiB.
const PODS_PER_PAGE: u32 = 100;
/// Nodes in a response to a list. Tenants cannot write nodes.
const NODES_PER_PAGE: u32 = 250;

/// Caches of nodes and pods.
pub struct Stores {
    pub nodes: Store<Node>,
    /// All pods; pods that belong to no job matter only for the devices that they hold.
    pods: Store<Pod>,
    pod_index: RwLock<PodIndex>,
}

/// Jobs to reconcile after a change.
pub enum Affected {
    Job(ObjectRef<TrainingJob>),
    /// All jobs, because the pool changed.
    All,
}

/// Namespaces whose jobs and pods are watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    Cluster,
    Namespace(String),
}

impl Scope {
    fn api<K>(&self, client: &Client) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match self {
            Scope::Cluster => Api::all(client.clone()),
            Scope::Namespace(name) => Api::namespaced(client.clone(), name),
        }
    }
}

/// Starts the caches. The streams drive them and yield the jobs to reconcile; both must be polled.
pub fn start(
    client: &Client,
    scope: &Scope,
) -> (
    Arc<Stores>,
    impl Stream<Item = Affected> + Send + 'static,
    impl Stream<Item = Affected> + Send + 'static,
) {
    let (stores, pod_writer, node_writer) = Stores::new();
    let known = stores.clone();
    let pod_stream = watcher(scope.api::<Pod>(client), pages(PODS_PER_PAGE))
        .default_backoff()
        .modify(slim_pod)
        .reflect(pod_writer)
        .filter_map(move |event| {
            let affected = event.ok().and_then(|event| known.take(&event));
            async move { affected }
        });
    let mut offers = Offers::default();
    let node_stream = watcher(Api::<Node>::all(client.clone()), pages(NODES_PER_PAGE))
        .default_backoff()
        .modify(slim_node)
        .reflect(node_writer)
        .filter_map(move |event| {
            let changed = event.is_ok_and(|event| offers.change(&event));
            async move { changed.then_some(Affected::All) }
        });
    (stores, pod_stream, node_stream)
}

fn pages(size: u32) -> watcher::Config {
    watcher::Config::default().page_size(size)
}

/// Cache of the jobs, and the stream that drives it and yields changed jobs. Unreadable jobs go to
/// `aside`.
pub fn jobs(
    client: &Client,
    scope: &Scope,
    aside: UnboundedSender<Seen>,
) -> (
    Store<TrainingJob>,
    impl Stream<Item = watcher::Result<TrainingJob>> + Send + 'static,
) {
    let (known, writer) = reflector::store();
    let mut filter = Filter::new(aside);
    let jobs = scope.api::<GuardedJob>(client);
    let stream = watcher(jobs, pages(JOBS_PER_PAGE))
        .default_backoff()
        .filter_map(move |event| {
            let readable = match event {
                Ok(event) => filter.pass(event).map(Ok),
                Err(error) => Some(Err(error)),
            };
            async move { readable }
        })
        .modify(slim_job)
        .reflect(writer)
        .applied_objects();
    (known, stream)
}

impl Stores {
    /// Empty caches, and what fills them.
    pub(super) fn new() -> (Arc<Stores>, Writer<Pod>, Writer<Node>) {
        let (pods, pod_writer) = reflector::store();
        let (nodes, node_writer) = reflector::store();
        let stores = Stores {
            nodes,
            pods,
            pod_index: RwLock::default(),
        };
        (Arc::new(stores), pod_writer, node_writer)
    }

    /// Waits until nodes and pods have been listed once.
    pub async fn ready(&self) {
        // A dropped writer ends the controller elsewhere.
        let _ = tokio::join!(self.nodes.wait_until_ready(), self.pods.wait_until_ready());
    }

    /// Cached pods of a job.
    pub fn pods_of(&self, namespace: &str, job: &str) -> Vec<Arc<Pod>> {
        let reference = |name: &str| ObjectRef::new(name).within(namespace);
        let pod_index = self.pod_index();
        let names = pod_index.pods_of(namespace, job);
        names
            .filter_map(|name| self.pods.get(&reference(name)))
            .collect()
    }

    /// Locks the pod index for reading.
    pub fn pod_index(&self) -> RwLockReadGuard<'_, PodIndex> {
        self.pod_index
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a watch event of a pod and returns the jobs that it affects.
    pub(super) fn take(&self, event: &watcher::Event<Pod>) -> Option<Affected> {
        let mut pod_index = self
            .pod_index
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        pod_index.apply(event);
        match event {
            watcher::Event::Apply(pod)
            | watcher::Event::InitApply(pod)
            | watcher::Event::Delete(pod) => affected(pod),
            watcher::Event::Init => None,
            // Pods may have been deleted since the last list.
            watcher::Event::InitDone => Some(Affected::All),
        }
    }
}

fn affected(pod: &Pod) -> Option<Affected> {
    match (controlling_job(&pod.metadata), pod.namespace()) {
        (Some(job), Some(namespace)) => {
            Some(Affected::Job(ObjectRef::new(&job.name).within(&namespace)))
        }
        // A pod of no job may have taken or released devices.
        _ => (!device_names(pod).is_empty()).then_some(Affected::All),
    }
}

/// Last known hash of each node's scheduling fields. Kubelets update their nodes every few seconds,
/// mostly without a change that affects planning.
#[derive(Default)]
struct Offers(HashMap<String, u64>);

impl Offers {
    /// Applies a watch event of a node; true if the pool may have changed.
    fn change(&mut self, event: &watcher::Event<Node>) -> bool {
        match event {
            watcher::Event::Apply(node) | watcher::Event::InitApply(node) => {
                let offer = offer(node);
                self.0.insert(node.name_any(), offer) != Some(offer)
            }
            watcher::Event::Delete(node) => self.0.remove(&node.name_any()).is_some(),
            watcher::Event::Init => false,
            // Nodes may have been deleted since the last list.
            watcher::Event::InitDone => true,
        }
    }
}

/// Hash of the fields of a node that decide which pods it accepts.
fn offer(node: &Node) -> u64 {
    let (spec, status) = (node.spec.as_ref(), node.status.as_ref());
    let taints = spec.and_then(|spec| spec.taints.as_ref());
    let taints: Vec<_> = taints
        .into_iter()
        .flatten()
        .map(|taint| (&taint.key, &taint.value, &taint.effect))
        .collect();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    let ready = conditions.find(|condition| condition.type_ == "Ready");
    let mut hasher = DefaultHasher::new();
    taints.hash(&mut hasher);
    spec.and_then(|spec| spec.unschedulable).hash(&mut hasher);
    ready.map(|ready| &ready.status).hash(&mut hasher);
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    for (name, quantity) in allocatable.into_iter().flatten() {
        (name, &quantity.0).hash(&mut hasher);
    }
    node.metadata.labels.hash(&mut hasher);
    hasher.finish()
}

/// Drops the unused fields of a job. Once the status has the recipe's snapshot, the controller reads no
/// text of the spec: the cache keeps each text once.
pub fn slim_job(job: &mut TrainingJob) {
    job.metadata.managed_fields = None;
    let planned = job.status.as_ref().and_then(|s| s.recipe.as_ref());
    if planned.is_some() {
        job.spec.recipe = RecipeSource::default();
        job.spec.overrides = Vec::new();
    }
}

fn slim_pod(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
    pod.metadata.annotations = None;
    if let Some(spec) = &mut pod.spec {
        spec.volumes = None;
        spec.affinity = None;
        spec.tolerations = None;
        spec.topology_spread_constraints = None;
        spec.security_context = None;
        spec.node_selector = None;
        spec.image_pull_secrets = None;
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
            container.security_context = None;
            container.ports = None;
        }
    }
    if let Some(status) = &mut pod.status {
        status.host_ips = None;
        status.pod_ips = None;
        if let Some(conditions) = &mut status.conditions {
            let read = ["PodScheduled", "DisruptionTarget"];
            conditions.retain(|condition| read.contains(&condition.type_.as_str()));
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

/// Window in which changes are coalesced: of the pool before all jobs are reconciled, of a job's
/// pods before that job is.
pub const COALESCE_WINDOW: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::operator::build::JOB_LABEL;
    use crate::operator::testing::owner;

    fn node(unschedulable: bool, gpus: &str, heartbeat: &str) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": "a", "labels": {"pool": "x"}},
            "spec": {"unschedulable": unschedulable},
            "status": {
                "allocatable": {"nvidia.com/gpu": gpus},
                "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": heartbeat}],
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_node_heartbeat_does_not_change_the_pool() {
        let mut offers = Offers::default();
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z");
        let mut apply = |node| offers.change(&watcher::Event::Apply(node));
        assert!(apply(node(false, "8", early)), "a new node");
        assert!(!apply(node(false, "8", late)));
        assert!(apply(node(true, "8", late)), "cordoned");
        assert!(apply(node(true, "7", late)), "one device less");
        assert!(!apply(node(true, "7", late)));
        assert!(offers.change(&watcher::Event::Delete(node(true, "7", late))));
        assert!(
            offers.change(&watcher::Event::Apply(node(true, "7", late))),
            "back"
        );
    }

    #[test]
    fn only_device_pods_outside_jobs_change_the_pool() {
        let pod = |owners: Value, limits: Value| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": "p", "namespace": "n", "labels": {JOB_LABEL: "j"},
                    "ownerReferences": owners},
                "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]},
            }))
            .unwrap()
        };
        let usual = json!({"cpu": "1", "memory": "1Gi"});
        assert!(affected(&pod(json!([]), usual.clone())).is_none());
        let holding = affected(&pod(json!([]), json!({"amd.com/gpu": "1"})));
        assert!(matches!(holding, Some(Affected::All)));
        let own = affected(&pod(json!([owner("j", "u")]), usual));
        assert!(matches!(own, Some(Affected::Job(job)) if job.name == "j"));
    }
}
