//! TrainingJobs that this controller cannot read: the schema admitted an invalid spec, or another
//! version of the controller wrote the status. One of them must not hide the others. It gets a
//! condition and waits for a change; its pods continue by the last readable spec.

use std::collections::{HashMap, HashSet};
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::Request;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::watcher::Event;
use kube::{Client, Resource};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{Instrument, error_span, warn};

use crate::api::condition::{ConditionReason, ConditionType};
use crate::api::guarded::GuardedJob;
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
/// Longest time of one attempt.
const ATTEMPT: Duration = Duration::from_secs(10);
/// Concurrent attempts for the jobs of one namespace. A namespace whose writes hang delays no other.
const AT_ONCE: usize = 4;

/// What the watch says about unreadable jobs.
pub enum Seen {
    Unreadable(Box<InvalidObject>),
    /// The job with this uid is readable again, or it no longer exists.
    Over(String),
}

/// Passes on readable jobs and sends unreadable ones aside.
pub struct Filter {
    aside: UnboundedSender<Seen>,
    /// Uids of the unreadable jobs.
    unreadable: HashSet<String>,
    /// Uids of the unreadable jobs before the list that the watch is reading.
    unlisted: HashSet<String>,
}

impl Filter {
    pub fn new(aside: UnboundedSender<Seen>) -> Filter {
        Filter {
            aside,
            unreadable: HashSet::new(),
            unlisted: HashSet::new(),
        }
    }

    /// The event for the cache; `None` if it is about an unreadable job.
    pub fn pass(&mut self, event: Event<GuardedJob>) -> Option<Event<TrainingJob>> {
        Some(match event {
            Event::Apply(job) => Event::Apply(self.take(job)?),
            Event::InitApply(job) => Event::InitApply(self.take(job)?),
            Event::Delete(job) => {
                let job = job.0.unwrap_or_else(without_spec);
                self.over(job.metadata.uid.as_deref());
                Event::Delete(job)
            }
            Event::Init => {
                self.unlisted.clone_from(&self.unreadable);
                Event::Init
            }
            Event::InitDone => {
                // Deleted since the last list.
                for uid in take(&mut self.unlisted) {
                    self.over(Some(&uid));
                }
                Event::InitDone
            }
        })
    }

    fn take(&mut self, guarded: GuardedJob) -> Option<TrainingJob> {
        match guarded.0 {
            Ok(job) => {
                self.over(job.metadata.uid.as_deref());
                Some(job)
            }
            Err(invalid) => {
                let uid = invalid.metadata.uid.clone().unwrap_or_default();
                self.unlisted.remove(&uid);
                self.unreadable.insert(uid);
                // The receiver is dropped when the controller ends.
                let _ = self.aside.send(Seen::Unreadable(Box::new(invalid)));
                None
            }
        }
    }

    fn over(&mut self, uid: Option<&str>) {
        let uid = uid.unwrap_or_default();
        self.unlisted.remove(uid);
        if let Some(uid) = self.unreadable.take(uid) {
            let _ = self.aside.send(Seen::Over(uid));
        }
    }
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
            code: None,
            checkpoint: CheckpointVolume::default(),
            service_account_annotations: Default::default(),
            budgets: Default::default(),
            active_deadline_seconds: None,
            progress_deadline_seconds: None,
            on_stall: Default::default(),
            suspend: false,
            pod_template: None,
            ttl_seconds_after_finished: None,
        },
        status: None,
    }
}

/// An unreadable job. Dropping it ends the attempts to write its condition.
struct Report {
    error: String,
    generation: Option<i64>,
    attempts: JoinSet<()>,
}

/// Writes the condition on unreadable jobs, once for each distinct error and generation.
pub async fn report(client: Client, mut seen: UnboundedReceiver<Seen>) {
    let mut reports: HashMap<String, Report> = HashMap::new();
    // Of the namespaces for which attempts run.
    let mut namespaces: HashMap<String, Arc<Semaphore>> = HashMap::new();
    while let Some(seen) = seen.recv().await {
        let object = match seen {
            Seen::Unreadable(object) => object,
            Seen::Over(uid) => {
                reports.remove(&uid);
                continue;
            }
        };
        let uid = object.metadata.uid.clone().unwrap_or_default();
        let generation = object.metadata.generation;
        let known = reports.get(&uid);
        if known.is_some_and(|known| known.error == object.error && known.generation == generation)
        {
            continue;
        }
        let (job, namespace) = (&object.metadata.name, &object.metadata.namespace);
        let span = error_span!("unreadable", job, namespace);
        span.in_scope(|| warn!(error = %object.error, "cannot read a TrainingJob"));
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        namespaces.retain(|_, permits| Arc::strong_count(permits) > 1);
        let permits = namespaces.entry(namespace);
        let permits = permits.or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE)));
        let mut report = Report {
            error: object.error.clone(),
            generation,
            attempts: JoinSet::new(),
        };
        let attempts = attempt(client.clone(), object, permits.clone());
        report.attempts.spawn(attempts.instrument(span));
        reports.insert(uid, report);
    }
}

async fn attempt(client: Client, object: Box<InvalidObject>, permits: Arc<Semaphore>) {
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
    let message = format!(
        "this controller cannot read the job: {}; correct its spec, or delete and apply it again",
        object.error
    );
    let message: String = message.chars().take(MESSAGE).collect();
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
    use tokio::sync::mpsc::unbounded_channel;

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
        let mut object = job(json!("two")).0.unwrap_err();
        object.metadata.name = Some(name.into());
        object.metadata.uid = Some(uid.into());
        object.metadata.generation = Some(1);
        object.error = error.into();
        object
    }

    /// Stores the job.
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
        insta::assert_snapshot!(message(&server, "a").unwrap(), @"this controller cannot read the job: invalid type; correct its spec, or delete and apply it again");
    }

    #[tokio::test]
    async fn a_job_whose_condition_cannot_be_written_delays_no_other() {
        let server = Arc::new(ApiServer::default());
        for name in ["failing", "other"] {
            put(&server, name, name, 1);
        }
        server.refuse_writes(KIND, "failing");
        let (aside, seen) = unbounded_channel();
        let reporter = tokio::spawn(report(server.client(), seen));
        for name in ["failing", "other"] {
            let object = unreadable(name, name, "invalid type");
            aside.send(Seen::Unreadable(Box::new(object))).unwrap();
        }
        holds(|| message(&server, "other").is_some()).await;
        assert_eq!(message(&server, "failing"), None);
        // It is tried again.
        holds(|| writes(&server) >= 3).await;
        reporter.abort();
    }

    #[tokio::test]
    async fn an_error_is_reported_once_until_the_job_is_readable() {
        let server = Arc::new(ApiServer::default());
        for name in ["a", "b"] {
            put(&server, name, name, 1);
        }
        let (aside, seen) = unbounded_channel();
        let reporter = tokio::spawn(report(server.client(), seen));
        let send = |seen| aside.send(seen).unwrap();
        let a = |error| Seen::Unreadable(Box::new(unreadable("a", "a", error)));
        let told = |error: &str| {
            let message = message(&server, "a");
            message.is_some_and(|message| message.contains(error))
        };
        send(a("first"));
        holds(|| told("first")).await;
        // The condition itself is a change of the job.
        send(a("first"));
        send(a("second"));
        holds(|| told("second")).await;
        assert_eq!(writes(&server), 2);
        put(&server, "a", "a", 1);
        send(Seen::Over("a".into()));
        send(a("second"));
        holds(|| told("second")).await;
        assert_eq!(writes(&server), 3);
        reporter.abort();
    }

    #[test]
    fn unreadable_jobs_go_aside() {
        let (aside, mut seen) = unbounded_channel();
        let mut filter = Filter::new(aside);
        let good = filter.pass(Event::Apply(job(json!(2))));
        assert!(matches!(good, Some(Event::Apply(job)) if job.spec.nodes == 2));
        for event in [Event::Apply, Event::InitApply] {
            assert!(filter.pass(event(job(json!("two")))).is_none());
            let invalid = seen.try_recv().unwrap();
            assert!(
                matches!(invalid, Seen::Unreadable(job) if job.metadata.name.as_deref() == Some("a"))
            );
        }
        // The cache must drop it as well.
        let gone = filter.pass(Event::Delete(job(json!("two"))));
        assert!(
            matches!(gone, Some(Event::Delete(job)) if job.metadata.uid.as_deref() == Some("u"))
        );
        assert!(matches!(seen.try_recv(), Ok(Seen::Over(uid)) if uid == "u"));
        assert!(seen.try_recv().is_err());
    }

    #[test]
    fn a_job_that_is_readable_again_or_no_longer_listed_is_forgotten() {
        let (aside, mut seen) = unbounded_channel();
        let mut filter = Filter::new(aside);
        let mut over = |events: Vec<Event<GuardedJob>>| {
            for event in events {
                filter.pass(event);
            }
            let mut over = 0;
            while let Ok(seen) = seen.try_recv() {
                over += usize::from(matches!(seen, Seen::Over(uid) if uid == "u"));
            }
            over
        };
        let (good, bad) = (|| job(json!(2)), || job(json!("two")));
        assert_eq!(over(vec![Event::Apply(bad()), Event::Apply(good())]), 1);
        assert_eq!(over(vec![Event::Apply(good())]), 0);
        let listed = vec![Event::Init, Event::InitApply(bad()), Event::InitDone];
        assert_eq!(over(listed), 0);
        assert_eq!(over(vec![Event::Init, Event::InitDone]), 1);
        assert_eq!(over(vec![Event::Init, Event::InitDone]), 0);
    }
}
