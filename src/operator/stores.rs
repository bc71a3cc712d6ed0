//! Caches of jobs, nodes and pods. Unused fields are dropped on arrival, so that a large cluster
//! needs little memory. Changes that do not affect a job or the pool cause no reconciliation.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use futures::stream::select;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{
    Container, Node, NodeCondition, NodeSpec, NodeStatus, Pod, PodSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::Api;
use kube::core::NamespaceResourceScope;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, Resource, ResourceExt};
use tokio::task::JoinSet;

use super::build::PROOF_LABEL;
use super::ownership::{controlling_job, is_owned_by};
use super::unreadable::Filter;
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

/// The objects of one namespace, or of all.
pub(super) fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match namespace {
        None => Api::all(client.clone()),
        Some(name) => Api::namespaced(client.clone(), name),
    }
}

/// Starts the caches, with the pods of one namespace or of all. The stream drives them and yields the jobs to reconcile.
pub fn start(
    client: &Client,
    namespace: Option<&str>,
) -> (
    Arc<Stores>,
    impl Stream<Item = Affected> + Send + Unpin + 'static + use<>,
) {
    let (stores, mut pod_writer, mut node_writer) = Stores::new();
    let known = stores.clone();
    let pod_stream = watcher(api::<Pod>(client, namespace), pages(PODS_PER_PAGE))
        .default_backoff()
        .modify(slim_pod)
        .filter_map(move |event| {
            let affected = event
                .ok()
                .and_then(|event| known.take(&event, &mut pod_writer));
            async move { affected }
        });
    let nodes = stores.nodes.clone();
    let node_stream = watcher(Api::<Node>::all(client.clone()), pages(NODES_PER_PAGE))
        .default_backoff()
        .modify(slim_node)
        .filter_map(move |event| {
            let changed = event.is_ok_and(|event| {
                let changed = changes_pool(&nodes, &event);
                node_writer.apply_watcher_event(&event);
                changed
            });
            async move { changed.then_some(Affected::All) }
        });
    (stores, select(pod_stream.boxed(), node_stream.boxed()))
}

fn pages(size: u32) -> watcher::Config {
    watcher::Config::default().page_size(size)
}

/// Cache of the jobs of one namespace or of all, and the stream that drives it and yields changed jobs. `report` gets the
/// unreadable ones.
pub fn jobs<F: FnMut(InvalidObject) -> JoinSet<()> + Send + 'static>(
    client: &Client,
    namespace: Option<&str>,
    report: F,
) -> (
    Store<TrainingJob>,
    impl Stream<Item = watcher::Result<TrainingJob>> + Send + 'static + use<F>,
) {
    let (known, writer) = reflector::store();
    let mut filter = Filter::new(report);
    let jobs = api::<GuardedJob>(client, namespace);
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

    /// Cached pods that a job owns to train, by name.
    pub fn pods_of(&self, job: &TrainingJob) -> BTreeMap<String, Arc<Pod>> {
        let namespace = job.namespace().unwrap_or_default();
        let mut pods = BTreeMap::new();
        for name in self.pod_index().pods_of(&ObjectRef::from_obj(job)) {
            let pod = self.pods.get(&ObjectRef::new(name).within(&namespace));
            let proves = |pod: &Pod| pod.labels().contains_key(PROOF_LABEL);
            let pod = pod.filter(|pod| is_owned_by(&pod.metadata, job) && !proves(pod));
            if let Some(pod) = pod {
                pods.insert(name.to_owned(), pod);
            }
        }
        pods
    }

    /// The cached pod of a name that a job owns.
    pub fn pod_of(&self, job: &TrainingJob, name: &str) -> Option<Arc<Pod>> {
        let namespace = job.namespace().unwrap_or_default();
        let pod = self.pods.get(&ObjectRef::new(name).within(&namespace));
        pod.filter(|pod| is_owned_by(&pod.metadata, job))
    }

    /// Locks the pod index for reading.
    pub fn pod_index(&self) -> RwLockReadGuard<'_, PodIndex> {
        self.pod_index
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a watch event of a pod and returns the jobs that it affects. A reader sees the index and the cache before
    /// the event, or both after it.
    pub(super) fn take(
        &self,
        event: &watcher::Event<Pod>,
        cache: &mut Writer<Pod>,
    ) -> Option<Affected> {
        let pod_index = self.pod_index.write();
        let mut pod_index = pod_index.unwrap_or_else(PoisonError::into_inner);
        pod_index.apply(event);
        cache.apply_watcher_event(event);
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

/// Whether a watch event of a node may change the pool. Kubelets update their nodes every few seconds, mostly without
/// a change of what [`slim_node`] keeps.
fn changes_pool(known: &Store<Node>, event: &watcher::Event<Node>) -> bool {
    match event {
        watcher::Event::Apply(node) => {
            let known = known.get(&ObjectRef::from_obj(node));
            known.is_none_or(|known| *known != *node)
        }
        // Nodes may have been deleted since the last list.
        watcher::Event::Delete(_) | watcher::Event::InitDone => true,
        watcher::Event::Init | watcher::Event::InitApply(_) => false,
    }
}

/// Drops what the controller reads only to plan a job: the texts of its recipe.
pub fn slim_job(job: &mut TrainingJob) {
    job.metadata.managed_fields = None;
    job.spec.recipe = RecipeSource {
        // Its text may change without the job.
        config_map: job.spec.recipe.config_map.take(),
        ..RecipeSource::default()
    };
    job.spec.overrides = Vec::new();
}

/// Keeps the fields of a pod that the controller reads.
fn slim_pod(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
    pod.metadata.annotations = None;
    if let Some(spec) = &mut pod.spec {
        let slim = |container: &mut Container| {
            *container = Container {
                resources: container.resources.take(),
                ..Container::default()
            };
        };
        spec.containers.iter_mut().for_each(slim);
        spec.init_containers.iter_mut().flatten().for_each(slim);
        *spec = PodSpec {
            containers: take(&mut spec.containers),
            init_containers: spec.init_containers.take(),
            node_name: spec.node_name.take(),
            ..PodSpec::default()
        };
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

/// Keeps the fields of a node that decide which pods it accepts.
fn slim_node(node: &mut Node) {
    node.metadata = ObjectMeta {
        name: node.metadata.name.take(),
        labels: node.metadata.labels.take(),
        ..ObjectMeta::default()
    };
    if let Some(spec) = &mut node.spec {
        for taint in spec.taints.iter_mut().flatten() {
            taint.time_added = None;
        }
        *spec = NodeSpec {
            taints: spec.taints.take(),
            unschedulable: spec.unschedulable,
            ..NodeSpec::default()
        };
    }
    if let Some(status) = &mut node.status {
        let conditions = take(&mut status.conditions).into_iter().flatten();
        let ready = conditions.filter(|condition| condition.type_ == "Ready");
        let ready = ready.map(|condition| NodeCondition {
            type_: condition.type_,
            status: condition.status,
            ..NodeCondition::default()
        });
        *status = NodeStatus {
            allocatable: status.allocatable.take(),
            conditions: Some(ready.collect()),
            ..NodeStatus::default()
        };
    }
}

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
        let (known, mut writer) = reflector::store();
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z");
        let mut apply = |mut node| {
            slim_node(&mut node);
            let event = watcher::Event::Apply(node);
            let changed = changes_pool(&known, &event);
            writer.apply_watcher_event(&event);
            changed
        };
        assert!(apply(node(false, "8", early)), "a new node");
        assert!(!apply(node(false, "8", late)));
        assert!(apply(node(true, "8", late)), "cordoned");
        assert!(apply(node(true, "7", late)), "one device less");
        assert!(!apply(node(true, "7", late)));
        let deleted = watcher::Event::Delete(node(true, "7", late));
        assert!(changes_pool(&known, &deleted));
        writer.apply_watcher_event(&deleted);
        let back = watcher::Event::Apply(node(true, "7", late));
        assert!(changes_pool(&known, &back), "back");
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
