//! Observes a job: its pods, their nodes, and the states of their agents.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ContainerStateTerminated, Node, Pod};
use kube::ResourceExt;
use kube::runtime::reflector::{ObjectRef, Store};

use super::agent_answer::{ANSWER_REFUSED, Published, Sender, agent_address};
use super::agents::{AgentStatus, Agents};
use super::build::{AGENT_PORT, is_outdated, resource_request, template_of};
use super::context::Context;
use super::liveness::{SILENCE, Silence};
use super::pod_index::{is_over, node_of};
use crate::api::status::{Current, Slot, TrainingJobStatus};
use crate::api::{OnCordon, TrainingJob};
use crate::inventory::kubernetes::{ResourceRequest, Standing, standing};
use crate::lifecycle::CheckpointRef;
use crate::lifecycle::agent_state::{self, AgentState, LaterGeneration, Problem};
use crate::lifecycle::placement::{PodState, SlotState};
use crate::lifecycle::protocol::Ending;
use crate::lifecycle::rank_status::{RankStatus, Stage};
use crate::telemetry::now;

/// Pods of one job that are polled at most: 1,024 in slots, and as many that leave. A user can give any
/// number of pods the labels and the owner of a job.
const POLLED: usize = 2048;

/// Observed state of a job.
#[derive(Default)]
pub struct ClusterState {
    /// The job's pods, by name.
    pub pods: BTreeMap<String, Arc<Pod>>,
    /// The job's slots, each with the state of its pod.
    pub slots: Vec<SlotState>,
    /// Messages for lost, leaving and outdated slots.
    pub reasons: BTreeMap<Slot, String>,
    /// The agents, by pod. Their states are limited to what agrees with the status.
    agents: BTreeMap<String, AgentStatus>,
    /// Ranks of the newest generation.
    pub ranks: Vec<RankStatus>,
    /// First rank of a lost member, with the reason.
    pub lost_member: Option<(u64, String)>,
    /// The newest checkpoint that an agent reports.
    pub committed: Option<CheckpointRef>,
    /// A problem or wait that keeps an agent from starting ranks.
    pub problem: Option<Problem>,
    /// A later generation than the published one, of which an agent tells.
    pub later: Option<LaterGeneration>,
    /// A rank that makes no progress, which the job only reports.
    pub stalled: Option<String>,
    /// Number of slots with ready pods on nodes that accept no new pods.
    pub staying: u32,
    /// Resource request of the job's pods.
    pub resource_request: ResourceRequest,
    /// Messages of pods that ended by themselves before they were members of a generation.
    pub ended_early: Vec<String>,
    /// Whether edits of the spec take effect.
    pub edits: bool,
    /// An external trainer may still run, and commit, in a pod that does not answer.
    pub may_commit: bool,
    /// Pods that are lost by further evidence than silence, with the message: no kubelet will confirm their end.
    unconfirmed_end: BTreeMap<String, String>,
    /// Nodes of lost pods whose agents did not answer. They get no new pods for now, even if Kubernetes
    /// still considers them ready.
    pub suspects: BTreeSet<String>,
}

impl ClusterState {
    /// Observes a job. `edits`: whether edits of the spec take effect; one that cannot be planned does
    /// not. `most_samples`: upper limit of the samples that its recipe allows, if known.
    pub fn of(
        job: &TrainingJob,
        status: &TrainingJobStatus,
        context: &Context,
        edits: bool,
        most_samples: Option<u64>,
    ) -> Self {
        let name = job.name_any();
        let nodes = &context.stores.nodes;
        let mut cluster = ClusterState {
            pods: context.stores.pods_of(job),
            edits,
            resource_request: resource_request(job),
            ..ClusterState::default()
        };
        cluster.observe_agents(job, status, &context.agents, most_samples);
        cluster.observe_silence(job, status, context);
        let template = edits.then(|| template_of(job));
        for slot in &status.slots {
            let pod = slot.pod(&name);
            let (how, message) = cluster.pod(job, template.as_deref(), status, &pod, nodes);
            let object = cluster.pods.get(&pod);
            if let Some(object) = object.filter(|pod| ended_by_itself(pod))
                && status.member(&pod).is_none()
            {
                cluster.ended_early.push(end_message(object));
            }
            let node = object.and_then(|pod| node_of(pod));
            if how == PodState::Lost && cluster.is_unreachable(&pod) {
                cluster.suspects.extend(node.map(str::to_owned));
            } else if how == PodState::Ready {
                let node = node.and_then(|node| nodes.get(&ObjectRef::new(node)));
                let tolerations = &cluster.resource_request.tolerations;
                let open = node.is_some_and(|node| standing(&node, tolerations) == Standing::Open);
                cluster.staying += u32::from(!open);
            }
            if let Some(message) = message {
                cluster.reasons.insert(*slot, message);
            }
            cluster.slots.push(SlotState {
                slot: *slot,
                pod: how,
            });
        }
        if let Some(current) = &status.generation {
            cluster.collect_ranks(&name, current);
        }
        cluster
    }

    /// Observes the agents of the job's pods, and what keeps those of members from their work.
    fn observe_agents(
        &mut self,
        job: &TrainingJob,
        status: &TrainingJobStatus,
        agents: &Agents,
        most_samples: Option<u64>,
    ) {
        let reference = ObjectRef::from_obj(job);
        let uids: BTreeSet<String> = self.pods.values().filter_map(|pod| pod.uid()).collect();
        agents.retain(|other, uid| *other != reference || uids.contains(uid));
        let published = Published {
            record: status.generation.as_ref().map(|current| &current.record),
            checkpoint: status.checkpoint.as_ref(),
            most_samples,
            now: now(),
        };
        let in_slot = status.slot_pods(&job.name_any());
        let living = self.pods.iter().filter(|(_, pod)| !is_over(pod));
        let (first, others): (Vec<_>, Vec<_>) =
            living.partition(|(pod, _)| in_slot.contains(*pod) || status.member(pod).is_some());
        let mut later = Vec::new();
        for (pod, object) in first.into_iter().chain(others).take(POLLED) {
            // A pod on a fake or dead node has no agent; polling it costs one task.
            let Some(mut agent) = poll(job, object, agents, &reference) else {
                continue;
            };
            if let Some(state) = agent.state.take() {
                later.extend(published.later(&state));
                agent.state = Some(published.admit(state));
            }
            self.agents.insert(pod.clone(), agent);
        }
        let later = later.into_iter();
        self.later = later.max_by_key(|later| (later.number, later.samples()));
        let agents = self.agents.iter();
        let members = agents.filter(|(pod, _)| status.member(pod).is_some());
        let mut states = members
            .clone()
            .filter_map(|(_, agent)| agent.state.as_ref());
        let mut rejections = members.filter_map(|(pod, agent)| {
            let message = format!("{pod}: {}", agent.rejection.as_ref()?);
            Some(Problem::new(ANSWER_REFUSED, message))
        });
        self.problem = agent_state::held_up(states.clone()).or_else(|| rejections.next());
        self.stalled = states.find_map(|agent| agent.stalled.clone());
    }

    /// Observes which silent pods are lost, or may still commit.
    fn observe_silence(
        &mut self,
        job: &TrainingJob,
        status: &TrainingJobStatus,
        context: &Context,
    ) {
        let named = status.generation.as_ref();
        let named = named
            .map(|current| self.named_as_lost(current))
            .unwrap_or_default();
        let (mut may_commit, mut unconfirmed_end) = (false, BTreeMap::new());
        for (pod, agent) in &self.agents {
            let Some(node) = self.pods.get(pod).and_then(|pod| node_of(pod)) else {
                continue;
            };
            if agent.silent_since.is_none() && agent.state.is_some() {
                continue;
            }
            let silence = Silence {
                pod,
                node,
                // An agent that has not been polled yet is not silent.
                silent: agent
                    .silent_since
                    .map_or(Duration::ZERO, |since| since.elapsed()),
                member: status.member(pod).is_some(),
                named: named.contains(pod),
                external_trainer: !status.command(&job.spec).is_empty()
                    && !self.all_ended(status, pod),
                fence_after: Duration::from_secs(job.spec.elasticity.fence_after_seconds.into()),
            };
            may_commit |= silence.may_commit();
            let tolerations = &self.resource_request.tolerations;
            let object = context.stores.nodes.get(&ObjectRef::new(node));
            let standing = object.map(|node| standing(&node, tolerations));
            if let Some(message) =
                silence.verdict(standing, || context.leases.is_stale(node, Instant::now()))
            {
                unconfirmed_end.insert(pod.clone(), message);
            }
        }
        (self.may_commit, self.unconfirmed_end) = (may_commit, unconfirmed_end);
    }

    /// State of a pod's agent, as far as it agrees with the status.
    pub fn agent(&self, pod: &str) -> Option<&AgentState> {
        self.agents.get(pod)?.state.as_ref()
    }

    /// States of all agents.
    pub fn states(&self) -> impl Iterator<Item = &AgentState> {
        self.agents
            .values()
            .filter_map(|agent| agent.state.as_ref())
    }

    /// States of the agents in the generation with this number.
    pub fn states_of(&self, number: Option<u64>) -> impl Iterator<Item = &AgentState> {
        self.states()
            .filter(move |agent| Some(agent.generation) == number)
    }

    /// Whether a pod's agent does not answer.
    fn is_unreachable(&self, pod: &str) -> bool {
        let since = self.agents.get(pod).and_then(|agent| agent.silent_since);
        since.is_some_and(|since| since.elapsed() > SILENCE)
    }

    /// The agent's or Kubernetes' reason for which a pod is not ready; `None` while it starts normally.
    pub fn held_up(&self, pod: &str) -> Option<String> {
        let problem = self.agent(pod).and_then(|agent| agent.problem.as_ref());
        let rejection = || self.agents.get(pod)?.rejection.as_ref();
        if let Some(message) = problem.map(|problem| &problem.message).or_else(rejection) {
            return Some(format!("{pod}: {message}"));
        }
        let status = self.pods.get(pod)?.status.as_ref()?;
        let containers = status.init_container_statuses.iter().flatten();
        let mut containers = containers.chain(status.container_statuses.iter().flatten());
        let waiting = containers.find_map(|container| {
            let waiting = container.state.as_ref()?.waiting.as_ref()?;
            let reason = waiting.reason.as_deref()?;
            let usual = matches!(reason, "ContainerCreating" | "PodInitializing");
            let message = waiting.message.as_deref().unwrap_or_default();
            (!usual).then(|| format!("{reason}: {message}"))
        });
        let unplaced = || {
            let mut conditions = status.conditions.iter().flatten();
            conditions.find_map(|c| {
                let unplaced = c.type_ == "PodScheduled" && c.status == "False";
                c.message.clone().filter(|_| unplaced)
            })
        };
        let message = waiting.or_else(unplaced)?;
        Some(format!("{pod}: {message}"))
    }

    /// Whether all ranks of the newest generation in a pod have ended.
    fn all_ended(&self, status: &TrainingJobStatus, pod: &str) -> bool {
        self.agent(pod).is_some_and(|agent| {
            Some(agent.generation) == status.number()
                && agent.ranks.iter().all(RankStatus::has_ended)
        })
    }

    /// Pods of members whose ranks a peer reports as lost.
    fn named_as_lost(&self, current: &Current) -> BTreeSet<String> {
        let theirs = self.states_of(Some(current.record.number));
        let ranks = theirs.flat_map(|agent| &agent.ranks);
        let lost: BTreeSet<u64> = ranks
            .filter_map(|rank| rank.held().and(rank.loss.as_ref()).map(|loss| loss.rank))
            .collect();
        let shares = current.record.shares();
        let of_lost = shares
            .filter(|(first, member)| lost.range(first..&(first + member.ranks)).next().is_some());
        of_lost
            .filter_map(|(_, member)| Some(member.pod.as_ref()?.name.clone()))
            .collect()
    }

    /// The state of a slot's pod, with the message of one that is lost, leaving or outdated. `template`: that of
    /// the job, if edits of it take effect.
    fn pod(
        &self,
        job: &TrainingJob,
        template: Option<&str>,
        status: &TrainingJobStatus,
        name: &str,
        nodes: &Store<Node>,
    ) -> (PodState, Option<String>) {
        let lost = |message: String| (PodState::Lost, Some(message));
        let member = status.member(name);
        let Some(pod) = self.pods.get(name) else {
            return match member {
                Some(_) => lost(format!("pod {name} was deleted")),
                None => (PodState::Pending, None),
            };
        };
        if member.is_some_and(|member| pod.uid().as_deref() != Some(&member.uid)) {
            return lost(format!("pod {name} was replaced"));
        }
        if is_over(pod) {
            return lost(end_message(pod));
        }
        let is_deleted = pod.metadata.deletion_timestamp.is_some();
        let outdated = template
            .is_some_and(|template| is_outdated(pod, template))
            .then(|| format!("pod {name} was made before the job's image or podTemplate changed"));
        let Some(node_name) = node_of(pod) else {
            return match outdated {
                Some(message) => (PodState::Outdated, Some(message)),
                None if is_deleted => lost(format!("pod {name} was deleted before it was placed")),
                None => (PodState::Pending, None),
            };
        };
        let Some(node) = nodes.get(&ObjectRef::new(node_name)) else {
            return lost(format!("node {node_name} was deleted"));
        };
        if let Some(message) = self.unconfirmed_end.get(name) {
            return lost(message.clone());
        }
        let standing = standing(&node, &self.resource_request.tolerations);
        let agent = self.agent(name);
        let problem = agent.and_then(|agent| agent.problem.as_ref());
        let broken = problem.filter(|p| member.is_some() && p.is_hardware());
        let leaving = if is_deleted {
            format!("pod {name} is being deleted")
        } else if disrupted(pod) {
            format!("pod {name} is being evicted")
        } else if outdated.is_some() {
            return (PodState::Outdated, outdated);
        } else if let Some(broken) = broken {
            // A new pod on this node detects the same problem before it gets ranks.
            format!("pod {name}: {}", broken.message)
        } else if status.excluded_nodes.iter().any(|node| node == node_name) {
            format!("a rank made no progress on node {node_name}")
        } else if standing == Standing::Cordoned && job.spec.elasticity.on_cordon == OnCordon::Drain
        {
            format!("node {node_name} is cordoned")
        } else if let Standing::Tainted(taint) = standing {
            format!("node {node_name} is tainted {taint}")
        } else {
            let polled = self.agents.get(name);
            let answers = polled.is_some_and(|agent| agent.silent_since.is_none());
            let devices = agent.map_or(0, |agent| agent.devices);
            let enough = agent.is_some() && devices >= u64::from(job.spec.gpus_per_node);
            // A member counts as ready until it is lost.
            let ready = member.is_some() || (answers && enough && problem.is_none());
            let how = if ready {
                PodState::Ready
            } else {
                PodState::Pending
            };
            return (how, None);
        };
        (PodState::Leaving, Some(leaving))
    }

    /// Collects the rank states of all members' agents.
    fn collect_ranks(&mut self, job: &str, current: &Current) {
        let slots = self.slots.iter();
        let slots: BTreeMap<String, (Slot, bool)> = slots
            .map(|state| {
                let is_lost = state.pod == PodState::Lost;
                (state.slot.pod(job), (state.slot, is_lost))
            })
            .collect();
        for (first, member) in current.record.shares() {
            let name = member.pod.as_ref().map_or("", |pod| pod.name.as_str());
            let agent = self.agent(name);
            let agent = agent.filter(|agent| agent.generation == current.record.number);
            let ranks = agent.map(|agent| agent.ranks.clone());
            let mut ranks = ranks.unwrap_or_default();
            let count = usize::try_from(member.ranks).unwrap_or(0);
            ranks.resize(count, RankStatus::default());
            let samples =
                |checkpoint: &Option<CheckpointRef>| checkpoint.as_ref().map(|c| c.samples);
            let committed = agent.and_then(|agent| agent.committed.clone());
            if samples(&committed) > samples(&self.committed) {
                self.committed = committed;
            }
            let slot = slots.get(name);
            if slot.is_none_or(|(_, is_lost)| *is_lost) {
                let killed_for_memory = self.pods.get(name).is_some_and(|pod| oom_killed(pod));
                for (rank_status, rank) in ranks.iter_mut().zip(first..) {
                    if !rank_status.has_ended() {
                        rank_status.stage = Stage::Ended(Ending::Signal(9));
                    }
                    if killed_for_memory && !rank_status.is_out_of_memory() {
                        rank_status.out_of_memory(format!(
                            "the container of rank {rank} exceeded its memory limit and was killed"
                        ));
                    }
                }
                let killed =
                    |rank: &RankStatus| matches!(rank.stage, Stage::Ended(Ending::Signal(_)));
                if self.lost_member.is_none() && ranks.iter().any(killed) {
                    let message = slot.and_then(|(slot, _)| self.reasons.get(slot)).cloned();
                    let message = message.unwrap_or_else(|| format!("pod {name} is gone"));
                    self.lost_member = Some((first, message));
                }
            }
            self.ranks.extend(ranks);
        }
    }

    /// Whether no kubelet will confirm the end of the pod. `suspect`: whether a node is suspected. An
    /// agent that is only silent may be starting or terminating.
    pub fn needs_forced_deletion(&self, pod: &Pod, suspect: impl Fn(&str) -> bool) -> bool {
        let name = pod.name_any();
        let suspect = || node_of(pod).is_some_and(suspect);
        self.unconfirmed_end.contains_key(&name) || (self.is_unreachable(&name) && suspect())
    }
}

/// Known state of a pod's agent; `None` before the pod has an address.
fn poll(
    job: &TrainingJob,
    pod: &Pod,
    agents: &Agents,
    reference: &ObjectRef<TrainingJob>,
) -> Option<AgentStatus> {
    let ip = pod.status.as_ref()?.pod_ip.as_deref()?;
    match agent_address(ip, AGENT_PORT) {
        Ok(address) => {
            let sender = Sender {
                job: job.uid()?,
                pod: pod.uid()?,
                address,
                ranks: usize::try_from(job.spec.gpus_per_node).ok()?,
            };
            Some(agents.poll(&sender, reference))
        }
        Err(rejection) => Some(AgentStatus {
            rejection: Some(rejection.to_string()),
            ..AgentStatus::default()
        }),
    }
}

/// Whether a pod ended and neither Kubernetes nor the controller ended it.
fn ended_by_itself(pod: &Pod) -> bool {
    is_over(pod) && !disrupted(pod) && pod.metadata.deletion_timestamp.is_none()
}

fn disrupted(pod: &Pod) -> bool {
    let mut conditions = pod
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    conditions.any(|c| c.type_ == "DisruptionTarget" && c.status == "True")
}

fn terminated(pod: &Pod) -> Option<&ContainerStateTerminated> {
    let mut containers = pod.status.as_ref()?.container_statuses.iter().flatten();
    containers.find_map(|container| container.state.as_ref()?.terminated.as_ref())
}

fn oom_killed(pod: &Pod) -> bool {
    terminated(pod).is_some_and(|end| end.reason.as_deref() == Some("OOMKilled"))
}

fn end_message(pod: &Pod) -> String {
    let name = pod.name_any();
    let reason = pod.status.as_ref().and_then(|s| s.reason.as_ref());
    match (terminated(pod), reason) {
        (Some(end), _) => {
            let reason = end.reason.as_deref().unwrap_or_default();
            let mut text = format!("pod {name} ended with exit code {} {reason}", end.exit_code);
            if let Some(message) = &end.message {
                text.push_str(": ");
                // A status line.
                text.extend(message.trim().chars().take(200));
            }
            text.trim_end().into()
        }
        (None, Some(reason)) => format!("pod {name} ended: {reason}"),
        (None, None) => format!("pod {name} ended"),
    }
}
