//! Ownership of objects. The controller changes and deletes only objects whose controller reference has
//! the uid of the job. A name or a label is not enough: an object of another owner may have it.

use std::fmt::Debug;

use axum::http::HeaderValue;
use axum::http::header::ACCEPT;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::core::{PartialObjectMeta, Request};
use kube::{Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::error::ReconcileError;
use crate::api::TrainingJob;

/// The controller's field manager.
pub const MANAGER: &str = "evenkeel-controller";

/// Response format for created objects: the controller does not read the completed object, which is
/// expensive to serialise and parse.
const METADATA_ONLY: HeaderValue =
    HeaderValue::from_static("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1");

/// A type of object that the controller creates for jobs.
pub trait JobObject:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
{
}

impl<K> JobObject for K where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned
{
}

/// The TrainingJob that controls an object.
pub fn controlling_job(object: &ObjectMeta) -> Option<&OwnerReference> {
    let mut owners = object.owner_references.iter().flatten();
    let controller = owners.find(|owner| owner.controller == Some(true))?;
    let group = controller.api_version.split('/').next();
    let is_job =
        group == Some(&*TrainingJob::group(&())) && controller.kind == TrainingJob::kind(&());
    is_job.then_some(controller)
}

/// Whether this job controls the object, and not an earlier job of the same name.
pub fn is_owned_by(object: &ObjectMeta, job: &TrainingJob) -> bool {
    controlling_job(object).is_some_and(|owner| Some(&owner.uid) == job.metadata.uid.as_ref())
}

/// Kind and name of an object, for messages.
pub fn title<K: JobObject>(object: &K) -> String {
    format!("{} `{}`", K::kind(&()), object.name_any())
}

/// Creates an object of a job. An object that has the name already is only read, and returned if the job owns it.
pub async fn create<K: JobObject>(
    client: &Client,
    job: &TrainingJob,
    object: &K,
) -> Result<Option<K>, ReconcileError> {
    let (name, namespace) = (object.name_any(), object.namespace().unwrap_or_default());
    let parameters = PostParams {
        field_manager: Some(MANAGER.into()),
        ..PostParams::default()
    };
    let body = serde_json::to_vec(object).map_err(kube::Error::SerdeError)?;
    let mut request = Request::new(K::url_path(&(), Some(&namespace)))
        .create(&parameters, body)
        .map_err(kube::Error::BuildRequest)?;
    request.headers_mut().insert(ACCEPT, METADATA_ONLY);
    match client.request::<PartialObjectMeta<K>>(request).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        other => return Ok(other.map(|_| None)?),
    }
    let api: Api<K> = Api::namespaced(client.clone(), &namespace);
    let Some(existing) = api.get_opt(&name).await? else {
        return Err(ReconcileError::Leaving(title(object)));
    };
    let Some(owner) = controlling_job(existing.meta()) else {
        return Err(ReconcileError::NameTaken(title(object)));
    };
    let is_own = Some(&owner.uid) == job.metadata.uid.as_ref();
    if is_own && existing.meta().deletion_timestamp.is_none() {
        return Ok(Some(existing));
    }
    // A namespace has one TrainingJob of a name, so another owner of it is gone and its objects follow.
    if is_own || Some(&owner.name) == job.metadata.name.as_ref() {
        return Err(ReconcileError::Leaving(title(object)));
    }
    Err(ReconcileError::NameTaken(title(object)))
}

/// Updates an existing object of a job if a field differs from `object`, for example after an upgrade
/// of the controller. Fails with a conflict if the object has changed or was replaced since it was read.
pub async fn update<K: JobObject>(
    client: &Client,
    existing: &K,
    object: &K,
) -> Result<(), kube::Error> {
    let value = |object: &K| serde_json::to_value(object).map_err(kube::Error::SerdeError);
    let mut fields = value(object)?;
    if let Some(metadata) = fields["metadata"].as_object_mut() {
        // The existing reference is the job's. The list may have further owners.
        metadata.remove("ownerReferences");
    }
    if covers(&value(existing)?, &fields) {
        return Ok(());
    }
    fields["metadata"]["uid"] = json!(existing.uid());
    fields["metadata"]["resourceVersion"] = json!(existing.resource_version());
    let api: Api<K> = Api::namespaced(client.clone(), &object.namespace().unwrap_or_default());
    let parameters = PatchParams {
        field_manager: Some(MANAGER.into()),
        ..PatchParams::default()
    };
    let patch = Patch::Merge(fields);
    api.patch_metadata(&object.name_any(), &parameters, &patch)
        .await
        .map(|_| ())
}

/// Whether `existing` has all of `fields`. It may have more, such as the API server's defaults; but an
/// empty selector matches only an empty one.
fn covers(existing: &Value, fields: &Value) -> bool {
    match (existing, fields) {
        (Value::Object(existing), Value::Object(fields)) if fields.is_empty() => {
            existing.is_empty()
        }
        (Value::Object(existing), Value::Object(fields)) => {
            let mut fields = fields.iter();
            fields.all(|(key, value)| existing.get(key).is_some_and(|own| covers(own, value)))
        }
        (Value::Array(existing), Value::Array(fields)) => {
            let mut pairs = existing.iter().zip(fields);
            existing.len() == fields.len() && pairs.all(|(own, value)| covers(own, value))
        }
        (existing, fields) => existing == fields,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::{Pod, Service, ServiceAccount};
    use k8s_openapi::api::networking::v1::NetworkPolicy;
    use k8s_openapi::api::rbac::v1::{Role, RoleBinding};

    use super::*;
    use crate::api::status::Slot;
    use crate::operator::build;
    use crate::operator::testing::{ApiServer, job, owner};

    /// Creates `object` while an object with these fields of its metadata has its name; returns the result
    /// and whether that object is unchanged.
    async fn beside<K: JobObject>(
        kind: &str,
        object: &K,
        metadata: &Value,
    ) -> (Result<Option<K>, ReconcileError>, bool) {
        let server = Arc::new(ApiServer::default());
        let mut existing = json!({"metadata": metadata, "data": "of the victim"});
        existing["metadata"]["name"] = json!(object.name_any());
        server.put(kind, existing);
        let before = server.get(kind, &object.name_any());
        let made = create(&server.client(), &job("x", "u"), object).await;
        let requests = server.requests(kind);
        assert_eq!(requests.len(), 2, "a POST and a GET: {requests:?}");
        (made, server.get(kind, &object.name_any()) == before)
    }

    async fn is_left_alone<K: JobObject>(kind: &str, object: &K) {
        let mut not_controller = owner("x", "u");
        not_controller["controller"] = json!(false);
        let mut another_kind = owner("x", "u");
        another_kind["apiVersion"] = json!("apps/v1");
        for metadata in [
            json!({}),
            json!({"labels": {"evenkeel.dev/job": "x", "app.kubernetes.io/managed-by": "evenkeel"}}),
            json!({"ownerReferences": [not_controller]}),
            json!({"ownerReferences": [another_kind]}),
            json!({"ownerReferences": [owner("another", "v")]}),
            json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        ] {
            let (made, unchanged) = beside(kind, object, &metadata).await;
            assert!(
                matches!(made, Err(ReconcileError::NameTaken(_))),
                "{kind} {metadata}: {made:?}"
            );
            assert!(unchanged, "{kind} {metadata}");
        }
    }

    #[tokio::test]
    async fn objects_of_other_owners_are_not_adopted() {
        let job = job("x", "u");
        let pod = build::pod(&job, Slot::default(), None).unwrap();
        is_left_alone::<Pod>("pods", &pod).await;
        is_left_alone::<Service>("services", &build::service(&job).unwrap()).await;
        is_left_alone::<ServiceAccount>("serviceaccounts", &build::service_account(&job)).await;
        is_left_alone::<NetworkPolicy>(
            "networkpolicies",
            &build::network_policy(&job, "system").unwrap(),
        )
        .await;
        is_left_alone::<Role>("roles", &build::role(&job).unwrap()).await;
        is_left_alone::<RoleBinding>("rolebindings", &build::role_binding(&job).unwrap()).await;
    }

    #[tokio::test]
    async fn objects_of_the_job_are_adopted_and_left_ones_waited_for() {
        let service = build::service(&job("x", "u")).unwrap();
        let deleted = "2026-01-01T00:00:00Z";
        let own = json!({"ownerReferences": [owner("x", "u")]});
        let (made, _) = beside("services", &service, &own).await;
        assert!(matches!(made, Ok(Some(_))), "{made:?}");
        for leaving in [
            json!({"ownerReferences": [owner("x", "u")], "deletionTimestamp": deleted}),
            json!({"ownerReferences": [owner("x", "earlier")]}),
            json!({"ownerReferences": [owner("x", "earlier")], "deletionTimestamp": deleted}),
        ] {
            let (made, unchanged) = beside("services", &service, &leaving).await;
            assert!(
                matches!(made, Err(ReconcileError::Leaving(_))),
                "{leaving}: {made:?}"
            );
            assert!(unchanged, "{leaving}");
        }
    }

    #[tokio::test]
    async fn an_object_of_an_older_controller_is_updated() {
        let server = Arc::new(ApiServer::default());
        let client = server.client();
        let job = job("x", "u");
        let policy = build::network_policy(&job, "system").unwrap();
        let mut older = serde_json::to_value(&policy).unwrap();
        older["spec"]["ingress"] = json!([{}]);
        older["metadata"]["annotations"] = json!({"of": "an administrator"});
        server.put("networkpolicies", older);
        let read = async || match create(&client, &job, &policy).await.unwrap() {
            Some(existing) => existing,
            other => panic!("{other:?}"),
        };
        let existing = read().await;
        update(&client, &existing, &policy).await.unwrap();
        let updated = read().await;
        assert_eq!(updated.spec, policy.spec);
        assert_eq!(
            updated.metadata.annotations.as_ref().unwrap()["of"],
            "an administrator"
        );
        // Without a difference there is no write.
        update(&client, &updated, &policy).await.unwrap();
        let requests = server.requests("networkpolicies");
        let patches = requests
            .iter()
            .filter(|request| request.starts_with("PATCH"));
        assert_eq!(patches.count(), 1);
    }

    #[tokio::test]
    async fn an_object_that_was_replaced_meanwhile_is_not_updated() {
        let server = Arc::new(ApiServer::default());
        let client = server.client();
        let job = job("x", "u");
        let policy = build::network_policy(&job, "system").unwrap();
        let mut own = serde_json::to_value(&policy).unwrap();
        own["spec"]["ingress"] = json!([]);
        server.put("networkpolicies", own);
        let Some(existing) = create(&client, &job, &policy).await.unwrap() else {
            panic!("the job owns it");
        };
        server.put(
            "networkpolicies",
            json!({"metadata": {"name": policy.name_any(), "uid": "of the victim"}}),
        );
        let refused = update(&client, &existing, &policy).await;
        assert!(matches!(&refused, Err(kube::Error::Api(status)) if status.is_conflict()));
        let kept = server.get("networkpolicies", &policy.name_any()).unwrap();
        assert_eq!(kept["spec"], Value::Null);
    }

    #[test]
    fn defaults_of_the_api_server_are_no_difference() {
        let fields = json!({"ports": [{"port": 1}], "selector": {"a": "b"}, "from": [{}]});
        let completed = json!({
            "ports": [{"port": 1, "protocol": "TCP"}], "selector": {"a": "b"}, "from": [{}], "type": "ClusterIP",
        });
        assert!(covers(&completed, &fields));
        for different in [
            json!({"ports": [{"port": 2}], "selector": {"a": "b"}, "from": [{}]}),
            json!({"ports": [{"port": 1}, {"port": 2}], "selector": {"a": "b"}, "from": [{}]}),
            json!({"ports": [{"port": 1}], "selector": {"a": "b"}, "from": [{"podSelector": {}}]}),
            json!({"ports": [{"port": 1}], "from": [{}]}),
        ] {
            assert!(!covers(&different, &fields), "{different}");
        }
    }
}
