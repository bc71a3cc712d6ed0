//! The key of a job's agents and ranks.

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;

use super::metadata;
use crate::api::TrainingJob;
use crate::lifecycle::authentication::{KEY_FILE, job_key, secret_name};
use crate::util::key::Key;

/// The Secret with the job's key. Its name contains the job's uid, so a job never gets the key of an earlier one
/// of its name.
pub fn secret(job: &TrainingJob, controller: &Key) -> Secret {
    let uid = job.uid().unwrap_or_default();
    let key = job_key(controller, &uid);
    Secret {
        metadata: metadata(job, secret_name(&uid)),
        immutable: Some(true),
        string_data: Some([(KEY_FILE.to_owned(), key.reveal())].into()),
        ..Secret::default()
    }
}
