//! Applies the status to the cluster: applies the objects that should exist and deletes the pods that
//! should not.

use std::collections::BTreeSet;
use std::fmt::Debug;

use axum::http::HeaderValue;
use axum::http::header::ACCEPT;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::core::{PartialObjectMeta, Request};
use kube::{Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::build;
use super::context::Context;
use super::faults;
use super::observe::ClusterState;
use crate::api::TrainingJob;
use crate::api::status::TrainingJobStatus;
use crate::util::lock::lock;

/// The controller's field manager.
pub const MANAGER: &str = "evenkeel-controller";
/// Concurrent requests for one job.
const CONCURRENCY: usize = 8;

/// Response format for created objects: the controller does not read the completed pod, which is
/// expensive to serialise and parse.
const METADATA_ONLY: HeaderValue =
    HeaderValue::from_static("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1");

/// Failure to apply an object.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The API server refused the request or did not answer.
    #[error("{0}")]
    Api(#[from] kube::Error),
    /// `podTemplate` does not give a valid pod.
    #[error("spec.podTemplate does not give a valid pod: {0}")]
    Template(#[from] serde_json::Error),
}

impl ApplyError {
    /// Message for objects that the API server refuses; `None` for errors that a retry may solve.
    pub fn refusal(&self) -> Option<String> {
        match self {
            ApplyError::Template(_) => Some(self.to_string()),
            ApplyError::Api(kube::Error::Api(status)) => {
                let asks =
                    (400..500).contains(&status.code) && ![408, 409, 429].contains(&status.code);
                let text: String = status.message.chars().take(500).collect();
                asks.then(|| format!("the API server refuses the objects of the job: {text}"))
            }
            ApplyError::Api(_) => None,
        }
    }
}

/// Applies the companion objects that must exist before the pods: the service account, without which
/// no pod can be created, and the network policy. Companion objects depend on the job's name alone.
pub async fn before_pods(client: &Client, job: &TrainingJob) -> Result<(), ApplyError> {
    let (account, policy) = (build::service_account(job), build::network_policy(job));
    tokio::try_join!(apply(client, &account), apply(client, &policy))?;
    Ok(())
}

/// Applies the companion objects that running pods need: the Service for their names and the access
/// rights of their agents. The rights are slow to apply with many jobs, since the API server checks
/// all bindings; an agent that starts earlier retries.
pub async fn beside_pods(client: &Client, job: &TrainingJob) -> Result<(), ApplyError> {
    let (role, binding) = (build::role(job), build::role_binding(job));
    let service = build::service(job);
    let access = async {
        // Only an administrator may bind a role that does not exist yet.
        apply(client, &role).await?;
        apply(client, &binding).await
    };
    tokio::try_join!(apply(client, &service), access)?;
    Ok(())
}

async fn apply<K>(client: &Client, object: &K) -> Result<(), kube::Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned,
{
    let namespace = object.namespace().unwrap_or_default();
    let api: Api<K> = Api::namespaced(client.clone(), &namespace);
    let mut applied = serde_json::to_value(object).map_err(kube::Error::SerdeError)?;
    applied["apiVersion"] = json!(K::api_version(&()));
    applied["kind"] = json!(K::kind(&()));
    api.patch_metadata(
        &object.name_any(),
        &PatchParams::apply(MANAGER).force(),
        &Patch::Apply(&applied),
    )
    .await?;
    Ok(())
}

/// Creates the pods of all slots without one and deletes all other pods of the job. The slots include
/// the members of a running generation, so none of these is deleted.
pub async fn pods(
    context: &Context,
    job: &TrainingJob,
    status: &TrainingJobStatus,
    cluster: &ClusterState,
) -> Result<(), ApplyError> {
    let (name, namespace) = (job.name_any(), job.namespace().unwrap_or_default());
    let uid = job.uid().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &namespace);
    context.forget_created(&uid, |pod| cluster.pods.contains_key(pod));
    let wanted: BTreeSet<String> = status.slots.iter().map(|slot| slot.pod(&name)).collect();
    let missing: Vec<Pod> = status
        .slots
        .iter()
        .filter(|slot| !cluster.pods.contains_key(&slot.pod(&name)))
        .filter(|slot| !was_member(status, &slot.pod(&name)))
        .filter(|slot| !context.has_just_created(&uid, &slot.pod(&name)))
        .map(|slot| build::pod(job, *slot, context.image.as_deref()))
        .collect::<Result<_, _>>()?;
    let names: Vec<String> = missing.iter().map(ResourceExt::name_any).collect();
    stream::iter(missing)
        .map(|pod| {
            let client = context.client.clone();
            async move { create(&client, &pod).await }
        })
        .buffer_unordered(CONCURRENCY)
        .try_collect::<()>()
        .await?;
    if !names.is_empty() {
        context.record_created(&uid, names.into_iter());
    }
    let unwanted = cluster
        .pods
        .values()
        .filter(|pod| !wanted.contains(&pod.name_any()));
    stream::iter(unwanted.cloned().collect::<Vec<_>>())
        .map(|pod| {
            let api = api.clone();
            let suspect = |node: &str| lock(&context.suspects).contains(&namespace, node);
            let dead = cluster.needs_forced_deletion(&pod, suspect);
            async move { delete(&api, &pod, dead).await }
        })
        .buffer_unordered(CONCURRENCY)
        .try_collect::<()>()
        .await?;
    Ok(())
}

/// Whether the pod was a member of the generation; the pod of a member is never recreated.
fn was_member(status: &TrainingJobStatus, pod: &str) -> bool {
    let members = status
        .generation
        .iter()
        .flat_map(|current| &current.record.members);
    members
        .filter_map(|member| member.pod.as_ref())
        .any(|member| member.name == pod)
}

async fn create(client: &Client, pod: &Pod) -> Result<(), kube::Error> {
    let parameters = PostParams {
        field_manager: Some(MANAGER.into()),
        ..PostParams::default()
    };
    let body = serde_json::to_vec(pod).map_err(kube::Error::SerdeError)?;
    let namespace = pod.namespace().unwrap_or_default();
    let mut request = Request::new(Pod::url_path(&(), Some(&namespace)))
        .create(&parameters, body)
        .map_err(kube::Error::BuildRequest)?;
    request.headers_mut().insert(ACCEPT, METADATA_ONLY);
    match client.request::<PartialObjectMeta<Pod>>(request).await {
        // Created before a crash, or not in the cache yet: the name identifies it.
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        other => {
            faults::point("pod", "create");
            other.map(|_| ())
        }
    }
}

/// Deletes a pod. No kubelet confirms the end of a pod on a dead node, so that pod is marked as
/// failed, as the pod garbage collector does, and force-deleted. Fencing stops its ranks behind a
/// network partition.
async fn delete(api: &Api<Pod>, pod: &Pod, dead: bool) -> Result<(), kube::Error> {
    let name = pod.name_any();
    let mut parameters = DeleteParams::default();
    if dead {
        let failed = json!({"status": {
            "phase": "Failed",
            "reason": "NodeLost",
            "conditions": [{
                "type": "DisruptionTarget", "status": "True", "reason": "DeletionByEvenkeel",
                "message": "the node does not answer and the job continues without it",
            }],
        }});
        let marked = api
            .patch_status(&name, &PatchParams::default(), &Patch::Strategic(failed))
            .await;
        match marked {
            Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
            other => other.map(|_| ())?,
        }
        parameters.grace_period_seconds = Some(0);
    } else if pod.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    parameters.preconditions = Some(kube::api::Preconditions {
        uid: pod.uid(),
        resource_version: None,
    });
    match api.delete(&name, &parameters).await {
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        other => other.map(|_| ()),
    }
}
