//! Applies the status to the cluster: creates the objects that should exist and deletes the pods that
//! should not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::json;

use super::build;
use super::context::{CACHED, Companions, Reconciliation, pause};
use super::error::ReconcileError;
use super::faults;
use super::keys;
use super::observe::ClusterState;
use super::ownership::{self, JobObject};
use crate::api::status::TrainingJobStatus;

/// Concurrent requests for one job.
const CONCURRENCY: usize = 8;

impl Reconciliation<'_> {
    /// Creates and deletes objects according to the status; true if the job must be reconciled again at once.
    pub async fn apply(
        &self,
        status: &TrainingJobStatus,
        cluster: &ClusterState,
        action: &str,
    ) -> Result<bool, ReconcileError> {
        // A job without slots needs no companion objects.
        let (applied, deleted) = self.state(|state| (state.applied, state.deleted_companions));
        let due = if status.slots.is_empty() {
            Companions::Complete
        } else {
            applied
        };
        let create = async {
            if due == Companions::Missing {
                self.before_pods().await?;
                self.context.record_first_pods(self.job, deleted);
                faults::point("companions", action);
            }
            let beside = async {
                // The remaining companion objects wait for a later reconciliation, so that the pods of other jobs
                // come first. Events of the job's own pods trigger that reconciliation.
                if due == Companions::BeforePods && !self.context.is_burst_of_others(self.job) {
                    self.beside_pods().await?;
                    self.state(|state| state.record_applied(Companions::Complete, deleted));
                }
                Ok(())
            };
            let (pods, beside) = tokio::join!(self.create_pods(status, cluster), beside);
            first([pods, beside])
        };
        // Deletions do not wait for objects that cannot be created.
        let (deleted, created) = tokio::join!(self.delete_pods(status, cluster), create);
        first([deleted, created])?;
        faults::point("pods", action);
        Ok(due == Companions::Missing)
    }

    /// Creates the companion objects that must exist before the pods: the service account, without which
    /// no pod can be created, the network policy and the Secret with the job's key. The others depend on the job's name
    /// alone.
    async fn before_pods(&self) -> Result<(), ReconcileError> {
        let Reconciliation { job, context, .. } = *self;
        let account = build::service_account(job);
        let policy = build::network_policy(job, &context.namespace)?;
        let (account, policy, key) = tokio::join!(
            self.companion(&account),
            self.companion(&policy),
            self.key_secret()
        );
        first([account, policy, key])
    }

    /// Creates the Secret with the job's key, unless one has its name. Any Secret of this name is taken for the right one:
    /// the controller may not read it.
    async fn key_secret(&self) -> Result<(), ReconcileError> {
        let Reconciliation { job, context, .. } = *self;
        let secret = build::secret(job, &context.key);
        let namespace = job.namespace().unwrap_or_default();
        keys::create_secret(context.client.clone(), &namespace, &secret).await?;
        Ok(())
    }

    /// Creates the companion objects that running pods need: the Service for their names and the access
    /// rights of their agents. The rights are slow to create with many jobs, since the API server checks
    /// all bindings; an agent that starts earlier retries.
    async fn beside_pods(&self) -> Result<(), ReconcileError> {
        let (role, binding) = (build::role(self.job)?, build::role_binding(self.job)?);
        let service = build::service(self.job)?;
        let access = async {
            // Only an administrator may bind a role that does not exist yet.
            self.companion(&role).await?;
            self.companion(&binding).await
        };
        let (service, access) = tokio::join!(self.companion(&service), access);
        first([service, access])
    }

    /// Creates a companion object, or updates the existing one if the job owns it.
    async fn companion<K: JobObject>(&self, object: &K) -> Result<(), ReconcileError> {
        if let Some(existing) = self.create(object).await? {
            ownership::update(&self.context.client, &existing, object).await?;
        }
        Ok(())
    }

    /// Creates an object, or returns the existing one if the job owns it. A name that another object has is
    /// tried again after a growing pause, however often the job is reconciled.
    async fn create<K: JobObject>(&self, object: &K) -> Result<Option<K>, ReconcileError> {
        let name = ownership::title(object);
        let taken = self.state(|state| state.taken.get(&name).copied());
        if taken.is_some_and(|(_, retry)| Instant::now() < retry) {
            return Err(ReconcileError::NameTaken(name));
        }
        let made = ownership::create(&self.context.client, self.job, object).await;
        self.state(|state| match made {
            Err(ReconcileError::NameTaken(_)) => {
                let attempts = taken.map_or(0, |(attempts, _)| attempts);
                let next = (attempts.saturating_add(1), Instant::now() + pause(attempts));
                state.taken.insert(name, next);
            }
            Ok(_) | Err(ReconcileError::Leaving(_)) => drop(state.taken.remove(&name)),
            Err(_) => {}
        });
        made
    }

    /// Creates the pods of all slots without one. A taken name does not keep the others back; the first pod that
    /// the API server refuses does, since it refuses the others too.
    async fn create_pods(
        &self,
        status: &TrainingJobStatus,
        cluster: &ClusterState,
    ) -> Result<(), ReconcileError> {
        // A pod of a refused edit would run the new image by the old command. The job waits for the correction.
        let template = build::template_of(self.job);
        let mut pods = cluster.pods.values();
        if !cluster.edits && pods.any(|pod| build::is_outdated(pod, &template)) {
            return Ok(());
        }
        let name = self.job.name_any();
        let mut missing = status.slots.clone();
        missing.retain(|slot| {
            let pod = slot.pod(&name);
            // The pod of a member is never created again.
            !cluster.pods.contains_key(&pod) && status.member(&pod).is_none()
        });
        self.state(|state| {
            let created = &mut state.created;
            created.retain(|pod, at| !cluster.pods.contains_key(pod) && at.elapsed() < CACHED);
            missing.retain(|slot| !created.contains_key(&slot.pod(&name)));
        });
        let image = self.context.image.as_deref();
        if !missing.is_empty() {
            // The job may have been planned before its priority class was unlisted.
            if self.buildable().is_err() {
                return Ok(());
            }
            // It may have been deleted, and it cannot be watched.
            self.key_secret().await?;
        }
        let missing = missing.into_iter();
        let pods = missing.map(|slot| build::pod(self.job, slot, image));
        let pods = pods.collect::<Result<Vec<Pod>, _>>()?;
        let refused = AtomicBool::new(false);
        let create = async |pod: Pod| {
            if refused.load(Ordering::Relaxed) {
                return Ok(());
            }
            let made = self.create(&pod).await;
            if made.as_ref().is_err_and(ReconcileError::is_refusal) {
                refused.store(true, Ordering::Relaxed);
            }
            made?;
            faults::point("pod", "create");
            self.state(|state| state.created.insert(pod.name_any(), Instant::now()));
            Ok(())
        };
        let requests = stream::iter(pods).map(create);
        let results: Vec<_> = requests.buffer_unordered(CONCURRENCY).collect().await;
        first(results)
    }

    /// Deletes all pods of the job that fill no slot. The slots include the members of a running generation, so none of
    /// these is deleted. A pod of a later attempt than the status has is left alone: then the status is an older one, of
    /// a cache that is late or of a restored API server.
    pub async fn delete_pods(
        &self,
        status: &TrainingJobStatus,
        cluster: &ClusterState,
    ) -> Result<(), ReconcileError> {
        let Reconciliation { job, context, .. } = *self;
        let (name, namespace) = (job.name_any(), job.namespace().unwrap_or_default());
        let api: Api<Pod> = Api::namespaced(context.client.clone(), &namespace);
        let wanted = status.slot_pods(&name);
        let unwanted = cluster.pods.iter().filter(|(pod, _)| {
            let attempt = attempt(&name, pod);
            !wanted.contains(*pod) && attempt.is_none_or(|attempt| attempt <= status.attempts)
        });
        let delete = async |pod: Arc<Pod>| {
            let suspect = |node: &str| context.leases.is_suspected(&namespace, node);
            let dead = cluster.needs_forced_deletion(&pod, suspect);
            Ok(delete(&api, &pod, dead).await?)
        };
        let unwanted: Vec<Arc<Pod>> = unwanted.map(|(_, pod)| pod.clone()).collect();
        let requests = stream::iter(unwanted).map(delete);
        let results: Vec<_> = requests.buffer_unordered(CONCURRENCY).collect().await;
        first(results)
    }
}

/// The error to report of several requests: a failed request, then a taken name. No request is cancelled
/// for the error of another one, so the result of each is recorded.
fn first(
    results: impl IntoIterator<Item = Result<(), ReconcileError>>,
) -> Result<(), ReconcileError> {
    let errors = results.into_iter().filter_map(Result::err);
    let first = errors.min_by_key(|error| match error {
        ReconcileError::NameTaken(_) => 1,
        ReconcileError::Leaving(_) => 2,
        _ => 0,
    });
    first.map_or(Ok(()), Err)
}

/// The attempt in a pod's name, which [`Slot::pod`] makes.
///
/// [`Slot::pod`]: crate::api::status::Slot::pod
fn attempt(job: &str, pod: &str) -> Option<u32> {
    let (number, attempt) = pod.strip_prefix(job)?.strip_prefix('-')?.split_once('-')?;
    number.parse::<u32>().ok()?;
    attempt.parse().ok()
}

/// Deletes a pod. No kubelet confirms the end of a pod on a dead node, so that pod is marked as
/// failed, as the pod garbage collector does, and force-deleted. Fencing stops its ranks behind a
/// network partition.
async fn delete(api: &Api<Pod>, pod: &Pod, dead: bool) -> Result<(), kube::Error> {
    let name = pod.name_any();
    let mut parameters = DeleteParams::default();
    if dead {
        // The API server refuses the uid of a replaced pod.
        let failed = json!({"metadata": {"uid": pod.uid()}, "status": {
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
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_invalid() => {}
            other => other.map(|_| ())?,
        }
        parameters.grace_period_seconds = Some(0);
    } else if pod.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    parameters.preconditions = Some(Preconditions {
        uid: pod.uid(),
        resource_version: None,
    });
    match api.delete(&name, &parameters).await {
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        other => other.map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::placement::Slot;
    use crate::operator::testing::{ApiServer, NAMESPACE, job};

    #[tokio::test]
    async fn a_pod_that_replaced_a_dead_one_is_neither_marked_nor_deleted() {
        let server = Arc::new(ApiServer::default());
        let mut dead = build::pod(&job("x", "u"), Slot::default(), None).unwrap();
        dead.metadata.uid = Some("dead".into());
        let name = dead.name_any();
        server.put(
            "pods",
            json!({"metadata": {"name": name, "uid": "another"}}),
        );
        let before = server.get("pods", &name);
        let api = Api::namespaced(server.client(), NAMESPACE);
        delete(&api, &dead, true).await.unwrap();
        assert_eq!(server.get("pods", &name), before);
    }
}
