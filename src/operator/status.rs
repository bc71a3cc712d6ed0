//! From one status to the next: first what was observed is taken in, then what was decided. Pure
//! but for the clock that it is given.

use std::time::Duration;

use kube::ResourceExt;

use super::ended::{Ended, count_pods};
use super::observe::Observation;
use crate::batch::{Plan, descend};
use crate::job::agent_state::AgentState;
use crate::job::api::TrainingJob;
use crate::job::api::status::{
    AfterLoss, Change, Current, HISTORY, Progress, Seat, State, TrainingJobStatus,
};
use crate::job::generation::{Address, Generation, Member, PodRef, Reason};
use crate::job::seen::{self, ANSWER, COMMIT};
use crate::job::steer::{Act, PodSeen};
use crate::job::{End, Outcome, Ranks};
use crate::words::count;

/// Takes in what was observed.
///
/// `holds`: whether a world of so many ranks can be planned with micro-batches up to a limit.
pub fn take_in(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    seen: &Observation,
    mut holds: impl FnMut(u64, u64) -> bool,
    now: f64,
) {
    let newest = status.checkpoint.as_ref().map_or(0, |pin| pin.samples);
    if let Some(pin) = seen.committed.as_ref().filter(|pin| pin.samples > newest) {
        status.checkpoint = Some(pin.clone());
        status.restarts = 0;
    }
    if let Some(last) = seen.ended_early.first() {
        count_pods(status, last.clone(), now);
    }
    take_in_progress(status, seen);
    take_in_own_progress(status, seen);
    let drain_seconds = f64::from(job.spec.elasticity.drain_seconds);
    let Some(current) = status.generation.as_mut().filter(|c| c.outcome.is_none()) else {
        return;
    };
    let in_trouble = seen.lost_member.is_some() || seen.ranks.iter().any(seen::Seen::in_trouble);
    if in_trouble {
        status.change_since.get_or_insert(now);
    }
    let waited = status.change_since.map_or(0.0, |since| now - since);
    if in_trouble
        && current.after_loss.is_none()
        && seen::is_settled(&seen.ranks, Duration::from_secs_f64(waited.max(0.0)))
    {
        current.after_loss = Some(AfterLoss {
            commit: seen::committer(
                &seen.ranks,
                status.checkpoint.as_ref().map_or(0, |p| p.samples),
            ),
        });
    }
    let plan = &current.record.plan;
    let batch = status
        .checkpoint
        .as_ref()
        .map_or(plan.global_batch_size, |pin| pin.batch);
    let mut outcome = seen::outcome(
        &seen.ranks,
        plan.per_device_batch_size,
        || descend(plan, batch).find(|limit| holds(plan.outline.world_size, *limit)),
        || false,
    );
    if let Some((rank, why)) = &seen.lost_member
        && matches!(outcome, Some(Outcome::Failed { .. } | Outcome::Lost { .. }))
        && !seen.ranks.iter().any(|seen| seen.failed.is_some())
    {
        // A pod or node that went away is no failure of the program.
        outcome = Some(Outcome::Lost {
            rank: *rank,
            why: why.clone(),
        });
    }
    // A program of the user's own may commit still where nobody answers: then neither clock counts.
    if outcome.is_none() && !seen.may_commit {
        let number = current.record.number;
        // Of one that was not heard yet, by a controller that was just started, nothing is known.
        let started = |pod: &String| {
            let agent = seen.agents.get(pod);
            agent.is_none_or(|agent| agent.generation >= number)
        };
        let mut members = current.record.members.iter().filter_map(|m| m.pod.as_ref());
        let never_started =
            !members.any(|pod| seen.pods.contains_key(&pod.name) && started(&pod.name));
        if current.drain && (never_started || waited > drain_seconds) {
            outcome = Some(Outcome::Drained);
        } else if current.after_loss.is_some() && waited > (ANSWER + COMMIT).as_secs_f64() {
            outcome = Some(Outcome::Lost {
                rank: 0,
                why: "the survivors of a loss did not end".into(),
            });
        }
    }
    let Some(outcome) = outcome else { return };
    status.change_since.get_or_insert(now);
    current.ended = Some(now);
    let ended = Ended {
        outcome,
        killed: seen.lost_member.is_none(),
        budget: job.spec.budgets.restarts,
    };
    let outcome = ended.count(status, now);
    if let Outcome::Failed { .. } = outcome {
        let words = seen.agents.values().map(|agent| &agent.last_words);
        status.last_words = words
            .max_by_key(|words| words.len())
            .cloned()
            .unwrap_or_default();
    }
    if let Some(current) = &mut status.generation {
        current.outcome = Some(outcome);
    }
}

fn take_in_progress(status: &mut TrainingJobStatus, seen: &Observation) {
    let Some(current) = &status.generation else {
        return;
    };
    let number = current.record.number;
    let theirs = || {
        seen.agents
            .values()
            .filter(|agent| agent.generation == number)
    };
    if let Some(change) = status.history.last_mut().filter(|c| c.generation == number) {
        let all = theirs().count() == current.record.members.len();
        let last = |of: fn(&AgentState) -> Option<f64>| {
            let latest = theirs()
                .map(of)
                .try_fold(0.0, |latest, at| Some(f64::max(latest, at?)));
            latest.filter(|_| all).map(|at| at - change.since)
        };
        let (started, ready) = (last(|agent| agent.started), last(|agent| agent.ready));
        change.started = change.started.or(started);
        change.restored = change.restored.or(ready);
        let first = theirs().find_map(|agent| agent.first_step);
        change.first_step = change.first_step.or(first.map(|at| at - change.since));
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
    status.progress = Some(Progress {
        samples: step.samples,
        budget,
        share: share.unwrap_or_default(),
        step: step.step,
        loss: format!("{:.4}", step.loss),
        batch: step.batch,
        tokens_per_second: (step.tokens as f64 / step.seconds.max(1e-9)) as u64,
    });
}

/// A program of the user's own makes progress by its checkpoints: another one than was known.
fn take_in_own_progress(status: &mut TrainingJobStatus, seen: &Observation) {
    let number = status.generation.as_ref().map(|c| c.record.number);
    // The first member's word: the others only know what they began with.
    let mut first = seen
        .agents
        .values()
        .filter(|agent| Some(agent.generation) == number && agent.first == 0);
    let Some(checkpoint) = first.find_map(|agent| agent.own_checkpoint.as_ref()) else {
        return;
    };
    if status.own_checkpoint.as_ref() != Some(checkpoint) {
        status.own_checkpoint = Some(checkpoint.clone());
        status.restarts = 0;
    }
}

/// The newest generation's ranks, as the state machine sees them.
pub fn ranks(status: &TrainingJobStatus) -> Ranks {
    let none = Ranks::None {
        resuming: status.checkpoint.is_some(),
    };
    match &status.generation {
        Some(_) if status.state == State::Suspended => none,
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

/// Seats of the newest generation's members, in their order.
pub fn members(status: &TrainingJobStatus, job: &str) -> Vec<Seat> {
    let members = status
        .generation
        .iter()
        .flat_map(|current| &current.record.members);
    members
        .filter_map(|member| {
            let name = &member.pod.as_ref()?.name;
            status
                .seats
                .iter()
                .copied()
                .find(|seat| seat.pod(job) == *name)
        })
        .collect()
}

/// Writes down what was decided. `plan` is the one of a world that is published.
pub fn carry_out(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    act: &Act,
    plan: Option<&Plan>,
    seen: &Observation,
    now: f64,
) {
    let why_leaving = || seen.reasons.values().next().cloned().unwrap_or_default();
    match act {
        Act::Stay => {
            if let Some(current) = &status.generation {
                status.state = if current.drain {
                    State::Draining
                } else {
                    State::Running
                };
            }
            if status.state == State::Running {
                status.why = seen
                    .problem
                    .as_ref()
                    .map_or_else(String::new, |p| p.message.clone());
                // A program of the user's own says nothing of its steps.
                let own = !status.command(&job.spec).is_empty();
                let arrived = |change: &Change| match own {
                    true => change.restored.is_some(),
                    false => change.first_step.is_some(),
                };
                let settled = status.history.last().is_none_or(arrived);
                let in_trouble = |current: &Current| current.after_loss.is_some();
                if settled && !status.generation.as_ref().is_some_and(in_trouble) {
                    status.change_since = None;
                }
            }
        }
        Act::Place => {
            status.state = State::Placing;
            status.change_since.get_or_insert(now);
            let name = job.name_any();
            let ready = |seat: &Seat| {
                let mut pods = seen.seats.iter().filter(|s| s.seat == *seat);
                pods.any(|s| s.pod == PodSeen::Ready)
            };
            let coming: Vec<String> = status
                .seats
                .iter()
                .filter(|seat| !ready(seat))
                .map(|seat| seat.pod(&name))
                .collect();
            let held_up = coming.iter().find_map(|pod| seen.held_up(pod));
            let paused = status.pod_failures.as_ref().filter(|f| now < f.again);
            status.why = match paused {
                Some(failures) => format!(
                    "pods end before they can train, {} so far, and are made again after a pause: {}",
                    count(failures.count.into(), "time"),
                    failures.last
                ),
                None => format!(
                    "{} of {} pods are not ready yet{}",
                    coming.len(),
                    status.seats.len(),
                    held_up.map_or_else(String::new, |why| format!(": {why}"))
                ),
            };
        }
        Act::Drain => {
            status.state = State::Draining;
            status.change_since.get_or_insert(now);
            status.why = if job.spec.suspend {
                "suspend asked for".into()
            } else {
                why_leaving()
            };
            if let Some(current) = &mut status.generation {
                current.drain = true;
            }
        }
        Act::Recall => {
            status.state = State::Running;
            if let Some(current) = &mut status.generation {
                current.drain = false;
            }
        }
        Act::Publish {
            members, reason, ..
        } => {
            if let Some(plan) = plan {
                publish(job, status, members, reason, plan, seen, now);
            }
        }
        Act::Wait { why } => {
            status.state = State::Waiting;
            status.why.clone_from(why);
        }
        Act::Suspend => {
            status.state = State::Suspended;
            status.why = "spec.suspend is true".into();
            status.change_since = None;
        }
        Act::End(end) => {
            status.finished = Some(now);
            status.change_since = None;
            (status.state, status.why) = match end {
                End::Failed { why } => (State::Failed, why.clone()),
                End::Finished | End::Drained => (State::Complete, String::new()),
            };
        }
    }
}

/// The arithmetic of the batch that is trained with now, which the norm test may have raised.
pub fn batch_now(status: &mut TrainingJobStatus) {
    let (Some(plan), Some(current)) = (&mut status.plan, &status.generation) else {
        return;
    };
    let trained = status.progress.as_ref().map(|progress| progress.batch);
    let committed = || status.checkpoint.as_ref().map(|pin| pin.batch);
    plan.proof = current.record.plan.proof_at(trained.or_else(committed));
}

/// Adds to the reason of the state what keeps the job from doing better.
pub fn notice(status: &mut TrainingJobStatus, notice: Option<String>) {
    let Some(notice) = notice else { return };
    match status.state {
        State::Running if status.why.is_empty() => status.why = notice,
        State::Placing | State::Waiting => status.why = format!("{}; {notice}", status.why),
        _ => {}
    }
}

fn publish(
    job: &TrainingJob,
    status: &mut TrainingJobStatus,
    members: &[Seat],
    reason: &Reason,
    plan: &Plan,
    seen: &Observation,
    now: f64,
) {
    let name = job.name_any();
    let members: Option<Vec<Member>> = members
        .iter()
        .map(|seat| {
            let pod = seen.pods.get(&seat.pod(&name))?;
            Some(Member {
                seat: seat.number.into(),
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
    // A pod that was ready has all of these; one that lost them since is seen at the next look.
    let Some(members) = members else { return };
    let number = status
        .generation
        .as_ref()
        .map_or(1, |current| current.record.number + 1);
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
    let since = status.change_since.unwrap_or(now);
    let mut change = Change::to(&record, u32::try_from(from).unwrap_or(u32::MAX), since);
    let ended = status.generation.as_ref().and_then(|current| current.ended);
    // One that ended before anything changed waited for the pool.
    change.drained = ended.map(|at| at - since).filter(|seconds| *seconds >= 0.0);
    change.published = Some(now - since);
    status.history.push(change);
    let old = status.history.len().saturating_sub(HISTORY);
    status.history.drain(..old);
    status.nodes = u32::try_from(record.members.len()).unwrap_or(u32::MAX);
    status.state = State::Running;
    status.why = record.reason.to_string();
    status.not_before = None;
    status.pod_failures = None;
    let accepted = match seen.edits {
        true => Some(job.spec.trainer.command.clone()),
        false => status.generation.take().and_then(|current| current.command),
    };
    status.generation = Some(Current {
        record,
        command: accepted,
        drain: false,
        after_loss: None,
        outcome: None,
        ended: None,
    });
}
