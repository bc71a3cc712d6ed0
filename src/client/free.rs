//! Free devices of a cluster, for planning before a launch.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams};

use super::{ClientError, Cluster};
use crate::inventory::kubernetes::{
    HeldDevices, ResourceRequest, allocatable, devices, free_slots, open,
};

/// Free devices of one resource, in slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Free {
    /// Resource name of the devices.
    pub resource: String,
    /// Devices of each slot.
    pub per_node: u32,
    /// Free slots on schedulable nodes.
    pub free: u32,
    /// All slots of these nodes.
    pub all: u32,
}

/// Counts free slots. By default a slot has as many devices as most schedulable nodes.
pub async fn free(
    cluster: &Cluster,
    resource: &str,
    per_node: Option<u32>,
) -> Result<Free, ClientError> {
    let everything = ListParams::default();
    let nodes = Api::<Node>::all(cluster.client.clone());
    let nodes = nodes.list(&everything).await;
    let nodes = nodes.map_err(|error| cluster.error(None, error))?.items;
    let Some(per_node) = per_node.or_else(|| usual(&nodes, resource)) else {
        return Err(ClientError::Usage(format!(
            "no schedulable node offers {resource}; `kubectl describe nodes` shows their resources, \
            choose another with --resource"
        )));
    };
    let pods = Api::<Pod>::all(cluster.client.clone());
    let running = ListParams::default().fields("status.phase!=Succeeded,status.phase!=Failed");
    let pods = pods.list(&running).await;
    let pods = pods.map_err(|error| cluster.error(None, error))?.items;
    let mut held = BTreeMap::new();
    for pod in &pods {
        if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) {
            *held.entry(node).or_default() += devices(pod, resource);
        }
    }
    let resource_request = ResourceRequest {
        resource: resource.to_owned(),
        per_slot: per_node.into(),
        node_selector: BTreeMap::new(),
        node_affinity: None,
        tolerations: Vec::new(),
    };
    let none = BTreeMap::new();
    let slots = |all: &BTreeMap<String, u64>| {
        let held = HeldDevices { all, own: &none };
        free_slots(nodes.iter(), &held, &[], &resource_request, |_| false)
    };
    Ok(Free {
        resource: resource.to_owned(),
        per_node,
        free: slots(&held),
        all: slots(&none),
    })
}

/// The most frequent number of devices on schedulable nodes; the larger of equally frequent ones.
fn usual(nodes: &[Node], resource: &str) -> Option<u32> {
    let mut frequency: BTreeMap<u64, u64> = BTreeMap::new();
    for node in nodes.iter().filter(|node| open(node)) {
        *frequency.entry(allocatable(node, resource)).or_default() += 1;
    }
    frequency.remove(&0);
    let usual = frequency
        .into_iter()
        .max_by_key(|(count, nodes)| (*nodes, *count));
    usual.and_then(|(count, _)| u32::try_from(count).ok())
}
