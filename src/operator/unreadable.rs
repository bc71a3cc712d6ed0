//! TrainingJobs that this controller cannot read: the schema admitted an invalid spec, or another
//! version of the controller wrote the status. One of them must not hide the others. It gets a
//! condition and waits for a change; its pods continue by the last readable spec.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::error_boundary::{DeserializeGuard, InvalidObject};
use kube::runtime::watcher::Event;
use kube::{Client, Resource};
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tracing::warn;

use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::schema::MESSAGE;
use crate::api::{CheckpointVolume, TrainingJob, TrainingJobSpec};

/// Type of the condition; only jobs that once were unreadable have it.
const READABLE: &str = ConditionType::Readable.name();
/// Separate field manager: an apply under the controller's name would remove the unreadable status.
const MANAGER: &str = "evenkeel-unreadable";
/// Pauses before the attempts to write the condition.
const PAUSES: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
];

/// Passes on readable jobs and sends unreadable ones to `aside`.
pub fn readable(
    event: Event<DeserializeGuard<TrainingJob>>,
    aside: &UnboundedSender<InvalidObject>,
) -> Option<Event<TrainingJob>> {
    let take = |guarded: DeserializeGuard<TrainingJob>| match guarded.0 {
        Ok(job) => Some(job),
        Err(invalid) => {
            // The receiver is dropped when the controller ends.
            let _ = aside.send(invalid);
            None
        }
    };
    Some(match event {
        Event::Apply(job) => Event::Apply(take(job)?),
        Event::InitApply(job) => Event::InitApply(take(job)?),
        Event::Delete(job) => Event::Delete(job.0.unwrap_or_else(without_spec)),
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
    })
}

/// Placeholder for an unreadable job that was deleted: only its metadata is read.
fn without_spec(invalid: InvalidObject) -> TrainingJob {
    TrainingJob {
        metadata: invalid.metadata,
        spec: TrainingJobSpec {
            recipe: Default::default(),
            overrides: Vec::new(),
            nodes: 1,
            gpus_per_node: 1,
            resource_name: String::new(),
            elasticity: Default::default(),
            image: String::new(),
            trainer: Default::default(),
            checkpoint: CheckpointVolume::default(),
            budgets: Default::default(),
            suspend: false,
            pod_template: None,
            ttl_seconds_after_finished: None,
        },
        status: None,
    }
}

/// Writes the condition on unreadable jobs, once for each distinct error.
pub async fn report(client: Client, mut objects: UnboundedReceiver<InvalidObject>) {
    let mut reported: HashMap<String, String> = HashMap::new();
    while let Some(object) = objects.recv().await {
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if reported.get(&uid) == Some(&object.error) {
            continue;
        }
        warn!(job = object.metadata.name, namespace = object.metadata.namespace, error = %object.error, "cannot read a TrainingJob");
        for pause in PAUSES {
            tokio::time::sleep(pause).await;
            match write(&client, &object).await {
                Ok(()) => break,
                Err(error) => warn!(%error, "cannot write a condition"),
            }
        }
        reported.insert(uid, object.error);
    }
}

async fn write(client: &Client, object: &InvalidObject) -> Result<(), kube::Error> {
    let name = object.metadata.name.clone().unwrap_or_default();
    let namespace = object.metadata.namespace.clone().unwrap_or_default();
    let resource = ApiResource::erase::<TrainingJob>(&());
    let jobs: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &resource);
    let error: String = object.error.chars().take(500).collect();
    let message = format!(
        "this controller cannot read the job: {error}; correct its spec, or delete and apply it again"
    );
    let message: String = message.chars().take(MESSAGE).collect();
    let patch = json!({
        "apiVersion": TrainingJob::api_version(&()),
        "kind": TrainingJob::kind(&()),
        "metadata": {"name": name},
        "status": {
            "message": message,
            "conditions": [{
                "type": READABLE, "status": "False", "reason": ConditionReason::Unreadable.name(), "message": message,
                "observedGeneration": object.metadata.generation,
                "lastTransitionTime": Timestamp::now().to_string(),
            }],
        },
    });
    let parameters = PatchParams::apply(MANAGER).force();
    match jobs
        .patch_status(&name, &parameters, &Patch::Apply(patch))
        .await
    {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        other => other.map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    fn job(nodes: serde_json::Value) -> DeserializeGuard<TrainingJob> {
        serde_json::from_value(json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": "a", "namespace": "n", "uid": "u"},
            "spec": {
                "recipe": {"inline": ""}, "image": "i", "checkpoint": {"path": "/c"}, "nodes": nodes,
            },
        }))
        .unwrap()
    }

    #[test]
    fn unreadable_jobs_go_aside() {
        let (aside, mut unreadable) = unbounded_channel();
        let good = readable(Event::Apply(job(json!(2))), &aside);
        assert!(matches!(good, Some(Event::Apply(job)) if job.spec.nodes == 2));
        for event in [Event::Apply, Event::InitApply] {
            assert!(readable(event(job(json!("two"))), &aside).is_none());
            let invalid = unreadable.try_recv().unwrap();
            assert_eq!(invalid.metadata.name.as_deref(), Some("a"));
        }
        // The cache must drop it as well.
        let gone = readable(Event::Delete(job(json!("two"))), &aside);
        assert!(
            matches!(gone, Some(Event::Delete(job)) if job.metadata.uid.as_deref() == Some("u"))
        );
        assert!(unreadable.try_recv().is_err());
    }
}
