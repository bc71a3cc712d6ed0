//! The conditions of a job, written together once its phase is decided. The phase that people read
//! is derived from them again, so that the two never differ.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use crate::api::condition::{ConditionReason as Reason, ConditionType};
use crate::api::status::{Phase, TrainingJobStatus};
use crate::lifecycle::Outcome;
use crate::lifecycle::agent_state::Problem;

/// What keeps a job from its plan, as `Planned` reports it, or from its objects, as `PodsReady` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    /// The problem and how to solve it.
    pub message: String,
}

/// Sets one condition; its transition time changes only with its status.
pub fn set(
    status: &mut TrainingJobStatus,
    kind: ConditionType,
    holds: bool,
    reason: Reason,
    message: &str,
) {
    debug_assert!(kind.allows(holds, reason), "{kind} {holds} {reason}");
    let value = if holds { "True" } else { "False" };
    let mut condition = Condition {
        type_: kind.name().into(),
        status: value.into(),
        reason: reason.name().into(),
        message: message.into(),
        observed_generation: status.observed_generation,
        last_transition_time: Time(Timestamp::now()),
    };
    let mut conditions = status.conditions.iter_mut();
    match conditions.find(|c| c.type_ == kind.name()) {
        Some(known) => {
            if known.status == value {
                condition.last_transition_time = known.last_transition_time.clone();
            }
            *known = condition;
        }
        None => status.conditions.push(condition),
    }
}

/// Sets `Readable` to True on a job that could not be read before.
pub fn readable(status: &mut TrainingJobStatus) {
    let kind = ConditionType::Readable;
    if status.conditions.iter().any(|c| c.type_ == kind.name()) {
        set(status, kind, true, Reason::Readable, "");
    }
}

/// Makes the status of an ended job one about the newest spec. `kubectl wait` ignores conditions of an
/// older generation, and an edit does not change how the job ended.
pub fn observe(status: &mut TrainingJobStatus, generation: Option<i64>) {
    status.observed_generation = generation;
    for condition in &mut status.conditions {
        condition.observed_generation = generation;
    }
}

/// Writes the conditions that follow from the phase; `blocked`: why objects of the job cannot be created;
/// `problem`: why an agent cannot start ranks, or why the job ends; `stalled`: a rank makes no progress.
/// Planning sets `Planned`.
pub fn of_phase(
    status: &mut TrainingJobStatus,
    blocked: Option<&Refusal>,
    problem: Option<&Problem>,
    stalled: bool,
) {
    use ConditionType as Type;
    let phase = status.phase;
    let message = status.message.clone();
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
    } else if let Some(problem) = problem.filter(|_| has_pods) {
        let reason = Reason::of_problem(Type::PodsReady, false, &problem.reason);
        (false, reason, problem.message.as_str())
    } else if phase == Phase::Placing && status.pod_failures.is_some() {
        (false, Reason::PodsEndedEarly, message.as_str())
    } else {
        (has_pods, reason, message.as_str())
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
        Phase::Failed => (reason, failure(status, problem)),
        _ => (Reason::NotFinished, Reason::NotFinished),
    };
    set(status, Type::PodsReady, ready, ready_reason, ready_message);
    let running_reason = if running && stalled {
        Reason::Stalled
    } else {
        reason
    };
    for (kind, holds, reason) in [
        (Type::Running, running, running_reason),
        (Type::Rescaling, rescales, rescale_reason),
        (Type::Suspended, suspended, suspend_reason),
        (Type::Complete, complete, complete_reason),
        (Type::Failed, failed, failed_reason),
    ] {
        set(status, kind, holds, reason, &message);
    }
    status.phase = Phase::of(&status.conditions);
}

/// The reason of a job's failure.
fn failure(status: &TrainingJobStatus, problem: Option<&Problem>) -> Reason {
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
        let mut status = TrainingJobStatus {
            phase,
            message: "message".into(),
            observed_generation: Some(3),
            rescale_since: Some(micro_time(1000.0)),
            ..TrainingJobStatus::default()
        };
        of_phase(&mut status, blocked.as_ref(), None, false);
        status
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
        let mut status = of(Phase::Complete, None);
        observe(&mut status, Some(4));
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
            let mut status = of(phase, None);
            of_phase(&mut status, None, Some(problem), false);
            assert_eq!(status.phase, phase);
            let mut all = status.conditions.into_iter();
            all.find(|c| c.type_ == kind.name()).unwrap().reason
        };
        let (ready, failed) = (ConditionType::PodsReady, ConditionType::Failed);
        let full = problem("VolumeFull", false);
        assert_eq!(reason(Phase::Running, ready, &full), "VolumeFull");
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
