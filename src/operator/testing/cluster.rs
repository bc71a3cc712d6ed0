//! A job's controller and its cluster.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};

use super::api_server::{ApiServer, merge};
use super::{NAMESPACE, job};
use crate::api::TrainingJob;
use crate::api::status::TrainingJobStatus;
use crate::operator::agents::AgentStatus;
use crate::operator::context::Context;
use crate::operator::controller::error_policy;
use crate::operator::error::ReconcileError;
use crate::operator::observe::ClusterState;
use crate::operator::reconcile::reconcile;
use crate::operator::stores::{Stores, slim_job};

/// The controller of the job [`job`] `x` and its cluster. Its caches have the server's pods, and agents answer
/// what the test says.
pub struct Cluster {
    pub server: Arc<ApiServer>,
    pub context: Arc<Context>,
    pods: Writer<Pod>,
    nodes: Writer<Node>,
}

impl Cluster {
    /// A cluster with two nodes of one GPU. The job may have one node or two, and takes all that the cluster has.
    pub fn new() -> Cluster {
        let server = Arc::new(ApiServer::default());
        let (stores, pods, nodes) = Stores::new();
        let context = server.context_with(stores);
        let mut cluster = Cluster {
            server,
            context,
            pods,
            nodes,
        };
        let job = serde_json::to_value(job("x", "u")).unwrap();
        cluster.server.put("trainingjobs", job);
        cluster.edit(json!({"elasticity": {"capacity": "Discovered", "scaleUpDelaySeconds": 0}}));
        for name in ["a", "b"] {
            cluster.put_node(name, json!({}));
        }
        cluster
    }

    /// Replaces the controller by a new process, which knows only what the API server has.
    pub fn restart_controller(&mut self) {
        let (stores, pods, nodes) = Stores::new();
        let old = std::mem::replace(&mut self.nodes, nodes);
        self.context = self.server.context_with(stores);
        self.pods = pods;
        for node in old.as_reader().state() {
            self.nodes
                .apply_watcher_event(&Event::Apply((*node).clone()));
        }
    }

    /// Adds or replaces a node with one GPU.
    pub fn put_node(&mut self, name: &str, spec: Value) {
        let node = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": spec,
            "status": {
                "allocatable": {"nvidia.com/gpu": "1"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }));
        let event = Event::Apply(node.unwrap());
        self.nodes.apply_watcher_event(&event);
    }

    pub fn remove_node(&mut self, name: &str) {
        let node = self
            .context
            .stores
            .nodes
            .get(&ObjectRef::new(name))
            .unwrap();
        self.nodes
            .apply_watcher_event(&Event::Delete((*node).clone()));
    }

    /// Changes the job's spec.
    pub fn edit(&self, spec: Value) {
        let generation = self.job().metadata.generation.unwrap_or_default() + 1;
        let patch = json!({"metadata": {"generation": generation}, "spec": spec});
        self.server.change("trainingjobs", "x", patch);
    }

    pub fn job(&self) -> TrainingJob {
        serde_json::from_value(self.server.get("trainingjobs", "x").unwrap()).unwrap()
    }

    pub fn status(&self) -> TrainingJobStatus {
        self.job().status.unwrap_or_default()
    }

    /// Reconciles once with up-to-date caches.
    pub async fn reconcile(&mut self) -> Result<Action, ReconcileError> {
        self.update_caches();
        let mut job = self.job();
        slim_job(&mut job);
        reconcile(Arc::new(job), self.context.clone()).await
    }

    /// Reconciles once, as the controller does: a failure becomes a pause.
    pub async fn reconcile_or_pause(&mut self) -> Action {
        let result = self.reconcile().await;
        let paused = |error| error_policy(Arc::new(self.job()), &error, self.context.clone());
        result.unwrap_or_else(paused)
    }

    /// Reconciles, with a scheduler and kubelets that start all pods, until the status holds.
    pub async fn reconcile_until(&mut self, holds: impl Fn(&TrainingJobStatus) -> bool) {
        let start = Instant::now();
        while !holds(&self.status()) {
            let status = self.status();
            let late = start.elapsed() > Duration::from_secs(60);
            assert!(!late, "timed out: {:?}: {}", status.phase, status.message);
            self.start_pods();
            self.reconcile().await.unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// The cluster with its job in the first generation, of two nodes, whose ranks are ready.
    pub async fn running() -> Cluster {
        let mut cluster = Cluster::new();
        cluster
            .reconcile_until(|status| status.generation.is_some())
            .await;
        assert_eq!(cluster.status().nodes, 2);
        cluster.ranks(|_| json!({"ready": true}));
        cluster
    }

    /// What a reconciliation observes now.
    pub fn observed(&mut self) -> ClusterState {
        self.update_caches();
        ClusterState::of(&self.job(), &self.status(), &self.context, true, Some(80))
    }

    fn update_caches(&mut self) {
        let mut gone = self.pods.as_reader().state();
        let names = self.server.names("pods");
        gone.retain(|pod| !names.contains(&pod.name_any()));
        let gone = gone.into_iter().map(|pod| Event::Delete((*pod).clone()));
        let pods = names.iter().map(|name| Event::Apply(self.pod(name)));
        for event in gone.chain(pods).collect::<Vec<_>>() {
            self.context.stores.take(&event, &mut self.pods);
        }
    }

    pub fn pod(&self, name: &str) -> Pod {
        serde_json::from_value(self.server.get("pods", name).unwrap()).unwrap()
    }

    /// Runs each pod without a node on a node without a pod.
    pub fn start_pods(&mut self) {
        for name in self.server.names("pods") {
            let names = self.server.names("pods").into_iter();
            let used: Vec<String> = names
                .filter_map(|pod| self.pod(&pod).spec?.node_name)
                .collect();
            if self
                .pod(&name)
                .spec
                .is_some_and(|spec| spec.node_name.is_some())
            {
                continue;
            }
            let mut nodes = self.context.stores.nodes.state();
            nodes.retain(|node| {
                let cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable);
                !used.contains(&node.name_any()) && cordoned != Some(true)
            });
            if let Some(node) = nodes.iter().map(|node| node.name_any()).min() {
                self.start_pod(&name, &node);
            }
        }
    }

    fn start_pod(&self, name: &str, node: &str) {
        // Never polled: `agent` sets the answers.
        let ip = format!("10.0.0.{}", node.as_bytes()[0]);
        let running = json!({
            "metadata": {"namespace": NAMESPACE},
            "spec": {"nodeName": node},
            "status": {"phase": "Running", "podIP": ip},
        });
        self.agent(name, json!({}));
        self.server.change("pods", name, running);
    }

    /// The agent of a pod answers with `state` from now on.
    pub fn agent(&self, pod: &str, state: Value) {
        self.set_agent(pod, state, None);
    }

    /// The agent of a pod is silent for `time`; its last answer was `state`.
    pub fn silent_agent(&self, pod: &str, state: Value, time: Duration) {
        let since = tokio::time::Instant::now().checked_sub(time).unwrap();
        self.set_agent(pod, state, Some(since));
    }

    fn set_agent(&self, pod: &str, state: Value, silent_since: Option<tokio::time::Instant>) {
        let uid = self.pod(pod).uid().unwrap();
        let mut known = json!({"job": "u", "pod": uid, "devices": 1});
        merge(&mut known, &state);
        let polled = AgentStatus {
            state: serde_json::from_value(known).unwrap(),
            silent_since,
            rejection: None,
        };
        let job = ObjectRef::new("x").within(NAMESPACE);
        self.context.agents.answer(&uid, job, polled);
    }

    /// The members' agents report one rank each.
    pub fn ranks(&self, of: impl Fn(usize) -> Value) {
        let current = self.status().generation.unwrap();
        for (index, member) in current.record.members.iter().enumerate() {
            let state = json!({"generation": current.record.number, "ranks": [of(index)]});
            self.agent(&member.pod.as_ref().unwrap().name, state);
        }
    }
}
