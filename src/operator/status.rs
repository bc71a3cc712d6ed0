//! Updates the status of a job: first with the observed state, then with the decision. Pure; the
//! caller passes the time.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;

use super::observe::ClusterState;
use super::outcome::{self, EndedGeneration, count_pods};
use super::planning::World;
use super::{build, conditions};
use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::status::{
    AfterLoss, Current, Phase, PlanSummary, Progress, Rescale, Slot, TrainingJobStatus,
};
use crate::api::{OnStall, TrainingJob};
use crate::lifecycle::agent_state::{AgentState, LaterGeneration, Problem};
use crate::lifecycle::generation::{Address, CheckpointRef, Generation, Member, PodRef, Reason};
use crate::lifecycle::placement::{Placement, PlacementAction, PodState};
use crate::lifecycle::rank_status::{self, RankStatus};
use crate::lifecycle::{End, Outcome, Ranks};
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

/// Why the job ends: its active deadline.
pub fn overdue(job: &TrainingJob, status: &TrainingJobStatus, now: f64) -> Option<Problem> {
    let limit = job.spec.active_deadline_seconds?;
    let since = status.start_time.as_ref().map(seconds)?;
    (now - since >= f64::from(limit)).then(|| Problem {
        reason: ConditionReason::DeadlineExceeded.name().to_owned(),
        message: format!("spec.activeDeadlineSeconds: the job has run for {limit} s"),
        deterministic: true,
    })
}

/// Updates the slots with a decision, and the plan with the published world.
pub fn place(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    placement: &Placement,
    world: Option<&World>,
) {
    status.attempts = placement.attempts;
    status.scale_up_pending_since = placement.scale_up_pending_since.map(micro_time);
    status.placement_since = placement.placement_since.map(micro_time);
    match &placement.action {
        PlacementAction::End(_) => return,
        PlacementAction::Publish {
            per_device_batch_size_limit: Some(limit),
            ..
        } => status.per_device_batch_size_limit = Some(*limit),
        _ => {}
    }
    status.slots.clone_from(&placement.slots);
    if let Some(World {
        plan,
        feasible_nodes,
    }) = world
    {
        status.plan = Some(PlanSummary::of(&job.spec, plan, feasible_nodes.clone()));
    }
}

/// Updates the status with the observed state.
///
/// `smaller(plan, batch)`: the largest feasible micro-batch below that of `plan` for the global batch `batch`.
pub fn apply_observed(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    cluster: &ClusterState,
    mut smaller: impl FnMut(&Plan, u64) -> Option<u64>,
    now: f64,
) {
    let newest = status
        .checkpoint
        .as_ref()
        .map_or(0, |checkpoint_ref| checkpoint_ref.samples);
    if let Some(checkpoint_ref) = cluster
        .committed
        .as_ref()
        .filter(|checkpoint_ref| checkpoint_ref.samples > newest)
    {
        status.checkpoint = Some(checkpoint_ref.clone());
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
        current.after_loss = Some(AfterLoss {
            commit: rank_status::committer(
                &cluster.ranks,
                status.checkpoint.as_ref().map_or(0, |p| p.samples),
            ),
        });
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
    let ended = EndedGeneration {
        outcome,
        killed: cluster.lost_member.is_none(),
        budget: job.spec.budgets.restarts,
    };
    let outcome = ended.count(status, now);
    if let Outcome::Failed { .. } = outcome {
        let tails = cluster.agents.values().map(|agent| &agent.log_tail);
        status.log_tail = tails
            .max_by_key(|tail| tail.len())
            .cloned()
            .unwrap_or_default();
    }
    if let Some(current) = &mut status.generation {
        current.outcome = Some(outcome);
    }
    if let Some(progress) = &mut status.progress {
        progress.time_left.clear();
    }
}

/// Continues above a later generation, or from a later checkpoint. The ranks of a later generation end when the next one
/// is published, and what they have committed is kept.
fn restore(status: &mut TrainingJobStatus, later: &LaterGeneration, now: f64) {
    if status.later_generation >= Some(later.number) {
        return;
    }
    let published = status
        .generation
        .as_ref()
        .map_or(0, |current| current.record.number);
    let samples = |checkpoint: &Option<CheckpointRef>| checkpoint.as_ref().map(|c| c.samples);
    if samples(&later.checkpoint) > samples(&status.checkpoint) {
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
    if current
        .command
        .as_ref()
        .is_some_and(|command| !command.is_empty())
    {
        return Vec::new();
    }
    let shares = current.record.shares();
    let stalled = shares.filter_map(|(first, member)| {
        let mut its =
            (first..first + member.ranks).filter_map(|rank| ranks.get(usize::try_from(rank).ok()?));
        let node = member.pod.as_ref().map(|pod| pod.node.clone());
        its.any(RankStatus::is_stalled).then_some(node)?
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
    let theirs = || {
        cluster
            .agents
            .values()
            .filter(|agent| agent.generation == number)
    };
    if let Some(change) = status.history.last_mut().filter(|c| c.generation == number) {
        let all = theirs().count() == current.record.members.len();
        let last = |of: fn(&AgentState) -> Option<f64>| {
            let latest = theirs()
                .map(of)
                .try_fold(0.0, |latest, at| Some(f64::max(latest, at?)));
            latest.filter(|_| all).map(|at| change.seconds_to(at))
        };
        let (started, ready) = (last(|agent| agent.started), last(|agent| agent.ready));
        let first = theirs().find_map(|agent| agent.first_step);
        let first = first.map(|at| change.seconds_to(at));
        let stages = &mut change.stages;
        stages.started_seconds = stages.started_seconds.or(started);
        stages.restored_seconds = stages.restored_seconds.or(ready);
        stages.first_step_seconds = stages.first_step_seconds.or(first);
    }
    let Some(step) = theirs().find_map(|agent| agent.step.as_ref()) else {
        return;
    };
    let budget = theirs().find_map(|agent| agent.budget);
    let share = budget.filter(|budget| *budget > 0).map(|budget| {
        format!(
            "{:.0} %",
            100.0 * (step.samples as f64 / budget as f64).min(1.0)
        )
    });
    let left = theirs().find_map(|agent| agent.seconds_left);
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
        time_left: match current.outcome {
            Some(_) => String::new(),
            None => left.map(human::whole_duration).unwrap_or_default(),
        },
    });
}

/// A changed checkpoint counts as progress of an external trainer.
fn update_external_progress(status: &mut TrainingJobStatus, cluster: &ClusterState, now: f64) {
    let number = status.generation.as_ref().map(|c| c.record.number);
    // Only the first member knows the newest checkpoint; the others know the one they resumed from.
    let mut first = cluster
        .agents
        .values()
        .filter(|agent| Some(agent.generation) == number && agent.first == 0);
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
    let members = status
        .generation
        .iter()
        .flat_map(|current| &current.record.members);
    members
        .filter_map(|member| {
            let name = &member.pod.as_ref()?.name;
            status
                .slots
                .iter()
                .copied()
                .find(|slot| slot.pod(job) == *name)
        })
        .collect()
}

/// Updates the status with a decision. `plan` is the plan of a published world.
pub fn apply_decision(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    action: &PlacementAction,
    plan: Option<&Plan>,
    cluster: &ClusterState,
    now: f64,
) {
    let why_leaving = || cluster.reasons.values().next().cloned().unwrap_or_default();
    match action {
        PlacementAction::Keep => {
            if let Some(current) = &status.generation {
                status.phase = if current.drain {
                    Phase::Draining
                } else {
                    Phase::Running
                };
            }
            if status.phase == Phase::Running {
                let problem = cluster.problem.as_ref().map(|problem| &problem.message);
                let problem = problem.or(cluster.stalled.as_ref());
                status.message = problem.cloned().unwrap_or_default();
                // An external trainer does not report its steps.
                let own = !status.command(&job.spec).is_empty();
                let arrived = |change: &Rescale| match own {
                    true => change.stages.restored_seconds.is_some(),
                    false => change.stages.first_step_seconds.is_some(),
                };
                let settled = status.history.last().is_none_or(arrived);
                let ends =
                    |current: &Current| current.after_loss.is_some() || current.outcome.is_some();
                let ends = status.generation.as_ref().is_some_and(ends);
                // The time that the others have to notice a loss counts from `rescale_since`.
                if settled && !ends && !in_trouble(cluster) {
                    status.rescale_since = None;
                }
            }
        }
        PlacementAction::Place => {
            status.phase = Phase::Placing;
            begin(&mut status.rescale_since, now);
            let name = job.name_any();
            let ready = |slot: &Slot| {
                let mut pods = cluster.slots.iter().filter(|s| s.slot == *slot);
                pods.any(|s| s.pod == PodState::Ready)
            };
            let coming: Vec<String> = status
                .slots
                .iter()
                .filter(|slot| !ready(slot))
                .map(|slot| slot.pod(&name))
                .collect();
            let held_up = coming.iter().find_map(|pod| cluster.held_up(pod));
            let paused = status
                .pod_failures
                .as_ref()
                .filter(|f| now < seconds(&f.retry_not_before));
            status.message = match paused {
                Some(failures) => format!(
                    "pods ended before they could train, {} so far; new pods follow after a pause: {}",
                    count(failures.count.into(), "time"),
                    failures.message
                ),
                None => format!(
                    "{} of {} pods are not ready yet{}",
                    coming.len(),
                    status.slots.len(),
                    held_up.map_or_else(String::new, |message| format!(": {message}"))
                ),
            };
        }
        PlacementAction::Drain => {
            status.phase = Phase::Draining;
            begin(&mut status.rescale_since, now);
            status.message = if job.spec.suspend {
                "spec.suspend is true".into()
            } else if let Some(overdue) = overdue(job, status, now) {
                overdue.message
            } else {
                why_leaving()
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
            members, reason, ..
        } => {
            if let Some(plan) = plan {
                publish(job, status, members, reason, plan, cluster, now);
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
}

/// Updates the formula to the current global batch, which the norm test may have raised.
pub fn batch_now(status: &mut TrainingJobStatus) {
    let (Some(plan), Some(current)) = (&mut status.plan, &status.generation) else {
        return;
    };
    let trained = status.progress.as_ref().map(|progress| progress.batch);
    let committed = || {
        status
            .checkpoint
            .as_ref()
            .map(|checkpoint_ref| checkpoint_ref.batch)
    };
    plan.formula = current.record.plan.formula_at(trained.or_else(committed));
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

fn publish(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    members: &[Slot],
    reason: &Reason,
    plan: &Plan,
    cluster: &ClusterState,
    now: f64,
) {
    let name = job.name_any();
    let members: Option<Vec<Member>> = members
        .iter()
        .map(|slot| {
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
        })
        .collect();
    // A ready pod has all of these fields; the next reconciliation handles one that has lost them.
    let Some(members) = members else { return };
    let newest = status
        .generation
        .as_ref()
        .map(|current| current.record.number);
    let number = newest
        .max(status.later_generation.take())
        .map_or(1, |newest| newest + 1);
    let from = status
        .generation
        .as_ref()
        .map_or(0, |current| current.record.members.len());
    let host = members
        .first()
        .and_then(|m| m.pod.as_ref())
        .map(|pod| pod.ip.clone());
    let offset = u16::try_from(number % u64::from(super::build::MASTER_PORTS)).unwrap_or(0);
    let record = Generation {
        job: job.uid().unwrap_or_default(),
        number,
        reason: reason.clone(),
        members,
        plan: plan.clone(),
        start: status.checkpoint.clone(),
        master: Address {
            host: host.unwrap_or_default(),
            port: super::build::MASTER_PORT + offset,
        },
        created: now,
    };
    let since = status.rescale_since.as_ref().map_or(now, seconds);
    let mut change = Rescale::to(&record, u32::try_from(from).unwrap_or(u32::MAX), since);
    let ended = status.generation.as_ref();
    let ended = ended.and_then(|current| current.end_time.clone());
    // A generation that ended before the change began waited for the pool.
    let ended = ended.filter(|at| *at >= change.start_time);
    change.stages.drained_seconds = ended.map(|at| change.seconds_to(seconds(&at)));
    change.stages.published_seconds = Some(change.seconds_to(now));
    status.history.push(change);
    status.nodes = u32::try_from(record.members.len()).unwrap_or(u32::MAX);
    status.phase = Phase::Running;
    status.message = record.reason.to_string();
    status.restart_not_before = None;
    status.pod_failures = None;
    begin(&mut status.start_time, now);
    let accepted = match cluster.edits {
        true => Some(job.spec.trainer.command.clone()),
        false => status.generation.take().and_then(|current| current.command),
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
