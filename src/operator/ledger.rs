//! Devices that are promised: seats that a job counts on although no pod of it is on a node yet.
//! Jobs decide one after the other under this ledger, so two never plan the same device.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use super::build::tolerations_and_selector;
use super::holdings::Holdings;
use super::stores::Stores;
use crate::inventory::kubernetes::{Wants, free_seats};
use crate::job::api::TrainingJob;

/// What a job counts on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Promise {
    resource: String,
    per_seat: u64,
    namespace: String,
    job: String,
    pods: BTreeSet<String>,
    /// Which change of the job's pods was counted after, and how many of them were on no node then.
    open: Option<(u64, usize)>,
}

impl Promise {
    /// How many of its pods are on no node. Every look at a job asks it of all others, so it is
    /// counted again only when one of these pods has changed.
    fn open(&mut self, holdings: &Holdings) -> usize {
        let change = holdings.changed(&self.namespace, &self.job);
        match self.open {
            Some((then, open)) if then == change => open,
            _ => {
                let placed = |name: &&String| holdings.is_placed(&self.namespace, name);
                let open = self.pods.iter().filter(|name| !placed(name)).count();
                self.open = Some((change, open));
                open
            }
        }
    }
}

/// The promises of all jobs, by uid.
#[derive(Debug, Default)]
pub struct Ledger {
    promises: HashMap<String, Promise>,
    suspects: HashMap<String, SystemTime>,
}

/// A node that stopped answering gets no new pod for so long: Kubernetes itself needs 50 s, as it
/// comes, to notice.
const SUSPICION: Duration = Duration::from_secs(90);

impl Ledger {
    /// From now on the job counts on these pods and no others.
    pub fn promise(&mut self, job: &TrainingJob, wants: &Wants, pods: BTreeSet<String>) {
        let uid = job.uid().unwrap_or_default();
        if pods.is_empty() {
            self.promises.remove(&uid);
            return;
        }
        let known = self.promises.get(&uid).filter(|known| known.pods == pods);
        let promise = Promise {
            resource: wants.resource.clone(),
            per_seat: wants.per_seat,
            namespace: job.namespace().unwrap_or_default(),
            job: job.name_any(),
            open: known.and_then(|known| known.open),
            pods,
        };
        self.promises.insert(uid, promise);
    }

    /// What a job's status says that it counts on.
    pub fn recover(&mut self, job: &TrainingJob) {
        let Some(status) = &job.status else { return };
        let name = job.name_any();
        let pods = status.seats.iter().map(|seat| seat.pod(&name)).collect();
        self.promise(job, &wants(job), pods);
    }

    /// Forgets jobs that do not exist any more.
    pub fn keep_only(&mut self, exists: impl Fn(&str) -> bool) {
        self.promises.retain(|job, _| exists(job));
    }

    /// Nothing is counted on these nodes for a while.
    pub fn suspect(&mut self, nodes: &BTreeSet<String>) {
        let now = SystemTime::now();
        self.suspects.retain(|_, since| recent(*since));
        for node in nodes {
            self.suspects.entry(node.clone()).or_insert(now);
        }
    }

    /// The nodes under suspicion, and since when.
    pub fn suspects(&self) -> Vec<(String, SystemTime)> {
        self.suspects
            .iter()
            .map(|(node, since)| (node.clone(), *since))
            .collect()
    }

    /// Whether a node is under suspicion.
    pub fn suspects_node(&self, node: &str) -> bool {
        self.suspects.get(node).is_some_and(|since| recent(*since))
    }

    /// A node gave a sign of life.
    pub fn trust(&mut self, node: &str) {
        self.suspects.remove(node);
    }

    /// The job is over.
    pub fn forget(&mut self, job: &str) {
        self.promises.remove(job);
    }

    /// Seats that fit for a job: free devices, and those that its own pods hold. One of its pods
    /// that is on its way out holds its devices for as long as it takes; the pod in its place waits
    /// for them.
    pub fn seats(&mut self, stores: &Stores, job: &TrainingJob, wants: &Wants) -> u32 {
        let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
        let uid = job.uid().unwrap_or_default();
        let holdings = stores.holdings();
        let held = holdings.held(&wants.resource, &namespace, &name, &uid);
        let promised: Vec<u64> = self
            .promises
            .iter_mut()
            .filter(|(other, promise)| **other != uid && promise.resource == wants.resource)
            .flat_map(|(_, promise)| {
                let open = promise.open(&holdings);
                std::iter::repeat_n(promise.per_seat, open)
            })
            .collect();
        drop(holdings);
        let nodes = stores.nodes.state();
        let suspect = |node: &Node| {
            let name = node.metadata.name.as_deref();
            name.is_some_and(|name| self.suspects_node(name))
        };
        let nodes = nodes
            .iter()
            .map(AsRef::as_ref)
            .filter(|node| !suspect(node));
        free_seats(nodes, &held, &promised, wants)
    }
}

/// What a job asks of a node.
pub fn wants(job: &TrainingJob) -> Wants {
    let (tolerations, node_selector) = tolerations_and_selector(job);
    Wants {
        resource: job.spec.resource_name.clone(),
        per_seat: job.spec.gpus_per_node.into(),
        node_selector,
        tolerations,
    }
}

fn recent(since: SystemTime) -> bool {
    since.elapsed().is_ok_and(|elapsed| elapsed < SUSPICION)
}
