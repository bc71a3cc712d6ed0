//! Events and log lines for the changes, and the failures, of a reconciliation.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Resource;
use kube::runtime::events::{Event, EventType};
use tracing::{Instrument, info, warn};
use xxhash_rust::xxh3::xxh3_64;

use super::context::Context;
use crate::api::TrainingJob;
use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::status::{Phase, TrainingJobStatus};

/// Reasons for which objects of the job cannot be created.
const BLOCKED: [&str; 2] = [
    ConditionReason::Refused.name(),
    ConditionReason::NameTaken.name(),
];
const PODS_ENDED_EARLY: &str = ConditionReason::PodsEndedEarly.name();

/// Writes a change to the object's events and to the log. Does not wait for the event.
pub fn announce(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    next: &TrainingJobStatus,
    context: &Context,
) {
    context.metrics.changed(before, next);
    let published = before.number() != next.number();
    let find = |status: &TrainingJobStatus, wanted: fn(&Condition) -> bool| {
        let condition = status
            .conditions
            .iter()
            .find(|condition| wanted(condition))?;
        Some((condition.reason.clone(), condition.message.clone()))
    };
    let blocked = |status| {
        find(status, |condition| {
            BLOCKED.contains(&condition.reason.as_str())
        })
    };
    let refused = |status| {
        find(status, |condition| {
            condition.type_ == ConditionType::Planned.name() && condition.status == "False"
        })
    };
    let newly_blocked = blocked(next)
        .filter(|(reason, _)| blocked(before).is_none_or(|(earlier, _)| earlier != *reason));
    let newly_refused = refused(next).filter(|refusal| refused(before).as_ref() != Some(refusal));
    let ended_early =
        |status: &TrainingJobStatus| status.pod_failures.as_ref().map_or(0, |f| f.count);
    let (reason, note) = match (next.history.last(), newly_blocked, &next.pod_failures) {
        (Some(change), _, _) if published => {
            let nodes = change.to_nodes;
            let note = format!("{}: {nodes} nodes, {}", change.message, change.formula);
            ("Generation".to_string(), note)
        }
        (_, Some(blocked), _) => blocked,
        _ if newly_refused.is_some() => newly_refused.unwrap_or_default(),
        (_, _, Some(failures)) if failures.count > ended_early(before) => {
            (PODS_ENDED_EARLY.to_string(), failures.message.clone())
        }
        _ if before.phase == next.phase => return,
        _ => (format!("{:?}", next.phase), next.message.clone()),
    };
    info!(%reason, %note, "changed");
    let kind = match next.phase {
        _ if refused(next).is_some_and(|(refusal, _)| refusal == reason) => EventType::Warning,
        Phase::Failed | Phase::Waiting | Phase::Pending => EventType::Warning,
        _ if BLOCKED.contains(&reason.as_str()) || reason == PODS_ENDED_EARLY => EventType::Warning,
        _ => EventType::Normal,
    };
    publish(job, kind, reason, &note, context);
}

/// Writes an event if the status could not be written.
pub fn unwritten(job: &TrainingJob, message: &str, context: &Context) {
    let reason = "StatusUnwritten".to_owned();
    publish(job, EventType::Warning, reason, message, context);
}

fn publish(job: &TrainingJob, kind: EventType, reason: String, note: &str, context: &Context) {
    // Events of one action within six minutes are one with a count, which shows only the first note.
    let action = format!("{reason}-{:08x}", xxh3_64(note.as_bytes()) as u32);
    let event = Event {
        type_: kind,
        reason,
        note: Some(note.chars().take(1000).collect()),
        action,
        secondary: None,
    };
    let (recorder, object) = (context.recorder.clone(), job.object_ref(&()));
    let published = async move {
        if let Err(error) = recorder.publish(&event, &object).await {
            warn!(%error, "cannot write an event");
        }
    };
    tokio::spawn(published.in_current_span());
}
