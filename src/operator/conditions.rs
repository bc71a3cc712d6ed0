//! A job's conditions, all of them written together from its state.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::unreadable::READABLE;
use crate::job::api::status::{State, TrainingJobStatus};

/// Sets one condition; its time changes only with its status.
pub fn set(status: &mut TrainingJobStatus, kind: &str, holds: bool, reason: &str, message: &str) {
    let value = if holds { "True" } else { "False" };
    let generation = status.observed_generation;
    let known = status.conditions.iter().position(|c| c.type_ == kind);
    let since = known
        .and_then(|at| status.conditions.get(at))
        .filter(|c| c.status == value)
        .map_or_else(
            || Time(Timestamp::now()),
            |c| c.last_transition_time.clone(),
        );
    let condition = Condition {
        type_: kind.into(),
        status: value.into(),
        reason: reason.into(),
        message: message.into(),
        observed_generation: generation,
        last_transition_time: since,
    };
    match known {
        Some(at) => status.conditions[at] = condition,
        None => status.conditions.push(condition),
    }
}

/// A job that could not be read once can be now.
pub fn readable(status: &mut TrainingJobStatus) {
    if status.conditions.iter().any(|c| c.type_ == READABLE) {
        set(status, READABLE, true, READABLE, "");
    }
}

/// Why pods are not ready, where the API server makes none.
pub const REFUSED: &str = "Refused";

/// Writes the conditions that follow from the state; `refused`: what the API server has against the
/// job's objects. `Planned` is set where plans are made.
pub fn of_state(status: &mut TrainingJobStatus, refused: Option<&str>) {
    let state = status.state;
    let why = status.why.clone();
    let name = format!("{state:?}");
    let rescaling = status.change_since.is_some()
        && status.generation.is_some()
        && !matches!(state, State::Complete | State::Failed | State::Suspended);
    for (kind, holds) in [
        (
            "PodsReady",
            matches!(state, State::Running | State::Draining),
        ),
        ("Running", state == State::Running),
        ("Rescaling", rescaling),
        ("Suspended", state == State::Suspended),
        ("Complete", state == State::Complete),
        ("Failed", state == State::Failed),
    ] {
        match refused.filter(|_| kind == "PodsReady") {
            Some(refused) => set(status, kind, holds, REFUSED, refused),
            None => set(status, kind, holds, &name, &why),
        }
    }
}
