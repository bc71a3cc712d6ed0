//! The objects beside the pods: their identity and access rights, their DNS names, network access to them, and the key of
//! their agents and ranks.

use k8s_openapi::api::core::v1::{Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::ResourceExt;
use serde_json::{Result, from_value, json};

use super::{AGENT_PORT, METRICS_PORT, companion, metadata, selector};
use crate::api::TrainingJob;
use crate::lifecycle::authentication::{KEY_FILE, job_key, secret_name};
use crate::util::key::Key;

/// Service account of the job's pods.
pub fn service_account(job: &TrainingJob) -> ServiceAccount {
    let annotations = &job.spec.service_account_annotations;
    let mut metadata = metadata(job, companion(job));
    metadata.annotations = Some(annotations.clone()).filter(|annotations| !annotations.is_empty());
    ServiceAccount {
        metadata,
        ..ServiceAccount::default()
    }
}

/// Role that may read one TrainingJob and nothing else. With a resource name, list and watch need the field selector
/// `metadata.name`.
pub fn role(job: &TrainingJob) -> Result<Role> {
    from_value(json!({
        "metadata": metadata(job, companion(job)),
        "rules": [{
            "apiGroups": ["evenkeel.dev"],
            "resources": ["trainingjobs"],
            "resourceNames": [job.name_any()],
            "verbs": ["get", "list", "watch"],
        }],
    }))
}

/// Binding of the role to the service account.
pub fn role_binding(job: &TrainingJob) -> Result<RoleBinding> {
    let name = companion(job);
    from_value(json!({
        "metadata": metadata(job, companion(job)),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace()}],
    }))
}

/// Headless Service: gives each pod a DNS name, also before it is ready.
pub fn service(job: &TrainingJob) -> Result<Service> {
    from_value(json!({
        "metadata": metadata(job, companion(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": selector(job),
            "ports": [{"name": "agent", "port": AGENT_PORT}],
        },
    }))
}

/// Restricts ingress only. The job's pods may connect on every port. On the agents' port the controller may
/// connect. On the port for metrics, pods with the label `evenkeel.dev/scrape` may, in the job's namespace or in a
/// namespace with that label: only an administrator labels namespaces, while any tenant labels pods. Egress is
/// open, since closing it breaks DNS, model hubs and storage.
///
/// `controller`: the controller's namespace.
pub fn network_policy(job: &TrainingJob, controller: &str) -> Result<NetworkPolicy> {
    let labelled = |key: &str, value: &str| json!({"matchLabels": {key: value}});
    let port = |number: u16| json!([{"port": number, "protocol": "TCP"}]);
    let own = json!({"matchLabels": selector(job)});
    let scrape = labelled("evenkeel.dev/scrape", "true");
    from_value(json!({
        "metadata": metadata(job, companion(job)),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {
                    "from": [{
                        "namespaceSelector": labelled("kubernetes.io/metadata.name", controller),
                        "podSelector": labelled("app.kubernetes.io/name", "evenkeel-controller"),
                    }],
                    "ports": port(AGENT_PORT),
                },
                {
                    "from": [
                        {"podSelector": scrape},
                        {"namespaceSelector": scrape, "podSelector": scrape},
                    ],
                    "ports": port(METRICS_PORT),
                },
            ],
        },
    }))
}

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
