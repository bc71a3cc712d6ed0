//! Events and log lines for the changes, and the failures, of a reconciliation.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Resource;
use kube::runtime::events::{Event, EventType};
use tracing::{Instrument, info, warn};

use super::context::Context;
use crate::api::TrainingJob;
use crate::api::condition::ConditionReason;
use crate::api::status::{Phase, TrainingJobStatus};

/// Reasons for which objects of the job cannot be created.
const BLOCKED: [ConditionReason; 2] = [ConditionReason::Refused, ConditionReason::NameTaken];
const PODS_ENDED_EARLY: ConditionReason = ConditionReason::PodsEndedEarly;

/// Writes a change to the object's events and to the log. Does not wait for the event.
pub fn announce(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    next: &TrainingJobStatus,
    context: &Context,
) {
    context.metrics.changed(before, next);
    let number = |status: &TrainingJobStatus| status.generation.as_ref().map(|c| c.record.number);
    let published = number(before) != number(next);
    let blocked = |status: &TrainingJobStatus| {
        let mut conditions = status.conditions.iter();
        let is_blocked = |c: &&Condition| BLOCKED.iter().any(|reason| reason.name() == c.reason);
        let condition = conditions.find(is_blocked)?;
        Some((condition.reason.clone(), condition.message.clone()))
    };
    let newly_blocked = blocked(next)
        .filter(|(reason, _)| blocked(before).is_none_or(|(earlier, _)| earlier != *reason));
    let ended_early =
        |status: &TrainingJobStatus| status.pod_failures.as_ref().map_or(0, |f| f.count);
    let (reason, note) = match next.history.last().filter(|_| published) {
        Some(change) => (
            "Generation".to_string(),
            format!(
                "{}: {} nodes, {}",
                change.message, change.to_nodes, change.formula
            ),
        ),
        None if let Some(blocked) = newly_blocked => blocked,
        None if ended_early(next) > ended_early(before) => {
            let last = next.pod_failures.as_ref().map(|f| f.message.clone());
            (PODS_ENDED_EARLY.to_string(), last.unwrap_or_default())
        }
        None if before.phase == next.phase => return,
        None => (format!("{:?}", next.phase), next.message.clone()),
    };
    info!(%reason, %note, "changed");
    let kind = match next.phase {
        Phase::Failed | Phase::Waiting | Phase::Pending => EventType::Warning,
        _ if BLOCKED
            .iter()
            .chain(&[PODS_ENDED_EARLY])
            .any(|one| one.name() == reason) =>
        {
            EventType::Warning
        }
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
    let event = Event {
        type_: kind,
        reason: reason.clone(),
        note: Some(note.chars().take(1000).collect()),
        action: reason,
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
