//! Capacity of a cluster's nodes: free devices for a job, and whether a node keeps its pods.
//!
//! All functions are pure and use objects of the API server. This module does not know jobs: its input is the
//! pods that hold devices, and reservations for slots without a pod.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// A job's resource request to a node.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceRequest {
    /// Resource name of a device, for example `nvidia.com/gpu`.
    pub resource: String,
    pub per_slot: u64,
    /// Labels that its nodes must have.
    pub node_selector: BTreeMap<String, String>,
    /// Taints that its pods tolerate.
    pub tolerations: Vec<Toleration>,
}

/// Whether a node keeps its pods, and takes new ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// The node keeps its pods and takes new ones.
    Open,
    /// The node is cordoned.
    Cordoned,
    /// A taint that the job does not tolerate: the node will go away, or is not for this job.
    Tainted(String),
    /// The node is not ready.
    NotReady,
}

/// The taint of a cordon, which follows the cordon and its end with a delay.
const CORDON: &str = "node.kubernetes.io/unschedulable";

/// Taints that repeat the node's own condition.
const NOT_READY: [&str; 2] = [
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
];

/// A node's standing for a job with these tolerations.
pub fn standing(node: &Node, tolerations: &[Toleration]) -> Standing {
    let conditions = node
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let ready = conditions
        .into_iter()
        .flatten()
        .find(|c| c.type_ == "Ready");
    if ready.is_none_or(|condition| condition.status != "True") {
        return Standing::NotReady;
    }
    let spec = node.spec.as_ref();
    let cordoned = spec.and_then(|spec| spec.unschedulable).unwrap_or(false);
    let taints = spec
        .and_then(|spec| spec.taints.as_ref())
        .into_iter()
        .flatten();
    let refusing = taints
        .filter(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"))
        .filter(|taint| !tolerations.iter().any(|t| tolerates(t, taint)))
        .map(|taint| taint.key.as_str());
    // Kubernetes may leave some of these taints behind after the node is ready again; they are removed later.
    let (left, meant): (Vec<&str>, Vec<&str>) = refusing.partition(|key| NOT_READY.contains(key));
    // Other taints of a cordoned node are intended, so they are not waited out.
    match meant.iter().find(|key| **key != CORDON) {
        Some(key) => Standing::Tainted((*key).to_owned()),
        None if cordoned || meant.contains(&CORDON) => Standing::Cordoned,
        None if !left.is_empty() => Standing::NotReady,
        None => Standing::Open,
    }
}

/// As in the scheduler (`v1helper.TolerationsTolerateTaint`).
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let same = |wanted: &Option<String>, has: &str| {
        wanted
            .as_deref()
            .is_none_or(|wanted| wanted.is_empty() || wanted == has)
    };
    if !same(&toleration.effect, &taint.effect) || !same(&toleration.key, &taint.key) {
        return false;
    }
    let value = taint.value.as_deref().unwrap_or("");
    match toleration.operator.as_deref() {
        Some("Exists") => true,
        _ => toleration.key.is_some() && toleration.value.as_deref().unwrap_or("") == value,
    }
}

/// Whether a node keeps its pods and takes new ones without tolerations.
pub fn open(node: &Node) -> bool {
    standing(node, &[]) == Standing::Open
}

/// Devices that a node offers to all pods together.
pub fn allocatable(node: &Node, resource: &str) -> u64 {
    let status = node.status.as_ref();
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    allocatable.and_then(|a| a.get(resource)).map_or(0, count)
}

/// Devices that a pod on a node holds: its containers' limits, or the largest limit of its init containers.
pub fn devices(pod: &Pod, resource: &str) -> u64 {
    let Some(spec) = &pod.spec else { return 0 };
    let of = |container: &k8s_openapi::api::core::v1::Container| {
        let resources = container.resources.as_ref();
        let limits = resources.and_then(|r| r.limits.as_ref().or(r.requests.as_ref()));
        limits
            .and_then(|limits| limits.get(resource))
            .map_or(0, count)
    };
    let together: u64 = spec.containers.iter().map(of).sum();
    let before = spec
        .init_containers
        .iter()
        .flatten()
        .map(of)
        .max()
        .unwrap_or(0);
    together.max(before)
}

/// The device resources that a pod's containers name: every resource name with a domain. Processors, memory
/// and disk have none.
pub fn device_names(pod: &Pod) -> BTreeSet<&str> {
    let containers = pod.spec.iter().flat_map(|spec| {
        let before = spec.init_containers.iter().flatten();
        spec.containers.iter().chain(before)
    });
    let resources = containers.filter_map(|container| container.resources.as_ref());
    resources
        .flat_map(|resources| resources.limits.iter().chain(&resources.requests))
        .flat_map(BTreeMap::keys)
        .map(String::as_str)
        .filter(|name| name.contains('/'))
        .collect()
}

/// Extended resources are whole numbers; any other quantity counts as 0.
fn count(quantity: &Quantity) -> u64 {
    let text = quantity.0.as_str();
    match text.strip_suffix('k') {
        Some(thousands) => thousands.parse::<u64>().map_or(0, |n| n * 1000),
        None => text.parse().unwrap_or(0),
    }
}

/// Number of a job's slots that fit beside everything that already holds devices.
///
/// `held`: devices held on each node, without the job's own pods that can stay. `reserved`: reservations of
/// other jobs that are on no node yet, each a number of devices.
pub fn free_slots<'a>(
    nodes: impl Iterator<Item = &'a Node>,
    held: &BTreeMap<String, u64>,
    reserved: &[u64],
    request: &ResourceRequest,
) -> u32 {
    // Number of nodes by free devices.
    let mut free: BTreeMap<u64, u64> = BTreeMap::new();
    let open = nodes
        .filter(|node| {
            standing(node, &request.tolerations) == Standing::Open && selected(node, request)
        })
        .map(|node| {
            let all = allocatable(node, &request.resource);
            let name = node.metadata.name.as_deref().unwrap_or("");
            all.saturating_sub(held.get(name).copied().unwrap_or(0))
        });
    for devices in open {
        *free.entry(devices).or_default() += 1;
    }
    // A reservation takes the node with the fewest free devices that suffice, which the scheduler may not do.
    // That leaves this job the most, and a pod that stays pending corrects it.
    for needed in reserved {
        let Some((&devices, nodes)) = free.range_mut(needed..).find(|(_, nodes)| **nodes > 0)
        else {
            continue;
        };
        *nodes -= 1;
        *free.entry(devices - needed).or_default() += 1;
    }
    let per_slot = request.per_slot.max(1);
    let slots: u64 = free
        .iter()
        .map(|(devices, nodes)| devices / per_slot * nodes)
        .sum();
    u32::try_from(slots).unwrap_or(u32::MAX)
}

fn selected(node: &Node, request: &ResourceRequest) -> bool {
    let labels = node.metadata.labels.as_ref();
    request.node_selector.iter().all(|(key, value)| {
        labels
            .and_then(|labels| labels.get(key))
            .is_some_and(|has| has == value)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(name: &str, gpus: &str, extra: serde_json::Value) -> Node {
        let mut node = json!({
            "metadata": {"name": name, "labels": {"pool": "a"}},
            "spec": {},
            "status": {
                "allocatable": {"nvidia.com/gpu": gpus},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        });
        node["spec"] = extra;
        serde_json::from_value(node).unwrap()
    }

    fn request(per_slot: u64) -> ResourceRequest {
        ResourceRequest {
            resource: "nvidia.com/gpu".into(),
            per_slot,
            node_selector: BTreeMap::new(),
            tolerations: Vec::new(),
        }
    }

    #[test]
    fn slots_are_counted_on_nodes_that_take_pods() {
        let nodes = [
            node("a", "8", json!({})),
            node("b", "8", json!({"unschedulable": true})),
            node(
                "c",
                "8",
                json!({"taints": [{"key": "x", "effect": "NoSchedule"}]}),
            ),
            node(
                "d",
                "7",
                json!({"taints": [{"key": "x", "effect": "PreferNoSchedule"}]}),
            ),
        ];
        let held = BTreeMap::from([("a".to_string(), 3)]);
        assert_eq!(free_slots(nodes.iter(), &held, &[], &request(1)), 5 + 7);
        assert_eq!(free_slots(nodes.iter(), &held, &[], &request(4)), 1 + 1);
        let mut tolerant = request(4);
        tolerant.tolerations = vec![Toleration {
            key: Some("x".into()),
            operator: Some("Exists".into()),
            ..Toleration::default()
        }];
        assert_eq!(free_slots(nodes.iter(), &held, &[], &tolerant), 1 + 2 + 1);
        tolerant.node_selector = BTreeMap::from([("pool".into(), "b".into())]);
        assert_eq!(free_slots(nodes.iter(), &held, &[], &tolerant), 0);
    }

    #[test]
    fn reserved_devices_are_not_counted_twice() {
        let nodes = [node("a", "4", json!({})), node("b", "2", json!({}))];
        let none = BTreeMap::new();
        assert_eq!(free_slots(nodes.iter(), &none, &[2], &request(2)), 2);
        assert_eq!(free_slots(nodes.iter(), &none, &[2], &request(4)), 1);
        assert_eq!(free_slots(nodes.iter(), &none, &[2, 4], &request(1)), 0);
    }

    #[test]
    fn a_node_that_is_not_ready_is_not_open() {
        let mut node = node("a", "8", json!({}));
        node.status.as_mut().unwrap().conditions.as_mut().unwrap()[0].status = "Unknown".into();
        assert_eq!(standing(&node, &[]), Standing::NotReady);
    }

    #[test]
    fn a_taint_left_by_an_outage_does_not_taint_the_node() {
        let taint = |key: &str| json!({"taints": [{"key": key, "effect": "NoExecute"}]});
        let left = node("a", "8", taint("node.kubernetes.io/unreachable"));
        assert_eq!(standing(&left, &[]), Standing::NotReady);
        let mut both = taint("node.kubernetes.io/unreachable");
        let meant = json!({"key": "maintenance", "effect": "NoSchedule"});
        both["taints"].as_array_mut().unwrap().push(meant);
        let meant = node("a", "8", both);
        assert_eq!(
            standing(&meant, &[]),
            Standing::Tainted("maintenance".into())
        );
    }

    #[test]
    fn a_pod_holds_the_devices_of_its_containers_or_its_largest_init_container() {
        let pod: Pod = serde_json::from_value(json!({
            "spec": {
                "containers": [
                    {"name": "a", "resources": {"limits": {"nvidia.com/gpu": "2"}}},
                    {"name": "b", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
                ],
                "initContainers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "4"}}}],
            },
        }))
        .unwrap();
        assert_eq!(devices(&pod, "nvidia.com/gpu"), 4);
        assert_eq!(devices(&pod, "amd.com/gpu"), 0);
    }
}
