//! Updates the status of a job: first with the observed state, then with the decision. Reads nothing but the job and the
//! time of a reconciliation.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;

use super::context::Reconciliation;
use super::observe::ClusterState;
use super::outcome::{self, count_pods};
use super::planning::World;
use super::{build, conditions};
use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::status::{
    AfterLoss, Current, Phase, PlanSummary, Progress, Rescale, Slot, TrainingJobStatus,
};
use crate::api::{OnStall, TrainingJob};
use crate::lifecycle::agent_state::{AgentState, LaterGeneration, Problem};
use crate::lifecycle::generation::{Address, Generation, Member, PodRef, Reason};
use crate::lifecycle::placement::{Placement, PlacementAction, PodState};
use crate::lifecycle::rank_status::{self, RankStatus};
use crate::lifecycle::{CheckpointRef, End, Outcome, Ranks};
use crate::plan::Plan;
use crate::telemetry::human;
use crate::util::format::count;
use crate::util::time::{micro_time, seconds};

/// The status with which a reconciliation begins: the last one, for the current spec and the current time.
pub fn of_spec(job: &TrainingJob, before: &TrainingJobStatus, now: f64) -> TrainingJobStatus {
    let mut next = before.clone();
    conditions::readable(&mut next);
    limit_times(&mut next, now);
    if job.spec.on_stall != OnStall::ExcludeNode {
        next.excluded_nodes.clear();
    }
    if next.observed_generation != job.metadata.generation {
        // The edit may solve what kept pods from starting.
        next.pod_failures = None;
    }
    next.observed_generation = job.metadata.generation;
    let labels = build::selector(job).into_iter();
    let labels = labels.map(|(key, value)| format!("{key}={value}"));
    next.selector = labels.collect::<Vec<_>>().join(",");
    next
}

/// Limits the times of a status to those that are possible now: the clock may have been set back since, or that of
/// another replica be fast.
fn limit_times(status: &mut TrainingJobStatus, now: f64) {
    let limit = |time: &mut MicroTime, latest: f64| {
        if seconds(time) > latest {
            *time = micro_time(latest);
        }
    };
    let since = [
        &mut status.scale_up_pending_since,
        &mut status.placement_since,
        &mut status.rescale_since,
        &mut status.start_time,
    ];
    since.into_iter().flatten().for_each(|at| limit(at, now));
    let failures = status.pod_failures.as_mut();
    let retry = failures.map(|failures| &mut failures.retry_not_before);
    let pauses = status.restart_not_before.iter_mut().chain(retry);
    pauses.for_each(|at| limit(at, now + outcome::LONGEST_BACK_OFF));
}

impl Reconciliation<'_> {
    /// Why the job ends: its active deadline.
    pub fn overdue(&self, status: &TrainingJobStatus) -> Option<Problem> {
        let limit = self.job.spec.active_deadline_seconds?;
        let since = status.start_time.as_ref().map(seconds)?;
        (self.now - since >= f64::from(limit)).then(|| Problem {
            reason: ConditionReason::DeadlineExceeded.name().to_owned(),
            message: format!("spec.activeDeadlineSeconds: the job has run for {limit} s"),
            deterministic: true,
        })
    }

    /// Updates the status with the observed state.
    ///
    /// `smaller(plan, batch)`: the largest feasible micro-batch below that of `plan` for the global batch `batch`.
    pub fn apply_observed(
        &self,
        status: &mut TrainingJobStatus,
        cluster: &ClusterState,
        mut smaller: impl FnMut(&Plan, u64) -> Option<u64>,
    ) {
        let Reconciliation { job, now, .. } = *self;
        let samples =
            |checkpoint: &Option<CheckpointRef>| checkpoint.as_ref().map_or(0, |c| c.samples);
        if samples(&cluster.committed) > samples(&status.checkpoint) {
            status.checkpoint.clone_from(&cluster.committed);
            status.checkpoint_time = Some(micro_time(now));
            status.restarts = 0;
        }
        if let Some(last) = cluster.ended_early.first() {
            count_pods(status, last.clone(), now);
        }
        if let Some(later) = &cluster.later {
            restore(status, later, now);
        }
        update_progress(status, cluster);
        update_external_progress(status, cluster, now);
        let Some(current) = status.generation.as_mut().filter(|c| c.outcome.is_none()) else {
            return;
        };
        let in_trouble = in_trouble(cluster);
        if in_trouble {
            begin(&mut status.rescale_since, now);
        }
        let rescale_since = status.rescale_since.as_ref();
        let waited = rescale_since.map_or(0.0, |since| now - seconds(since));
        if in_trouble
            && current.after_loss.is_none()
            && rank_status::is_settled(&cluster.ranks, Duration::from_secs_f64(waited.max(0.0)))
        {
            let commit = rank_status::committer(&cluster.ranks, samples(&status.checkpoint));
            current.after_loss = Some(AfterLoss { commit });
        }
        let plan = &current.record.plan;
        let checkpoint = status.checkpoint.as_ref();
        let batch = checkpoint.map_or(plan.global_batch_size, |checkpoint| checkpoint.batch);
        let outcome = outcome::decide(job, current, cluster, waited, || smaller(plan, batch));
        let Some(outcome) = outcome else { return };
        begin(&mut status.rescale_since, now);
        current.end_time = Some(micro_time(now));
        if job.spec.on_stall == OnStall::ExcludeNode {
            let nodes = stalled_nodes(current, &cluster.ranks);
            status.excluded_nodes.retain(|node| !nodes.contains(node));
            status.excluded_nodes.extend(nodes);
        }
        let killed = cluster.lost_member.is_none();
        let outcome = outcome::count(status, outcome, killed, job.spec.budgets.restarts, now);
        if let Outcome::Failed { .. } = outcome {
            let tails = cluster.states().map(|agent| &agent.log_tail);
            let longest = tails.max_by_key(|tail| tail.len());
            status.log_tail = longest.cloned().unwrap_or_default();
        }
        if let Some(current) = &mut status.generation {
            current.outcome = Some(outcome);
        }
        if let Some(progress) = &mut status.progress {
            progress.time_left.clear();
        }
    }

    /// Updates the status with a decision, and with the world that it publishes.
    pub fn apply_decision(
        &self,
        status: &mut TrainingJobStatus,
        placement: &Placement,
        world: Option<World>,
        cluster: &ClusterState,
    ) {
        let Reconciliation { job, now, .. } = *self;
        status.attempts = placement.attempts;
        status.scale_up_pending_since = placement.scale_up_pending_since.map(micro_time);
        status.placement_since = placement.placement_since.map(micro_time);
        if !matches!(placement.action, PlacementAction::End(_)) {
            status.slots.clone_from(&placement.slots);
        }
        match &placement.action {
            PlacementAction::Keep => self.keep(status, cluster),
            PlacementAction::Place => {
                status.phase = Phase::Placing;
                begin(&mut status.rescale_since, now);
                status.message = self.placing(status, cluster);
            }
            PlacementAction::Drain => {
                status.phase = Phase::Draining;
                begin(&mut status.rescale_since, now);
                status.message = if job.spec.suspend {
                    "spec.suspend is true".into()
                } else if let Some(overdue) = self.overdue(status) {
                    overdue.message
                } else {
                    let why_leaving = cluster.reasons.values().next();
                    why_leaving.cloned().unwrap_or_default()
                };
                if let Some(current) = &mut status.generation {
                    current.drain = true;
                }
            }
            PlacementAction::CancelDrain => {
                status.phase = Phase::Running;
                if let Some(current) = &mut status.generation {
                    current.drain = false;
                }
            }
            PlacementAction::Publish {
                members,
                reason,
                per_device_batch_size_limit: limit,
            } => {
                status.per_device_batch_size_limit = limit.or(status.per_device_batch_size_limit);
                if let Some(World {
                    plan,
                    feasible_nodes,
                }) = world
                {
                    status.plan = Some(PlanSummary::of(&job.spec, &plan, feasible_nodes));
                    self.publish(status, members, reason, plan, cluster);
                }
            }
            PlacementAction::Wait { message } => {
                status.phase = Phase::Waiting;
                status.message.clone_from(message);
            }
            PlacementAction::Suspend => {
                status.phase = Phase::Suspended;
                status.start_time = None;
                status.message = "spec.suspend is true".into();
                status.rescale_since = None;
            }
            PlacementAction::End(end) => {
                status.completion_time = Some(micro_time(now));
                status.rescale_since = None;
                (status.phase, status.message) = match end {
                    End::Failed { message } => (Phase::Failed, message.clone()),
                    End::Finished | End::Drained => (Phase::Complete, String::new()),
                };
            }
        }
        if let (Some(plan), Some(current)) = (&mut status.plan, &status.generation) {
            // The norm test may have raised the global batch.
            let trained = status.progress.as_ref().map(|progress| progress.batch);
            let committed = status.checkpoint.as_ref().map(|c| c.batch);
            plan.formula = current.record.plan.formula_at(trained.or(committed));
        }
    }

    fn keep(&self, status: &mut TrainingJobStatus, cluster: &ClusterState) {
        if let Some(current) = &status.generation {
            status.phase = if current.drain {
                Phase::Draining
            } else {
                Phase::Running
            };
        }
        if status.phase != Phase::Running {
            return;
        }
        let problem = cluster.problem.as_ref().map(|problem| &problem.message);
        let problem = problem.or(cluster.stalled.as_ref());
        status.message = problem.cloned().unwrap_or_default();
        let is_external = !status.command(&self.job.spec).is_empty();
        let arrived = |change: &Rescale| {
            if is_external {
                // An external trainer does not report its steps.
                change.stages.restored_seconds.is_some()
            } else {
                change.stages.first_step_seconds.is_some()
            }
        };
        let settled = status.history.last().is_none_or(arrived);
        let ends = |current: &Current| current.after_loss.is_some() || current.outcome.is_some();
        let ends = status.generation.as_ref().is_some_and(ends);
        // The time that the others have to notice a loss counts from `rescale_since`.
        if settled && !ends && !in_trouble(cluster) {
            status.rescale_since = None;
        }
    }

    /// The message while pods are placed.
    fn placing(&self, status: &TrainingJobStatus, cluster: &ClusterState) -> String {
        let failures = status.pod_failures.as_ref();
        if let Some(failures) = failures.filter(|f| self.now < seconds(&f.retry_not_before)) {
            return format!(
                "pods ended before they could train, {} so far; new pods follow after a pause: {}",
                count(failures.count.into(), "time"),
                failures.message
            );
        }
        let name = self.job.name_any();
        let ready = |slot: &Slot| {
            let mut pods = cluster.slots.iter().filter(|s| s.slot == *slot);
            pods.any(|s| s.pod == PodState::Ready)
        };
        let coming = status.slots.iter().filter(|slot| !ready(slot));
        let coming: Vec<String> = coming.map(|slot| slot.pod(&name)).collect();
        let held_up = coming.iter().find_map(|pod| cluster.held_up(pod));
        let held_up = held_up.map_or_else(String::new, |message| format!(": {message}"));
        let (coming, all) = (coming.len(), status.slots.len());
        format!("{coming} of {all} pods are not ready yet{held_up}")
    }

    fn publish(
        &self,
        status: &mut TrainingJobStatus,
        members: &[Slot],
        reason: &Reason,
        plan: Plan,
        cluster: &ClusterState,
    ) {
        let Reconciliation { job, now, .. } = *self;
        let name = job.name_any();
        let member = |slot: &Slot| {
            let pod = cluster.pods.get(&slot.pod(&name))?;
            Some(Member {
                slot: slot.number.into(),
                ranks: job.spec.gpus_per_node.into(),
                pod: Some(PodRef {
                    name: pod.name_any(),
                    uid: pod.uid()?,
                    ip: pod.status.as_ref()?.pod_ip.clone()?,
                    node: pod.spec.as_ref()?.node_name.clone()?,
                }),
            })
        };
        // A ready pod has all of these fields; the next reconciliation handles one that has lost them.
        let Some(members) = members.iter().map(member).collect::<Option<Vec<Member>>>() else {
            return;
        };
        let newest = status.number().max(status.later_generation.take());
        let number = newest.map_or(1, |newest| newest + 1);
        let first = members.first().and_then(|member| member.pod.as_ref());
        let host = first.map_or_else(String::new, |pod| pod.ip.clone());
        let offset = u16::try_from(number % u64::from(build::MASTER_PORTS)).unwrap_or(0);
        let record = Generation {
            job: job.uid().unwrap_or_default(),
            number,
            reason: reason.clone(),
            members,
            plan,
            start: status.checkpoint.clone(),
            master: Address {
                host,
                port: build::MASTER_PORT + offset,
            },
            created: now,
        };
        let since = status.rescale_since.as_ref().map_or(now, seconds);
        let before = status.generation.take();
        let from = before.as_ref().map_or(0, |c| c.record.members.len());
        let mut change = Rescale::to(&record, u32::try_from(from).unwrap_or(u32::MAX), since);
        let ended = before.as_ref().and_then(|current| current.end_time.clone());
        // A generation that ended before the change began waited for the pool.
        let ended = ended.filter(|at| *at >= change.start_time);
        change.stages.drained_seconds = ended.map(|at| change.seconds_to(seconds(&at)));
        change.stages.published_seconds = Some(change.seconds_to(now));
        status.nodes = change.to_nodes;
        status.history.push(change);
        status.phase = Phase::Running;
        status.message = record.reason.to_string();
        status.restart_not_before = None;
        status.pod_failures = None;
        begin(&mut status.start_time, now);
        let accepted = if cluster.edits {
            Some(job.spec.trainer.command.clone())
        } else {
            before.and_then(|current| current.command)
        };
        status.generation = Some(Current {
            record,
            command: accepted,
            drain: false,
            after_loss: None,
            outcome: None,
            end_time: None,
        });
    }
}

/// Continues above a later generation, or from a later checkpoint. The ranks of a later generation end when the next one
/// is published, and what they have committed is kept.
fn restore(status: &mut TrainingJobStatus, later: &LaterGeneration, now: f64) {
    if status.later_generation >= Some(later.number) {
        return;
    }
    let published = status.number().unwrap_or(0);
    if later.samples() > status.checkpoint.as_ref().map(|newest| newest.samples) {
        status.checkpoint.clone_from(&later.checkpoint);
        status.checkpoint_time = Some(micro_time(now));
    }
    if later.number >= published {
        status.later_generation = Some(later.number);
        let found = if later.number == published {
            "another one of this number".to_owned()
        } else {
            later.number.to_string()
        };
        let from = match &status.checkpoint {
            Some(checkpoint) => format!("the checkpoint of {} samples", checkpoint.samples),
            None => "the beginning".to_owned(),
        };
        let message = format!(
            "the status has generation {published}, and the pods or the volume have {found}: the API server was restored \
             from an older copy of its data; the job continues above it, from {from}"
        );
        let kind = ConditionType::Restored;
        conditions::set(status, kind, true, ConditionReason::OlderStatus, &message);
    }
    if let Some(current) = status.generation.as_mut().filter(|c| c.outcome.is_none()) {
        begin(&mut status.rescale_since, now);
        current.end_time = Some(micro_time(now));
        // They are fenced: they write only below the directory of their generation.
        current.outcome = Some(Outcome::Drained);
    }
}

/// Nodes of the ranks that were killed for a lack of progress. Of an external trainer they are all of one host, and
/// not known to be the cause.
fn stalled_nodes(current: &Current, ranks: &[RankStatus]) -> Vec<String> {
    let command = current.command.as_ref();
    if command.is_some_and(|command| !command.is_empty()) {
        return Vec::new();
    }
    let shares = current.record.shares();
    let stalled = shares.filter_map(|(first, member)| {
        let its = ranks.iter().skip(usize::try_from(first).ok()?);
        let mut its = its.take(usize::try_from(member.ranks).ok()?);
        let node = member.pod.as_ref().map(|pod| pod.node.clone());
        node.filter(|_| its.any(RankStatus::is_stalled))
    });
    stalled.collect()
}

/// Whether a rank of the newest generation failed or is lost, so that the others must end.
fn in_trouble(cluster: &ClusterState) -> bool {
    cluster.lost_member.is_some() || cluster.ranks.iter().any(RankStatus::in_trouble)
}

/// Sets a time to `now`, unless it is set already.
fn begin(since: &mut Option<MicroTime>, now: f64) {
    since.get_or_insert_with(|| micro_time(now));
}

fn update_progress(status: &mut TrainingJobStatus, cluster: &ClusterState) {
    let Some(current) = &status.generation else {
        return;
    };
    let number = current.record.number;
    let agents: Vec<&AgentState> = cluster.states_of(Some(number)).collect();
    if let Some(change) = status.history.last_mut().filter(|c| c.generation == number) {
        let all = agents.len() == current.record.members.len();
        let last = |of: fn(&AgentState) -> Option<f64>| {
            let mut times = agents.iter().map(|agent| of(agent));
            let latest = times.try_fold(0.0, |latest, at| Some(f64::max(latest, at?)));
            latest.filter(|_| all).map(|at| change.seconds_to(at))
        };
        let (started, ready) = (last(|agent| agent.started), last(|agent| agent.ready));
        let first = agents.iter().find_map(|agent| agent.first_step);
        let first = first.map(|at| change.seconds_to(at));
        let stages = &mut change.stages;
        stages.started_seconds = stages.started_seconds.or(started);
        stages.restored_seconds = stages.restored_seconds.or(ready);
        stages.first_step_seconds = stages.first_step_seconds.or(first);
    }
    let Some(step) = agents.iter().find_map(|agent| agent.step.as_ref()) else {
        return;
    };
    let budget = agents.iter().find_map(|agent| agent.budget);
    let share = budget.filter(|budget| *budget > 0).map(|budget| {
        let share = (step.samples as f64 / budget as f64).min(1.0);
        format!("{:.0} %", 100.0 * share)
    });
    let left = agents.iter().find_map(|agent| agent.seconds_left);
    let left = left.filter(|_| current.outcome.is_none());
    status.progress = Some(Progress {
        samples: step.samples,
        budget,
        share: share.unwrap_or_default(),
        step: step.step,
        loss: if step.external.is_some() && !step.loss.is_finite() {
            String::new()
        } else {
            format!("{:.4}", step.loss)
        },
        batch: step.batch,
        // The API server stores integers below 2^63.
        tokens_per_second: (step.tokens as f64 / step.seconds.max(1e-9)).min(1e15) as u64,
        time_left: left.map(human::whole_duration).unwrap_or_default(),
    });
}

/// A changed checkpoint counts as progress of an external trainer.
fn update_external_progress(status: &mut TrainingJobStatus, cluster: &ClusterState, now: f64) {
    // Only the first member knows the newest checkpoint; the others know the one they resumed from.
    let mut first = cluster
        .states_of(status.number())
        .filter(|agent| agent.first == 0);
    let Some(checkpoint) = first.find_map(|agent| agent.external_checkpoint.as_ref()) else {
        return;
    };
    if status.external_checkpoint.as_ref() != Some(checkpoint) {
        status.external_checkpoint = Some(checkpoint.clone());
        status.checkpoint_time = Some(micro_time(now));
        status.restarts = 0;
    }
}

/// Ranks of the newest generation, as input of the state machine.
pub fn ranks(status: &TrainingJobStatus) -> Ranks {
    let none = Ranks::None {
        resuming: status.checkpoint.is_some(),
    };
    match &status.generation {
        Some(_) if status.phase == Phase::Suspended => none,
        None => none,
        Some(Current {
            record,
            outcome: Some(outcome),
            ..
        }) => Ranks::Ended {
            world: record.world(),
            outcome: outcome.clone(),
        },
        Some(Current { record, drain, .. }) => Ranks::Running {
            world: record.world(),
            draining: *drain,
        },
    }
}

/// Slots of the newest generation's members, in the order of the members.
pub fn members(status: &TrainingJobStatus, job: &str) -> Vec<Slot> {
    let slots = status.slots.iter();
    let slots: BTreeMap<String, Slot> = slots.map(|slot| (slot.pod(job), *slot)).collect();
    let slot_of = |pod: &PodRef| slots.get(&pod.name).copied();
    status.members().filter_map(slot_of).collect()
}

/// Appends to the status message what keeps the job from a larger world.
pub fn notice(status: &mut TrainingJobStatus, notice: Option<String>) {
    let Some(notice) = notice else { return };
    match status.phase {
        Phase::Running if status.message.is_empty() => status.message = notice,
        Phase::Placing | Phase::Waiting => status.message = format!("{}; {notice}", status.message),
        _ => {}
    }
}
