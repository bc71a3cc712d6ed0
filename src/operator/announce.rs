//! Events on the objects, and the log: what a look has changed, or could not.

use kube::runtime::events::{Event, EventType};
use kube::{Resource, ResourceExt};
use tracing::{info, warn};

use super::conditions::REFUSED;
use super::context::Context;
use crate::job::api::TrainingJob;
use crate::job::api::status::{State, TrainingJobStatus};

/// Says on the object and in the log what changed; nobody waits for the event to be written.
pub fn announce(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    next: &TrainingJobStatus,
    context: &Context,
) {
    let number = |status: &TrainingJobStatus| status.generation.as_ref().map(|c| c.record.number);
    let published = number(before) != number(next);
    let refused = |status: &TrainingJobStatus| {
        let mut conditions = status.conditions.iter();
        conditions.any(|condition| condition.reason == REFUSED)
    };
    let ended_early =
        |status: &TrainingJobStatus| status.pod_failures.as_ref().map_or(0, |f| f.count);
    let (reason, note) = match next.history.last().filter(|_| published) {
        Some(change) => (
            "Generation".to_string(),
            format!("{}: {} nodes, {}", change.reason, change.to, change.proof),
        ),
        None if refused(next) && !refused(before) => (REFUSED.to_string(), next.why.clone()),
        None if ended_early(next) > ended_early(before) => {
            let last = next.pod_failures.as_ref().map(|f| f.last.clone());
            ("PodsEndedEarly".to_string(), last.unwrap_or_default())
        }
        None if before.state == next.state => return,
        None => (format!("{:?}", next.state), next.why.clone()),
    };
    info!(job = %job.name_any(), namespace = job.namespace(), %reason, %note, "changed");
    let kind = match next.state {
        State::Failed | State::Waiting | State::Pending => EventType::Warning,
        _ if [REFUSED, "PodsEndedEarly"].contains(&reason.as_str()) => EventType::Warning,
        _ => EventType::Normal,
    };
    publish(job, kind, reason, &note, context);
}

/// Says on the object that its status could not be written, which says nothing then.
pub fn unwritten(job: &TrainingJob, why: &str, context: &Context) {
    let reason = "StatusUnwritten".to_owned();
    publish(job, EventType::Warning, reason, why, context);
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
    tokio::spawn(async move {
        if let Err(error) = recorder.publish(&event, &object).await {
            warn!(%error, "an event could not be written");
        }
    });
}
