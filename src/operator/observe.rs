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
use crate::lifecycle::agent_state::{self, AgentState, LaterGeneration, Problem};
use crate::lifecycle::generation::PodRef;
use crate::lifecycle::placement::{PodState, SlotState};
use crate::lifecycle::protocol::Ending;
use crate::lifecycle::rank_status::{RankStatus, Stage};
use crate::lifecycle::{CheckpointRef, Generation, Member};
use crate::telemetry::now;

/// Largest number of pods of one job that the controller polls: 1,024 in slots, and as many that leave. A user can give
/// any number of pods the labels and the owner of a job.
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
    /// The agents, by pod. Each state is only the part that agrees with the status ([`Published::admit`]).
    agents: BTreeMap<String, AgentStatus>,
    /// Ranks of the newest generation.
    pub ranks: Vec<RankStatus>,
    /// First rank of a lost member, with the reason.
    pub lost_member: Option<(u64, String)>,
    /// The newest checkpoint that an agent reports.
    pub committed: Option<CheckpointRef>,
    /// Why an agent of a member cannot start its ranks yet.
    pub problem: Option<Problem>,
    /// The latest generation or checkpoint beyond the status that an agent reports.
    pub later: Option<LaterGeneration>,
    /// Message that a rank makes no progress, if `spec.onStall` is Report.
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
    /// Lost pods whose end no kubelet will confirm, with the message. There is more evidence than the agent's silence.
    unconfirmed_end: BTreeMap<String, String>,
    /// Nodes of lost pods whose agents did not answer. These nodes get no new pods for now, even if Kubernetes still
    /// reports them as ready.
    pub suspects: BTreeSet<String>,
}

/// Most lost pods that a record names.
const LOST_PODS: usize = 64;

impl ClusterState {
    /// Observes a job. `edits`: whether edits of the spec take effect; an edit without a plan does not.
    /// `most_samples`: upper limit of the samples that its recipe allows, if known.
    pub fn of(
        job: &TrainingJob,
        status: &TrainingJobStatus,
        context: &Context,
        edits: bool,
        most_samples: Option<u64>,
    ) -> Self {
        let pods = context.stores.pods_of(job);
        let (agents, later) = poll_pods(job, status, &pods, &context.agents, most_samples);
        let cluster = ClusterState {
            pods,
            agents,
            later,
            edits,
            resource_request: resource_request(job),
            ..ClusterState::default()
        };
        let (may_commit, unconfirmed_end) = cluster.silence(job, status, context);
        let cluster = ClusterState {
            problem: cluster.problem_of_member(status),
            stalled: cluster.stalled_member(status),
            may_commit,
            unconfirmed_end,
            ..cluster
        };
        let cluster = cluster.with_slots(job, status, &context.stores.nodes);
        match &status.generation {
            Some(current) => cluster.with_ranks(&job.name_any(), current),
            None => cluster,
        }
    }

    /// The agents of the newest generation's members, by pod.
    fn members(
        &self,
        status: &TrainingJobStatus,
    ) -> impl Iterator<Item = (&String, &AgentStatus)> + Clone {
        let agents = self.agents.iter();
        agents.filter(move |(pod, _)| status.member(pod).is_some())
    }

    /// Why an agent of a member cannot start its ranks yet.
    fn problem_of_member(&self, status: &TrainingJobStatus) -> Option<Problem> {
        let states = self.members(status);
        let held_up = agent_state::held_up(states.filter_map(|(_, agent)| agent.state.as_ref()));
        let mut rejections = self.members(status).filter_map(|(pod, agent)| {
            let message = format!("{pod}: {}", agent.rejection.as_ref()?);
            Some(Problem::new(ANSWER_REFUSED, message))
        });
        held_up.or_else(|| rejections.next())
    }

    /// Message that a rank makes no progress.
    fn stalled_member(&self, status: &TrainingJobStatus) -> Option<String> {
        let mut members = self.members(status);
        members.find_map(|(_, agent)| agent.state.as_ref()?.stalled.clone())
    }

    /// Whether a silent pod may still commit, and the silent pods that are lost, with the message.
    fn silence(
        &self,
        job: &TrainingJob,
        status: &TrainingJobStatus,
        context: &Context,
    ) -> (bool, BTreeMap<String, String>) {
        let current = status.generation.as_ref();
        let named = current.map_or_else(BTreeSet::new, |current| self.named_as_lost(current));
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
        (may_commit, unconfirmed_end)
    }

    /// The cluster with the states of the slots' pods.
    fn with_slots(
        self,
        job: &TrainingJob,
        status: &TrainingJobStatus,
        nodes: &Store<Node>,
    ) -> ClusterState {
        let name = job.name_any();
        let template = self.edits.then(|| template_of(job));
        let (mut slots, mut reasons) = (Vec::new(), BTreeMap::new());
        let (mut ended_early, mut suspects) = (Vec::new(), BTreeSet::new());
        let mut staying = 0;
        for slot in &status.slots {
            let pod = slot.pod(&name);
            let (how, message) = self.pod(job, template.as_deref(), status, &pod, nodes);
            let object = self.pods.get(&pod);
            if let Some(object) = object.filter(|pod| ended_by_itself(pod))
                && status.member(&pod).is_none()
            {
                ended_early.push(end_message(object));
            }
            let node = object.and_then(|pod| node_of(pod));
            if how == PodState::Lost && self.is_unreachable(&pod) {
                suspects.extend(node.map(str::to_owned));
            } else if how == PodState::Ready {
                let node = node.and_then(|node| nodes.get(&ObjectRef::new(node)));
                let tolerations = &self.resource_request.tolerations;
                let open = node.is_some_and(|node| standing(&node, tolerations) == Standing::Open);
                staying += u32::from(!open);
            }
            if let Some(message) = message {
                reasons.insert(*slot, message);
            }
            slots.push(SlotState {
                slot: *slot,
                pod: how,
            });
        }
        ClusterState {
            slots,
            reasons,
            ended_early,
            suspects,
            staying,
            ..self
        }
    }

    /// The part of an agent's state that agrees with the status.
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

    /// Why a pod is not ready, as its agent or Kubernetes reports it; `None` while the pod starts normally.
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

    /// Whether a pod's ranks have all ended. Only ranks of the newest generation count.
    fn all_ended(&self, status: &TrainingJobStatus, pod: &str) -> bool {
        self.agent(pod).is_some_and(|agent| {
            Some(agent.generation) == status.number()
                && agent.ranks.iter().all(RankStatus::has_ended)
        })
    }

    /// Uids of lost pods of a generation and those before it, the newest last: what its record says, and those that are
    /// not in these members of the next one.
    pub fn lost_of(&self, before: &Generation, members: &[Member]) -> Vec<String> {
        let stays = |pod: &PodRef| members.iter().any(|it| it.pod.as_ref() == Some(pod));
        let is_lost = |pod: &&PodRef| {
            let found = self.pods.get(&pod.name);
            let found = found.filter(|found| found.uid().as_ref() == Some(&pod.uid));
            let agent = self.agents.get(&pod.name);
            let answers = agent.is_some_and(|agent| agent.silent_since.is_none());
            !stays(pod) && (!answers || found.is_none_or(|found| is_over(found)))
        };
        let lost = before.pods().filter(is_lost);
        let mut lost: Vec<String> = (before.lost.iter().cloned())
            .chain(lost.map(|pod| pod.uid.clone()))
            .collect();
        lost.drain(..lost.len().saturating_sub(LOST_PODS));
        lost
    }

    /// Names of the members' pods that have a rank which a peer reports as lost.
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

    /// The state of a pod in a slot, and the message if the pod is lost, leaving or outdated. `template`: the pod template
    /// of the job; `None` if edits take no effect.
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
            let message = format!("node {node_name} is cordoned");
            return (PodState::Cordoned, Some(message));
        } else if let Standing::Tainted(taint) = standing {
            format!("node {node_name} is tainted {taint}")
        } else {
            let polled = self.agents.get(name);
            let answers = polled.is_some_and(|agent| agent.silent_since.is_none());
            let devices = agent.map_or(0, |agent| agent.devices);
            let enough = agent.is_some() && devices >= u64::from(job.spec.gpus_per_node);
            // A member counts as ready until it is lost.
            let prepares = agent.is_some_and(|agent| agent.prepares);
            let can_join = answers && enough && problem.is_none() && !prepares;
            let ready = member.is_some() || can_join;
            let how = if ready {
                PodState::Ready
            } else {
                PodState::Pending
            };
            return (how, None);
        };
        (PodState::Leaving, Some(leaving))
    }

    /// The cluster with the ranks of all members, and with what they report.
    fn with_ranks(self, job: &str, current: &Current) -> ClusterState {
        let (mut all, mut newest, mut lost_member) = (Vec::new(), None, None);
        let samples = |checkpoint: &Option<CheckpointRef>| checkpoint.as_ref().map(|c| c.samples);
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
            let committed = agent.and_then(|agent| agent.committed.clone());
            if samples(&committed) > samples(&newest) {
                newest = committed;
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
                if lost_member.is_none() && ranks.iter().any(killed) {
                    let message = slot.and_then(|(slot, _)| self.reasons.get(slot)).cloned();
                    let message = message.unwrap_or_else(|| format!("pod {name} is gone"));
                    lost_member = Some((first, message));
                }
            }
            all.extend(ranks);
        }
        ClusterState {
            ranks: all,
            committed: newest,
            lost_member,
            ..self
        }
    }

    /// Whether no kubelet will confirm the end of the pod. `suspect`: whether a node is suspected. Silence alone is not
    /// enough: the agent may be starting or terminating.
    pub fn needs_forced_deletion(&self, pod: &Pod, suspect: impl Fn(&str) -> bool) -> bool {
        let name = pod.name_any();
        let suspect = || node_of(pod).is_some_and(suspect);
        self.unconfirmed_end.contains_key(&name) || (self.is_unreachable(&name) && suspect())
    }
}

/// Polls the agents of the job's pods. Also returns the latest generation or checkpoint
/// beyond the status that an agent reports.
fn poll_pods(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    pods: &BTreeMap<String, Arc<Pod>>,
    agents: &Agents,
    most_samples: Option<u64>,
) -> (BTreeMap<String, AgentStatus>, Option<LaterGeneration>) {
    let reference = ObjectRef::from_obj(job);
    let uids: BTreeSet<String> = pods.values().filter_map(|pod| pod.uid()).collect();
    agents.retain(|other, uid| *other != reference || uids.contains(uid));
    let published = Published {
        record: status.generation.as_ref().map(|current| &current.record),
        checkpoint: status.checkpoint.as_ref(),
        most_samples,
        now: now(),
    };
    let in_slot = status.slot_pods(&job.name_any());
    let living = pods.iter().filter(|(_, pod)| !is_over(pod));
    let (first, others): (Vec<_>, Vec<_>) =
        living.partition(|(pod, _)| in_slot.contains(*pod) || status.member(pod).is_some());
    let (mut polled, mut later) = (BTreeMap::new(), Vec::new());
    for (pod, object) in first.into_iter().chain(others).take(POLLED) {
        // A pod on a fake or dead node has no agent; polling it costs one task.
        let Some(agent) = poll(job, object, agents, &reference) else {
            continue;
        };
        later.extend(
            agent
                .state
                .as_ref()
                .and_then(|state| published.later(state)),
        );
        let state = agent.state.map(|state| published.admit(state));
        polled.insert(pod.clone(), AgentStatus { state, ..agent });
    }
    let later = later.into_iter();
    (
        polled,
        later.max_by_key(|later| (later.number, later.samples())),
    )
}

/// What the controller knows of a pod's agent; `None` before the pod has an address.
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
