//! Jobs without running pods: those that cannot be planned and those that are over.

use std::time::Duration;

use kube::api::{DeleteParams, Preconditions};
use kube::core::Request;
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};

use super::context::Context;
use super::error::ReconcileError;
use super::events::announce;
use super::observe::ClusterState;
use super::recipe_source::Refusal;
use super::write::write;
use super::{apply, conditions};
use crate::api::TrainingJob;
use crate::api::condition::ConditionType;
use crate::api::status::{Phase, TrainingJobStatus};
use crate::telemetry::now;
use crate::util::lock::lock;
use crate::util::time::seconds;

/// Handles a job that cannot be planned and never ran: it gets no objects and waits for a change.
pub async fn refuse(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    mut next: TrainingJobStatus,
    refusal: &Refusal,
    context: &Context,
) -> Result<Action, ReconcileError> {
    next.phase = Phase::Pending;
    // Pods placed before an edit made the job invalid hold unused devices.
    next.slots.clear();
    lock(&context.reservations).forget(&job.uid().unwrap_or_default());
    next.message.clone_from(&refusal.message);
    conditions::set(
        &mut next,
        ConditionType::Planned,
        false,
        refusal.reason,
        &refusal.message,
    );
    conditions::of_phase(&mut next, None, None, false);
    let written = write(job, before, &mut next, context).await?;
    announce(&written, before, &next, context);
    if !before.slots.is_empty() {
        let (stores, agents, leases) = (&context.stores, &context.agents, &context.leases);
        let cluster = ClusterState::of(job, &next, stores, agents, leases, false, None);
        apply::delete_pods(context, &written, &next, &cluster).await?;
    }
    Ok(match refusal.waits {
        true => Action::requeue(Duration::from_secs(5)),
        false => Action::await_change(),
    })
}

/// Handles a finished job: its agents exit by themselves, its objects remain until it is deleted or
/// its TTL expires.
pub async fn keep(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let mut observed = status.clone();
    conditions::observe(&mut observed, job.metadata.generation);
    write(job, status, &mut observed, context).await?;
    context.forget(job);
    let (Some(ttl), Some(finished)) =
        (job.spec.ttl_seconds_after_finished, &status.completion_time)
    else {
        return Ok(Action::await_change());
    };
    let left = seconds(finished) + f64::from(ttl) - now();
    if left > 0.0 {
        return Ok(Action::requeue(Duration::from_secs_f64(left)));
    }
    let parameters = DeleteParams::background().preconditions(Preconditions {
        uid: job.uid(),
        resource_version: None,
    });
    let jobs = TrainingJob::url_path(&(), job.namespace().as_deref());
    let request = Request::new(jobs).delete(&job.name_any(), &parameters);
    let request = request.map_err(kube::Error::BuildRequest)?;
    // While a finalizer holds the job, the response is the object, which `Api::delete` decodes unguarded.
    match context.client.request_text(request).await {
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
        other => {
            other?;
        }
    }
    Ok(Action::await_change())
}
