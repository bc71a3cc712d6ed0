//! Builds the objects of a TrainingJob from its spec and status alone. The same job always gives the
//! same objects, so applying them twice has no effect.

mod companions;
mod overlay;
mod pod;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Resource, ResourceExt};

pub use companions::{network_policy, role, role_binding, secret, service, service_account};
pub use pod::{
    TRAINER, is_outdated, pod, proof_name, proof_pod, resource_request, run_directory, template_of,
};

use crate::api::TrainingJob;

/// HTTP port of the agents.
pub use crate::lifecycle::event_log::AGENT_PORT;
/// HTTP port of the agents for health and metrics, which need no key.
pub const METRICS_PORT: u16 = 8472;
/// Rank 0 of generation N listens on this port plus N modulo [`MASTER_PORTS`], so a generation never
/// waits for the port of the previous one.
pub const MASTER_PORT: u16 = 29500;
/// Number of ports that the generations use in turn.
pub const MASTER_PORTS: u16 = 100;
/// Label with the name of a pod's TrainingJob.
pub const JOB_LABEL: &str = "evenkeel.dev/job";
/// Label with the number of the slot that a pod fills.
pub const SLOT_LABEL: &str = "evenkeel.dev/slot";
/// Label of the pod that proves a job's ledger, with the number of the proof.
pub const PROOF_LABEL: &str = "evenkeel.dev/proof";

/// Label with a hash of the spec fields from which a pod was made.
pub const TEMPLATE_LABEL: &str = "evenkeel.dev/template";

/// Labels that select all pods of a job.
pub fn selector(job: &TrainingJob) -> BTreeMap<String, String> {
    BTreeMap::from([(JOB_LABEL.to_string(), job.name_any())])
}

/// Name, labels and owner of an object of the job.
fn metadata(job: &TrainingJob, name: String) -> ObjectMeta {
    let owner = job.controller_owner_ref(&()).map(|owner| OwnerReference {
        block_owner_deletion: Some(true),
        ..owner
    });
    let mut labels = selector(job);
    labels.insert("app.kubernetes.io/managed-by".into(), "evenkeel".into());
    ObjectMeta {
        name: Some(name),
        namespace: job.namespace(),
        labels: Some(labels),
        owner_references: owner.map(|owner| vec![owner]),
        ..ObjectMeta::default()
    }
}

/// Name of the job's companion objects of every kind. The prefix keeps it apart from users' names; at
/// most 52 characters of the job's name keep it a DNS label. Different jobs have different names.
fn companion(job: &TrainingJob) -> String {
    format!("evenkeel-{}", job.name_any())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Serialize;
    use serde_json::json;

    use super::*;
    use crate::api::LONGEST_NAME;
    use crate::api::status::Slot;
    use crate::operator::testing::job;

    fn yaml(object: &impl Serialize) -> String {
        serde_saphyr::to_string(object).unwrap()
    }

    /// Snapshot of all objects of one job: security contexts, volumes, NCCL variables, network access and
    /// access rights.
    #[test]
    fn the_objects_of_a_job() {
        let job: TrainingJob = serde_json::from_value(json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": "first", "namespace": "training", "uid": "u-1"},
            "spec": {
                "nodes": 2, "gpusPerNode": 8, "image": "evenkeel/evenkeel:0.1.0",
                "resourceName": "nvidia.com/mig-1g.10gb", "recipe": {"inline": ""},
                "checkpoint": {"claim": "checkpoints"},
                "trainer": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
                "serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/train"},
                "podTemplate": {"spec": {
                    "nodeSelector": {"pool": "gpu"}, "priorityClassName": "batch",
                    "imagePullSecrets": [{"name": "registry"}],
                }},
            },
        }))
        .unwrap();
        let slot = Slot {
            number: 1,
            attempt: 4,
        };
        let objects = [
            yaml(&pod(&job, slot, None).unwrap()),
            yaml(&service(&job).unwrap()),
            yaml(&network_policy(&job, "evenkeel-system").unwrap()),
            yaml(&secret(&job, &"0".repeat(64).parse().unwrap())),
            yaml(&service_account(&job)),
            yaml(&role(&job).unwrap()),
            yaml(&role_binding(&job).unwrap()),
        ];
        insta::assert_snapshot!(objects.join("---\n"));
    }

    #[test]
    fn the_longest_job_name_gives_names_of_dns_labels() {
        let name = "a".repeat(LONGEST_NAME);
        let last = Slot {
            number: 1023,
            attempt: 99_999,
        };
        assert!(companion(&job(&name, "u")).len() <= 63);
        assert_eq!(last.pod(&name).len(), 63);
    }

    proptest! {
        /// Slots and attempts have no dashes, so the end of a pod's name determines its job.
        #[test]
        fn objects_of_different_jobs_have_different_names(
            names in proptest::array::uniform2("[a-b]([-a-b0-2]{0,6}[a-b0-2])?"),
            slots in proptest::array::uniform2((0u32..4, 0u32..4)),
        ) {
            let [one, other] = &names;
            let [a, b] = slots.map(|(number, attempt)| Slot { number, attempt });
            prop_assert_eq!(a.pod(one) == b.pod(other), one == other && a == b);
            let (first, second) = (companion(&job(one, "u")), companion(&job(other, "u")));
            prop_assert_eq!(first == second, one == other);
        }
    }
}
