//! Whose objects have the names of a job's objects.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::runtime::controller::Action;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};

use crate::api::TrainingJob;
use crate::api::status::{Phase, TrainingJobStatus};
use crate::operator::build;
use crate::operator::companions;
use crate::operator::conditions::{self, Findings};
use crate::operator::context::{Companions, Context};
use crate::operator::reconcile::reconcile;
use crate::operator::stores::slim_job;
use crate::operator::testing::{ApiServer, Cluster, job, owner};
use crate::util::time::micro_time;

/// Kinds of companion objects that pods wait for, and those that they do not wait for.
const BEFORE_PODS: [&str; 2] = ["serviceaccounts", "networkpolicies"];
const BESIDE_PODS: [&str; 3] = ["services", "roles", "rolebindings"];

/// A server with the job `x`.
fn server() -> Arc<ApiServer> {
    let server = Arc::new(ApiServer::default());
    server.put("trainingjobs", serde_json::to_value(job("x", "u")).unwrap());
    server
}

async fn reconcile_once(server: &ApiServer, context: &Arc<Context>) -> Action {
    let job = server.get("trainingjobs", "x").unwrap();
    let job = Arc::new(serde_json::from_value(job).unwrap());
    reconcile(job, context.clone()).await.unwrap()
}

async fn reconcile_until(
    server: &ApiServer,
    context: &Arc<Context>,
    holds: impl Fn(&ApiServer) -> bool,
) {
    let start = Instant::now();
    while !holds(server) {
        assert!(start.elapsed() < Duration::from_secs(60), "timed out");
        reconcile_once(server, context).await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn ready(server: &ApiServer) -> Value {
    let job = server.get("trainingjobs", "x").unwrap_or_default();
    let mut conditions = job["status"]["conditions"].as_array().into_iter().flatten();
    let ready = conditions.find(|condition| condition["type"] == "PodsReady");
    ready.cloned().unwrap_or_default()
}

fn is_taken(server: &ApiServer) -> bool {
    ready(server)["reason"] == "NameTaken"
}

// Planning needs a thread besides the runtime's own.
#[tokio::test(flavor = "multi_thread")]
async fn a_companion_of_another_owner_is_reported_and_left_alone() {
    for kind in BEFORE_PODS.iter().chain(&BESIDE_PODS) {
        let (server, name) = (server(), "evenkeel-x");
        server.put(
            kind,
            json!({"metadata": {"name": name}, "data": "of the victim"}),
        );
        let victim = server.get(kind, name);
        let context = server.context();
        reconcile_until(&server, &context, is_taken).await;
        let condition = ready(&server);
        assert_eq!(condition["status"], "False");
        let message = condition["message"].as_str().unwrap().to_lowercase();
        assert!(message.contains("`evenkeel-x` exists"), "{message}");
        let pods = server.names("pods").len();
        assert_eq!(
            pods,
            if BEFORE_PODS.contains(kind) { 0 } else { 2 },
            "{kind}"
        );
        // Further reconciliations do not ask for the name each time.
        let asked = || server.requests(kind).len();
        let before = asked();
        for _ in 0..50 {
            reconcile_once(&server, &context).await;
        }
        assert!(asked() - before < 20, "{kind}: {}", asked() - before);
        assert_eq!(server.get(kind, name), victim, "{kind}");
        // It recovers by itself.
        server.remove(kind, name);
        reconcile_until(&server, &context, |server| {
            !is_taken(server) && server.names("rolebindings").len() == 1
        })
        .await;
        assert_eq!(server.names("pods").len(), 2);
        let made = server.get(kind, name).unwrap();
        assert_eq!(
            made["metadata"]["ownerReferences"],
            json!([owner("x", "u")])
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_another_owner_is_reported_and_does_not_keep_others_back() {
    let (server, name) = (server(), "x-0-1");
    let labels = json!({build::JOB_LABEL: "x", build::SLOT_LABEL: "0"});
    server.put(
        "pods",
        json!({"metadata": {"name": name, "labels": labels}}),
    );
    let victim = server.get("pods", name);
    let context = server.context();
    reconcile_until(&server, &context, is_taken).await;
    let message = ready(&server)["message"].clone();
    assert_eq!(
        message,
        "Pod `x-0-1` exists and does not belong to this TrainingJob; delete it, or create the job \
         with another name"
    );
    assert_eq!(server.names("pods"), ["x-0-1", "x-1-2"]);
    assert_eq!(server.get("pods", name), victim);
    server.remove("pods", name);
    reconcile_until(&server, &context, |server| !is_taken(server)).await;
    let made = server.get("pods", name).unwrap();
    assert_eq!(
        made["metadata"]["ownerReferences"],
        json!([owner("x", "u")])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_an_earlier_job_are_waited_for_without_a_condition() {
    let server = server();
    let leave = |kind: &str, name: &str| {
        let owners = json!([owner("x", "earlier")]);
        server.put(
            kind,
            json!({"metadata": {"name": name, "ownerReferences": owners}}),
        );
    };
    leave("networkpolicies", "evenkeel-x");
    leave("pods", "x-0-1");
    let context = server.context();
    for _ in 0..5 {
        let action = reconcile_once(&server, &context).await;
        assert_ne!(action, Action::await_change());
        assert!(!is_taken(&server));
    }
    server.remove("networkpolicies", "evenkeel-x");
    reconcile_until(&server, &context, |server| server.names("pods").len() == 2).await;
    server.remove("pods", "x-0-1");
    reconcile_until(&server, &context, |server| server.names("pods").len() == 2).await;
    assert!(!is_taken(&server));
    for pod in ["x-0-1", "x-1-2"] {
        let made = server.get("pods", pod).unwrap();
        assert_eq!(
            made["metadata"]["ownerReferences"],
            json!([owner("x", "u")])
        );
    }
}

/// The job `x` that is over and whose time to live has passed.
fn expired(uid: &str) -> TrainingJob {
    let mut expired = job("x", uid);
    expired.spec.ttl_seconds_after_finished = Some(0);
    let status = TrainingJobStatus {
        completion_time: Some(micro_time(1000.0)),
        phase: Phase::Complete,
        ..TrainingJobStatus::default()
    };
    let status = conditions::finish(status, &Findings::default());
    expired.status = Some(conditions::observed(&status, expired.metadata.generation));
    expired
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_job_is_deleted() {
    let server = server();
    let expired = expired("u");
    server.put("trainingjobs", serde_json::to_value(&expired).unwrap());
    let done = reconcile(Arc::new(expired), server.context()).await;
    assert_eq!(done.unwrap(), Action::await_change());
    assert_eq!(server.names("trainingjobs"), [] as [&str; 0]);
    let requests = server.requests("trainingjobs");
    assert_eq!(requests, ["DELETE trainingjobs/x"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_job_is_not_deleted_in_place_of_its_successor() {
    let server = server();
    let done = reconcile(Arc::new(expired("earlier")), server.context()).await;
    assert_eq!(done.unwrap(), Action::await_change());
    assert_eq!(server.names("trainingjobs"), ["x"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_companion_is_applied_again() {
    let mut cluster = Cluster::running().await;
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    let (mut known, mut writer) = (cluster.job(), Writer::default());
    slim_job(&mut known);
    writer.apply_watcher_event(&Event::Apply(known));
    let mut context = Arc::into_inner(cluster.context).unwrap();
    context.known = writer.as_reader();
    cluster.context = Arc::new(context);
    let service = cluster.server.get("services", "evenkeel-x").unwrap();
    cluster.server.remove("services", "evenkeel-x");
    let metadata = serde_json::from_value(service["metadata"].clone()).unwrap();
    // Another reconciliation is applying them meanwhile.
    let deleted = |cluster: &Cluster| {
        let job = cluster.job();
        cluster
            .context
            .state(&job, |state| state.deleted_companions)
    };
    let before = deleted(&cluster);
    let job = companions::forget(&cluster.context, &metadata);
    assert_eq!(job.unwrap().name, "x");
    assert_eq!(deleted(&cluster), before + 1);
    cluster.context.state(&cluster.job(), |state| {
        state.record_applied(Companions::Complete, before);
        assert_eq!(state.applied, Companions::Missing);
    });
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    assert!(cluster.server.get("services", "evenkeel-x").is_some());
}
