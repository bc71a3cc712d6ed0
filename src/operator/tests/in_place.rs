//! Ranks that continue in the next generation with their processes.

use serde_json::{Value, json};

use crate::api::status::{Phase, TrainingJobStatus};
use crate::lifecycle::generation::Carried;
use crate::operator::testing::Cluster;

/// A rank with a state, 24 samples after the start, after the loss of another one.
fn survivor(lost: u64) -> Value {
    json!({"lost": {
        "rank": lost, "message": "connection closed",
        "step": 3, "samples": 24, "batch": 8, "whole": true, "joinable": true,
    }})
}

fn paused() -> Value {
    let held = json!({"step": 3, "samples": 24, "batch": 8, "whole": true, "joinable": true});
    json!({"paused": true, "kept": held})
}

/// What an agent of the first generation says of its only rank.
fn state(rank: Value) -> Value {
    json!({"generation": 1, "continues": true, "ranks": [rank]})
}

/// The agents of both pods say that their ranks are like this.
fn both(cluster: &Cluster, rank: &Value) {
    for pod in ["x-0-1", "x-1-2"] {
        cluster.agent(pod, state(rank.clone()));
    }
}

/// A running job, one of whose nodes has just been cordoned.
async fn cordoned() -> Cluster {
    let mut cluster = Cluster::running().await;
    both(&cluster, &json!({"ready": true}));
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster
}

/// The members of the newest generation: their pods, with the ranks that continue there.
fn members(status: &TrainingJobStatus) -> Vec<(String, Vec<u64>)> {
    let record = &status.generation.as_ref().unwrap().record;
    let member = record.members.iter();
    member
        .map(|it| (it.pod.clone().unwrap().name, it.carries.clone()))
        .collect()
}

fn carried(rank: u64) -> Option<Carried> {
    Some(Carried {
        from: 1,
        rank,
        step: 3,
        samples: 24,
        batch: 8,
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn survivors_continue_at_once_and_the_pod_that_replaces_the_lost_one_joins_later() {
    let mut cluster = Cluster::running().await;
    let record = cluster.status().generation.unwrap().record;
    assert_eq!(record.plan.global_batch_size, 8);
    cluster.put_node("c", json!({}));
    cluster.remove_node("a");
    cluster.agent("x-0-1", state(json!({"ready": true})));
    cluster.agent("x-1-2", state(survivor(0)));
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(members(&status), [("x-1-2".to_owned(), vec![1])]);
    let current = status.generation.clone().unwrap();
    assert_eq!(
        (current.record.number, current.record.carried),
        (2, carried(0))
    );
    assert_eq!((current.after_loss, current.record.start), (None, None));
    assert_eq!((status.disruptions, status.restarts), (1, 0));
    assert_eq!(status.slots.len(), 2, "the pod under way is kept");

    let state = json!({"generation": 2, "continues": true, "ranks": [{"ready": true}]});
    cluster.agent("x-1-2", state);
    let drains = |status: &TrainingJobStatus| status.phase == Phase::Draining;
    cluster.reconcile_until(drains).await;
    let current = cluster.status().generation.unwrap();
    assert!(current.drain && current.pause);
    let state = json!({"generation": 2, "continues": true, "ranks": [paused()]});
    cluster.agent("x-1-2", state);
    let joined = "x-0-3".to_owned();
    cluster.agent(&joined, json!({"continues": true}));
    cluster.reconcile().await.unwrap();
    let found = members(&cluster.status());
    assert_eq!(found, [(joined, vec![]), ("x-1-2".to_owned(), vec![0])]);
    let record = cluster.status().generation.unwrap().record;
    assert_eq!(record.carried.map(|it| (it.from, it.rank)), Some((2, 1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_that_cannot_continue_commit_what_they_hold() {
    let mut unknown = survivor(1);
    unknown["lost"]["joinable"] = false.into();
    // An agent of an earlier version, and a state that no new process can take.
    for (continues, rank) in [(false, survivor(1)), (true, unknown)] {
        let mut cluster = Cluster::running().await;
        let ended = json!({"ending": {"signal": 9}});
        let state =
            |rank: &Value| json!({"generation": 1, "continues": continues, "ranks": [rank]});
        cluster.agent("x-0-1", state(&rank));
        cluster.agent("x-1-2", state(&ended));
        cluster.reconcile().await.unwrap();
        let current = cluster.status().generation.unwrap();
        assert_eq!(current.record.number, 1);
        assert_eq!(current.after_loss.unwrap().commit, Some(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ranks_of_a_cordoned_node_are_left_out_without_a_checkpoint() {
    let mut cluster = cordoned().await;
    cluster.reconcile().await.unwrap();
    let current = cluster.status().generation.unwrap();
    assert!(current.drain && current.pause);
    cluster.agent("x-0-1", state(paused()));
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.status().number(), Some(1), "the other still trains");
    cluster.agent("x-1-2", state(paused()));
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(members(&status), [("x-0-1".to_owned(), vec![0])]);
    let record = status.generation.unwrap().record;
    assert_eq!((record.carried, record.start), (carried(0), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cordoned_node_is_left_when_another_pod_stands_by() {
    let mut cluster = cordoned().await;
    cluster.put_node("c", json!({}));
    cluster
        .reconcile_until(|status| status.slots.len() == 3)
        .await;
    let joins = cluster.status().slots[2].pod("x");
    cluster.start_pods();
    cluster.agent(&joins, json!({"continues": true, "prepares": true}));
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
        assert!(!cluster.status().generation.unwrap().drain);
    }
    insta::assert_snapshot!(cluster.status().message, @"node b is cordoned: its ranks leave when other pods can take their place");
    cluster.agent(&joins, json!({"continues": true}));
    cluster.reconcile().await.unwrap();
    let current = cluster.status().generation.unwrap();
    assert!(current.drain && current.pause);
    both(&cluster, &paused());
    cluster.reconcile().await.unwrap();
    let found = members(&cluster.status());
    assert_eq!(found, [("x-0-1".to_owned(), vec![0]), (joins, vec![])]);
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_that_wait_commit_when_their_job_is_suspended() {
    let mut cluster = cordoned().await;
    cluster.reconcile().await.unwrap();
    cluster.edit(json!({"suspend": true}));
    both(&cluster, &paused());
    cluster.reconcile().await.unwrap();
    let current = cluster.status().generation.unwrap();
    assert_eq!(current.record.number, 1);
    assert_eq!(current.after_loss.unwrap().commit, Some(0));
}
