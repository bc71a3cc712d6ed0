//! Requests that the API server refuses.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kube::core::Status;
use kube::runtime::controller::Action;
use serde_json::json;

use crate::operator::controller::error_policy;
use crate::operator::error::ReconcileError;
use crate::operator::testing::Cluster;
use crate::util::lock::lock;

#[tokio::test(flavor = "multi_thread")]
async fn the_first_retry_after_a_conflict_is_soon_and_the_next_ones_are_later() {
    let mut cluster = Cluster::running().await;
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.server.refuse_kind("trainingjobs", 409, "Conflict");
    let soon = Duration::from_millis(50);
    let first = cluster.reconcile_or_pause().await;
    assert_eq!(first, Action::requeue(soon));
    for _ in 0..8 {
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

#[tokio::test(flavor = "multi_thread")]
async fn the_log_names_the_job_and_the_generation_of_a_failure() {
    let cluster = Cluster::running().await;
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let error = Status::failure("no quorum", "InternalError").with_code(500);
    let error = ReconcileError::Api(kube::Error::Api(error.boxed()));
    tracing::subscriber::with_default(subscriber, || {
        error_policy(Arc::new(cluster.job()), &error, cluster.context.clone())
    });
    let text = String::from_utf8(lock(&log.0).clone()).unwrap();
    let (line, _) = text.split_once(" error=").unwrap();
    insta::assert_snapshot!(line.trim(), @r#"WARN reconcile{job=x namespace="n" generation=1}: reconciliation failed"#);
}
