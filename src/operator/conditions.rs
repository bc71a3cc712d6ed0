//! The conditions of a job, computed together at the end of a reconciliation. The phase that people read
//! is derived from them again, so that the two never differ.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use crate::api::condition::{ConditionReason as Reason, ConditionType};
use crate::api::status::{Phase, TrainingJobStatus};
use crate::lifecycle::Outcome;
use crate::lifecycle::agent_state::Problem;

/// Message of the condition `Planned` of a job with a plan.
const PLANNED: &str = "the recipe is planned and its rules hold";

/// Why the controller refuses a job what it needs: its plan, as `Planned` reports it, its objects, as `PodsReady` does,
/// or more time, as `Failed` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    /// The problem and how to solve it.
    pub message: String,
}

/// What the conditions report and no other field of the status has.
#[derive(Debug, Default)]
pub struct Findings<'a> {
    /// Whether the newest spec has a plan. `None`: the condition `Planned` remains.
    pub planned: Option<Result<(), &'a Refusal>>,
    /// Message that the API server was restored from an older copy of its data.
    pub restored: Option<&'a str>,
    /// Why objects of the job cannot be created.
    pub blocked: Option<&'a Refusal>,
    /// Why an agent cannot start ranks.
    pub problem: Option<&'a Problem>,
    /// The job has reached its active deadline.
    pub overdue: Option<&'a Refusal>,
    /// A rank makes no progress.
    pub stalled: bool,
}

/// The status with the conditions that follow from its phase and the findings.
pub fn finish(status: TrainingJobStatus, findings: &Findings<'_>) -> TrainingJobStatus {
    let conditions = merged(&status, &reported(&status, findings));
    TrainingJobStatus {
        phase: Phase::of(&conditions),
        conditions,
        ..status
    }
}

/// The status with these conditions, beside the others that it has.
pub fn with(status: TrainingJobStatus, reported: &[Reported<'_>]) -> TrainingJobStatus {
    TrainingJobStatus {
        conditions: merged(&status, reported),
        ..status
    }
}

/// The conditions of a status, with the reported ones in place of those of the same type.
fn merged(status: &TrainingJobStatus, reported: &[Reported<'_>]) -> Vec<Condition> {
    let mut conditions = status.conditions.clone();
    for &(kind, holds, reason, message) in reported {
        debug_assert!(kind.allows(holds, reason), "{kind} {holds} {reason}");
        let value = if holds { "True" } else { "False" };
        let known = conditions.iter_mut().find(|c| c.type_ == kind.name());
        let unchanged = known.as_ref().filter(|known| known.status == value);
        let condition = Condition {
            type_: kind.name().into(),
            status: value.into(),
            reason: reason.name().into(),
            message: message.into(),
            observed_generation: status.observed_generation,
            // The time changes only with the status of the condition.
            last_transition_time: unchanged.map_or_else(
                || Time(Timestamp::now()),
                |known| known.last_transition_time.clone(),
            ),
        };
        match known {
            Some(known) => *known = condition,
            None => conditions.push(condition),
        }
    }
    conditions
}

/// The status of an ended job, about the newest spec. `kubectl wait` ignores conditions of an
/// older generation, and an edit does not change how the job ended.
pub fn observed(status: &TrainingJobStatus, generation: Option<i64>) -> TrainingJobStatus {
    let conditions = status.conditions.iter().cloned();
    let conditions = conditions.map(|condition| Condition {
        observed_generation: generation,
        ..condition
    });
    TrainingJobStatus {
        observed_generation: generation,
        conditions: conditions.collect(),
        ..status.clone()
    }
}

/// A condition, whether it holds, the reason and the message.
pub type Reported<'a> = (ConditionType, bool, Reason, &'a str);

/// The conditions to write, in the order in which a new status has them.
fn reported<'a>(status: &'a TrainingJobStatus, findings: &Findings<'a>) -> Vec<Reported<'a>> {
    use ConditionType as Type;
    let Findings {
        planned,
        restored,
        blocked,
        problem,
        overdue,
        stalled,
    } = *findings;
    let phase = status.phase;
    let message = status.message.as_str();
    let reason = match phase {
        Phase::Pending => Reason::NotPlanned,
        Phase::Placing => Reason::Placing,
        Phase::Running => Reason::Training,
        Phase::Draining => Reason::Draining,
        Phase::Waiting => Reason::InsufficientCapacity,
        Phase::Suspended => Reason::Suspended,
        Phase::Complete => Reason::BudgetReached,
        Phase::Failed => Reason::Failed,
    };
    let (running, suspended) = (phase == Phase::Running, phase == Phase::Suspended);
    let (complete, failed) = (phase == Phase::Complete, phase == Phase::Failed);
    let active = !(suspended || complete || failed || phase == Phase::Pending);
    let has_pods = running || phase == Phase::Draining;
    let (ready, ready_reason, ready_message) = if let Some(blocked) = blocked.filter(|_| active) {
        (has_pods, blocked.reason, blocked.message.as_str())
    } else if let Some(problem) = problem.filter(|_| has_pods || phase == Phase::Placing) {
        let reason = Reason::of_problem(Type::PodsReady, false, &problem.reason);
        (false, reason, problem.message.as_str())
    } else if phase == Phase::Placing && status.pod_failures.is_some() {
        (false, Reason::PodsEndedEarly, message)
    } else {
        // Other conditions explain why a job drains or has ended.
        let lacks = matches!(phase, Phase::Pending | Phase::Placing | Phase::Waiting);
        (has_pods, reason, if lacks { message } else { "" })
    };
    let running_reason = if running && stalled {
        Reason::Stalled
    } else {
        reason
    };
    let rescales = active && status.rescale_since.is_some() && status.generation.is_some();
    let rescale_reason = if rescales && running {
        Reason::Recovering
    } else {
        reason
    };
    let suspend_reason = if suspended {
        Reason::Suspended
    } else {
        Reason::NotSuspended
    };
    let (complete_reason, failed_reason) = match phase {
        Phase::Complete => (reason, reason),
        Phase::Failed => (reason, failure(status, problem, overdue)),
        _ => (Reason::NotFinished, Reason::NotFinished),
    };
    // Only a job that could not be read before has this condition.
    let is_readable = |c: &Condition| c.type_ == Type::Readable.name();
    let was_unreadable = status.conditions.iter().any(is_readable);
    let readable = was_unreadable.then_some((Type::Readable, true, Reason::Readable, ""));
    let planned = planned.map(|planned| match planned {
        Ok(()) => (Type::Planned, true, Reason::Planned, PLANNED),
        Err(refusal) => (Type::Planned, false, refusal.reason, &*refusal.message),
    });
    let restored = restored.map(|message| (Type::Restored, true, Reason::OlderStatus, message));
    // A message belongs to the one condition that it explains.
    let if_holds = |holds: bool| {
        if holds && message != ready_message {
            message
        } else {
            ""
        }
    };
    let follow = [
        (Type::PodsReady, ready, ready_reason, ready_message),
        (Type::Running, running, running_reason, if_holds(running)),
        (
            Type::Rescaling,
            rescales,
            rescale_reason,
            if_holds(rescales && !running),
        ),
        (
            Type::Suspended,
            suspended,
            suspend_reason,
            if_holds(suspended),
        ),
        (Type::Complete, complete, complete_reason, ""),
        (Type::Failed, failed, failed_reason, if_holds(failed)),
    ];
    let first = [readable, planned, restored];
    first.into_iter().flatten().chain(follow).collect()
}

/// The reason of a job's failure.
fn failure(
    status: &TrainingJobStatus,
    problem: Option<&Problem>,
    overdue: Option<&Refusal>,
) -> Reason {
    if let Some(overdue) = overdue {
        return overdue.reason;
    }
    if let Some(problem) = problem.filter(|problem| problem.deterministic) {
        return Reason::of_problem(ConditionType::Failed, true, &problem.reason);
    }
    let current = status.generation.as_ref();
    match current.and_then(|current| current.outcome.as_ref()) {
        Some(Outcome::OutOfMemory { .. }) => Reason::OutOfMemory,
        Some(Outcome::Failed {
            deterministic: true,
            ..
        }) => Reason::PermanentFailure,
        Some(Outcome::Failed { .. }) => Reason::RestartBudgetExceeded,
        Some(Outcome::Finished | Outcome::Drained | Outcome::Lost { .. }) | None => {
            Reason::CannotStart
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::time::micro_time;

    const PHASES: [Phase; 8] = [
        Phase::Pending,
        Phase::Placing,
        Phase::Running,
        Phase::Draining,
        Phase::Waiting,
        Phase::Suspended,
        Phase::Complete,
        Phase::Failed,
    ];

    fn of(phase: Phase, blocked: Option<Reason>) -> TrainingJobStatus {
        let blocked = blocked.map(|reason| Refusal {
            reason,
            message: "quota exceeded".into(),
        });
        let status = TrainingJobStatus {
            phase,
            message: "message".into(),
            observed_generation: Some(3),
            rescale_since: Some(micro_time(1000.0)),
            ..TrainingJobStatus::default()
        };
        let blocked = blocked.as_ref();
        finish(
            status,
            &Findings {
                blocked,
                ..Findings::default()
            },
        )
    }

    #[test]
    fn phase_follows_from_the_conditions() {
        for phase in PHASES {
            for blocked in [None, Some(Reason::Refused), Some(Reason::NameTaken)] {
                assert_eq!(of(phase, blocked).phase, phase);
            }
        }
    }

    #[test]
    fn every_condition_has_a_documented_reason() {
        for phase in PHASES {
            for condition in of(phase, None).conditions {
                let kind = ConditionType::ALL
                    .iter()
                    .find(|kind| kind.name() == condition.type_);
                let reason = Reason::ALL
                    .iter()
                    .find(|reason| reason.name() == condition.reason);
                let holds = condition.status == "True";
                assert!(kind.unwrap().allows(holds, *reason.unwrap()), "{phase:?}");
            }
        }
    }

    #[test]
    fn edit_of_an_ended_job_keeps_its_conditions() {
        let status = observed(&of(Phase::Complete, None), Some(4));
        let mut all = status.conditions.iter();
        assert!(all.all(|condition| condition.observed_generation == Some(4)));
        assert_eq!(Phase::of(&status.conditions), Phase::Complete);
    }

    #[test]
    fn problem_of_an_agent_is_a_reason() {
        let problem = |reason: &str, deterministic| Problem {
            reason: reason.into(),
            message: "make room".into(),
            deterministic,
        };
        let reason = |phase, kind: ConditionType, problem: &Problem| {
            let findings = Findings {
                problem: Some(problem),
                ..Findings::default()
            };
            let status = finish(of(phase, None), &findings);
            assert_eq!(status.phase, phase);
            let mut all = status.conditions.into_iter();
            all.find(|c| c.type_ == kind.name()).unwrap().reason
        };
        let (ready, failed) = (ConditionType::PodsReady, ConditionType::Failed);
        let full = problem("VolumeFull", false);
        assert_eq!(reason(Phase::Running, ready, &full), "VolumeFull");
        assert_eq!(reason(Phase::Placing, ready, &full), "VolumeFull");
        assert_eq!(reason(Phase::Waiting, ready, &full), "InsufficientCapacity");
        assert_eq!(
            reason(Phase::Running, ready, &problem("New", false)),
            "CannotStart"
        );
        let refused = problem("CommandRefused", true);
        assert_eq!(reason(Phase::Failed, failed, &refused), "CommandRefused");
        assert_eq!(reason(Phase::Failed, failed, &full), "CannotStart");
    }

    #[test]
    fn a_message_is_in_one_condition() {
        for phase in PHASES {
            for blocked in [None, Some(Reason::Refused)] {
                let status = of(phase, blocked);
                let told = status.conditions.iter().filter(|c| c.message == "message");
                let expected = usize::from(phase != Phase::Complete);
                assert!(
                    told.count() <= expected,
                    "{phase:?}: {:#?}",
                    status.conditions
                );
            }
            let told = of(phase, None).conditions;
            let told = told.iter().any(|c| c.message == "message");
            // What drains is a generation, which this status has not.
            let silent = matches!(phase, Phase::Complete | Phase::Draining);
            assert_eq!(told, !silent, "{phase:?}");
        }
    }

    #[test]
    fn complete_and_failed_become_true_only_at_the_end() {
        for phase in PHASES {
            let status = of(phase, None);
            let find = |kind: ConditionType| {
                let mut all = status.conditions.iter();
                all.find(|c| c.type_ == kind.name()).unwrap()
            };
            let complete = find(ConditionType::Complete);
            let failed = find(ConditionType::Failed);
            assert_eq!(complete.status == "True", phase == Phase::Complete);
            assert_eq!(failed.status == "True", phase == Phase::Failed);
            // kubectl wait ignores a condition of an older generation of the spec.
            assert_eq!(complete.observed_generation, Some(3));
        }
    }
}
