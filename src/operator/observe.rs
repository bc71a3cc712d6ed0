//! What a job looks like from outside: its pods, their nodes, what their agents say.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use super::agents::{Agents, Heard};
use super::build::is_outdated;
use super::holdings::{is_over, node_of};
use super::leases::Leases;
use super::ledger::wants;
use super::silence::{SILENCE, Silence};
use super::stores::Stores;
use crate::inventory::kubernetes::{Standing, Wants, standing};
use crate::job::Pin;
use crate::job::agent_state::{self, AgentState, Problem};
use crate::job::api::status::{Current, Seat, TrainingJobStatus};
use crate::job::api::{OnCordon, TrainingJob};
use crate::job::generation::PodRef;
use crate::job::protocol::Ending;
use crate::job::seen::Seen;
use crate::job::steer::{PodSeen, SeatSeen};

/// What a job looks like.
pub struct Observation {
    /// Its pods, by name.
    pub pods: BTreeMap<String, Arc<Pod>>,
    /// Its seats.
    pub seats: Vec<SeatSeen>,
    /// Why seats are lost or leaving, for people.
    pub reasons: BTreeMap<Seat, String>,
    /// What the agents say, by pod.
    pub agents: BTreeMap<String, AgentState>,
    /// The newest generation's ranks.
    pub ranks: Vec<Seen>,
    /// The first rank of a member that is lost, and why.
    pub lost_member: Option<(u64, String)>,
    /// The newest checkpoint that an agent knows of.
    pub committed: Option<Pin>,
    /// Why an agent cannot start ranks.
    pub problem: Option<Problem>,
    /// Seats that stay on nodes which take no new pods.
    pub staying: u32,
    /// Where the pods may run.
    pub wants: Wants,
    /// How pods ended that were never part of a generation, other than by being deleted or evicted.
    pub ended_early: Vec<String>,
    /// What was edited of the spec is taken up.
    pub edits: bool,
    /// A program of the user's own may run, and commit, in a pod that does not answer.
    pub may_commit: bool,
    /// Pods whose agents do not answer.
    unreachable: BTreeSet<String>,
    /// Those of them whose nodes, or peers, say so too: nobody there will confirm that they ended.
    out_of_reach: BTreeSet<String>,
    /// Nodes of lost pods that did not answer any more: nothing new is counted on them for now,
    /// whatever Kubernetes still thinks of them.
    pub suspects: BTreeSet<String>,
}

impl Observation {
    /// Looks. `edits`: whether what was edited of the spec is to be taken up; an edit that cannot be
    /// planned is not.
    pub fn of(
        job: &TrainingJob,
        status: &TrainingJobStatus,
        stores: &Stores,
        agents: &Agents,
        leases: &Leases,
        edits: bool,
    ) -> Self {
        let name = job.name_any();
        let namespace = job.namespace().unwrap_or_default();
        let wants = wants(job);
        let reference = ObjectRef::new(&name).within(&namespace);
        let pods: BTreeMap<String, Arc<Pod>> = stores
            .pods_of(&namespace, &name)
            .into_iter()
            .filter(|pod| belongs(pod, job))
            .map(|pod| (pod.name_any(), pod))
            .collect();
        agents.keep_only(
            &reference,
            &pods.values().filter_map(|pod| pod.uid()).collect(),
        );
        let heard: BTreeMap<String, Heard> = pods
            .values()
            .filter(|pod| !is_over(pod))
            .filter_map(|pod| {
                let ip = pod.status.as_ref()?.pod_ip.as_deref()?;
                let uid = pod.uid()?;
                // A fake or dead node's pod has no agent; asking it costs one task.
                Some((pod.name_any(), agents.heard(&uid, ip, &reference)))
            })
            .collect();
        let mut seen = Observation {
            seats: Vec::new(),
            reasons: BTreeMap::new(),
            agents: heard
                .iter()
                .filter_map(|(pod, heard)| Some((pod.clone(), heard.state.clone()?)))
                .collect(),
            ranks: Vec::new(),
            lost_member: None,
            committed: None,
            problem: None,
            staying: 0,
            unreachable: heard
                .iter()
                .filter(|(_, heard)| heard.silent_since.is_some_and(|s| s.elapsed() > SILENCE))
                .map(|(pod, _)| pod.clone())
                .collect(),
            edits,
            ended_early: Vec::new(),
            may_commit: false,
            out_of_reach: BTreeSet::new(),
            suspects: BTreeSet::new(),
            wants,
            pods,
        };
        let named = status
            .generation
            .as_ref()
            .map(|c| seen.named_as_lost(c))
            .unwrap_or_default();
        let silences = seen.pods.iter().filter_map(|(pod, object)| {
            let heard = heard.get(pod)?;
            let silent = match heard.silent_since {
                Some(since) => since.elapsed(),
                // It answers, or was not asked yet.
                None if heard.state.is_some() => return None,
                None => Duration::ZERO,
            };
            Some(Silence {
                pod,
                node: node_of(object)?,
                silent,
                member: member_of(status, pod).is_some(),
                named: named.contains(pod),
                own_program: !status.command(&job.spec).is_empty() && !seen.all_ended(status, pod),
                fence_after: Duration::from_secs(job.spec.elasticity.fence_after_seconds.into()),
            })
        });
        let silences: Vec<Silence<'_>> = silences.collect();
        let may_commit = silences.iter().any(Silence::may_commit);
        let gone = silences.iter().filter_map(|silence| {
            let node = stores.nodes.get(&ObjectRef::new(silence.node));
            let standing = node.map(|node| standing(&node, &seen.wants.tolerations));
            let why = silence.verdict(standing, || leases.is_stale(silence.node))?;
            Some((silence.pod.to_owned(), why))
        });
        let silences: BTreeMap<String, String> = gone.collect();
        seen.may_commit = may_commit;
        for seat in &status.seats {
            let pod = seat.pod(&name);
            let (how, why) = seen.pod(job, status, &pod, stores, heard.get(&pod), &silences);
            if let Some(end) = seen.ended_early(status, &pod) {
                seen.ended_early.push(end);
            }
            if how == PodSeen::Lost
                && seen.unreachable.contains(&pod)
                && let Some(node) = seen.pods.get(&pod).and_then(|pod| node_of(pod))
            {
                seen.suspects.insert(node.to_string());
            }
            if how == PodSeen::Ready && !seen.on_open_node(&pod, stores) {
                seen.staying += 1;
            }
            if let Some(why) = why {
                seen.reasons.insert(*seat, why);
            }
            seen.seats.push(SeatSeen {
                seat: *seat,
                pod: how,
            });
        }
        if let Some(current) = &status.generation {
            seen.look_at_ranks(&name, status, current);
        }
        let members = seen.agents.iter();
        let members = members.filter(|(pod, _)| member_of(status, pod).is_some());
        seen.problem = agent_state::held_up(members.map(|(_, agent)| agent));
        seen.out_of_reach = silences.into_keys().collect();
        seen
    }

    /// How a pod ended that was never part of a generation, where it ended by itself.
    fn ended_early(&self, status: &TrainingJobStatus, name: &str) -> Option<String> {
        let pod = self.pods.get(name)?;
        let own = is_over(pod) && !disrupted(pod) && pod.metadata.deletion_timestamp.is_none();
        (own && member_of(status, name).is_none()).then(|| end_of(pod))
    }

    /// What holds up a pod that is coming, in its agent's or Kubernetes' words; `None` while it is only young.
    pub fn held_up(&self, pod: &str) -> Option<String> {
        let agent = self.agents.get(pod);
        if let Some(problem) = agent.and_then(|agent| agent.problem.as_ref()) {
            return Some(format!("{pod}: {}", problem.message));
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
        let why = waiting.or_else(unplaced)?;
        Some(format!("{pod}: {why}"))
    }

    /// Whether the pool counts the pod's node.
    fn on_open_node(&self, pod: &str, stores: &Stores) -> bool {
        let node = self.pods.get(pod).and_then(|pod| node_of(pod));
        let node = node.and_then(|node| stores.nodes.get(&ObjectRef::new(node)));
        node.is_some_and(|node| standing(&node, &self.wants.tolerations) == Standing::Open)
    }

    /// Whether the newest generation's ranks in a pod are known to have ended.
    fn all_ended(&self, status: &TrainingJobStatus, pod: &str) -> bool {
        let current = status.generation.as_ref();
        let number = current.map(|current| current.record.number);
        self.agents.get(pod).is_some_and(|agent| {
            Some(agent.generation) == number && agent.ranks.iter().all(|seen| seen.ending.is_some())
        })
    }

    /// Members whose ranks a peer names as lost.
    fn named_as_lost(&self, current: &Current) -> BTreeSet<String> {
        let number = current.record.number;
        let theirs = self
            .agents
            .values()
            .filter(|agent| agent.generation == number);
        let lost: BTreeSet<u64> = theirs
            .flat_map(|agent| agent.ranks.iter())
            .filter_map(|seen| seen.lost.as_ref().map(|lost| lost.rank))
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
        heard: Option<&Heard>,
        silences: &BTreeMap<String, String>,
    ) -> (PodSeen, Option<String>) {
        let lost = |why: String| (PodSeen::Lost, Some(why));
        let member = member_of(status, name);
        let Some(pod) = self.pods.get(name) else {
            return match member {
                Some(_) => lost(format!("pod {name} was deleted")),
                None => (PodSeen::Coming, None),
            };
        };
        if member.is_some_and(|member| pod.uid().as_deref() != Some(&member.uid)) {
            return lost(format!("pod {name} was replaced"));
        }
        if is_over(pod) {
            return lost(end_of(pod));
        }
        let outdated = (self.edits && is_outdated(pod, job)).then(|| {
            (
                PodSeen::Outdated,
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
                None => (PodSeen::Coming, None),
            };
        };
        let Some(node) = stores.nodes.get(&ObjectRef::new(node_name)) else {
            return lost(format!("node {node_name} was deleted"));
        };
        let standing = standing(&node, &self.wants.tolerations);
        if let Some(why) = silences.get(name) {
            return lost(why.clone());
        }
        if pod.metadata.deletion_timestamp.is_some() {
            return (
                PodSeen::Leaving,
                Some(format!("pod {name} is being deleted")),
            );
        }
        if disrupted(pod) {
            return (
                PodSeen::Leaving,
                Some(format!("pod {name} is being evicted")),
            );
        }
        if let Some(outdated) = outdated {
            return outdated;
        }
        let agent = self.agents.get(name);
        let broken = agent.and_then(|agent| agent.problem.as_ref());
        if let Some(broken) = broken.filter(|p| member.is_some() && p.is_of_hardware()) {
            // Another pod there finds the same before it is given ranks.
            let why = format!("pod {name}: {}", broken.message);
            return (PodSeen::Leaving, Some(why));
        }
        match standing {
            Standing::Cordoned if job.spec.elasticity.on_cordon == OnCordon::Shrink => {
                return (
                    PodSeen::Leaving,
                    Some(format!("node {node_name} is cordoned")),
                );
            }
            Standing::Tainted(taint) => {
                return (
                    PodSeen::Leaving,
                    Some(format!("node {node_name} is tainted {taint}")),
                );
            }
            _ => {}
        }
        let answers = heard.is_some_and(|heard| heard.silent_since.is_none());
        let fit = agent.is_some_and(|agent| {
            agent.problem.is_none() && agent.devices >= u64::from(job.spec.gpus_per_node)
        });
        // A member is there until it is known to be lost.
        match (answers && fit) || member.is_some() {
            true => (PodSeen::Ready, None),
            false => (PodSeen::Coming, None),
        }
    }

    /// Puts together what the members' agents say of their ranks.
    fn look_at_ranks(&mut self, job: &str, status: &TrainingJobStatus, current: &Current) {
        let number = current.record.number;
        for (first, member) in current.record.shares() {
            let count = usize::try_from(member.ranks).unwrap_or(0);
            let mut ranks = vec![Seen::default(); count];
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
                ranks.resize(count, Seen::default());
                let newer = |pin: &Pin| {
                    self.committed
                        .as_ref()
                        .is_none_or(|c| c.samples < pin.samples)
                };
                if let Some(pin) = agent.committed.as_ref().filter(|pin| newer(pin)) {
                    self.committed = Some(pin.clone());
                }
            }
            let seat = status.seats.iter().find(|seat| seat.pod(job) == name);
            let how = seat.and_then(|seat| self.seats.iter().find(|seen| seen.seat == *seat));
            let lost = how.is_none_or(|seen| seen.pod == PodSeen::Lost);
            if lost {
                let killed_for_memory = self.pods.get(&name).is_some_and(|pod| oom_killed(pod));
                for (seen, rank) in ranks.iter_mut().zip(first..) {
                    if seen.ending.is_none() {
                        seen.ending = Some(Ending::Signal(9));
                    }
                    if killed_for_memory && seen.out_of_memory.is_none() {
                        seen.out_of_memory = Some(format!(
                            "the container of rank {rank} was killed for its memory limit"
                        ));
                    }
                }
                let finished = ranks
                    .iter()
                    .all(|seen| !matches!(seen.ending, Some(Ending::Signal(_))));
                if !finished && self.lost_member.is_none() {
                    let why = seat.and_then(|seat| self.reasons.get(seat)).cloned();
                    let why = why.unwrap_or_else(|| format!("pod {name} is gone"));
                    self.lost_member = Some((first, why));
                }
            }
            self.ranks.extend(ranks);
        }
    }
}

impl Observation {
    /// Whether nobody on the pod's node will confirm that it ended. `suspect`: nodes that stopped
    /// answering a moment ago. An agent that is only silent may be starting, or saying goodbye.
    pub fn is_out_of_reach(&self, pod: &Pod, suspect: impl Fn(&str) -> bool) -> bool {
        let name = pod.name_any();
        let suspect = || node_of(pod).is_some_and(suspect);
        self.out_of_reach.contains(&name) || (self.unreachable.contains(&name) && suspect())
    }
}

/// The member of the newest generation that a pod of this name is.
fn member_of<'s>(status: &'s TrainingJobStatus, name: &str) -> Option<&'s PodRef> {
    let current = status.generation.as_ref()?;
    let mut members = current.record.members.iter().filter_map(|m| m.pod.as_ref());
    members.find(|pod| pod.name == name)
}

/// Whether this very job made the pod, not one that had its name before.
fn belongs(pod: &Pod, job: &TrainingJob) -> bool {
    let owners = pod.metadata.owner_references.iter().flatten();
    owners
        .map(|owner| Some(&owner.uid))
        .any(|uid| uid == job.metadata.uid.as_ref())
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

/// As much of a text as a status line takes.
fn short(text: &str) -> String {
    text.chars().take(200).collect()
}

fn end_of(pod: &Pod) -> String {
    let name = pod.name_any();
    let status = pod.status.as_ref();
    let reason = status.and_then(|status| status.reason.clone());
    match (terminated(pod), reason) {
        (Some(end), _) => {
            let reason = end.reason.clone().unwrap_or_default();
            let said = end.message.iter().map(|words| words.trim());
            let said = said.map(|words| format!(": {}", short(words)));
            format!(
                "pod {name} ended with exit code {} {reason}{}",
                end.exit_code,
                said.collect::<String>()
            )
            .trim_end()
            .into()
        }
        (None, Some(reason)) => format!("pod {name} ended: {reason}"),
        (None, None) => format!("pod {name} ended"),
    }
}
