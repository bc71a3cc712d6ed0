//! TrainingJobs that this controller cannot read: the schema admitted an invalid spec, or another
//! version of the controller wrote the status. One of them must not hide the others. It gets a
//! condition and waits for a change; its pods continue by the last readable spec.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::Request;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::watcher::Event;
use kube::{Client, Resource, ResourceExt};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{Instrument, error_span, warn};

use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::guarded::GuardedJob;
use crate::api::schema::MESSAGE;
use crate::api::{TrainingJob, TrainingJobSpec};

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
/// Longest time of one attempt.
const ATTEMPT: Duration = Duration::from_secs(10);
/// Concurrent attempts for the jobs of one namespace. A namespace whose writes hang delays no other.
const AT_ONCE: usize = 4;

struct Report {
    error: String,
    generation: Option<i64>,
    /// Whether the list has it that the watch reads or has read.
    listed: bool,
    /// Attempts to write its condition. They end when dropped.
    _attempts: JoinSet<()>,
}

/// Passes on readable jobs, and passes unreadable ones to `report`, once for each distinct error and generation.
pub struct Filter<F> {
    report: F,
    /// The unreadable jobs, by uid.
    reports: HashMap<String, Report>,
}

impl<F: FnMut(InvalidObject) -> JoinSet<()>> Filter<F> {
    pub fn new(report: F) -> Filter<F> {
        Filter {
            report,
            reports: HashMap::new(),
        }
    }

    /// The event for the cache; `None` if it is about an unreadable job.
    pub fn pass(&mut self, event: Event<GuardedJob>) -> Option<Event<TrainingJob>> {
        Some(match event {
            Event::Apply(job) => Event::Apply(self.take(job)?),
            Event::InitApply(job) => Event::InitApply(self.take(job)?),
            Event::Delete(job) => {
                let job = job.decoded.unwrap_or_else(|invalid| TrainingJob {
                    metadata: invalid.metadata,
                    // Only the metadata is read.
                    spec: TrainingJobSpec::default(),
                    status: None,
                });
                self.reports.remove(&job.uid().unwrap_or_default());
                Event::Delete(job)
            }
            Event::Init => {
                for report in self.reports.values_mut() {
                    report.listed = false;
                }
                Event::Init
            }
            Event::InitDone => {
                // The others were deleted since the last list.
                self.reports.retain(|_, report| report.listed);
                Event::InitDone
            }
        })
    }

    fn take(&mut self, guarded: GuardedJob) -> Option<TrainingJob> {
        let invalid = match guarded.decoded {
            Ok(job) => {
                self.reports.remove(&job.uid().unwrap_or_default());
                return Some(job);
            }
            Err(invalid) => invalid,
        };
        let (error, generation) = (invalid.error.clone(), invalid.metadata.generation);
        let uid = invalid.metadata.uid.clone().unwrap_or_default();
        match self.reports.get_mut(&uid) {
            Some(known) if known.error == error && known.generation == generation => {
                known.listed = true;
            }
            _ => {
                let report = Report {
                    error,
                    generation,
                    listed: true,
                    _attempts: (self.report)(invalid),
                };
                self.reports.insert(uid, report);
            }
        }
        None
    }
}

/// Writes the conditions of unreadable jobs.
pub fn reporter(client: Client) -> impl FnMut(InvalidObject) -> JoinSet<()> {
    // Of the namespaces for which attempts run.
    let mut namespaces: HashMap<String, Arc<Semaphore>> = HashMap::new();
    move |object| {
        let (job, namespace) = (&object.metadata.name, &object.metadata.namespace);
        let span = error_span!("unreadable", job, namespace);
        span.in_scope(|| warn!(error = %object.error, "cannot read a TrainingJob"));
        namespaces.retain(|_, permits| Arc::strong_count(permits) > 1);
        let permits = namespaces.entry(namespace.clone().unwrap_or_default());
        let permits = permits.or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE)));
        let attempts = attempt(client.clone(), object, permits.clone());
        [attempts.instrument(span)].into_iter().collect()
    }
}

async fn attempt(client: Client, object: InvalidObject, permits: Arc<Semaphore>) {
    for pause in PAUSES {
        sleep(pause).await;
        // The semaphore is never closed.
        let _permit = permits.acquire().await;
        match timeout(ATTEMPT, write(&client, &object)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => warn!(%error, "cannot write a condition"),
            Err(_) => warn!("cannot write a condition within {ATTEMPT:?}"),
        }
    }
}

/// Writes the condition of a job on which the controller failed, unless the job has it. The write itself leads to the next
/// reconciliation.
pub async fn report(client: &Client, job: &TrainingJob, error: &str) {
    let object = InvalidObject {
        error: error.to_owned(),
        metadata: job.metadata.clone(),
    };
    let said = message(&object);
    let mut known = job.status.iter().flat_map(|status| &status.conditions);
    if known
        .any(|known| known.type_ == READABLE && known.status == "False" && known.message == said)
    {
        return;
    }
    if !matches!(timeout(ATTEMPT, write(client, &object)).await, Ok(Ok(()))) {
        warn!("cannot write a condition");
    }
}

fn message(object: &InvalidObject) -> String {
    let message = format!(
        "this controller cannot handle the job: {}; correct its spec, or delete and apply it again",
        object.error
    );
    message.chars().take(MESSAGE).collect()
}

/// Writes the condition, unless the job has been replaced or edited since: the watch reports the new one.
async fn write(client: &Client, object: &InvalidObject) -> Result<(), kube::Error> {
    let name = object.metadata.name.clone().unwrap_or_default();
    let namespace = object.metadata.namespace.clone().unwrap_or_default();
    let resource = ApiResource::erase::<TrainingJob>(&());
    let jobs: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &resource);
    let Some(current) = jobs.get_metadata_opt(&name).await? else {
        return Ok(());
    };
    let current = current.metadata;
    if current.uid != object.metadata.uid || current.generation != object.metadata.generation {
        return Ok(());
    }
    let message = message(object);
    let patch = json!({
        "apiVersion": TrainingJob::api_version(&()),
        "kind": TrainingJob::kind(&()),
        // For the status of a custom resource the API server ignores the uid, but not the version.
        "metadata": {"name": name, "uid": current.uid, "resourceVersion": current.resource_version},
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
    let request = Request::new(TrainingJob::url_path(&(), Some(&namespace)))
        .patch_subresource("status", &name, &parameters, &Patch::Apply(patch))
        .map_err(kube::Error::BuildRequest)?;
    // The response is the object, whose decoding may need much memory.
    match client.request_text(request).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        other => other.map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::operator::testing::{ApiServer, NAMESPACE};

    const KIND: &str = "trainingjobs";
    const DEADLINE: Duration = Duration::from_secs(20);

    fn job(nodes: Value) -> GuardedJob {
        serde_json::from_value(json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": "a", "namespace": "n", "uid": "u"},
            "spec": {
                "recipe": {"inline": ""}, "image": "i", "checkpoint": {"path": "/c"}, "nodes": nodes,
            },
        }))
        .unwrap()
    }

    /// An unreadable job of generation 1, as the watch sees it.
    fn unreadable(name: &str, uid: &str, error: &str) -> InvalidObject {
        let mut object = job(json!("two")).decoded.unwrap_err();
        object.metadata.name = Some(name.into());
        object.metadata.uid = Some(uid.into());
        object.metadata.generation = Some(1);
        object.error = error.into();
        object
    }

    fn put(server: &ApiServer, name: &str, uid: &str, generation: i64) {
        let metadata =
            json!({"name": name, "namespace": NAMESPACE, "uid": uid, "generation": generation});
        server.put(
            KIND,
            json!({
                "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
                "metadata": metadata, "spec": {"nodes": "two"},
            }),
        );
    }

    /// The message of the condition of a stored job.
    fn message(server: &ApiServer, name: &str) -> Option<String> {
        let job = server.get(KIND, name)?;
        let condition = &job["status"]["conditions"][0];
        let unreadable = condition["type"] == READABLE && condition["status"] == "False";
        unreadable.then(|| condition["message"].as_str().unwrap().to_owned())
    }

    fn writes(server: &ApiServer) -> usize {
        let requests = server.requests(KIND);
        let patches = requests.iter().filter(|line| line.starts_with("PATCH"));
        patches.count()
    }

    async fn holds(condition: impl Fn() -> bool) {
        let poll = async {
            while !condition() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(DEADLINE, poll).await.unwrap();
    }

    #[tokio::test]
    async fn a_job_that_took_the_name_or_was_edited_is_left_alone() {
        let server = Arc::new(ApiServer::default());
        let client = server.client();
        let object = unreadable("a", "old", "invalid type");
        // Deleted.
        write(&client, &object).await.unwrap();
        put(&server, "a", "new", 1);
        write(&client, &object).await.unwrap();
        put(&server, "a", "old", 2);
        write(&client, &object).await.unwrap();
        assert_eq!((message(&server, "a"), writes(&server)), (None, 0));
        put(&server, "a", "old", 1);
        write(&client, &object).await.unwrap();
        insta::assert_snapshot!(message(&server, "a").unwrap(), @"this controller cannot handle the job: invalid type; correct its spec, or delete and apply it again");
    }

    /// The watch event of an unreadable job.
    fn applied(name: &str, error: &str) -> Event<GuardedJob> {
        let mut job = job(json!("two"));
        job.decoded = Err(unreadable(name, name, error));
        Event::Apply(job)
    }

    #[tokio::test]
    async fn a_job_whose_condition_cannot_be_written_delays_no_other() {
        let server = Arc::new(ApiServer::default());
        for name in ["failing", "other"] {
            put(&server, name, name, 1);
        }
        server.refuse_writes(KIND, "failing");
        let mut filter = Filter::new(reporter(server.client()));
        for name in ["failing", "other"] {
            filter.pass(applied(name, "invalid type"));
        }
        holds(|| message(&server, "other").is_some()).await;
        assert_eq!(message(&server, "failing"), None);
        // It is tried again.
        holds(|| writes(&server) >= 3).await;
    }

    #[tokio::test]
    async fn an_error_is_reported_once_until_the_job_is_readable() {
        let server = Arc::new(ApiServer::default());
        for name in ["a", "b"] {
            put(&server, name, name, 1);
        }
        let mut filter = Filter::new(reporter(server.client()));
        let told = |error: &str| {
            let message = message(&server, "a");
            message.is_some_and(|message| message.contains(error))
        };
        filter.pass(applied("a", "first"));
        holds(|| told("first")).await;
        // The condition itself is a change of the job.
        filter.pass(applied("a", "first"));
        filter.pass(applied("a", "second"));
        holds(|| told("second")).await;
        assert_eq!(writes(&server), 2);
        put(&server, "a", "a", 1);
        let mut readable = job(json!(2));
        readable.decoded.as_mut().unwrap().metadata.uid = Some("a".into());
        filter.pass(Event::Apply(readable));
        filter.pass(applied("a", "second"));
        holds(|| told("second")).await;
        assert_eq!(writes(&server), 3);
    }

    #[test]
    fn unreadable_jobs_go_aside() {
        let mut seen = Vec::new();
        let mut filter = Filter::new(|object: InvalidObject| {
            seen.push(object.metadata.name.unwrap());
            JoinSet::new()
        });
        let good = filter.pass(Event::Apply(job(json!(2))));
        assert!(matches!(good, Some(Event::Apply(job)) if job.spec.nodes == 2));
        for event in [Event::Apply, Event::InitApply] {
            assert!(filter.pass(event(job(json!("two")))).is_none());
            assert!(filter.reports.contains_key("u"));
        }
        // The cache must drop it as well.
        let gone = filter.pass(Event::Delete(job(json!("two"))));
        assert!(
            matches!(gone, Some(Event::Delete(job)) if job.metadata.uid.as_deref() == Some("u"))
        );
        assert!(filter.reports.is_empty());
        assert_eq!(seen, ["a"]);
    }

    #[test]
    fn a_job_that_is_readable_again_or_no_longer_listed_is_forgotten() {
        let mut filter = Filter::new(|_| JoinSet::new());
        let mut is_known = |events: Vec<Event<GuardedJob>>| {
            for event in events {
                filter.pass(event);
            }
            filter.reports.contains_key("u")
        };
        let (good, bad) = (|| job(json!(2)), || job(json!("two")));
        assert!(is_known(vec![Event::Apply(bad())]));
        assert!(!is_known(vec![Event::Apply(good())]));
        assert!(!is_known(vec![Event::Apply(good())]));
        let listed = vec![Event::Init, Event::InitApply(bad()), Event::InitDone];
        assert!(is_known(listed));
        assert!(!is_known(vec![Event::Init, Event::InitDone]));
    }
}
