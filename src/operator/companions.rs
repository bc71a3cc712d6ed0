//! Companion objects that are deleted while their job needs them: the controller creates them again. The Secret is not among
//! them, since the controller may not watch Secrets: it is created again with the next pods.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream::{BoxStream, select_all};
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{NamespaceResourceScope, PartialObjectMeta};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::UnboundedSender;
use tracing::info;

use super::context::{Companions, Context};
use super::ownership::controlling_job;
use super::stores::api;
use crate::api::TrainingJob;
use crate::api::status::TrainingJobStatus;

/// Objects in a response to a list.
const PAGE: u32 = 250;

/// Has the jobs of deleted companion objects reconciled, with all of these to be applied again.
pub async fn restore(
    context: Arc<Context>,
    namespace: Option<String>,
    changed: UnboundedSender<ObjectRef<TrainingJob>>,
) {
    let (client, namespace) = (&context.client, namespace.as_deref());
    let mut deleted = select_all([
        deletions::<Service>(client, namespace),
        deletions::<ServiceAccount>(client, namespace),
        deletions::<Role>(client, namespace),
        deletions::<RoleBinding>(client, namespace),
        deletions::<NetworkPolicy>(client, namespace),
    ]);
    while let Some(companion) = deleted.next().await {
        if let Some(job) = forget(&context, &companion)
            && changed.send(job).is_err()
        {
            return;
        }
    }
}

/// The metadata of companion objects of one kind as they are deleted.
fn deletions<K>(client: &Client, namespace: Option<&str>) -> BoxStream<'static, ObjectMeta>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + DeserializeOwned
        + Send
        + 'static,
{
    let own = watcher::Config::default()
        .labels("app.kubernetes.io/managed-by=evenkeel")
        .page_size(PAGE);
    let events = watcher(api::<PartialObjectMeta<K>>(client, namespace), own).default_backoff();
    let deleted = events.filter_map(async |event| match event {
        Ok(Event::Delete(object)) => Some(object.metadata),
        _ => None,
    });
    deleted.boxed()
}

/// The job that needs a deleted companion object. All of them count as missing from now on.
pub(super) fn forget(context: &Context, companion: &ObjectMeta) -> Option<ObjectRef<TrainingJob>> {
    let owner = controlling_job(companion)?;
    let namespace = companion.namespace.as_deref()?;
    let reference = ObjectRef::<TrainingJob>::new(&owner.name).within(namespace);
    let job = context.known.get(&reference)?;
    let is_over = job.status.as_ref().is_some_and(TrainingJobStatus::is_over);
    let leaves = job.metadata.deletion_timestamp.is_some() || is_over;
    if leaves || job.metadata.uid.as_ref() != Some(&owner.uid) {
        return None;
    }
    let name = companion.name.as_deref();
    info!(
        job = owner.name,
        namespace, name, "a companion object was deleted"
    );
    context.state(&job, |state| {
        state.deleted_companions += 1;
        state.applied = Companions::Missing;
    });
    Some(reference)
}
