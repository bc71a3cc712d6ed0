//! Reservations: devices counted for pods that no node runs yet. Jobs decide one after the other
//! under the lock of these reservations, so two jobs never plan the same device.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use super::build::tolerations_and_selector;
use super::stores::Stores;
use crate::api::TrainingJob;
use crate::inventory::kubernetes::{ResourceRequest, free_slots};
use crate::operator::pod_index::PodIndex;

/// Devices reserved for the pods of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reservation {
    resource: String,
    per_slot: u64,
    namespace: String,
    job: String,
    pods: BTreeSet<String>,
    /// Number of the last counted change of the job's pods, and how many were on no node then.
    unplaced: Option<(u64, usize)>,
}

impl Reservation {
    /// Number of its pods that are on no node. Each reconciliation needs it for all other jobs, so it is
    /// counted again only when one of these pods has changed.
    fn unplaced(&mut self, pod_index: &PodIndex) -> usize {
        let change = pod_index.changed(&self.namespace, &self.job);
        match self.unplaced {
            Some((then, unplaced)) if then == change => unplaced,
            _ => {
                let placed = |name: &&String| pod_index.is_placed(&self.namespace, name);
                let unplaced = self.pods.iter().filter(|name| !placed(name)).count();
                self.unplaced = Some((change, unplaced));
                unplaced
            }
        }
    }
}

/// Reservations of all jobs, by uid, and the suspected nodes.
#[derive(Debug, Default)]
pub struct Reservations {
    by_job: HashMap<String, Reservation>,
    suspects: HashMap<String, SystemTime>,
}

/// Time for which an unresponsive node gets no new pod. Kubernetes with its defaults needs 50 s to
/// detect such a node.
const SUSPICION: Duration = Duration::from_secs(90);

impl Reservations {
    /// Reserves devices for these pods of a job and releases its other reservations.
    pub fn reserve(
        &mut self,
        job: &TrainingJob,
        resource_request: &ResourceRequest,
        pods: BTreeSet<String>,
    ) {
        let uid = job.uid().unwrap_or_default();
        if pods.is_empty() {
            self.by_job.remove(&uid);
            return;
        }
        let known = self.by_job.get(&uid).filter(|known| known.pods == pods);
        let reservation = Reservation {
            resource: resource_request.resource.clone(),
            per_slot: resource_request.per_slot,
            namespace: job.namespace().unwrap_or_default(),
            job: job.name_any(),
            unplaced: known.and_then(|known| known.unplaced),
            pods,
        };
        self.by_job.insert(uid, reservation);
    }

    /// Reserves the devices of the slots in a job's status.
    pub fn restore(&mut self, job: &TrainingJob) {
        let Some(status) = &job.status else { return };
        let name = job.name_any();
        let pods = status.slots.iter().map(|slot| slot.pod(&name)).collect();
        self.reserve(job, &resource_request(job), pods);
    }

    /// Releases the reservations of deleted jobs.
    pub fn keep_only(&mut self, exists: impl Fn(&str) -> bool) {
        self.by_job.retain(|job, _| exists(job));
    }

    /// Excludes these nodes for [`SUSPICION`].
    pub fn suspect(&mut self, nodes: &BTreeSet<String>) {
        let now = SystemTime::now();
        self.suspects.retain(|_, since| recent(*since));
        for node in nodes {
            self.suspects.entry(node.clone()).or_insert(now);
        }
    }

    /// Suspected nodes, each with the start of the suspicion.
    pub fn suspects(&self) -> Vec<(String, SystemTime)> {
        self.suspects
            .iter()
            .map(|(node, since)| (node.clone(), *since))
            .collect()
    }

    /// Whether a node is suspected.
    pub fn suspects_node(&self, node: &str) -> bool {
        self.suspects.get(node).is_some_and(|since| recent(*since))
    }

    /// Ends the suspicion of a node.
    pub fn trust(&mut self, node: &str) {
        self.suspects.remove(node);
    }

    /// Releases the reservations of a job.
    pub fn forget(&mut self, job: &str) {
        self.by_job.remove(job);
    }

    /// Slots that fit for a job, on free devices and on those that the job's pods hold. A terminating pod holds
    /// its devices until it has ended; its replacement waits for them.
    pub fn slots(
        &mut self,
        stores: &Stores,
        job: &TrainingJob,
        resource_request: &ResourceRequest,
    ) -> u32 {
        let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
        let uid = job.uid().unwrap_or_default();
        let pod_index = stores.pod_index();
        let held = pod_index.held(&resource_request.resource, &namespace, &name, &uid);
        let reserved: Vec<u64> = self
            .by_job
            .iter_mut()
            .filter(|(other, reservation)| {
                **other != uid && reservation.resource == resource_request.resource
            })
            .flat_map(|(_, reservation)| {
                let unplaced = reservation.unplaced(&pod_index);
                std::iter::repeat_n(reservation.per_slot, unplaced)
            })
            .collect();
        drop(pod_index);
        let nodes = stores.nodes.state();
        let suspect = |node: &Node| {
            let name = node.metadata.name.as_deref();
            name.is_some_and(|name| self.suspects_node(name))
        };
        let nodes = nodes
            .iter()
            .map(AsRef::as_ref)
            .filter(|node| !suspect(node));
        free_slots(nodes, &held, &reserved, resource_request)
    }
}

/// Resource request of a job's pod.
pub fn resource_request(job: &TrainingJob) -> ResourceRequest {
    let (tolerations, node_selector) = tolerations_and_selector(job);
    ResourceRequest {
        resource: job.spec.resource_name.clone(),
        per_slot: job.spec.gpus_per_node.into(),
        node_selector,
        tolerations,
    }
}

fn recent(since: SystemTime) -> bool {
    since.elapsed().is_ok_and(|elapsed| elapsed < SUSPICION)
}
