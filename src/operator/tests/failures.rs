//! Requests that the API server refuses, and controllers that end between two requests.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::core::Status;
use kube::runtime::controller::Action;
use serde_json::json;
use tracing::instrument::WithSubscriber;
use tracing_subscriber::fmt::format::FmtSpan;

use crate::api::status::Phase;
use crate::operator::build::{self, JOB_LABEL};
use crate::operator::controller::error_policy;
use crate::operator::error::ReconcileError;
use crate::operator::reservations::Pool;
use crate::operator::testing::{Cluster, NAMESPACE, job, owner};
use crate::util::lock::lock;

/// The answer of an API server to pods beyond a quota.
const QUOTA: &str = "pods \"x-0-1\" is forbidden: exceeded quota: gpus";

/// Requests so far that create pods.
fn creations(cluster: &Cluster) -> Vec<String> {
    let mut requests = cluster.server.requests("pods");
    requests.retain(|request| request.starts_with("POST"));
    requests
}

fn pods_ready(cluster: &Cluster) -> Option<Condition> {
    let mut conditions = cluster.status().conditions.into_iter();
    conditions.find(|condition| condition.type_ == "PodsReady")
}

/// A cluster whose API server refuses the job's pods, which the job's conditions say.
async fn refused() -> Cluster {
    let mut cluster = Cluster::new();
    cluster.server.refuse_kind("pods", 403, QUOTA);
    let start = Instant::now();
    while pods_ready(&cluster).is_none_or(|condition| condition.reason != "Refused") {
        assert!(start.elapsed() < Duration::from_secs(60), "timed out");
        cluster.reconcile_or_pause().await;
    }
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_a_controller_did_not_create_are_created_once_by_the_next_one() {
    let mut cluster = Cluster::new();
    cluster.server.refuse_kind("pods", 500, "no quorum");
    while creations(&cluster).is_empty() {
        cluster.reconcile_or_pause().await;
    }
    let before = cluster.status();
    assert_eq!((before.attempts, before.slots.len()), (2, 2));
    assert_eq!(cluster.server.names("pods"), [] as [&str; 0]);
    let failed = creations(&cluster).len();

    cluster.restart_controller();
    cluster.server.accept_kind("pods");
    cluster
        .reconcile_until(|status| status.generation.is_some())
        .await;
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    let mut created = creations(&cluster).split_off(failed);
    created.sort();
    assert_eq!(created, ["POST pods/x-0-1", "POST pods/x-1-2"]);
    let after = cluster.status();
    assert_eq!(
        (after.attempts, after.slots),
        (before.attempts, before.slots)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_a_controller_did_not_delete_are_deleted_by_the_next_one() {
    let mut cluster = Cluster::running().await;
    cluster.edit(json!({"suspend": true}));
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster.server.refuse_kind("pods", 500, "no quorum");
    let start = Instant::now();
    while cluster.status().phase != Phase::Suspended {
        assert!(start.elapsed() < Duration::from_secs(60), "timed out");
        cluster.reconcile_or_pause().await;
    }
    assert_eq!(cluster.server.names("pods"), ["x-0-1", "x-1-2"]);

    cluster.restart_controller();
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster.server.accept_kind("pods");
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.server.names("pods"), [] as [&str; 0]);
    cluster.edit(json!({"suspend": false}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Running)
        .await;
    assert_eq!(cluster.server.names("pods"), ["x-0-3", "x-1-4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_be_deleted_does_not_keep_the_others() {
    let mut cluster = Cluster::running().await;
    for number in 10..30 {
        let metadata = json!({
            "name": format!("left-{number}"), "namespace": NAMESPACE, "labels": {JOB_LABEL: "x"},
            "ownerReferences": [owner("x", "u")],
        });
        cluster.server.put("pods", json!({"metadata": metadata}));
    }
    cluster.server.refuse_writes("pods", "left-10");
    let error = cluster.reconcile().await.unwrap_err();
    assert!(error.to_string().contains("left-10"), "{error}");
    assert_eq!(cluster.server.names("pods"), ["left-10", "x-0-1", "x-1-2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_pods_are_reported_and_wait_for_a_pause_or_an_edit() {
    let mut cluster = refused().await;
    let condition = pods_ready(&cluster).unwrap();
    assert_eq!(condition.status, "False");
    insta::assert_snapshot!(condition.message, @r#"the API server refuses the objects of the job: pods "x-0-1" is forbidden: exceeded quota: gpus"#);
    for _ in 0..10 {
        cluster.context.pause(&cluster.job());
    }
    let tried = creations(&cluster).len();
    for _ in 0..5 {
        assert_ne!(cluster.reconcile().await.unwrap(), Action::await_change());
    }
    assert_eq!(creations(&cluster).len(), tried);
    assert_eq!(cluster.status().attempts, 2);

    cluster.edit(json!({}));
    cluster.reconcile_or_pause().await;
    assert!(creations(&cluster).len() > tried);
    cluster.server.accept_kind("pods");
    cluster.edit(json!({}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Running)
        .await;
    cluster.reconcile().await.unwrap();
    assert_eq!(pods_ready(&cluster).unwrap().status, "True");
    assert_eq!(cluster.server.names("pods"), ["x-0-1", "x-1-2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_leader_reserves_no_devices_for_refused_pods() {
    let mut cluster = refused().await;
    cluster.restart_controller();
    // Not refused this time, and not created either.
    cluster.server.refuse_kind("pods", 500, "no quorum");
    cluster.reconcile().await.unwrap_err();
    let stores = &cluster.context.stores;
    let pod_index = stores.pod_index();
    let pool = Pool {
        nodes: &stores.nodes.state(),
        pod_index: &pod_index,
        lost: &BTreeSet::new(),
        avoid: &|_| false,
    };
    let other = job("y", "v");
    let request = build::resource_request(&other);
    let mut reservations = lock(&cluster.context.reservations);
    let free = reservations.slots(&pool, &other, &request, Instant::now());
    assert_eq!(free, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_retry_after_a_conflict_is_soon_and_the_next_ones_are_later() {
    let mut cluster = Cluster::running().await;
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.server.refuse_kind("trainingjobs", 409, "Conflict");
    let soon = Duration::from_millis(50);
    let first = cluster.reconcile_or_pause().await;
    assert_eq!(first, Action::requeue(soon));
    // The least pause of the second retry is as long.
    cluster.reconcile_or_pause().await;
    for _ in 1..8 {
        assert_ne!(cluster.reconcile_or_pause().await, Action::requeue(soon));
    }
    let pause = cluster.context.conflict_pause(&cluster.job());
    assert!(pause > Duration::from_secs(10), "{pause:?}");
    let text = cluster.context.metrics.text();
    let results = text
        .lines()
        .filter(|line| line.starts_with("evenkeel_controller_reconcile_duration_seconds_count"));
    let mut results: Vec<&str> = results.filter(|line| !line.contains("\"ok\"")).collect();
    results.sort_unstable();
    assert_eq!(
        results,
        [
            "evenkeel_controller_reconcile_duration_seconds_count{result=\"conflict\"} 9",
            "evenkeel_controller_reconcile_duration_seconds_count{result=\"error\"} 0"
        ]
    );
    cluster.server.accept_kind("trainingjobs");
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.context.conflict_pause(&cluster.job()), soon);
}

/// A log in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Writes warnings, and each span when it begins.
    fn subscriber(&self) -> impl tracing::Subscriber + Send + Sync + use<> {
        // If there were only one subscriber, the first test to enter a span would decide for all whether it is enabled,
        // also a test without a subscriber.
        static SECOND: LazyLock<tracing::Dispatch> =
            LazyLock::new(|| tracing::Dispatch::new(tracing_subscriber::registry()));
        LazyLock::force(&SECOND);
        let writer = self.clone();
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_span_events(FmtSpan::NEW)
            .without_time()
            .with_target(false)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish()
    }

    fn text(&self) -> String {
        String::from_utf8(lock(&self.0).clone()).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_step_of_a_reconciliation_has_a_span() {
    let mut cluster = Cluster::running().await;
    let log = Log::default();
    let reconciled = cluster.reconcile().with_subscriber(log.subscriber());
    reconciled.await.unwrap();
    let text = log.text();
    let spans = text.lines().filter_map(|line| line.strip_suffix(": new"));
    let spans: Vec<&str> = spans.map(str::trim).collect();
    insta::assert_snapshot!(spans.join("\n"), @r#"
    ERROR reconcile{job=x namespace="n" generation=1}
    ERROR reconcile{job=x namespace="n" generation=1}:step{name="plan"}
    ERROR reconcile{job=x namespace="n" generation=1}:step{name="observe"}
    ERROR reconcile{job=x namespace="n" generation=1}:step{name="decide"}
    ERROR reconcile{job=x namespace="n" generation=1}:step{name="build"}
    ERROR reconcile{job=x namespace="n" generation=1}:step{name="write-status"}
    ERROR reconcile{job=x namespace="n" generation=1}:step{name="apply"}
    "#);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_names_the_job_and_the_generation_of_a_failure() {
    let cluster = Cluster::running().await;
    let log = Log::default();
    let error = Status::failure("no quorum", "InternalError").with_code(500);
    let error = ReconcileError::Api(kube::Error::Api(error.boxed()));
    tracing::subscriber::with_default(log.subscriber(), || {
        error_policy(Arc::new(cluster.job()), &error, cluster.context.clone())
    });
    let text = log.text();
    let (lines, _) = text.split_once(" error=").unwrap();
    let line = lines.lines().last().unwrap();
    insta::assert_snapshot!(line.trim(), @r#"WARN reconcile{job=x namespace="n" generation=1}: reconciliation failed"#);
}
