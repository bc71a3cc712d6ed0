//! Access rights of the pods: they may read their TrainingJob and nothing else.

use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;

use super::{companion, metadata};
use crate::api::TrainingJob;

/// Service account of the job's pods.
pub fn service_account(job: &TrainingJob) -> ServiceAccount {
    let annotations = &job.spec.service_account_annotations;
    ServiceAccount {
        metadata: ObjectMeta {
            annotations: Some(annotations.clone()).filter(|annotations| !annotations.is_empty()),
            ..metadata(job, companion(job))
        },
        ..ServiceAccount::default()
    }
}

/// Role that may read one TrainingJob. With a resource name, list and watch need the field selector
/// `metadata.name`.
pub fn role(job: &TrainingJob) -> Role {
    Role {
        metadata: metadata(job, companion(job)),
        rules: Some(vec![PolicyRule {
            api_groups: Some(vec!["evenkeel.dev".into()]),
            resources: Some(vec!["trainingjobs".into()]),
            resource_names: Some(vec![job.name_any()]),
            verbs: ["get", "list", "watch"].map(String::from).to_vec(),
            ..PolicyRule::default()
        }]),
    }
}

/// Binding of the role to the service account.
pub fn role_binding(job: &TrainingJob) -> RoleBinding {
    RoleBinding {
        metadata: metadata(job, companion(job)),
        role_ref: RoleRef {
            api_group: "rbac.authorization.k8s.io".into(),
            kind: "Role".into(),
            name: companion(job),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".into(),
            name: companion(job),
            namespace: job.namespace(),
            ..Subject::default()
        }]),
    }
}
