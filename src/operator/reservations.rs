//! Reservations: devices counted for pods that no node runs yet. Jobs decide one after the other
//! under the lock of these reservations, so two jobs never plan the same device.
//!
//! A reservation only keeps other jobs from creating pods that would stay pending. It never takes devices
//! that a pod holds, and it ends when the API server refuses the pod, when the scheduler reports it as
//! unschedulable, and after a time limit. A tenant could begin a new time limit with each new job, so other
//! namespaces count its reservations only while its namespace has credit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use super::build;
use crate::api::TrainingJob;
use crate::api::status::Slot;
use crate::inventory::kubernetes::{HeldDevices, ReservedPods, ResourceRequest, free_slots};
use crate::operator::pod_index::PodIndex;

/// Longest time for which pods without a node reserve devices: a scheduler places a pod that fits within
/// seconds. A shorter `placementSeconds` of the job takes precedence.
const LONGEST: Duration = Duration::from_secs(60);
/// Parts of the time that a namespace without waiting pods adds to its credit: a tenth.
const REFILL: u32 = 10;
/// Different resource requests whose reservations count for each namespace. Each costs a pass over all
/// nodes.
const REQUESTS_PER_NAMESPACE: usize = 8;

/// Devices reserved for the pods of a job.
#[derive(Debug, Clone, PartialEq)]
struct Reservation {
    request: ResourceRequest,
    job: ObjectRef<TrainingJob>,
    pods: BTreeSet<String>,
    /// Number of the last counted change of the job's pods, and how many waited for a node then.
    waiting: Option<(u64, usize)>,
    /// Start of the time limit: the last time at which none of its pods waited.
    since: Instant,
    limit: Duration,
    /// Pods for which it reserved devices when they were last counted.
    counted: usize,
}

impl Reservation {
    /// Number of its pods that wait for a node. Each reconciliation needs it for all other jobs, so it is
    /// counted again only when one of these pods has changed.
    fn waiting(&mut self, uid: &str, pod_index: &PodIndex) -> usize {
        let change = pod_index.changed(&self.job);
        if let Some((then, waiting)) = self.waiting
            && then == change
        {
            return waiting;
        }
        let pods = self.pods.iter();
        let pods = pods.map(|name| ObjectRef::new(name).within(self.namespace()));
        let waiting = pods.filter(|pod| pod_index.waits_for_node(pod, uid));
        let waiting = waiting.count();
        self.waiting = Some((change, waiting));
        waiting
    }

    fn namespace(&self) -> &str {
        self.job.namespace.as_deref().unwrap_or_default()
    }

    /// Counts the pods for which it reserves devices.
    fn count(&mut self, uid: &str, pod_index: &PodIndex, now: Instant) {
        let waiting = self.waiting(uid, pod_index);
        if waiting == 0 {
            self.since = now;
        }
        let in_time = now.duration_since(self.since) < self.limit;
        self.counted = if in_time { waiting } else { 0 };
    }
}

/// Time for which other namespaces count the reservations of a namespace.
#[derive(Debug)]
struct Credit {
    /// At most [`LONGEST`].
    left: Duration,
    /// Last change of `left`, and whether pods waited since then.
    at: Instant,
    waits: bool,
}

impl Credit {
    fn full(now: Instant) -> Credit {
        Credit {
            left: LONGEST,
            at: now,
            waits: false,
        }
    }

    /// Uses or adds the time since the last change.
    fn count(&mut self, waits: bool, now: Instant) {
        let past = now.duration_since(self.at);
        self.left = if self.waits {
            self.left.saturating_sub(past)
        } else {
            (self.left + past / REFILL).min(LONGEST)
        };
        (self.at, self.waits) = (now, waits);
    }
}

/// Reservations of all jobs, by uid.
#[derive(Debug, Default)]
pub struct Reservations {
    by_job: HashMap<String, Reservation>,
    /// By namespace; a namespace without an entry has full credit.
    credits: HashMap<String, Credit>,
}

/// The cluster as one job counts on it.
pub struct Pool<'a> {
    pub nodes: &'a [Arc<Node>],
    pub pod_index: &'a PodIndex,
    /// Nodes on which the job lost a pod: what its pods hold there does not count.
    pub lost: &'a BTreeSet<String>,
    /// Whether free devices of a node do not count.
    pub avoid: &'a dyn Fn(&str) -> bool,
}

impl Reservations {
    /// Reserves devices for these pods of a job and releases its other reservations. New pods do not extend
    /// the time limit while others still wait.
    pub fn reserve(
        &mut self,
        job: &TrainingJob,
        request: &ResourceRequest,
        pods: BTreeSet<String>,
        pod_index: &PodIndex,
        now: Instant,
    ) {
        let uid = job.uid().unwrap_or_default();
        if pods.is_empty() {
            self.by_job.remove(&uid);
            return;
        }
        let (mut since, mut waiting) = (now, None);
        if let Some(known) = self.by_job.get_mut(&uid) {
            known.count(&uid, pod_index, now);
            let same_pods = known.pods == pods;
            if same_pods && known.request == *request {
                return;
            }
            (since, waiting) = (known.since, known.waiting.filter(|_| same_pods));
        }
        let placement = Duration::from_secs(job.spec.elasticity.placement_seconds.into());
        let reservation = Reservation {
            request: request.clone(),
            job: ObjectRef::from_obj(job),
            waiting,
            pods,
            since,
            limit: placement.min(LONGEST),
            counted: 0,
        };
        self.by_job.insert(uid, reservation);
    }

    /// Reserves the devices of the slots in a job's status.
    pub fn restore(&mut self, job: &TrainingJob, pod_index: &PodIndex, now: Instant) {
        let Some(status) = &job.status else { return };
        let pods = status.slot_pods(&job.name_any());
        self.reserve(job, &reserved_request(job), pods, pod_index, now);
    }

    /// Releases the reservations of the jobs that `keep` does not want, by their uids.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.by_job.retain(|job, _| keep(job));
    }

    /// Releases the reservations for pods of a job that do not exist, because the API server refuses them.
    pub fn refused(&mut self, job: &str, exists: impl Fn(&str) -> bool) {
        if let Some(reservation) = self.by_job.get_mut(job) {
            reservation.pods.retain(|pod| exists(pod));
            reservation.waiting = None;
        }
    }

    /// Releases the reservations of a job.
    pub fn forget(&mut self, job: &str) {
        self.by_job.remove(job);
    }

    /// Slots that fit for a job, on free devices and on those that the job's pods hold. A terminating pod holds
    /// its devices until it has ended; its replacement waits for them.
    pub fn slots(
        &mut self,
        pool: &Pool<'_>,
        job: &TrainingJob,
        request: &ResourceRequest,
        now: Instant,
    ) -> u32 {
        let resource = &request.resource;
        let mut own = pool.pod_index.own(resource, job);
        own.retain(|node, _| !pool.lost.contains(node));
        let held = HeldDevices {
            all: pool.pod_index.held(resource),
            own: &own,
        };
        let reserved = self.reserved(job, resource, pool.pod_index, now);
        let nodes = pool.nodes.iter().map(AsRef::as_ref);
        free_slots(nodes, &held, &reserved, request, pool.avoid)
    }

    /// Reserved pods of all jobs but one, as that one counts them: equal requests of a namespace together,
    /// and those of other namespaces only while these have credit.
    fn reserved(
        &mut self,
        except: &TrainingJob,
        resource: &str,
        pod_index: &PodIndex,
        now: Instant,
    ) -> Vec<ReservedPods<'_>> {
        let own = except.namespace().unwrap_or_default();
        let except = except.uid().unwrap_or_default();
        let mut waiting = BTreeSet::new();
        for (uid, reservation) in &mut self.by_job {
            reservation.count(uid, pod_index, now);
            if reservation.counted > 0 && !waiting.contains(reservation.namespace()) {
                waiting.insert(reservation.namespace().to_owned());
            }
        }
        for namespace in &waiting {
            let credit = self.credits.entry(namespace.clone());
            credit.or_insert_with(|| Credit::full(now));
        }
        self.credits.retain(|namespace, credit| {
            credit.count(waiting.contains(namespace), now);
            credit.waits || credit.left < LONGEST
        });
        let mut by_namespace: BTreeMap<&str, Vec<ReservedPods<'_>>> = BTreeMap::new();
        for (uid, reservation) in &self.by_job {
            let (namespace, request) = (reservation.namespace(), &reservation.request);
            let spent = self.credits.get(namespace);
            let spent = namespace != own && spent.is_some_and(|credit| credit.left.is_zero());
            let count = reservation.counted;
            let counts = *uid != except && request.resource == resource && request.per_slot > 0;
            if !counts || count == 0 || spent {
                continue;
            }
            let requests = by_namespace.entry(namespace).or_default();
            if let Some(equal) = requests.iter_mut().find(|pods| pods.request == request) {
                equal.count += count;
            } else if requests.len() < REQUESTS_PER_NAMESPACE {
                requests.push(ReservedPods { request, count });
            }
        }
        by_namespace.into_values().flatten().collect()
    }
}

/// Resource request of the pods that a job reserves devices for; none if `podTemplate` gives no valid pod.
fn reserved_request(job: &TrainingJob) -> ResourceRequest {
    let pod = build::pod(job, Slot::default(), None).unwrap_or_default();
    build::resource_request(job).of_pod(&pod)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use kube::runtime::watcher::Event;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::lifecycle::placement::{
        PlacementAction, PlacementInput, PodState, SlotState, decide_placement,
    };
    use crate::lifecycle::{RankAction, Ranks};
    use crate::operator::build::JOB_LABEL;
    use crate::operator::leases::Leases;
    use crate::operator::testing::owner;

    const GPU: &str = "nvidia.com/gpu";

    fn node(name: &str, gpus: u64, pool: &str, tainted: bool) -> Arc<Node> {
        let taints = if tainted {
            json!([{"key": "team", "effect": "NoSchedule"}])
        } else {
            json!([])
        };
        let node = json!({
            "metadata": {"name": name, "labels": {"pool": pool}},
            "spec": {"taints": taints},
            "status": {
                "allocatable": {GPU: gpus.to_string()},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        });
        Arc::new(serde_json::from_value(node).unwrap())
    }

    fn job(name: &str, namespace: &str, nodes: u32, gpus: u64, template: Value) -> TrainingJob {
        serde_json::from_value(json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": namespace, "uid": format!("{namespace}-{name}")},
            "spec": {
                "nodes": nodes, "gpusPerNode": gpus, "image": "i", "recipe": {"inline": ""},
                "checkpoint": {"claim": "c"},
                "podTemplate": {"spec": template},
            },
        }))
        .unwrap()
    }

    fn pod(job: &TrainingJob, name: &str, node: Option<&str>, unschedulable: bool) -> Event<Pod> {
        let reason = if unschedulable {
            "Unschedulable"
        } else {
            "SchedulingGated"
        };
        let scheduled = json!({"type": "PodScheduled", "status": "False", "reason": reason});
        Event::Apply(serde_json::from_value(json!({
            "metadata": {
                "name": name, "namespace": job.namespace(), "labels": {JOB_LABEL: job.name_any()},
                "ownerReferences": [owner(&job.name_any(), &job.uid().unwrap())],
            },
            "spec": {"nodeName": node, "containers": [{
                "name": "c", "resources": {"limits": {GPU: job.spec.gpus_per_node.to_string()}},
            }]},
            "status": {"phase": "Pending", "conditions": if node.is_none() { json!([scheduled]) } else { json!([]) }},
        })).unwrap())
    }

    /// A cluster with its reservations.
    #[derive(Default)]
    struct World {
        nodes: Vec<Arc<Node>>,
        pod_index: PodIndex,
        reservations: Reservations,
        leases: Leases,
    }

    impl World {
        fn slots(&mut self, job: &TrainingJob, now: Instant) -> u32 {
            let namespace = job.namespace().unwrap_or_default();
            let leases = &self.leases;
            let pool = Pool {
                nodes: &self.nodes,
                pod_index: &self.pod_index,
                lost: &BTreeSet::new(),
                avoid: &|node| leases.is_suspected(&namespace, node),
            };
            self.reservations
                .slots(&pool, job, &build::resource_request(job), now)
        }

        fn reserve(&mut self, job: &TrainingJob, pods: &[&str], now: Instant) {
            let pods = pods.iter().map(|pod| (*pod).to_owned()).collect();
            let request = reserved_request(job);
            self.reservations
                .reserve(job, &request, pods, &self.pod_index, now);
        }

        /// The decision for a running job with ready pods on all its nodes.
        fn decision(&mut self, job: &TrainingJob, now: Instant) -> PlacementAction {
            let placeable = self.slots(job, now);
            let members: Vec<Slot> = (0..job.spec.nodes)
                .map(|number| Slot { number, attempt: 1 })
                .collect();
            let ready = |slot: &Slot| SlotState {
                slot: *slot,
                pod: PodState::Ready,
            };
            let slots: Vec<SlotState> = members.iter().map(ready).collect();
            let placement = decide_placement(&PlacementInput {
                desired: job.spec.nodes,
                bounds: 1..=64,
                ranks_per_node: 1,
                feasible: &|_| true,
                pool: placeable,
                placeable,
                largest_node: &|| 64,
                slots: &slots,
                members: &members,
                ranks: Ranks::Running {
                    world: job.spec.nodes.into(),
                    draining: false,
                },
                waits: false,
                suspend: false,
                overdue: None,
                restarts_left: 3,
                problem: None,
                attempts: 9,
                scale_up_pending_since: None,
                placement_since: None,
                scale_up_delay: 0.0,
                placement: 30.0,
                not_before: 0.0,
                no_pod_before: 0.0,
                now: 0.0,
            });
            placement.action
        }
    }

    #[test]
    fn pods_that_a_scheduler_or_the_api_server_refuses_reserve_nothing() {
        let mut world = World {
            nodes: vec![node("a", 4, "x", false), node("b", 4, "x", false)],
            ..World::default()
        };
        let (waiting, other) = (
            job("w", "one", 2, 4, json!({"schedulerName": "unknown"})),
            job("o", "two", 2, 4, json!({})),
        );
        let start = Instant::now();
        world.reserve(&waiting, &["w-0-1", "w-1-2"], start);
        assert_eq!(world.slots(&other, start), 0);
        world.pod_index.apply(&pod(&waiting, "w-0-1", None, true));
        assert_eq!(world.slots(&other, start), 1, "unschedulable");
        let exists = |pod: &str| pod == "w-0-1";
        world.reservations.refused("one-w", exists);
        assert_eq!(world.slots(&other, start), 2, "refused");
    }

    #[test]
    fn a_reservation_ends_after_its_time_limit_whatever_new_pods_it_names() {
        let mut world = World {
            nodes: vec![node("a", 4, "x", false), node("b", 4, "x", false)],
            ..World::default()
        };
        let waiting = job("w", "one", 2, 4, json!({"schedulerName": "unknown"}));
        let other = job("o", "two", 2, 4, json!({}));
        let start = Instant::now();
        world.reserve(&waiting, &["w-0-1", "w-1-2"], start);
        let half = start + LONGEST / 2;
        world.reserve(&waiting, &["w-0-3", "w-1-4"], half);
        assert_eq!(world.slots(&other, half), 0);
        let end = start + LONGEST;
        assert_eq!(world.slots(&other, end), 2);
        world.reserve(&waiting, &["w-0-5", "w-1-6"], end);
        assert_eq!(world.slots(&other, end), 2);
        for (name, node) in [("w-0-5", "a"), ("w-1-6", "b")] {
            world
                .pod_index
                .apply(&pod(&waiting, name, Some(node), false));
        }
        assert_eq!(world.slots(&other, end), 0, "held by pods");
        world.reserve(&waiting, &["w-0-5", "w-1-6"], end);
        world.pod_index.apply(&Event::Init);
        world.pod_index.apply(&Event::InitDone);
        world.reserve(&waiting, &["w-0-7", "w-1-8"], end);
        assert_eq!(world.slots(&other, end), 0, "a new limit after a placement");
    }

    #[test]
    fn new_jobs_do_not_extend_a_namespaces_reservations_for_others() {
        let mut world = World {
            nodes: vec![node("a", 4, "x", false), node("b", 4, "x", false)],
            ..World::default()
        };
        let (other, neighbour) = (
            job("o", "two", 2, 4, json!({})),
            job("n", "one", 2, 4, json!({})),
        );
        let start = Instant::now();
        let (mut now, mut reserved) = (start, 0);
        // Each second for ten minutes; a new job every 30 s.
        for second in 0..600 {
            now = start + Duration::from_secs(second);
            let name = format!("w{}", second / 30);
            let before = format!("one-w{}", (second / 30).saturating_sub(1));
            if second % 30 == 0 {
                world.reservations.forget(&before);
                let waiting = job(&name, "one", 2, 4, json!({"schedulerName": "unknown"}));
                world.reserve(&waiting, &["w-0-1", "w-1-2"], now);
            }
            reserved += u32::from(world.slots(&other, now) == 0);
            assert_eq!(world.slots(&neighbour, now), 0, "counted in its namespace");
        }
        assert!(reserved <= 61, "{reserved} s");
        world.reservations.forget("one-w19");
        assert_eq!(world.slots(&other, now), 2);
        let later = now + LONGEST * REFILL;
        assert_eq!(world.slots(&other, later), 2);
        let again = job("again", "one", 2, 4, json!({}));
        world.reserve(&again, &["again-0-1", "again-1-2"], later);
        assert_eq!(world.slots(&other, later), 0);
    }

    #[test]
    fn pods_without_devices_reserve_none() {
        let mut world = World {
            nodes: vec![node("a", 4, "x", false)],
            ..World::default()
        };
        let container = json!({"name": "trainer", "resources": null});
        let without = job("w", "one", 1, 4, json!({"containers": [container]}));
        let now = Instant::now();
        world.reserve(&without, &["w-0-1"], now);
        assert_eq!(world.slots(&job("o", "two", 1, 4, json!({})), now), 1);
    }

    /// Something that job `n` of another owner does.
    #[derive(Debug, Clone)]
    enum Act {
        /// Wants pods with this template, perhaps with an unknown scheduler.
        Reserve(usize, Value, u8),
        /// A pod that waits, is unschedulable, or names its node and so bypasses the scheduler.
        Pod(usize, u8, Option<u8>, bool),
        /// Its agents claim that nodes are dead.
        Suspect(usize, u8),
        Refused(usize),
        Delete(usize),
    }

    fn any_template() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(json!({})),
            Just(json!({"schedulerName": "unknown"})),
            Just(json!({"nodeSelector": {"pool": "x"}})),
            Just(json!({"nodeSelector": {"pool": "nowhere"}})),
            Just(json!({"tolerations": [{"operator": "Exists"}]})),
            Just(json!({"tolerations": "no list", "affinity": 3})),
            Just(
                json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [
                    {"key": "pool", "operator": "In", "values": ["y"]}]}]}}}})
            ),
        ]
    }

    fn any_act() -> impl Strategy<Value = Act> {
        prop_oneof![
            (0usize..3, any_template(), 0u8..20)
                .prop_map(|(n, t, count)| Act::Reserve(n, t, count)),
            (
                0usize..3,
                0u8..4,
                proptest::option::of(0u8..5),
                any::<bool>()
            )
                .prop_map(|(n, name, node, refused)| Act::Pod(n, name, node, refused)),
            (0usize..3, 0u8..5).prop_map(|(n, node)| Act::Suspect(n, node)),
            (0usize..3).prop_map(Act::Refused),
            (0usize..3).prop_map(Act::Delete),
        ]
    }

    proptest! {
        /// In random pools no action of other jobs changes what a running job holds.
        #[test]
        fn no_action_of_another_job_changes_what_a_running_job_holds(
            pool in proptest::collection::vec((1u64..9, any::<bool>(), any::<bool>()), 1..6),
            gpus in 1u64..4,
            other_gpus in 1u64..9,
            acts in proptest::collection::vec(any_act(), 1..20),
        ) {
            let names: Vec<String> = (0..5).map(|number| format!("n{number}")).collect();
            let mut world = World::default();
            for ((gpus, x, tainted), name) in pool.iter().zip(&names) {
                world.nodes.push(node(name, *gpus, if *x { "x" } else { "y" }, *tainted));
            }
            // The job fills the pool's untainted nodes.
            let mut places = Vec::new();
            for ((all, _, tainted), name) in pool.iter().zip(&names) {
                let fit = if *tainted { 0 } else { all / gpus };
                places.extend((0..fit).map(|_| name.clone()));
            }
            prop_assume!(!places.is_empty());
            let running = job("b", "own", places.len() as u32, gpus, json!({}));
            for (number, node) in places.iter().enumerate() {
                let name = format!("b-{number}-1");
                world.pod_index.apply(&pod(&running, &name, Some(node), false));
            }
            let now = Instant::now();
            // The first other job shares the running job's namespace.
            let mut others: Vec<TrainingJob> = ["own", "one", "two"]
                .iter()
                .map(|namespace| job("a", namespace, 4, other_gpus, json!({})))
                .collect();
            for act in acts {
                match act.clone() {
                    Act::Reserve(n, template, count) => {
                        others[n].spec.pod_template = Some(json!({"spec": template}));
                        let pods: Vec<String> = (0..count).map(|pod| format!("a-{pod}-1")).collect();
                        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
                        world.reserve(&others[n], &pods, now);
                    }
                    Act::Pod(n, name, node, refused) => {
                        let node = node.map(|node| names[usize::from(node)].as_str());
                        world.pod_index.apply(&pod(&others[n], &format!("a-{name}-1"), node, refused));
                    }
                    Act::Suspect(n, node) => {
                        let namespace = others[n].namespace().unwrap();
                        let nodes = BTreeSet::from([names[usize::from(node)].clone()]);
                        world.leases.suspect(&namespace, &nodes);
                    }
                    Act::Refused(n) => {
                        world.reservations.refused(&others[n].uid().unwrap(), |_| false);
                    }
                    Act::Delete(n) => world.reservations.forget(&others[n].uid().unwrap()),
                }
                prop_assert_eq!(world.slots(&running, now), running.spec.nodes, "{:?}", act);
                prop_assert_eq!(world.decision(&running, now), PlacementAction::Ranks(RankAction::Keep), "{:?}", act);
            }
        }
    }
}
