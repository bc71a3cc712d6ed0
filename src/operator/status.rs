//! The status of a job, step by step: for the spec, with what was observed, and with the decision. Each step returns a
//! status and reads nothing but its arguments, the job and the time of the reconciliation.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;

use super::build;
use super::conditions::Refusal;
use super::context::Reconciliation;
use super::observe::ClusterState;
use super::outcome::{self, Counted, count_pods};
use super::planning::{Planning, World};
use crate::api::condition::ConditionReason;
use crate::api::status::{
    AfterLoss, Current, KeptRecipe, Phase, PlanSummary, PodFailures, Progress, Rescale,
    RescaleStages, Slot, TrainingJobStatus,
};
use crate::api::{OnStall, TrainingJob};
use crate::lifecycle::agent_state::{AgentState, LaterGeneration};
use crate::lifecycle::generation::{Address, Generation, Member, PodRef, Reason};
use crate::lifecycle::placement::{Placement, PlacementAction, PodState};
use crate::lifecycle::rank_status::{self, RankStatus};
use crate::lifecycle::{CheckpointRef, End, Outcome, RankAction, Ranks};
use crate::plan::Plan;
use crate::telemetry::human;
use crate::util::format::count;
use crate::util::time::{micro_time, seconds};

/// The status with which a reconciliation begins: the last one, for the current spec and the current time.
pub fn of_spec(job: &TrainingJob, before: &TrainingJobStatus, now: f64) -> TrainingJobStatus {
    let until = |time: &Option<MicroTime>, latest| Some(limited(time.as_ref()?, latest));
    let latest_retry = now + outcome::LONGEST_BACK_OFF;
    // An edit may solve what kept pods from starting.
    let edited = before.observed_generation != job.metadata.generation;
    let failures = before.pod_failures.clone().filter(|_| !edited);
    let pod_failures = failures.map(|failures| PodFailures {
        retry_not_before: limited(&failures.retry_not_before, latest_retry),
        ..failures
    });
    let labels = build::selector(job).into_iter();
    let labels = labels.map(|(key, value)| format!("{key}={value}"));
    TrainingJobStatus {
        observed_generation: job.metadata.generation,
        selector: labels.collect::<Vec<_>>().join(","),
        scale_up_pending_since: until(&before.scale_up_pending_since, now),
        placement_since: until(&before.placement_since, now),
        rescale_since: until(&before.rescale_since, now),
        start_time: until(&before.start_time, now),
        restart_not_before: until(&before.restart_not_before, latest_retry),
        pod_failures,
        excluded_nodes: if job.spec.on_stall == OnStall::ExcludeNode {
            before.excluded_nodes.clone()
        } else {
            Vec::new()
        },
        ..before.clone()
    }
}

/// A time, limited to the latest one that is possible now: the clock may have been set back since, or that of another
/// replica be fast. `latest`: seconds since the Unix epoch.
fn limited(time: &MicroTime, latest: f64) -> MicroTime {
    if seconds(time) > latest {
        micro_time(latest)
    } else {
        time.clone()
    }
}

impl Reconciliation<'_> {
    /// The status with the planned recipe, and with the first plan.
    pub fn with_plan(
        &self,
        status: TrainingJobStatus,
        before: &TrainingJobStatus,
        planned: &Planning,
        first: Option<(KeptRecipe, World)>,
    ) -> TrainingJobStatus {
        let observed_generation = if planned.verdict.is_some() {
            status.observed_generation
        } else {
            // The newest spec is not planned yet.
            before.observed_generation
        };
        // A refused recipe may still be edited, so the status has only planned ones.
        let (recipe, plan) = match first {
            Some((recipe, first)) => {
                let summary = || PlanSummary::of(&self.job.spec, &first.plan, first.feasible_nodes);
                (Some(recipe), Some(status.plan.unwrap_or_else(summary)))
            }
            None => (status.recipe, status.plan),
        };
        TrainingJobStatus {
            observed_generation,
            recipe,
            plan,
            ..status
        }
    }

    /// Why the job ends: its active deadline.
    pub fn overdue(&self, status: &TrainingJobStatus) -> Option<Refusal> {
        let limit = self.job.spec.active_deadline_seconds?;
        let since = status.start_time.as_ref().map(seconds)?;
        (self.now - since >= f64::from(limit)).then(|| Refusal {
            reason: ConditionReason::DeadlineExceeded,
            message: format!("spec.activeDeadlineSeconds: the job has run for {limit} s"),
        })
    }

    /// The status with the observed state, without an end of the generation.
    pub fn with_observed(
        &self,
        status: TrainingJobStatus,
        cluster: &ClusterState,
    ) -> TrainingJobStatus {
        let now = self.now;
        let status = with_checkpoints(status, cluster, now);
        let status = match cluster.ended_early.first() {
            Some(last) => TrainingJobStatus {
                pod_failures: Some(count_pods(status.pod_failures.as_ref(), last, now)),
                ..status
            },
            None => status,
        };
        let status = match &cluster.later {
            Some(later) => with_later(status, later, now),
            None => status,
        };
        with_progress(status, cluster)
    }

    /// The status with the end of the generation, if its ranks have ended, and with what those do that wait for an order.
    ///
    /// `ranks`: those of the generation. `smaller(plan, batch)`: the largest feasible micro-batch below that of `plan` for the
    /// global batch `batch`.
    pub fn with_outcome(
        &self,
        status: TrainingJobStatus,
        cluster: &ClusterState,
        ranks: &[RankStatus],
        mut smaller: impl FnMut(&Plan, u64) -> Option<u64>,
    ) -> TrainingJobStatus {
        let Reconciliation { job, now, .. } = *self;
        let Some(current) = running(&status) else {
            return status;
        };
        let in_trouble = in_trouble(cluster);
        let rescale_since = if in_trouble {
            Some(since(status.rescale_since.as_ref(), now))
        } else {
            status.rescale_since.clone()
        };
        let waited = rescale_since
            .as_ref()
            .map_or(0.0, |since| now - seconds(since));
        let settled = || {
            let waited = Duration::from_secs_f64(waited.max(0.0));
            let is_settled = in_trouble && rank_status::is_settled(ranks, waited);
            is_settled || rank_status::is_paused(ranks)
        };
        let current = Current {
            after_loss: current.after_loss.or_else(|| {
                settled().then(|| AfterLoss {
                    commit: rank_status::committer(ranks, samples(&status.checkpoint)),
                })
            }),
            ..current.clone()
        };
        let plan = &current.record.plan;
        let checkpoint = status.checkpoint.as_ref();
        let batch = checkpoint.map_or(plan.global_batch_size, |checkpoint| checkpoint.batch);
        let outcome = outcome::decide(job, &current, cluster, ranks, waited, || {
            smaller(plan, batch)
        });
        let Some(outcome) = outcome else {
            return TrainingJobStatus {
                rescale_since,
                generation: Some(current),
                ..status
            };
        };
        let killed = cluster.lost_member.is_none();
        let Counted {
            outcome,
            restarts,
            disruptions,
            restart_not_before,
        } = outcome::count(&status, outcome, killed, job.spec.budgets.restarts, now);
        let stalled = if job.spec.on_stall == OnStall::ExcludeNode {
            stalled_nodes(&current, ranks)
        } else {
            Vec::new()
        };
        let earlier = status.excluded_nodes.into_iter();
        let earlier = earlier.filter(|node| !stalled.contains(node)).collect();
        TrainingJobStatus {
            rescale_since: Some(since(rescale_since.as_ref(), now)),
            restarts,
            disruptions,
            restart_not_before,
            excluded_nodes: [earlier, stalled].concat(),
            log_tail: if let Outcome::Failed { .. } = outcome {
                let tails = cluster.states().map(|agent| &agent.log_tail);
                let longest = tails.max_by_key(|tail| tail.len());
                longest.cloned().unwrap_or_default()
            } else {
                status.log_tail
            },
            progress: status.progress.map(|progress| Progress {
                time_left: String::new(),
                ..progress
            }),
            generation: Some(Current {
                end_time: Some(micro_time(now)),
                outcome: Some(outcome),
                ..current
            }),
            ..status
        }
    }

    /// The status with a decision, and with the world that it publishes.
    pub fn with_decision(
        &self,
        status: TrainingJobStatus,
        placement: &Placement,
        world: Option<World>,
        cluster: &ClusterState,
    ) -> TrainingJobStatus {
        let status = TrainingJobStatus {
            attempts: placement.attempts,
            scale_up_pending_since: placement.scale_up_pending_since.map(micro_time),
            placement_since: placement.placement_since.map(micro_time),
            slots: if placement.action.ends_job() {
                status.slots
            } else {
                placement.slots.clone()
            },
            ..status
        };
        let status = match &placement.action {
            PlacementAction::Place => TrainingJobStatus {
                phase: Phase::Placing,
                message: self.placing(&status, cluster),
                rescale_since: Some(since(status.rescale_since.as_ref(), self.now)),
                ..status
            },
            PlacementAction::Ranks(action) => self.with_action(status, action, world, cluster),
        };
        let Some(current) = &status.generation else {
            return status;
        };
        // The norm test may have raised the global batch.
        let trained = status.progress.as_ref().map(|progress| progress.batch);
        let committed = status.checkpoint.as_ref().map(|c| c.batch);
        let formula = current.record.plan.formula_at(trained.or(committed));
        TrainingJobStatus {
            plan: status.plan.map(|plan| PlanSummary { formula, ..plan }),
            ..status
        }
    }

    fn with_action(
        &self,
        status: TrainingJobStatus,
        action: &RankAction<Vec<Slot>>,
        world: Option<World>,
        cluster: &ClusterState,
    ) -> TrainingJobStatus {
        let Reconciliation { job, now, .. } = *self;
        let suspended = || "spec.suspend is true".to_owned();
        match action {
            RankAction::Keep => self.keep(status, cluster),
            RankAction::Drain => {
                let cause = if job.spec.suspend {
                    suspended()
                } else if let Some(overdue) = self.overdue(&status) {
                    overdue.message
                } else {
                    let why_leaving = cluster.reasons.values().next();
                    why_leaving.cloned().unwrap_or_default()
                };
                let pause = self.pauses(&status, cluster);
                TrainingJobStatus {
                    phase: Phase::Draining,
                    message: cause.clone(),
                    rescale_since: Some(since(status.rescale_since.as_ref(), now)),
                    generation: draining(status.generation, Some(cause), pause),
                    ..status
                }
            }
            RankAction::CancelDrain => TrainingJobStatus {
                phase: Phase::Running,
                generation: draining(status.generation, None, false),
                ..status
            },
            RankAction::Publish {
                world: members,
                reason,
                per_device_batch_size_limit: limit,
            } => {
                let status = TrainingJobStatus {
                    per_device_batch_size_limit: limit.or(status.per_device_batch_size_limit),
                    ..status
                };
                match world {
                    Some(world) => self.publish(status, members, reason, world, cluster),
                    None => status,
                }
            }
            RankAction::Wait { message } => TrainingJobStatus {
                phase: Phase::Waiting,
                message: message.clone(),
                ..status
            },
            RankAction::End(End::Drained) => TrainingJobStatus {
                phase: Phase::Suspended,
                message: suspended(),
                start_time: None,
                rescale_since: None,
                ..status
            },
            RankAction::End(End::Finished) => TrainingJobStatus {
                phase: Phase::Complete,
                message: String::new(),
                completion_time: Some(micro_time(now)),
                rescale_since: None,
                progress: status.progress.map(complete),
                ..status
            },
            RankAction::End(End::Failed { message }) => TrainingJobStatus {
                phase: Phase::Failed,
                message: message.clone(),
                completion_time: Some(micro_time(now)),
                rescale_since: None,
                ..status
            },
        }
    }

    fn keep(&self, status: TrainingJobStatus, cluster: &ClusterState) -> TrainingJobStatus {
        let problem = cluster.problem.as_ref().map(|problem| &problem.message);
        let has_started = |change: &Rescale| change.stages.started_seconds.is_some();
        let phase = match &status.generation {
            Some(current) if current.drain => Phase::Draining,
            // Its pods unpack code, run the setup command or wait for their volume or bucket.
            Some(_) if problem.is_some() && !status.history.last().is_none_or(has_started) => {
                Phase::Placing
            }
            Some(_) => Phase::Running,
            None => status.phase,
        };
        if status.generation.is_none() || phase == Phase::Draining {
            return TrainingJobStatus { phase, ..status };
        }
        let problem = problem.or(cluster.stalled.as_ref());
        let mut cordoned = cluster
            .slots
            .iter()
            .filter(|it| it.pod == PodState::Cordoned);
        let cordoned = cordoned.find_map(|it| cluster.reasons.get(&it.slot));
        let waiting = cordoned
            .map(|cause| format!("{cause}: its ranks leave when other pods can take their place"));
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
        TrainingJobStatus {
            phase,
            message: problem.cloned().or(waiting).unwrap_or_default(),
            // The time that the others have to notice a loss counts from it.
            rescale_since: if settled && !ends && !in_trouble(cluster) {
                None
            } else {
                status.rescale_since
            },
            ..status
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
        status: TrainingJobStatus,
        members: &[Slot],
        reason: &Reason,
        world: World,
        cluster: &ClusterState,
    ) -> TrainingJobStatus {
        let Reconciliation { job, now, .. } = *self;
        let World {
            plan,
            feasible_nodes,
        } = world;
        let summary = Some(PlanSummary::of(&job.spec, &plan, feasible_nodes));
        // A ready pod has all fields of a member; the next reconciliation handles one that has lost them.
        let Some(members) = self.members_in(members, cluster) else {
            return TrainingJobStatus {
                plan: summary,
                ..status
            };
        };
        let newest = status.number().max(status.later_generation);
        let number = newest.map_or(1, |newest| newest + 1);
        let before = status.generation.as_ref();
        let (members, carried) = match self.continued(&status, cluster, &members) {
            Some((members, carried)) => (members, Some(carried)),
            None => (members, None),
        };
        let first = members.first().and_then(|member| member.pod.as_ref());
        let host = first.map_or_else(String::new, |pod| pod.ip.clone());
        let offset = u16::try_from(number % u64::from(build::MASTER_PORTS)).unwrap_or(0);
        let record = Generation {
            job: job.uid().unwrap_or_default(),
            number,
            reason: reason.clone(),
            lost: before.map_or_else(Vec::new, |before| cluster.lost_of(&before.record, &members)),
            members,
            plan,
            start: status.checkpoint.clone(),
            master: Address {
                host,
                port: build::MASTER_PORT + offset,
            },
            carried,
            created: now,
        };
        let change = rescale(&record, before, status.rescale_since.as_ref(), now);
        let command = if cluster.edits {
            Some(job.spec.trainer.command.clone())
        } else {
            before.and_then(|current| current.command.clone())
        };
        TrainingJobStatus {
            phase: Phase::Running,
            message: change.message.clone(),
            nodes: change.to_nodes,
            plan: summary,
            later_generation: None,
            start_time: Some(since(status.start_time.as_ref(), now)),
            restart_not_before: None,
            pod_failures: None,
            history: status.history.into_iter().chain([change]).collect(),
            generation: Some(Current {
                record,
                command,
                drain: false,
                pause: false,
                drain_cause: String::new(),
                after_loss: None,
                outcome: None,
                end_time: None,
            }),
            ..status
        }
    }

    /// The members of a generation in these slots. `None`: a pod lacks a field of a member.
    pub fn members_in(&self, slots: &[Slot], cluster: &ClusterState) -> Option<Vec<Member>> {
        let name = self.job.name_any();
        let member = |slot: &Slot| {
            let pod = cluster.pods.get(&slot.pod(&name))?;
            Some(Member {
                slot: slot.number.into(),
                ranks: self.job.spec.gpus_per_node.into(),
                carries: Vec::new(),
                pod: Some(PodRef {
                    name: pod.name_any(),
                    uid: pod.uid()?,
                    ip: pod.status.as_ref()?.pod_ip.clone()?,
                    node: pod.spec.as_ref()?.node_name.clone()?,
                }),
            })
        };
        slots.iter().map(member).collect()
    }
}

/// The rescale to the generation `record`, published now, from the generation `before`.
fn rescale(
    record: &Generation,
    before: Option<&Current>,
    rescale_since: Option<&MicroTime>,
    now: f64,
) -> Rescale {
    let from = before.map_or(0, |current| current.record.members.len());
    let from = u32::try_from(from).unwrap_or(u32::MAX);
    let change = Rescale::to(record, from, rescale_since.map_or(now, seconds));
    // A loss has its own words.
    let drained = matches!(record.reason, Reason::Resumed | Reason::Resized { .. });
    let cause = before.map_or("", |current| current.drain_cause.as_str());
    let message = match cause {
        "" => change.message,
        cause if drained => format!("{}: {cause}", change.message),
        _ => change.message,
    };
    let change = Rescale { message, ..change };
    let ended = before.and_then(|current| current.end_time.as_ref());
    // A generation that ended before the change began waited for the pool.
    let ended = ended.filter(|at| **at >= change.start_time);
    let stages = RescaleStages {
        drained_seconds: ended.map(|at| change.seconds_to(seconds(at))),
        published_seconds: Some(change.seconds_to(now)),
        ..RescaleStages::default()
    };
    Rescale { stages, ..change }
}

/// The status with new checkpoints: committed ones, and those that an external trainer wrote. Both are progress.
fn with_checkpoints(
    status: TrainingJobStatus,
    cluster: &ClusterState,
    now: f64,
) -> TrainingJobStatus {
    let committed = cluster.committed.as_ref();
    let committed = committed.filter(|found| found.samples > samples(&status.checkpoint));
    // Only the first member knows the newest checkpoint; the others know the one they resumed from.
    let mut first = cluster
        .states_of(status.number())
        .filter(|agent| agent.first == 0);
    let external = first.find_map(|agent| agent.external_checkpoint.as_ref());
    let external = external.filter(|found| status.external_checkpoint.as_ref() != Some(found));
    if committed.is_none() && external.is_none() {
        return status;
    }
    TrainingJobStatus {
        checkpoint: committed.cloned().or(status.checkpoint),
        external_checkpoint: external.cloned().or(status.external_checkpoint),
        checkpoint_time: Some(micro_time(now)),
        restarts: 0,
        ..status
    }
}

fn samples(checkpoint: &Option<CheckpointRef>) -> u64 {
    checkpoint.as_ref().map_or(0, |c| c.samples)
}

/// The status above a later generation, or from a later checkpoint. The ranks of a later generation end when the next one
/// is published, and what they have committed is kept.
fn with_later(status: TrainingJobStatus, later: &LaterGeneration, now: f64) -> TrainingJobStatus {
    if status.later_generation >= Some(later.number) {
        return status;
    }
    let newest = status.checkpoint.as_ref().map(|newest| newest.samples);
    let (checkpoint, checkpoint_time) = if later.samples() > newest {
        (later.checkpoint.clone(), Some(micro_time(now)))
    } else {
        (status.checkpoint.clone(), status.checkpoint_time.clone())
    };
    let (generation, rescale_since) = match running(&status) {
        Some(current) => {
            let fenced = Current {
                end_time: Some(micro_time(now)),
                // Its ranks write only below the directory of their generation.
                outcome: Some(Outcome::Drained),
                ..current.clone()
            };
            (
                Some(fenced),
                Some(since(status.rescale_since.as_ref(), now)),
            )
        }
        None => (status.generation.clone(), status.rescale_since.clone()),
    };
    TrainingJobStatus {
        later_generation: if Some(later.number) >= status.number() {
            Some(later.number)
        } else {
            status.later_generation
        },
        checkpoint,
        checkpoint_time,
        generation,
        rescale_since,
        ..status
    }
}

/// Message that the API server was restored from an older copy of its data, for a status with a later generation.
pub fn restored_message(status: &TrainingJobStatus, later: u64) -> String {
    let published = status.number().unwrap_or(0);
    let found = if later == published {
        "another one of this number".to_owned()
    } else {
        later.to_string()
    };
    let from = match &status.checkpoint {
        Some(checkpoint) => format!("the checkpoint of {} samples", checkpoint.samples),
        None => "the beginning".to_owned(),
    };
    format!(
        "the status has generation {published}, and the pods or the volume have {found}: the API server was restored \
         from an older copy of its data; the job continues above it, from {from}"
    )
}

/// The newest generation, unless it has ended.
fn running(status: &TrainingJobStatus) -> Option<&Current> {
    let current = status.generation.as_ref();
    current.filter(|current| current.outcome.is_none())
}

/// The generation, ordered to drain or not. `pause`: its ranks wait then.
fn draining(generation: Option<Current>, cause: Option<String>, pause: bool) -> Option<Current> {
    generation.map(|current| Current {
        drain: cause.is_some(),
        // A drain is not changed once it is ordered.
        pause: if current.drain { current.pause } else { pause },
        drain_cause: cause.unwrap_or_default(),
        ..current
    })
}

/// Nodes whose ranks were killed for a lack of progress. Empty for an external trainer: its agent kills all ranks of a
/// host, and does not know which of them is the cause.
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

/// The start of a period that lasts until `now`: an earlier one, if it has begun.
fn since(earlier: Option<&MicroTime>, now: f64) -> MicroTime {
    earlier.cloned().unwrap_or_else(|| micro_time(now))
}

/// The status with the steps and the stages that the agents of the newest generation report.
fn with_progress(status: TrainingJobStatus, cluster: &ClusterState) -> TrainingJobStatus {
    let Some(current) = &status.generation else {
        return status;
    };
    let number = current.record.number;
    let agents: Vec<&AgentState> = cluster.states_of(Some(number)).collect();
    let progress = progress(current, &agents);
    let all = agents.len() == current.record.members.len();
    let with_stages = |change: Rescale| {
        if change.generation == number {
            let stages = stages(&change, &agents, all);
            Rescale { stages, ..change }
        } else {
            change
        }
    };
    TrainingJobStatus {
        history: status.history.into_iter().map(with_stages).collect(),
        progress: caught_up(
            progress.or(status.progress),
            status.checkpoint.as_ref(),
            agents.iter().find_map(|agent| agent.budget),
        ),
        ..status
    }
}

/// The progress, not behind the newest checkpoint: the steps before it may have been reported to a status that was lost
/// when the API server was restored. `budget`: that of the agents.
fn caught_up(
    progress: Option<Progress>,
    checkpoint: Option<&CheckpointRef>,
    budget: Option<u64>,
) -> Option<Progress> {
    let behind = |known: &u64| progress.as_ref().is_none_or(|p| p.samples < *known);
    let Some(checkpoint) = checkpoint.filter(|checkpoint| behind(&checkpoint.samples)) else {
        return progress;
    };
    let budget = progress.and_then(|progress| progress.budget).or(budget);
    Some(Progress {
        samples: checkpoint.samples,
        budget,
        share: share(checkpoint.samples, budget),
        step: checkpoint.step,
        batch: checkpoint.batch,
        // Unknown: no agent reports its last step any more.
        loss: String::new(),
        tokens_per_second: 0,
        time_left: String::new(),
    })
}

/// The progress of a job that has used up its budget, which no agent may have reported.
fn complete(progress: Progress) -> Progress {
    let budget = progress
        .budget
        .or((progress.samples > 0).then_some(progress.samples));
    Progress {
        share: share(progress.samples, budget),
        budget,
        ..progress
    }
}

/// The samples as a share of the budget; empty if it is unknown.
fn share(samples: u64, budget: Option<u64>) -> String {
    let share = budget.filter(|budget| *budget > 0).map(|budget| {
        let share = (samples as f64 / budget as f64).min(1.0);
        format!("{:.0} %", 100.0 * share)
    });
    share.unwrap_or_default()
}

/// The stages of the newest rescale. `all`: the agents of all members have reported.
fn stages(change: &Rescale, agents: &[&AgentState], all: bool) -> RescaleStages {
    let last = |of: fn(&AgentState) -> Option<f64>| {
        let mut times = agents.iter().map(|agent| of(agent));
        let latest = times.try_fold(0.0, |latest, at| Some(f64::max(latest, at?)));
        latest.filter(|_| all).map(|at| change.seconds_to(at))
    };
    let first_step = agents.iter().find_map(|agent| agent.first_step);
    let known = &change.stages;
    RescaleStages {
        started_seconds: known.started_seconds.or(last(|agent| agent.started)),
        restored_seconds: known.restored_seconds.or(last(|agent| agent.ready)),
        first_step_seconds: (known.first_step_seconds)
            .or(first_step.map(|at| change.seconds_to(at))),
        ..known.clone()
    }
}

/// The newest step of a generation; `None` before an agent reports one.
fn progress(current: &Current, agents: &[&AgentState]) -> Option<Progress> {
    let step = agents.iter().find_map(|agent| agent.step.as_ref())?;
    let budget = agents.iter().find_map(|agent| agent.budget);
    let left = agents.iter().find_map(|agent| agent.seconds_left);
    let left = left.filter(|_| current.outcome.is_none());
    Some(Progress {
        samples: step.samples,
        budget,
        share: share(step.samples, budget),
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
    })
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

/// The members' slots, in the order of the members. A pod without a slot is left out.
pub fn members(status: &TrainingJobStatus, job: &str) -> Vec<Slot> {
    let slots = status.slots.iter();
    let slots: BTreeMap<String, Slot> = slots.map(|slot| (slot.pod(job), *slot)).collect();
    let slot_of = |pod: &PodRef| slots.get(&pod.name).copied();
    status.members().filter_map(slot_of).collect()
}

/// The message of the status with a notice of what keeps the job from a larger world.
pub fn noticed(status: &TrainingJobStatus, notice: Option<String>) -> String {
    let message = &status.message;
    match (status.phase, notice) {
        (Phase::Running, Some(notice)) if message.is_empty() => notice,
        (Phase::Placing | Phase::Waiting, Some(notice)) if notice != *message => {
            format!("{message}; {notice}")
        }
        _ => message.clone(),
    }
}
