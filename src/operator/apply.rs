//! Applies the status to the cluster: creates the objects that should exist and deletes the pods that
//! should not.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::json;

use super::build;
use super::conditions::Blocked;
use super::context::{Companions, Context};
use super::faults;
use super::keys;
use super::observe::ClusterState;
use super::ownership::{self, Creation, JobObject};
use crate::api::TrainingJob;
use crate::api::condition::ConditionReason;
use crate::api::status::TrainingJobStatus;
use crate::util::lock::lock;

/// Concurrent requests for one job.
const CONCURRENCY: usize = 8;

/// Failure to apply an object.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The API server refused the request or did not answer.
    #[error("{0}")]
    Api(#[from] kube::Error),
    /// `podTemplate` does not give a valid pod.
    #[error("spec.podTemplate does not give a valid pod: {0}")]
    Template(#[from] serde_json::Error),
    /// An object that the job does not own has the name of one of its objects.
    #[error(
        "{0} exists and does not belong to this TrainingJob; delete it, or create the job with another name"
    )]
    NameTaken(String),
    /// The name becomes free when an object of this or an earlier job is deleted.
    #[error("{0} is being deleted")]
    Leaving(String),
}

impl ApplyError {
    /// Whether the API server refuses the object.
    fn is_refusal(&self) -> bool {
        let blocked = self.blocked();
        blocked.is_some_and(|blocked| blocked.reason == ConditionReason::Refused)
    }

    /// What keeps the job from its objects; `None` for errors that a retry may solve.
    pub fn blocked(&self) -> Option<Blocked> {
        let (reason, message) = match self {
            ApplyError::Template(_) => (ConditionReason::Refused, self.to_string()),
            ApplyError::NameTaken(_) => (ConditionReason::NameTaken, self.to_string()),
            ApplyError::Api(kube::Error::Api(status)) => {
                let asks =
                    (400..500).contains(&status.code) && ![408, 409, 429].contains(&status.code);
                let text: String = status.message.chars().take(500).collect();
                let message = format!("the API server refuses the objects of the job: {text}");
                (ConditionReason::Refused, asks.then_some(message)?)
            }
            ApplyError::Api(_) | ApplyError::Leaving(_) => return None,
        };
        Some(Blocked { reason, message })
    }
}

/// Creates and deletes objects according to the status; true if the job must be reconciled again at once.
pub async fn apply(
    job: &TrainingJob,
    status: &TrainingJobStatus,
    cluster: &ClusterState,
    action: &str,
    context: &Context,
) -> Result<bool, ApplyError> {
    let uid = job.uid().unwrap_or_default();
    // A job without slots needs no companion objects.
    let due = match status.slots.is_empty() {
        true => Companions::Complete,
        false => context.companions(&uid),
    };
    let create = async {
        if due == Companions::Missing {
            before_pods(context, job).await?;
            context.record_first_pods(&uid);
            faults::point("companions", action);
        }
        // The remaining companion objects wait for a later reconciliation, so that the pods of other jobs
        // come first. Events of the job's own pods trigger that reconciliation.
        let waits = due == Companions::BeforePods && context.is_burst_of_others(&uid);
        let beside = async {
            if due == Companions::BeforePods && !waits {
                beside_pods(context, job).await?;
                context.record_companions(&uid);
            }
            Ok(())
        };
        let pods = create_pods(context, job, status, cluster);
        let (pods, beside) = tokio::join!(pods, beside);
        first([pods, beside])
    };
    // Deletions do not wait for objects that cannot be created.
    let delete = delete_pods(context, job, status, cluster);
    let (deleted, created) = tokio::join!(delete, create);
    first([deleted, created])?;
    faults::point("pods", action);
    Ok(due == Companions::Missing)
}

/// Creates the companion objects that must exist before the pods: the service account, without which
/// no pod can be created, the network policy and the Secret with the job's key. The others depend on the job's name
/// alone.
pub async fn before_pods(context: &Context, job: &TrainingJob) -> Result<(), ApplyError> {
    let account = build::service_account(job);
    let policy = build::network_policy(job, &context.namespace);
    // Any Secret of this name is taken for the right one: the controller may not read it.
    let secret = build::secret(job, &context.key);
    let namespace = job.namespace().unwrap_or_default();
    let key = async {
        let created = keys::create_secret(context.client.clone(), &namespace, &secret).await;
        created.map(|_| ()).map_err(ApplyError::Api)
    };
    let (account, policy, key) = tokio::join!(
        companion(context, job, &account),
        companion(context, job, &policy),
        key
    );
    first([account, policy, key])
}

/// Creates the companion objects that running pods need: the Service for their names and the access
/// rights of their agents. The rights are slow to create with many jobs, since the API server checks
/// all bindings; an agent that starts earlier retries.
pub async fn beside_pods(context: &Context, job: &TrainingJob) -> Result<(), ApplyError> {
    let (role, binding) = (build::role(job), build::role_binding(job));
    let service = build::service(job);
    let access = async {
        // Only an administrator may bind a role that does not exist yet.
        companion(context, job, &role).await?;
        companion(context, job, &binding).await
    };
    let (service, access) = tokio::join!(companion(context, job, &service), access);
    first([service, access])
}

/// Creates a companion object, or updates the existing one if the job owns it.
async fn companion<K: JobObject>(
    context: &Context,
    job: &TrainingJob,
    object: &K,
) -> Result<(), ApplyError> {
    if let Some(existing) = create(context, job, object).await? {
        ownership::update(&context.client, &existing, object).await?;
    }
    Ok(())
}

/// Creates an object, or returns the existing one if the job owns it. A name that another object has is
/// tried again after a growing pause, however often the job is reconciled.
async fn create<K: JobObject>(
    context: &Context,
    job: &TrainingJob,
    object: &K,
) -> Result<Option<K>, ApplyError> {
    let uid = job.uid().unwrap_or_default();
    let name = format!("{} `{}`", K::kind(&()), object.name_any());
    if context.is_taken(&uid, &name) {
        return Err(ApplyError::NameTaken(name));
    }
    let made = ownership::create(&context.client, job, object).await?;
    let taken = matches!(made, Creation::NameTaken);
    context.record_name(&uid, &name, taken);
    match made {
        Creation::Created => Ok(None),
        Creation::Owned(existing) => Ok(Some(existing)),
        Creation::Leaving => Err(ApplyError::Leaving(name)),
        Creation::NameTaken => Err(ApplyError::NameTaken(name)),
    }
}

/// Creates the pods of all slots without one. A taken name does not keep the others back; the first pod that
/// the API server refuses does, since it refuses the others too.
pub async fn create_pods(
    context: &Context,
    job: &TrainingJob,
    status: &TrainingJobStatus,
    cluster: &ClusterState,
) -> Result<(), ApplyError> {
    let name = job.name_any();
    let uid = job.uid().unwrap_or_default();
    context.forget_created(&uid, |pod| cluster.pods.contains_key(pod));
    let missing: Vec<Pod> = status
        .slots
        .iter()
        .filter(|slot| !cluster.pods.contains_key(&slot.pod(&name)))
        .filter(|slot| !was_member(status, &slot.pod(&name)))
        .filter(|slot| !context.has_just_created(&uid, &slot.pod(&name)))
        .map(|slot| build::pod(job, *slot, context.image.as_deref()))
        .collect::<Result<_, _>>()?;
    let refused = AtomicBool::new(false);
    let create = async |pod: Pod| {
        if refused.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let made = create(context, job, &pod).await;
        if made.as_ref().is_err_and(ApplyError::is_refusal) {
            refused.store(true, Ordering::Relaxed);
        }
        made?;
        faults::point("pod", "create");
        Ok(Some(pod.name_any()))
    };
    let results: Vec<Result<Option<String>, ApplyError>> = stream::iter(missing)
        .map(create)
        .buffer_unordered(CONCURRENCY)
        .collect()
        .await;
    let created: Vec<String> = results.iter().flatten().flatten().cloned().collect();
    if !created.is_empty() {
        context.record_created(&uid, created.into_iter());
    }
    first(results.into_iter().map(|result| result.map(|_| ())))
}

/// The error to report of several requests: a failed request, then a taken name. No request is cancelled
/// for the error of another one, so the result of each is recorded.
pub fn first(results: impl IntoIterator<Item = Result<(), ApplyError>>) -> Result<(), ApplyError> {
    let errors = results.into_iter().filter_map(Result::err);
    let first = errors.min_by_key(|error| match error {
        ApplyError::Api(_) | ApplyError::Template(_) => 0,
        ApplyError::NameTaken(_) => 1,
        ApplyError::Leaving(_) => 2,
    });
    first.map_or(Ok(()), Err)
}

/// Deletes all pods of the job that fill no slot. The slots include the members of a running generation, so none of
/// these is deleted. A pod of a later attempt than the status has is left alone: then the status is an older one, of
/// a cache that is late or of a restored API server.
pub async fn delete_pods(
    context: &Context,
    job: &TrainingJob,
    status: &TrainingJobStatus,
    cluster: &ClusterState,
) -> Result<(), ApplyError> {
    let (name, namespace) = (job.name_any(), job.namespace().unwrap_or_default());
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &namespace);
    let wanted: BTreeSet<String> = status.slots.iter().map(|slot| slot.pod(&name)).collect();
    let unwanted = cluster
        .pods
        .values()
        .filter(|pod| !wanted.contains(&pod.name_any()))
        .filter(|pod| {
            let attempt = attempt(&name, &pod.name_any());
            attempt.is_none_or(|attempt| attempt <= status.attempts)
        });
    let results: Vec<Result<(), kube::Error>> = stream::iter(unwanted.cloned().collect::<Vec<_>>())
        .map(|pod| {
            let api = api.clone();
            let suspect = |node: &str| lock(&context.suspects).contains(&namespace, node);
            let dead = cluster.needs_forced_deletion(&pod, suspect);
            async move { delete(&api, &pod, dead).await }
        })
        .buffer_unordered(CONCURRENCY)
        .collect()
        .await;
    first(
        results
            .into_iter()
            .map(|result| result.map_err(ApplyError::Api)),
    )
}

/// The attempt in a pod's name, which [`Slot::pod`] makes.
///
/// [`Slot::pod`]: crate::api::status::Slot::pod
fn attempt(job: &str, pod: &str) -> Option<u32> {
    let (number, attempt) = pod.strip_prefix(job)?.strip_prefix('-')?.split_once('-')?;
    number.parse::<u32>().ok()?;
    attempt.parse().ok()
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
    use std::sync::Arc;

    use kube::core::Status;

    use super::*;
    use crate::api::status::Slot;
    use crate::operator::testing::{ApiServer, NAMESPACE, job};

    #[test]
    fn only_errors_that_no_retry_solves_block_a_job() {
        let api = |code: u16| {
            let status = Status::failure(&"x".repeat(600), "Reason").with_code(code);
            ApplyError::Api(kube::Error::Api(status.boxed()))
        };
        for code in [400, 403, 404, 422] {
            let error = api(code);
            assert!(error.is_refusal(), "{code}");
            let Blocked { reason, message } = error.blocked().unwrap();
            assert_eq!(reason, ConditionReason::Refused);
            let shown = "the API server refuses the objects of the job: ".len() + 500;
            assert_eq!(message.len(), shown, "a long answer is truncated");
        }
        for code in [408, 409, 429, 500, 503] {
            assert_eq!(api(code).blocked(), None, "{code}");
        }
        assert_eq!(ApplyError::Leaving("Pod `x`".into()).blocked(), None);
        let taken = ApplyError::NameTaken("Pod `x`".into());
        let reason = taken.blocked().map(|blocked| blocked.reason);
        assert_eq!(reason, Some(ConditionReason::NameTaken));
        assert!(!taken.is_refusal());
        let invalid = serde_json::from_str::<u8>("-").unwrap_err();
        assert!(ApplyError::Template(invalid).is_refusal());
    }

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
