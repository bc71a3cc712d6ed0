//! Capacity of a cluster's nodes: free devices for a job, and whether a node keeps its pods.
//!
//! All functions are pure and use objects of the API server. This module does not know jobs: its input is the
//! devices that pods hold, and reservations for pods that are on no node yet.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, Pod, Taint, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// A job's resource request to a node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ResourceRequest {
    /// Resource name of a device, for example `nvidia.com/gpu`.
    pub resource: String,
    pub per_slot: u64,
    /// Labels that its nodes must have.
    pub node_selector: BTreeMap<String, String>,
    pub node_affinity: Option<NodeSelector>,
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
    let status = node.status.iter();
    let mut conditions = status.flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.find(|condition| condition.type_ == "Ready");
    if ready.is_none_or(|condition| condition.status != "True") {
        return Standing::NotReady;
    }
    let spec = node.spec.iter();
    let cordoned = spec.clone().any(|spec| spec.unschedulable == Some(true));
    let taints = spec.flat_map(|spec| spec.taints.iter().flatten());
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
        let wanted = wanted.as_deref().unwrap_or("");
        wanted.is_empty() || wanted == has
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
    let together = spec.containers.iter().map(of).fold(0, u64::saturating_add);
    let before = spec.init_containers.iter().flatten().map(of).max();
    together.max(before.unwrap_or(0))
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
        Some(thousands) => thousands.parse().map_or(0, |n: u64| n.saturating_mul(1000)),
        None => text.parse().unwrap_or(0),
    }
}

/// Most tolerations, selected labels, and values in the node affinity of a request: each reconciliation
/// evaluates them for each node.
pub const MOST_CONSTRAINTS: usize = 256;

impl ResourceRequest {
    /// The request with the devices that a pod really asks for: a template may change its resources.
    pub fn of_pod(self, pod: &Pod) -> ResourceRequest {
        ResourceRequest {
            per_slot: devices(pod, &self.resource),
            ..self
        }
    }

    /// Number of its tolerations, selected labels, and values and expressions of the affinity.
    pub fn constraints(&self) -> usize {
        let terms = self.node_affinity.iter();
        let terms = terms.flat_map(|affinity| &affinity.node_selector_terms);
        let requirements = terms.flat_map(|term| {
            let expressions = term.match_expressions.iter().flatten();
            expressions.chain(term.match_fields.iter().flatten())
        });
        let values = requirements.map(|wanted| 1 + wanted.values.as_ref().map_or(0, Vec::len));
        let affinity = self.node_affinity.as_ref();
        let terms = affinity.map_or(0, |affinity| affinity.node_selector_terms.len());
        terms + values.sum::<usize>() + self.tolerations.len() + self.node_selector.len()
    }

    /// Whether a new pod with this request can be placed on the node.
    pub fn matches(&self, node: &Node) -> bool {
        self.is_open(node) && self.selects(node)
    }

    /// Whether the node keeps the pods of this request.
    fn is_open(&self, node: &Node) -> bool {
        standing(node, &self.tolerations) == Standing::Open
    }

    /// Whether the node has the labels that selector and affinity require.
    fn selects(&self, node: &Node) -> bool {
        let none = BTreeMap::new();
        let labels = node.metadata.labels.as_ref().unwrap_or(&none);
        let mut selector = self.node_selector.iter();
        let affinity = self.node_affinity.as_ref();
        selector.all(|(key, value)| labels.get(key) == Some(value))
            && affinity.is_none_or(|affinity| satisfies(node, labels, affinity))
    }
}

/// As in the scheduler (`component-helpers/scheduling/corev1/nodeaffinity`): one of the terms holds, and a
/// term without requirements never does.
fn satisfies(node: &Node, labels: &BTreeMap<String, String>, affinity: &NodeSelector) -> bool {
    affinity.node_selector_terms.iter().any(|term| {
        let expressions = term.match_expressions.as_deref().unwrap_or_default();
        let fields = term.match_fields.as_deref().unwrap_or_default();
        let label = |key: &str| labels.get(key).map(String::as_str);
        // The only field that Kubernetes allows here.
        let field = |key: &str| {
            let name = node.metadata.name.as_deref();
            name.filter(|_| key == "metadata.name")
        };
        let mut labelled = expressions
            .iter()
            .map(|wanted| holds(wanted, label(&wanted.key)));
        let mut named = fields
            .iter()
            .map(|wanted| holds(wanted, field(&wanted.key)));
        let empty = expressions.is_empty() && fields.is_empty();
        !empty && labelled.all(|holds| holds) && named.all(|holds| holds)
    })
}

fn holds(wanted: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = wanted.values.as_deref().unwrap_or_default();
    let among = |value: &str| values.iter().any(|wanted| wanted == value);
    let numbers = || {
        let value: i64 = value?.parse().ok()?;
        let limit: i64 = values.first()?.parse().ok()?;
        Some((value, limit))
    };
    match wanted.operator.as_str() {
        "In" => value.is_some_and(among),
        "NotIn" => !value.is_some_and(among),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(value, limit)| value > limit),
        "Lt" => numbers().is_some_and(|(value, limit)| value < limit),
        _ => false,
    }
}

/// Devices that pods hold, by node.
pub struct HeldDevices<'a> {
    /// Devices of all pods.
    pub all: &'a BTreeMap<String, u64>,
    /// Devices of the job's own pods, which are part of `all`.
    pub own: &'a BTreeMap<String, u64>,
}

/// Pods of another job that are on no node yet.
pub struct ReservedPods<'a> {
    pub request: &'a ResourceRequest,
    pub count: usize,
}

/// Devices of a node for one job.
struct Offer<'a> {
    node: &'a Node,
    /// Whether the job's pods can be placed on the node.
    usable: bool,
    /// Devices that no pod holds.
    free: u64,
    /// Devices that the job's own pods hold.
    own: u64,
}

/// Number of a job's slots that fit: on free devices of matching nodes, and on those that its own pods hold.
///
/// Reservations are subtracted from free devices only. What the job holds depends on its own pods and on the
/// node alone, so no other job can change it. `avoid`: nodes whose free devices do not count.
pub fn free_slots<'a>(
    nodes: impl Iterator<Item = &'a Node>,
    held: &HeldDevices<'_>,
    reserved: &[ReservedPods<'_>],
    request: &ResourceRequest,
    avoid: impl Fn(&str) -> bool,
) -> u32 {
    let devices_on = |map: &BTreeMap<String, u64>, name: &str| map.get(name).copied().unwrap_or(0);
    let mut offers: Vec<Offer<'_>> = nodes
        .map(|node| {
            let name = node.metadata.name.as_deref().unwrap_or("");
            let all = allocatable(node, &request.resource);
            let open = request.is_open(node);
            let mut offer = Offer {
                node,
                usable: open && request.selects(node),
                free: 0,
                own: 0,
            };
            if !avoid(name) {
                offer.free = all.saturating_sub(devices_on(held.all, name));
            }
            // Labels count when a pod is placed, not while it runs.
            if open {
                offer.own = devices_on(held.own, name).min(all);
            }
            offer
        })
        .collect();
    for pods in reserved {
        reserve(&mut offers, pods);
    }
    let per_slot = request.per_slot.max(1);
    let slots: u64 = offers
        .iter()
        .map(|offer| {
            let free = if offer.usable { offer.free } else { 0 };
            offer.own.saturating_add(free) / per_slot
        })
        .fold(0, u64::saturating_add);
    u32::try_from(slots).unwrap_or(u32::MAX)
}

/// The most devices that a node has for a request, held ones included; 0 if no node suits it.
pub fn largest_node<'a>(nodes: impl Iterator<Item = &'a Node>, request: &ResourceRequest) -> u64 {
    let suits = nodes.filter(|node| request.matches(node));
    suits
        .map(|node| allocatable(node, &request.resource))
        .max()
        .unwrap_or(0)
}

/// Subtracts reserved pods from the free devices of nodes on which they can be placed. A pod takes a node
/// that the job cannot use, else the node with the fewest free devices that suffice, which the scheduler may
/// not do. That leaves the job the most, and a pod that stays pending corrects it.
fn reserve(offers: &mut [Offer<'_>], pods: &ReservedPods<'_>) {
    let needed = pods.request.per_slot.max(1);
    let fits = |offer: &Offer<'_>| offer.free >= needed && pods.request.matches(offer.node);
    let mut order: BTreeSet<(bool, u64, usize)> = offers
        .iter()
        .enumerate()
        .filter(|(_, offer)| fits(offer))
        .map(|(at, offer)| (offer.usable, offer.free, at))
        .collect();
    for _ in 0..pods.count {
        let Some((usable, free, at)) = order.pop_first() else {
            return;
        };
        offers[at].free -= needed;
        if free - needed >= needed {
            order.insert((usable, free - needed, at));
        }
    }
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
            node_affinity: None,
            tolerations: Vec::new(),
        }
    }

    /// Slots of a job without pods.
    fn slots(
        nodes: &[Node],
        all: &BTreeMap<String, u64>,
        reserved: &[(&ResourceRequest, usize)],
        request: &ResourceRequest,
    ) -> u32 {
        slots_beside_own(nodes, all, &BTreeMap::new(), reserved, request)
    }

    fn slots_beside_own(
        nodes: &[Node],
        all: &BTreeMap<String, u64>,
        own: &BTreeMap<String, u64>,
        reserved: &[(&ResourceRequest, usize)],
        request: &ResourceRequest,
    ) -> u32 {
        let reserved: Vec<ReservedPods<'_>> = reserved
            .iter()
            .map(|&(request, count)| ReservedPods { request, count })
            .collect();
        let held = HeldDevices { all, own };
        free_slots(nodes.iter(), &held, &reserved, request, |_| false)
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
        assert_eq!(slots(&nodes, &held, &[], &request(1)), 5 + 7);
        assert_eq!(slots(&nodes, &held, &[], &request(4)), 1 + 1);
        let mut tolerant = request(4);
        tolerant.tolerations = vec![Toleration {
            key: Some("x".into()),
            operator: Some("Exists".into()),
            ..Toleration::default()
        }];
        assert_eq!(slots(&nodes, &held, &[], &tolerant), 1 + 2 + 1);
        tolerant.node_selector = BTreeMap::from([("pool".into(), "b".into())]);
        assert_eq!(slots(&nodes, &held, &[], &tolerant), 0);
    }

    #[test]
    fn reserved_devices_are_not_counted_twice() {
        let nodes = [node("a", "4", json!({})), node("b", "2", json!({}))];
        let none = BTreeMap::new();
        let (two, four) = (request(2), request(4));
        assert_eq!(slots(&nodes, &none, &[(&two, 1)], &request(2)), 2);
        assert_eq!(slots(&nodes, &none, &[(&two, 1)], &request(4)), 1);
        let both = [(&two, 1), (&four, 1)];
        assert_eq!(slots(&nodes, &none, &both, &request(1)), 0);
    }

    #[test]
    fn reservations_leave_held_devices_alone() {
        let nodes = [node("a", "4", json!({})), node("b", "4", json!({}))];
        let own = BTreeMap::from([("a".to_string(), 4)]);
        let reserved = request(4);
        let beside = |all| slots_beside_own(&nodes, all, &own, &[(&reserved, 9)], &request(4));
        assert_eq!(beside(&own), 1, "the free node is reserved");
        // A pod that names its node bypasses the scheduler; the kubelet refuses it.
        let twice = BTreeMap::from([("a".to_string(), 8), ("b".to_string(), 4)]);
        assert_eq!(beside(&twice), 1);
        let fewer = [node("a", "3", json!({}))];
        assert_eq!(slots_beside_own(&fewer, &own, &own, &[], &request(4)), 0);
    }

    #[test]
    fn a_lost_label_takes_nothing_from_running_pods() {
        let nodes = [node("a", "4", json!({}))];
        let own = BTreeMap::from([("a".to_string(), 2)]);
        let mut elsewhere = request(2);
        elsewhere.node_selector = [("pool".to_string(), "b".to_string())].into();
        let beside = |request: &ResourceRequest| slots_beside_own(&nodes, &own, &own, &[], request);
        assert_eq!(beside(&elsewhere), 1);
        assert_eq!(beside(&request(2)), 2);
    }

    #[test]
    fn absurd_device_counts_do_not_overflow() {
        let limits = json!({"limits": {"nvidia.com/gpu": "9223372036854775807"}});
        let container = |name| json!({"name": name, "resources": limits});
        let pod: Pod = serde_json::from_value(json!({
            "spec": {"containers": [container("a"), container("b"), container("c")]},
        }))
        .unwrap();
        assert_eq!(devices(&pod, "nvidia.com/gpu"), u64::MAX);
    }

    #[test]
    fn reservations_count_only_on_nodes_that_match() {
        let mut nodes = [node("a", "4", json!({})), node("b", "4", json!({}))];
        nodes[1].metadata.labels = Some([("pool".to_string(), "b".to_string())].into());
        let none = BTreeMap::new();
        let mut elsewhere = request(4);
        elsewhere.node_selector = [("pool".to_string(), "c".to_string())].into();
        assert_eq!(slots(&nodes, &none, &[(&elsewhere, 2)], &request(4)), 2);
        elsewhere.node_selector = [("pool".to_string(), "b".to_string())].into();
        assert_eq!(slots(&nodes, &none, &[(&elsewhere, 2)], &request(4)), 1);
        let mut other = request(4);
        other.node_selector = [("pool".to_string(), "a".to_string())].into();
        let anywhere = request(4);
        assert_eq!(slots(&nodes, &none, &[(&anywhere, 1)], &other), 1);
    }

    #[test]
    fn node_affinity_is_evaluated_as_in_the_scheduler() {
        let mut node = node("a", "4", json!({}));
        node.metadata.labels = Some([("size".to_string(), "8".to_string())].into());
        let selects = |terms: serde_json::Value| {
            let mut request = request(4);
            let affinity = json!({"nodeSelectorTerms": terms});
            request.node_affinity = Some(serde_json::from_value(affinity).unwrap());
            request.matches(&node)
        };
        let label = |operator: &str, values: serde_json::Value| json!([{"matchExpressions": [{"key": "size", "operator": operator, "values": values}]}]);
        assert!(selects(label("In", json!(["4", "8"]))));
        assert!(!selects(label("In", json!(["4"]))));
        assert!(!selects(label("NotIn", json!(["8"]))));
        assert!(selects(label("Exists", json!(null))));
        assert!(!selects(label("DoesNotExist", json!(null))));
        assert!(selects(label("Gt", json!(["7"]))));
        assert!(!selects(label("Lt", json!(["8"]))));
        let named = |name: &str| json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]);
        assert!(selects(named("a")));
        assert!(!selects(named("b")));
        assert!(!selects(json!([{}])), "an empty term matches no node");
        assert!(selects(json!([{}, named("a")[0]])));
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
