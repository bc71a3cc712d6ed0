//! The objects of a TrainingJob, made from its spec and status alone: the same job always gives the
//! same objects, so applying them twice does nothing.

mod access;
mod network;
mod overlay;
mod pod;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Resource, ResourceExt};

pub use access::{role, role_binding, service_account};
pub use network::{network_policy, service};
pub use pod::{is_outdated, pod, run_directory, tolerations_and_selector};

use crate::job::api::TrainingJob;

/// The port of the agents' HTTP.
pub const AGENT_PORT: u16 = 8471;
/// Where rank 0 of generation N listens: this port and N modulo [`MASTER_PORTS`] above it, so that
/// the next generation never waits for the last one's port.
pub const MASTER_PORT: u16 = 29500;
/// How many ports the generations take turns with.
pub const MASTER_PORTS: u16 = 100;
/// The label that says which TrainingJob a pod belongs to.
pub const JOB_LABEL: &str = "evenkeel.dev/job";
/// The label that says which seat a pod fills.
pub const SEAT_LABEL: &str = "evenkeel.dev/seat";

/// The label that says what of the job's spec a pod was made from.
pub const TEMPLATE_LABEL: &str = "evenkeel.dev/template";

/// Labels that select all pods of a job.
pub fn selector(job: &TrainingJob) -> BTreeMap<String, String> {
    BTreeMap::from([(JOB_LABEL.to_string(), job.name_any())])
}

/// Name, labels and owner of an object of the job.
fn metadata(job: &TrainingJob, name: String) -> ObjectMeta {
    let mut labels = selector(job);
    labels.insert("app.kubernetes.io/managed-by".into(), "evenkeel".into());
    ObjectMeta {
        name: Some(name),
        namespace: job.namespace(),
        labels: Some(labels),
        owner_references: Some(vec![owner(job)]),
        ..ObjectMeta::default()
    }
}

fn owner(job: &TrainingJob) -> OwnerReference {
    OwnerReference {
        api_version: TrainingJob::api_version(&()).into(),
        kind: TrainingJob::kind(&()).into(),
        name: job.name_any(),
        uid: job.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// The name of the job's service account, role and binding.
fn account(job: &TrainingJob) -> String {
    format!("{}-agent", job.name_any())
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde_json::json;

    use super::*;
    use crate::job::api::status::Seat;

    fn yaml(object: &impl Serialize) -> String {
        serde_saphyr::to_string(object).unwrap()
    }

    /// All that is made of one job, for people to read: security contexts, volumes, what NCCL is told, who
    /// may reach the pods and what these may do.
    #[test]
    fn the_objects_of_a_job_are_these() {
        let job: TrainingJob = serde_json::from_value(json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": "first", "namespace": "training", "uid": "u-1"},
            "spec": {
                "nodes": 2, "gpusPerNode": 8, "image": "evenkeel/evenkeel:0.1.0",
                "resourceName": "nvidia.com/mig-1g.10gb", "recipe": {"inline": ""},
                "checkpoint": {"claim": "checkpoints"},
                "trainer": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
                "podTemplate": {"spec": {
                    "nodeSelector": {"pool": "gpu"}, "priorityClassName": "batch",
                    "imagePullSecrets": [{"name": "registry"}],
                }},
            },
        }))
        .unwrap();
        let seat = Seat {
            number: 1,
            attempt: 4,
        };
        let objects = [
            yaml(&pod(&job, seat, None).unwrap()),
            yaml(&service(&job)),
            yaml(&network_policy(&job)),
            yaml(&service_account(&job)),
            yaml(&role(&job)),
            yaml(&role_binding(&job)),
        ];
        insta::assert_snapshot!(objects.join("---\n"));
    }
}
