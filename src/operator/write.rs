//! Writes the status of a job.

use kube::api::{Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::context::Context;
use super::error::ReconcileError;
use super::ownership::MANAGER;
use crate::api::TrainingJob;
use crate::api::status::TrainingJobStatus;

/// Message of a server-side apply with a field that the CRD lacks. Its code is 500, so only the message
/// distinguishes it from other failures (structured-merge-diff v6, `typed/helpers.go`).
const UNDECLARED: &str = "not declared in schema";

/// Writes the status, if it changed, with the observed resource version: another controller's write in
/// between is a conflict, and the job is reconciled again.
pub async fn write(
    job: &TrainingJob,
    before: &TrainingJobStatus,
    next: &mut TrainingJobStatus,
    context: &Context,
) -> Result<TrainingJob, ReconcileError> {
    next.bound();
    if before == next {
        return Ok(job.clone());
    }
    let patch = json!({
        "apiVersion": TrainingJob::api_version(&()),
        "kind": TrainingJob::kind(&()),
        "metadata": {"name": job.name_any(), "resourceVersion": job.resource_version()},
        "status": next,
    });
    let jobs = context.jobs(job);
    let parameters = PatchParams::apply(MANAGER).force();
    let written = jobs
        .patch_status(&job.name_any(), &parameters, &Patch::Apply(patch))
        .await
        .map_err(|error| match error {
            kube::Error::Api(said) if said.message.contains(UNDECLARED) => {
                ReconcileError::Definition(said)
            }
            other => other.into(),
        })?;
    let written = written.0.map_err(|invalid| {
        kube::Error::SerdeError(<serde_json::Error as serde::de::Error>::custom(invalid))
    })?;
    context.record_written(&written);
    Ok(written)
}
