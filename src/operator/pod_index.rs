//! Index of the pods by job, and of their devices by node. It is updated with every watch event, so
//! that a reconciliation reads the job's pods and the nodes, but not all pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher::Event;

use super::ownership::controlling_job;
use crate::api::TrainingJob;
use crate::inventory::kubernetes::{device_names, devices};

/// Devices of one pod that count at most, so that sums over all pods do not overflow.
const MOST_DEVICES: u64 = 1 << 20;

/// The indexed fields of a pod.
struct IndexedPod {
    /// The TrainingJob that controls it, and its uid.
    job: Option<(ObjectRef<TrainingJob>, String)>,
    /// Node to which it is bound.
    node: Option<String>,
    /// Devices by resource that it holds on the node; empty once it has ended.
    devices: Vec<(String, u64)>,
    /// Whether a scheduler may still place it: it has no node, is not being deleted, and no scheduler has
    /// reported that it does not fit.
    waits: bool,
}

impl IndexedPod {
    fn of(pod: &Pod) -> IndexedPod {
        let namespace = pod.namespace().unwrap_or_default();
        let owner = controlling_job(&pod.metadata);
        let node = node_of(pod).map(str::to_owned);
        let mut held = Vec::new();
        if node.is_some() && !is_over(pod) {
            for resource in device_names(pod) {
                let count = devices(pod, resource).min(MOST_DEVICES);
                if count > 0 {
                    held.push((resource.to_owned(), count));
                }
            }
        }
        let ends = pod.metadata.deletion_timestamp.is_some() || is_over(pod);
        IndexedPod {
            waits: node.is_none() && !ends && !is_unschedulable(pod),
            job: owner.map(|owner| {
                let job = ObjectRef::new(&owner.name).within(&namespace);
                (job, owner.uid.clone())
            }),
            node,
            devices: held,
        }
    }

    fn is_owned_by(&self, uid: &str) -> bool {
        self.job.as_ref().is_some_and(|(_, owner)| owner == uid)
    }
}

/// Pods of a job.
#[derive(Default)]
struct JobPods {
    names: BTreeSet<String>,
    /// Number of the last change of these pods.
    changed: u64,
}

/// Index of all pods by job and of their devices by node.
#[derive(Default)]
pub struct PodIndex {
    pods: HashMap<ObjectRef<Pod>, IndexedPod>,
    jobs: HashMap<ObjectRef<TrainingJob>, JobPods>,
    /// Number of changes so far.
    changes: u64,
    /// Held devices, by resource and node.
    held: HashMap<String, BTreeMap<String, u64>>,
    /// The index of the list that the watch is reading. It replaces this one at the end of the list.
    listed: Option<Box<PodIndex>>,
}

impl PodIndex {
    /// Applies a watch event.
    pub fn apply(&mut self, event: &Event<Pod>) {
        match event {
            Event::Init => {
                self.listed = Some(Box::new(PodIndex {
                    changes: self.changes,
                    ..PodIndex::default()
                }));
            }
            Event::InitApply(pod) => {
                if let Some(listed) = &mut self.listed {
                    listed.put(pod);
                }
            }
            Event::InitDone => {
                if let Some(listed) = self.listed.take() {
                    *self = *listed;
                }
            }
            Event::Apply(pod) => self.put(pod),
            Event::Delete(pod) => self.remove(pod),
        }
    }

    fn put(&mut self, pod: &Pod) {
        self.remove(pod);
        let indexed = IndexedPod::of(pod);
        if let Some(node) = &indexed.node {
            for (resource, count) in &indexed.devices {
                let nodes = self.held.entry(resource.clone()).or_default();
                *nodes.entry(node.clone()).or_default() += count;
            }
        }
        if let Some((job, _)) = &indexed.job {
            let pods = self.jobs.entry(job.clone()).or_default();
            pods.names.insert(pod.name_any());
            self.changes += 1;
            pods.changed = self.changes;
        }
        self.pods.insert(reference(pod), indexed);
    }

    fn remove(&mut self, pod: &Pod) {
        let Some(indexed) = self.pods.remove(&reference(pod)) else {
            return;
        };
        if let Some(node) = &indexed.node {
            for (resource, count) in &indexed.devices {
                let nodes = self.held.entry(resource.clone()).or_default();
                let held = nodes.remove(node).unwrap_or(0).saturating_sub(*count);
                if held > 0 {
                    nodes.insert(node.clone(), held);
                }
            }
        }
        if let Some((job, _)) = indexed.job
            && let Some(pods) = self.jobs.get_mut(&job)
        {
            pods.names.remove(&pod.name_any());
            self.changes += 1;
            pods.changed = self.changes;
            if pods.names.is_empty() {
                self.jobs.remove(&job);
            }
        }
    }

    /// Names of the pods of a job and of earlier jobs of its name.
    pub fn pods_of(&self, job: &ObjectRef<TrainingJob>) -> impl Iterator<Item = &str> {
        let pods = self.jobs.get(job).into_iter();
        pods.flat_map(|pods| &pods.names).map(String::as_str)
    }

    /// Number of the last change of a job's pods; 0 while it has none.
    pub fn changed(&self, job: &ObjectRef<TrainingJob>) -> u64 {
        self.jobs.get(job).map_or(0, |pods| pods.changed)
    }

    /// Whether the pod of the job with this uid may still get a node, also one that does not exist yet.
    pub fn waits_for_node(&self, pod: &ObjectRef<Pod>, uid: &str) -> bool {
        let pod = self.pods.get(pod);
        pod.is_none_or(|pod| pod.waits && pod.is_owned_by(uid))
    }

    /// Devices held on each node by all pods.
    pub fn held(&self, resource: &str) -> &BTreeMap<String, u64> {
        static NONE: BTreeMap<String, u64> = BTreeMap::new();
        self.held.get(resource).unwrap_or(&NONE)
    }

    /// Devices held on each node by the pods that a job owns.
    pub fn own(&self, resource: &str, job: &TrainingJob) -> BTreeMap<String, u64> {
        let mut own = BTreeMap::new();
        let (namespace, uid) = (
            job.namespace().unwrap_or_default(),
            job.uid().unwrap_or_default(),
        );
        for name in self.pods_of(&ObjectRef::from_obj(job)) {
            let pod = self.pods.get(&ObjectRef::new(name).within(&namespace));
            let Some(pod) = pod.filter(|pod| pod.is_owned_by(&uid)) else {
                continue;
            };
            let Some(node) = &pod.node else { continue };
            let devices = pod.devices.iter().filter(|(name, _)| name == resource);
            *own.entry(node.clone()).or_default() += devices.map(|(_, count)| count).sum::<u64>();
        }
        own
    }
}

/// A pod by namespace and name alone.
fn reference(pod: &Pod) -> ObjectRef<Pod> {
    ObjectRef::new(&pod.name_any()).within(&pod.namespace().unwrap_or_default())
}

/// Whether a scheduler has reported that the pod fits on no node.
fn is_unschedulable(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions.into_iter().flatten().any(|c| {
        c.type_ == "PodScheduled"
            && c.status == "False"
            && c.reason.as_deref() == Some("Unschedulable")
    })
}

/// Node to which a pod is bound.
pub fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Whether a pod has ended; it then holds no devices.
pub fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::operator::build::JOB_LABEL;
    use crate::operator::testing::owner;

    const GPU: &str = "nvidia.com/gpu";

    /// A pod with the label of one of the jobs `j0` … or none, owned by one or none, on one of the nodes
    /// `n0` … or on none.
    fn pod(
        (name, label, job): (u8, Option<u8>, Option<u8>),
        node: Option<u8>,
        gpus: u64,
        over: bool,
        unschedulable: bool,
    ) -> Pod {
        let labels = label.map(|job| json!({JOB_LABEL: format!("j{job}")}));
        let owners = job.map(|job| json!([owner(&format!("j{job}"), &format!("u{job}"))]));
        serde_json::from_value(json!({
            "metadata": {
                "name": format!("p{name}"), "namespace": "n",
                "labels": labels, "ownerReferences": owners,
            },
            "spec": {
                "nodeName": node.map(|node| format!("n{node}")),
                "containers": [{"name": "c", "resources": {"limits": {GPU: gpus.to_string()}}}],
            },
            "status": {
                "phase": if over { "Failed" } else { "Running" },
                "conditions": [{
                    "type": "PodScheduled", "status": if unschedulable { "False" } else { "True" },
                    "reason": "Unschedulable",
                }],
            },
        }))
        .unwrap()
    }

    fn any_pod() -> impl Strategy<Value = Pod> {
        let job = || proptest::option::of(0u8..3);
        let node = proptest::option::of(0u8..3);
        let names = (0u8..6, job(), job());
        (names, node, 0u64..5, any::<bool>(), any::<bool>()).prop_map(
            |(names, node, gpus, over, unschedulable)| pod(names, node, gpus, over, unschedulable),
        )
    }

    #[derive(Debug, Clone)]
    enum Step {
        Put(Pod),
        Delete(Pod),
        List(Vec<Pod>),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => any_pod().prop_map(Step::Put),
            2 => any_pod().prop_map(Step::Delete),
            1 => proptest::collection::vec(any_pod(), 0..4).prop_map(Step::List),
        ]
    }

    proptest! {
        /// The incremental index equals a scan of all pods.
        #[test]
        fn the_pod_index_equals_a_full_scan(steps in proptest::collection::vec(any_step(), 1..30)) {
            let mut pod_index = PodIndex::default();
            let mut all: BTreeMap<String, Pod> = BTreeMap::new();
            let mut before: HashMap<(u64, String), Vec<String>> = HashMap::new();
            for step in steps {
                match step {
                    Step::Put(pod) => {
                        pod_index.apply(&Event::Apply(pod.clone()));
                        all.insert(pod.name_any(), pod);
                    }
                    Step::Delete(pod) => {
                        pod_index.apply(&Event::Delete(pod.clone()));
                        all.remove(&pod.name_any());
                    }
                    Step::List(pods) => {
                        all.clear();
                        pod_index.apply(&Event::Init);
                        for pod in pods {
                            pod_index.apply(&Event::InitApply(pod.clone()));
                            all.insert(pod.name_any(), pod);
                        }
                        pod_index.apply(&Event::InitDone);
                    }
                }
                for job in 0..3 {
                    let (name, uid) = (format!("j{job}"), format!("u{job}"));
                    let job_pods = |pod: &&Pod| {
                        controlling_job(&pod.metadata).is_some_and(|owner| owner.uid == uid)
                    };
                    let own: Vec<String> =
                        all.values().filter(job_pods).map(ResourceExt::name_any).collect();
                    let job = crate::operator::testing::job(&name, &uid);
                    let reference = ObjectRef::from_obj(&job);
                    prop_assert_eq!(pod_index.pods_of(&reference).collect::<Vec<_>>(), own);
                    let waits = |pod: &&Pod| {
                        node_of(pod).is_none() && !is_over(pod) && !is_unschedulable(pod)
                    };
                    let waiting = all.values().filter(job_pods).filter(waits);
                    let waiting: Vec<String> = waiting.map(ResourceExt::name_any).collect();
                    let number = pod_index.changed(&reference);
                    let then = before.entry((number, name.clone())).or_insert(waiting.clone());
                    prop_assert_eq!(&*then, &waiting, "nothing changed by number {}", number);
                    let held = |of: &dyn Fn(&&Pod) -> bool| {
                        let mut held: BTreeMap<String, u64> = BTreeMap::new();
                        for pod in all.values().filter(|pod| of(pod) && !is_over(pod)) {
                            if let Some(node) = node_of(pod) {
                                *held.entry(node.to_owned()).or_default() += devices(pod, GPU);
                            }
                        }
                        held.retain(|_, count| *count > 0);
                        held
                    };
                    prop_assert_eq!(pod_index.held(GPU), &held(&|_| true));
                    let mut own = pod_index.own(GPU, &job);
                    own.retain(|_, count| *count > 0);
                    prop_assert_eq!(own, held(&job_pods));
                }
                for pod in all.values() {
                    let owner = controlling_job(&pod.metadata);
                    let owned = owner.is_some_and(|owner| owner.uid == "u0");
                    let waits = node_of(pod).is_none() && !is_over(pod) && !is_unschedulable(pod);
                    let waiting = pod_index.waits_for_node(&reference(pod), "u0");
                    prop_assert_eq!(waiting, owned && waits);
                }
            }
        }
    }
}
