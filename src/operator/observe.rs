//! Observes a job: its pods, their nodes, and the states of their agents.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use super::agent_answer::{ANSWER_REFUSED, Published, Sender, agent_address};
use super::agents::{AgentStatus, Agents};
use super::build::{AGENT_PORT, is_outdated, resource_request};
use super::leases::Leases;
use super::ownership::is_owned_by;
use super::stores::Stores;
use crate::api::status::{Current, Slot, TrainingJobStatus};
use crate::api::{OnCordon, TrainingJob};
use crate::inventory::kubernetes::{ResourceRequest, Standing, standing};
use crate::lifecycle::CheckpointRef;
use crate::lifecycle::agent_state::{self, AgentState, LaterGeneration, Problem};
use crate::lifecycle::generation::PodRef;
use crate::lifecycle::placement::{PodState, SlotState};
use crate::lifecycle::protocol::Ending;
use crate::lifecycle::rank_status::{RankStatus, Stage};
use crate::operator::liveness::{SILENCE, Silence};
use crate::operator::pod_index::{is_over, node_of};
use crate::telemetry::now;

/// Pods of one job that are polled at most: 1,024 in slots, and as many that leave. A user can give any
/// number of pods the labels and the owner of a job.
const POLLED: usize = 2048;

/// Observed state of a job.
pub struct ClusterState {
    /// The job's pods, by name.
    pub pods: BTreeMap<String, Arc<Pod>>,
    /// The job's slots, each with the state of its pod.
    pub slots: Vec<SlotState>,
    /// Messages for lost, leaving and outdated slots.
    pub reasons: BTreeMap<Slot, String>,
    /// States of the agents, by pod, as far as they agree with the status.
    pub agents: BTreeMap<String, AgentState>,
    /// Why the controller ignores answers, by pod.
    rejections: BTreeMap<String, String>,
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
    /// Pods whose agents do not answer.
    unreachable: BTreeSet<String>,
    /// Pods that are lost by further evidence: no kubelet will confirm their end.
    unconfirmed_end: BTreeSet<String>,
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
        stores: &Stores,
        agents: &Agents,
        leases: &Leases,
        edits: bool,
        most_samples: Option<u64>,
    ) -> Self {
        let name = job.name_any();
        let namespace = job.namespace().unwrap_or_default();
        let resource_request = resource_request(job);
        let reference = ObjectRef::new(&name).within(&namespace);
        let pods: BTreeMap<String, Arc<Pod>> = stores
            .pods_of(&namespace, &name)
            .into_iter()
            .filter(|pod| is_owned_by(&pod.metadata, job))
            .map(|pod| (pod.name_any(), pod))
            .collect();
        agents.keep_only(
            &reference,
            &pods.values().filter_map(|pod| pod.uid()).collect(),
        );
        let in_slot: BTreeSet<String> = status.slots.iter().map(|slot| slot.pod(&name)).collect();
        let (first, others): (Vec<_>, Vec<_>) = pods
            .iter()
            .filter(|(_, pod)| !is_over(pod))
            .partition(|(name, _)| in_slot.contains(*name) || member_of(status, name).is_some());
        let polled: BTreeMap<String, AgentStatus> = first
            .into_iter()
            .chain(others)
            .take(POLLED)
            // A pod on a fake or dead node has no agent; polling it costs one task.
            .filter_map(|(name, pod)| Some((name.clone(), poll(job, pod, agents, &reference)?)))
            .collect();
        let published = Published {
            record: status.generation.as_ref().map(|current| &current.record),
            checkpoint: status.checkpoint.as_ref(),
            most_samples,
            now: now(),
        };
        let mut cluster = ClusterState {
            slots: Vec::new(),
            reasons: BTreeMap::new(),
            agents: polled
                .iter()
                .filter_map(|(pod, polled)| {
                    Some((pod.clone(), published.admit(polled.state.as_ref()?)))
                })
                .collect(),
            rejections: polled
                .iter()
                .filter_map(|(pod, polled)| Some((pod.clone(), polled.rejection.clone()?)))
                .collect(),
            ranks: Vec::new(),
            lost_member: None,
            committed: None,
            problem: None,
            staying: 0,
            unreachable: polled
                .iter()
                .filter(|(_, polled)| polled.silent_since.is_some_and(|s| s.elapsed() > SILENCE))
                .map(|(pod, _)| pod.clone())
                .collect(),
            edits,
            ended_early: Vec::new(),
            may_commit: false,
            stalled: None,
            later: polled
                .values()
                .filter_map(|polled| published.later(polled.state.as_ref()?))
                .max_by_key(|later| (later.number, later.checkpoint.as_ref().map(|c| c.samples))),
            unconfirmed_end: BTreeSet::new(),
            suspects: BTreeSet::new(),
            resource_request,
            pods,
        };
        let named = status
            .generation
            .as_ref()
            .map(|c| cluster.named_as_lost(c))
            .unwrap_or_default();
        let candidates = cluster.pods.iter().filter_map(|(pod, object)| {
            let polled = polled.get(pod)?;
            let silent = match polled.silent_since {
                Some(since) => since.elapsed(),
                // It answers, or has not been polled yet.
                None if polled.state.is_some() => return None,
                None => Duration::ZERO,
            };
            Some(Silence {
                pod,
                node: node_of(object)?,
                silent,
                member: member_of(status, pod).is_some(),
                named: named.contains(pod),
                external_trainer: !status.command(&job.spec).is_empty()
                    && !cluster.all_ended(status, pod),
                fence_after: Duration::from_secs(job.spec.elasticity.fence_after_seconds.into()),
            })
        });
        let silences: Vec<Silence<'_>> = candidates.collect();
        let may_commit = silences.iter().any(Silence::may_commit);
        let gone = silences.iter().filter_map(|silence| {
            let node = stores.nodes.get(&ObjectRef::new(silence.node));
            let standing = node.map(|node| standing(&node, &cluster.resource_request.tolerations));
            let message = silence.verdict(standing, || leases.is_stale(silence.node))?;
            Some((silence.pod.to_owned(), message))
        });
        let lost_pods: BTreeMap<String, String> = gone.collect();
        cluster.may_commit = may_commit;
        for slot in &status.slots {
            let pod = slot.pod(&name);
            let (how, message) =
                cluster.pod(job, status, &pod, stores, polled.get(&pod), &lost_pods);
            if let Some(end) = cluster.ended_early(status, &pod) {
                cluster.ended_early.push(end);
            }
            if how == PodState::Lost
                && cluster.unreachable.contains(&pod)
                && let Some(node) = cluster.pods.get(&pod).and_then(|pod| node_of(pod))
            {
                cluster.suspects.insert(node.to_string());
            }
            if how == PodState::Ready && !cluster.on_open_node(&pod, stores) {
                cluster.staying += 1;
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
            cluster.collect_ranks(&name, status, current);
        }
        let members = cluster.agents.iter();
        let members = members.filter(|(pod, _)| member_of(status, pod).is_some());
        cluster.problem = agent_state::held_up(members.map(|(_, agent)| agent)).or_else(|| {
            let mut members = cluster.rejections.iter();
            let (pod, message) = members.find(|(pod, _)| member_of(status, pod).is_some())?;
            Some(Problem {
                reason: ANSWER_REFUSED.into(),
                message: format!("{pod}: {message}"),
                deterministic: false,
            })
        });
        let mut members = cluster.agents.iter();
        cluster.stalled = members.find_map(|(pod, agent)| {
            let stalled = agent.stalled.as_ref()?;
            member_of(status, pod).map(|_| stalled.clone())
        });
        cluster.unconfirmed_end = lost_pods.into_keys().collect();
        cluster
    }

    /// Message of a pod that ended by itself before it was a member of a generation.
    fn ended_early(&self, status: &TrainingJobStatus, name: &str) -> Option<String> {
        let pod = self.pods.get(name)?;
        let own = is_over(pod) && !disrupted(pod) && pod.metadata.deletion_timestamp.is_none();
        (own && member_of(status, name).is_none()).then(|| end_message(pod))
    }

    /// The agent's or Kubernetes' reason for which a pod is not ready; `None` while it starts normally.
    pub fn held_up(&self, pod: &str) -> Option<String> {
        let agent = self.agents.get(pod);
        if let Some(problem) = agent.and_then(|agent| agent.problem.as_ref()) {
            return Some(format!("{pod}: {}", problem.message));
        }
        if let Some(rejection) = self.rejections.get(pod) {
            return Some(format!("{pod}: {rejection}"));
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
            let conditions = status.conditions.iter().flatten();
            let mut unplaced =
                conditions.filter(|c| c.type_ == "PodScheduled" && c.status == "False");
            unplaced.find_map(|condition| condition.message.clone())
        };
        let message = waiting.or_else(unplaced)?;
        Some(format!("{pod}: {message}"))
    }

    /// Whether the pod's node accepts new pods.
    fn on_open_node(&self, pod: &str, stores: &Stores) -> bool {
        let node = self.pods.get(pod).and_then(|pod| node_of(pod));
        let node = node.and_then(|node| stores.nodes.get(&ObjectRef::new(node)));
        node.is_some_and(|node| {
            standing(&node, &self.resource_request.tolerations) == Standing::Open
        })
    }

    /// Whether all ranks of the newest generation in a pod have ended.
    fn all_ended(&self, status: &TrainingJobStatus, pod: &str) -> bool {
        let current = status.generation.as_ref();
        let number = current.map(|current| current.record.number);
        self.agents.get(pod).is_some_and(|agent| {
            Some(agent.generation) == number && agent.ranks.iter().all(RankStatus::has_ended)
        })
    }

    /// Pods of members whose ranks a peer reports as lost.
    fn named_as_lost(&self, current: &Current) -> BTreeSet<String> {
        let number = current.record.number;
        let theirs = self
            .agents
            .values()
            .filter(|agent| agent.generation == number);
        let lost: BTreeSet<u64> = theirs
            .flat_map(|agent| agent.ranks.iter())
            .filter_map(|rank| Some(rank.loss_report()?.rank))
            .collect();
        let shares = current.record.shares();
        let of_lost = shares
            .filter(|(first, member)| lost.range(first..&(first + member.ranks)).next().is_some());
        of_lost
            .filter_map(|(_, member)| Some(member.pod.as_ref()?.name.clone()))
            .collect()
    }

    fn pod(
        &self,
        job: &TrainingJob,
        status: &TrainingJobStatus,
        name: &str,
        stores: &Stores,
        polled: Option<&AgentStatus>,
        lost_pods: &BTreeMap<String, String>,
    ) -> (PodState, Option<String>) {
        let lost = |message: String| (PodState::Lost, Some(message));
        let member = member_of(status, name);
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
        let outdated = (self.edits && is_outdated(pod, job)).then(|| {
            (
                PodState::Outdated,
                Some(format!(
                    "pod {name} was made before the job's image or podTemplate changed"
                )),
            )
        });
        let Some(node_name) = node_of(pod) else {
            if let Some(outdated) = outdated {
                return outdated;
            }
            return match pod.metadata.deletion_timestamp {
                Some(_) => lost(format!("pod {name} was deleted before it was placed")),
                None => (PodState::Pending, None),
            };
        };
        let Some(node) = stores.nodes.get(&ObjectRef::new(node_name)) else {
            return lost(format!("node {node_name} was deleted"));
        };
        let standing = standing(&node, &self.resource_request.tolerations);
        if let Some(message) = lost_pods.get(name) {
            return lost(message.clone());
        }
        if pod.metadata.deletion_timestamp.is_some() {
            return (
                PodState::Leaving,
                Some(format!("pod {name} is being deleted")),
            );
        }
        if disrupted(pod) {
            return (
                PodState::Leaving,
                Some(format!("pod {name} is being evicted")),
            );
        }
        if let Some(outdated) = outdated {
            return outdated;
        }
        let agent = self.agents.get(name);
        let broken = agent.and_then(|agent| agent.problem.as_ref());
        if let Some(broken) = broken.filter(|p| member.is_some() && p.is_hardware()) {
            // A new pod on this node detects the same problem before it gets ranks.
            let message = format!("pod {name}: {}", broken.message);
            return (PodState::Leaving, Some(message));
        }
        if status.excluded_nodes.iter().any(|node| node == node_name) {
            let message = format!("a rank made no progress on node {node_name}");
            return (PodState::Leaving, Some(message));
        }
        match standing {
            Standing::Cordoned if job.spec.elasticity.on_cordon == OnCordon::Drain => {
                return (
                    PodState::Leaving,
                    Some(format!("node {node_name} is cordoned")),
                );
            }
            Standing::Tainted(taint) => {
                return (
                    PodState::Leaving,
                    Some(format!("node {node_name} is tainted {taint}")),
                );
            }
            _ => {}
        }
        let answers = polled.is_some_and(|polled| polled.silent_since.is_none());
        let fit = agent.is_some_and(|agent| {
            agent.problem.is_none() && agent.devices >= u64::from(job.spec.gpus_per_node)
        });
        // A member counts as ready until it is lost.
        match (answers && fit) || member.is_some() {
            true => (PodState::Ready, None),
            false => (PodState::Pending, None),
        }
    }

    /// Collects the rank states of all members' agents.
    fn collect_ranks(&mut self, job: &str, status: &TrainingJobStatus, current: &Current) {
        let number = current.record.number;
        for (first, member) in current.record.shares() {
            let count = usize::try_from(member.ranks).unwrap_or(0);
            let mut ranks = vec![RankStatus::default(); count];
            let name = member
                .pod
                .as_ref()
                .map(|pod| pod.name.clone())
                .unwrap_or_default();
            if let Some(agent) = self
                .agents
                .get(&name)
                .filter(|agent| agent.generation == number)
            {
                ranks.clone_from(&agent.ranks);
                ranks.resize(count, RankStatus::default());
                let newer = |checkpoint_ref: &CheckpointRef| {
                    self.committed
                        .as_ref()
                        .is_none_or(|c| c.samples < checkpoint_ref.samples)
                };
                if let Some(checkpoint_ref) = agent
                    .committed
                    .as_ref()
                    .filter(|checkpoint_ref| newer(checkpoint_ref))
                {
                    self.committed = Some(checkpoint_ref.clone());
                }
            }
            let slot = status.slots.iter().find(|slot| slot.pod(job) == name);
            let how = slot.and_then(|slot| self.slots.iter().find(|state| state.slot == *slot));
            let lost = how.is_none_or(|state| state.pod == PodState::Lost);
            if lost {
                let killed_for_memory = self.pods.get(&name).is_some_and(|pod| oom_killed(pod));
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
                let finished = ranks
                    .iter()
                    .all(|rank| !matches!(rank.stage, Stage::Ended(Ending::Signal(_))));
                if !finished && self.lost_member.is_none() {
                    let message = slot.and_then(|slot| self.reasons.get(slot)).cloned();
                    let message = message.unwrap_or_else(|| format!("pod {name} is gone"));
                    self.lost_member = Some((first, message));
                }
            }
            self.ranks.extend(ranks);
        }
    }
}

impl ClusterState {
    /// Whether no kubelet will confirm the end of the pod. `suspect`: whether a node is suspected. An
    /// agent that is only silent may be starting or terminating.
    pub fn needs_forced_deletion(&self, pod: &Pod, suspect: impl Fn(&str) -> bool) -> bool {
        let name = pod.name_any();
        let suspect = || node_of(pod).is_some_and(suspect);
        self.unconfirmed_end.contains(&name) || (self.unreachable.contains(&name) && suspect())
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
    let sender = |address| {
        Some(Sender {
            job: job.uid()?,
            pod: pod.uid()?,
            address,
            ranks: usize::try_from(job.spec.gpus_per_node).ok()?,
        })
    };
    match agent_address(ip, AGENT_PORT) {
        Ok(address) => Some(agents.poll(&sender(address)?, reference)),
        Err(rejection) => Some(AgentStatus {
            rejection: Some(rejection.to_string()),
            ..AgentStatus::default()
        }),
    }
}

/// The newest generation's member with this pod name.
fn member_of<'s>(status: &'s TrainingJobStatus, name: &str) -> Option<&'s PodRef> {
    let current = status.generation.as_ref()?;
    let mut members = current.record.members.iter().filter_map(|m| m.pod.as_ref());
    members.find(|pod| pod.name == name)
}

fn disrupted(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|c| c.type_ == "DisruptionTarget" && c.status == "True")
}

fn terminated(pod: &Pod) -> Option<&k8s_openapi::api::core::v1::ContainerStateTerminated> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses
        .iter()
        .find_map(|c| c.state.as_ref()?.terminated.as_ref())
}

fn oom_killed(pod: &Pod) -> bool {
    terminated(pod).is_some_and(|end| end.reason.as_deref() == Some("OOMKilled"))
}

/// Truncates a text to 200 characters for a status line.
fn truncated(text: &str) -> String {
    text.chars().take(200).collect()
}

fn end_message(pod: &Pod) -> String {
    let name = pod.name_any();
    let status = pod.status.as_ref();
    let reason = status.and_then(|status| status.reason.clone());
    match (terminated(pod), reason) {
        (Some(end), _) => {
            let reason = end.reason.clone().unwrap_or_default();
            let message = end.message.iter().map(|text| text.trim());
            let message = message.map(|text| format!(": {}", truncated(text)));
            format!(
                "pod {name} ended with exit code {} {reason}{}",
                end.exit_code,
                message.collect::<String>()
            )
            .trim_end()
            .into()
        }
        (None, Some(reason)) => format!("pod {name} ended: {reason}"),
        (None, None) => format!("pod {name} ended"),
    }
}
