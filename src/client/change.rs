//! List, create, scale, suspend and delete TrainingJobs.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::error_boundary::{DeserializeGuard, InvalidObject};
use serde_json::{Value, json};

use super::{ClientError, Cluster};
use crate::api::{CODE_KEY, TrainingJob};

/// Jobs of the namespace, or of all namespaces; and those that this program cannot read.
pub async fn list(
    cluster: &Cluster,
    all: bool,
) -> Result<(Vec<TrainingJob>, Vec<InvalidObject>), ClientError> {
    let jobs: Api<DeserializeGuard<TrainingJob>> = if all {
        Api::all(cluster.client.clone())
    } else {
        Api::namespaced(cluster.client.clone(), &cluster.namespace)
    };
    let found = jobs.list(&ListParams::default()).await;
    let found = found.map_err(|error| cluster.error(None, error))?.items;
    let (mut readable, mut others) = (Vec::new(), Vec::new());
    for job in found {
        match job.0 {
            Ok(job) => readable.push(job),
            Err(invalid) => others.push(invalid),
        }
    }
    Ok((readable, others))
}

/// Creates a job; fails if the name is taken.
pub async fn create(cluster: &Cluster, job: &TrainingJob) -> Result<TrainingJob, ClientError> {
    let created = cluster.jobs().create(&PostParams::default(), job).await;
    created.map_err(|error| match &error {
        kube::Error::Api(status) if status.reason == "AlreadyExists" => {
            let name = job.metadata.name.as_deref().unwrap_or_default();
            let namespace = &cluster.namespace;
            ClientError::Usage(format!(
                "TrainingJob {name} already exists in namespace {namespace}; choose another name with --name, \
                or delete it with `evenkeel cancel {name} -n {namespace}`"
            ))
        }
        _ => cluster.error(None, error),
    })
}

/// Creates the ConfigMap with the archive of a job's code. It is deleted with the job.
pub async fn create_code(
    cluster: &Cluster,
    job: &TrainingJob,
    name: &str,
    archive: Vec<u8>,
) -> Result<(), ClientError> {
    let code = ConfigMap {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            owner_references: job.owner_ref(&()).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        binary_data: Some([(CODE_KEY.to_owned(), ByteString(archive))].into()),
        immutable: Some(true),
        ..ConfigMap::default()
    };
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let created = maps.create(&PostParams::default(), &code).await;
    created
        .map(drop)
        .map_err(|error| cluster.error(None, error))
}

/// Sets the requested number of nodes.
pub async fn scale(cluster: &Cluster, name: &str, nodes: u32) -> Result<TrainingJob, ClientError> {
    patch(cluster, name, json!({"spec": {"nodes": nodes}})).await
}

/// Suspends or resumes a job.
pub async fn suspend(
    cluster: &Cluster,
    name: &str,
    suspend: bool,
) -> Result<TrainingJob, ClientError> {
    patch(cluster, name, json!({"spec": {"suspend": suspend}})).await
}

/// Asks for a proof of the job's ledger.
pub async fn prove_ledger(
    cluster: &Cluster,
    name: &str,
    number: u32,
) -> Result<TrainingJob, ClientError> {
    patch(cluster, name, json!({"spec": {"proveLedger": number}})).await
}

/// Deletes a job with all its objects; returns its last state.
pub async fn cancel(cluster: &Cluster, name: &str) -> Result<TrainingJob, ClientError> {
    let job = cluster.job(name).await?;
    let deleted = cluster
        .jobs()
        .delete(name, &DeleteParams::foreground())
        .await;
    deleted.map_err(|error| cluster.error(Some(name), error))?;
    Ok(job)
}

async fn patch(cluster: &Cluster, name: &str, change: Value) -> Result<TrainingJob, ClientError> {
    let patched = cluster
        .jobs()
        .patch(name, &PatchParams::default(), &Patch::Merge(&change))
        .await;
    patched.map_err(|error| cluster.error(Some(name), error))
}
