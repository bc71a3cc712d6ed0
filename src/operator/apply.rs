//! Making the cluster look as the status says: objects that should exist are applied, pods that
//! should not are deleted.

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
use super::locked::locked;
use super::observe::Observation;
use crate::job::api::TrainingJob;
use crate::job::api::status::TrainingJobStatus;

/// Our name as a field manager.
pub const MANAGER: &str = "evenkeel-controller";
/// Requests for one job that are under way at once.
const AT_ONCE: usize = 8;

/// What is asked for in answer to an object that was made: a pod as the API server completed it is
/// long to write and to read, and nobody reads it.
const METADATA_ONLY: HeaderValue =
    HeaderValue::from_static("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1");

/// Why something could not be applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The API server said no, or nothing.
    #[error("{0}")]
    Api(#[from] kube::Error),
    /// `podTemplate` makes no pod.
    #[error("spec.podTemplate makes no pod: {0}")]
    Template(#[from] serde_json::Error),
}

impl ApplyError {
    /// What the API server has against the objects, in its words; `None` where trying again is all that
    /// it takes.
    pub fn refusal(&self) -> Option<String> {
        match self {
            ApplyError::Template(_) => Some(self.to_string()),
            ApplyError::Api(kube::Error::Api(status)) => {
                let asks =
                    (400..500).contains(&status.code) && ![408, 409, 429].contains(&status.code);
                let text: String = status.message.chars().take(500).collect();
                asks.then(|| format!("the API server refuses it: {text}"))
            }
            ApplyError::Api(_) => None,
        }
    }
}

/// What must be there before a pod is: its account, without which none can be made, and its
/// network's policy. All companions depend on the job's name alone.
pub async fn before_pods(client: &Client, job: &TrainingJob) -> Result<(), ApplyError> {
    let (account, policy) = (build::service_account(job), build::network_policy(job));
    tokio::try_join!(apply(client, &account), apply(client, &policy))?;
    Ok(())
}

/// What pods need once they run: their names, and what their agents may do. The latter is slow to
/// apply where there are many jobs, since the API server looks through all bindings; an agent that
/// is earlier asks again.
pub async fn beside_pods(client: &Client, job: &TrainingJob) -> Result<(), ApplyError> {
    let (role, binding) = (build::role(job), build::role_binding(job));
    let service = build::service(job);
    let access = async {
        // Nobody but an administrator may bind a role that does not exist yet.
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

/// Makes the pods of all seats that have none, deletes all other pods of the job. Members of a
/// generation that still runs are among the seats, so none of them is deleted.
pub async fn pods(
    context: &Context,
    job: &TrainingJob,
    status: &TrainingJobStatus,
    seen: &Observation,
) -> Result<(), ApplyError> {
    let (name, namespace) = (job.name_any(), job.namespace().unwrap_or_default());
    let uid = job.uid().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &namespace);
    context.cached(&uid, |pod| seen.pods.contains_key(pod));
    let wanted: BTreeSet<String> = status.seats.iter().map(|seat| seat.pod(&name)).collect();
    let missing: Vec<Pod> = status
        .seats
        .iter()
        .filter(|seat| !seen.pods.contains_key(&seat.pod(&name)))
        .filter(|seat| !was_member(status, &seat.pod(&name)))
        .filter(|seat| !context.has_just_created(&uid, &seat.pod(&name)))
        .map(|seat| build::pod(job, *seat, context.image.as_deref()))
        .collect::<Result<_, _>>()?;
    let names: Vec<String> = missing.iter().map(ResourceExt::name_any).collect();
    stream::iter(missing)
        .map(|pod| {
            let client = context.client.clone();
            async move { create(&client, &pod).await }
        })
        .buffer_unordered(AT_ONCE)
        .try_collect::<()>()
        .await?;
    if !names.is_empty() {
        context.created(&uid, names.into_iter());
    }
    let unwanted = seen
        .pods
        .values()
        .filter(|pod| !wanted.contains(&pod.name_any()));
    stream::iter(unwanted.cloned().collect::<Vec<_>>())
        .map(|pod| {
            let api = api.clone();
            let suspect = |node: &str| locked(&context.ledger).suspects_node(node);
            let dead = seen.is_out_of_reach(&pod, suspect);
            async move { delete(&api, &pod, dead).await }
        })
        .buffer_unordered(AT_ONCE)
        .try_collect::<()>()
        .await?;
    Ok(())
}

/// A member whose pod is gone is not made again under the same name.
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
        // Made before a crash, or not seen yet: its name says that it is the same.
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        other => {
            faults::point("pod", "create");
            other.map(|_| ())
        }
    }
}

/// Deletes a pod. Nobody confirms the end of one on a dead node: it is marked as failed, as the
/// pod garbage collector does, and forced out; a rank that lives on behind a cut network is fenced.
async fn delete(api: &Api<Pod>, pod: &Pod, dead: bool) -> Result<(), kube::Error> {
    let name = pod.name_any();
    let mut parameters = DeleteParams::default();
    if dead {
        let failed = json!({"status": {
            "phase": "Failed",
            "reason": "NodeLost",
            "conditions": [{
                "type": "DisruptionTarget", "status": "True", "reason": "DeletionByEvenkeel",
                "message": "the node does not answer and its peers went on without it",
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
