//! Ranks that make no progress, and jobs that run too long.

use serde_json::{Value, json};

use super::lifecycle::causes;
use crate::api::status::{Phase, Slot, TrainingJobStatus};
use crate::operator::build;
use crate::operator::testing::{Cluster, job};

/// The reason of a condition that holds.
fn reason(status: &TrainingJobStatus, kind: &str) -> String {
    let mut conditions = status.conditions.iter();
    let condition = conditions.find(|c| c.type_ == kind && c.status == "True");
    condition.map_or_else(String::new, |condition| condition.reason.clone())
}

/// Ends generation 1 with a stall of rank 1, on node b.
async fn stalled(change: Value) -> Cluster {
    let mut cluster = Cluster::running().await;
    cluster.edit(change);
    let stalled = "no progress for 600 s while computing";
    cluster.ranks(|rank| match rank {
        0 => {
            json!({"lost": {"rank": 1, "message": "closed", "samples": 0, "whole": true}, "ending": {"code": 75}})
        }
        _ => json!({"kill_reason": stalled, "stalled": true, "ending": {"signal": 9}}),
    });
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_rank_is_restarted_on_its_node() {
    let cluster = stalled(json!({})).await;
    let status = cluster.status();
    let cause = "lost rank 1: no progress for 600 s while computing, so it was killed";
    assert_eq!((status.nodes, status.restarts), (2, 1));
    assert!(status.excluded_nodes.is_empty());
    assert_eq!(causes(status), ["started", cause]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_of_a_stalled_rank_gets_no_pods_until_the_reaction_changes() {
    let mut cluster = stalled(json!({"onStall": "ExcludeNode"})).await;
    let status = cluster.status();
    assert_eq!(
        (status.nodes, status.excluded_nodes),
        (1, vec!["b".to_owned()])
    );
    cluster.ranks(|_| json!({"ready": true}));
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    assert_eq!(cluster.server.names("pods"), ["x-0-1"]);
    // The pod for a second node must avoid the excluded one.
    cluster.put_node("c", json!({}));
    cluster.reconcile().await.unwrap();
    let names = cluster.server.names("pods");
    let new = names.iter().find(|name| *name != "x-0-1").unwrap();
    let pod = serde_json::to_value(cluster.pod(new)).unwrap();
    let terms = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    assert_eq!(
        pod.pointer(terms),
        Some(
            &json!([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["b"]}]}])
        )
    );
    cluster.edit(json!({"onStall": "Restart"}));
    cluster.reconcile().await.unwrap();
    assert!(cluster.status().excluded_nodes.is_empty());
}

#[test]
fn excluded_nodes_narrow_every_alternative_of_a_templates_affinity() {
    let mut job = job("x", "u");
    job.status = Some(TrainingJobStatus {
        excluded_nodes: vec!["b".to_owned()],
        ..TrainingJobStatus::default()
    });
    let zone = |zone: &str| json!([{"key": "zone", "operator": "In", "values": [zone]}]);
    let required = |terms: Value| {
        let required = json!({"nodeSelectorTerms": terms});
        json!({"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}})
    };
    let alternatives = json!([{"matchExpressions": zone("1")}, {"matchExpressions": zone("2")}]);
    job.spec.pod_template = Some(required(alternatives));
    let pod = build::pod(&job, Slot::default(), None).unwrap();
    let not_b = json!([{"key": "metadata.name", "operator": "NotIn", "values": ["b"]}]);
    let narrowed = ["1", "2"].map(|at| json!({"matchExpressions": zone(at), "matchFields": not_b}));
    let affinity = required(json!(narrowed))["spec"]["affinity"].take();
    assert_eq!(json!(pod.spec.unwrap().affinity), affinity);
    // The API server stores any template.
    job.spec.pod_template = Some(json!({"spec": {"affinity": 5}}));
    build::pod(&job, Slot::default(), None).unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stall_that_is_only_reported_shows_in_the_condition() {
    let mut cluster = Cluster::running().await;
    let message = "rank 0: no progress for 600 s while computing";
    let state = json!({"generation": 1, "ranks": [{"ready": true}], "stalled": message});
    cluster.agent("x-0-1", state);
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(
        (status.phase, status.message.as_str()),
        (Phase::Running, message)
    );
    assert_eq!(reason(&status, "Running"), "Stalled");
    assert_eq!(reason(&status, "PodsReady"), "Training");
    cluster.ranks(|_| json!({"ready": true}));
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(status.message, "");
    assert_eq!(reason(&status, "Running"), "Training");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_beyond_its_active_deadline_commits_and_fails() {
    let mut cluster = Cluster::running().await;
    cluster.edit(json!({"activeDeadlineSeconds": 3600}));
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.status().phase, Phase::Running);
    let long_ago = json!({"status": {"startTime": "2025-01-01T00:00:00.000000Z"}});
    cluster.server.change("trainingjobs", "x", long_ago);
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    let message = "spec.activeDeadlineSeconds: the job has run for 3600 s";
    assert_eq!(
        (status.phase, status.message.as_str()),
        (Phase::Draining, message)
    );
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Failed)
        .await;
    let status = cluster.status();
    assert_eq!(status.message, message);
    assert_eq!(reason(&status, "Failed"), "DeadlineExceeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspension_resets_the_active_deadline() {
    let mut cluster = Cluster::running().await;
    let began = cluster.status().start_time;
    assert!(began.is_some());
    cluster.edit(json!({"suspend": true}));
    cluster.reconcile().await.unwrap();
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Suspended)
        .await;
    assert_eq!(cluster.status().start_time, None);
    cluster.edit(json!({"suspend": false}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Running)
        .await;
    assert!(cluster.status().start_time > began);
}
