//! An API server with an older state than the pods and the volume, and clocks that were set.

use serde_json::{Value, json};

use super::lifecycle::checkpoint;
use crate::api::status::{Phase, TrainingJobStatus};
use crate::operator::testing::Cluster;
use crate::telemetry::now;
use crate::util::time::{micro_time, seconds};

fn message(status: &TrainingJobStatus) -> Option<&str> {
    let mut conditions = status.conditions.iter();
    let condition = conditions.find(|c| c.type_ == "Restored" && c.status == "True")?;
    Some(&condition.message)
}

/// Answers of the members' agents.
fn agents(cluster: &Cluster, state: &Value) {
    for pod in ["x-0-1", "x-1-2"] {
        cluster.agent(pod, state.clone());
    }
}

/// The older copy has no progress, and the ranks find that nothing is left to train.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_ends_without_another_step_has_its_whole_progress() {
    let mut cluster = Cluster::running().await;
    assert_eq!(cluster.status().progress, None);
    let later = json!({"number": 5, "checkpoint": checkpoint(5, 10)});
    let state = json!({"generation": 5, "ranks": [{"ready": true}], "later": later});
    agents(&cluster, &state);
    cluster
        .reconcile_until(|status| status.number() == Some(6))
        .await;
    cluster.ranks(|_| json!({"ending": {"code": 0}}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Complete)
        .await;
    let progress = cluster.status().progress.unwrap();
    assert_eq!(
        (progress.samples, progress.step, progress.share.as_str()),
        (80, 10, "100 %")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_continues_above_the_generations_that_its_status_does_not_have() {
    let mut cluster = Cluster::running().await;
    // What the older copy had.
    let progress = json!({"samples": 8, "budgetSamples": 80, "percent": "10 %", "step": 1,
        "loss": "3.1", "batch": 8, "tokensPerSecond": 100});
    let restored = json!({"status": {"progress": progress}});
    cluster.server.change("trainingjobs", "x", restored);
    // The ranks of generation 4 have committed; generation 5 has started from that.
    let later = json!({"number": 5, "checkpoint": checkpoint(4, 6)});
    agents(
        &cluster,
        &json!({"generation": 4, "ranks": [{"ready": true}], "committed": checkpoint(4, 3), "later": later}),
    );
    cluster
        .reconcile_until(|status| status.number() == Some(6))
        .await;
    let status = cluster.status();
    assert_eq!(
        message(&status),
        Some(
            "the status has generation 1, and the pods or the volume have 5: the API server was restored from an \
             older copy of its data; the job continues above it, from the checkpoint of 48 samples"
        )
    );
    assert_eq!(
        (status.restarts, status.disruptions, status.later_generation),
        (0, 0, None)
    );
    let progress = status.progress.unwrap();
    assert_eq!((progress.samples, progress.share.as_str()), (48, "60 %"));
    assert_eq!((progress.step, progress.loss.as_str()), (6, ""));
    let start = status.generation.unwrap().record.start.unwrap();
    assert_eq!(
        (start.path.as_str(), start.samples),
        ("gen-4/step-0000006", 48)
    );
    // The agents' answers are older than the new generation.
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    assert_eq!(cluster.status().number(), Some(6));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_published_before_the_volume_was_searched() {
    let mut cluster = Cluster::running().await;
    let mut state = json!({"generation": 3, "ranks": [{"ready": true}]});
    agents(&cluster, &state);
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    assert_eq!(cluster.status().number(), Some(1));
    // The ranks have committed after the search.
    state["later"] = json!({"number": 3, "checkpoint": checkpoint(2, 3)});
    state["committed"] = checkpoint(3, 4);
    agents(&cluster, &state);
    cluster
        .reconcile_until(|status| status.number() == Some(4))
        .await;
    let start = cluster.status().generation.unwrap().record.start.unwrap();
    assert_eq!(start.path, "gen-3/step-0000004");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_generation_of_the_same_number_on_the_volume_is_skipped() {
    let mut cluster = Cluster::running().await;
    let state = json!({"later": {"number": 1, "checkpoint": null}});
    agents(&cluster, &state);
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    let status = cluster.status();
    assert!(message(&status).unwrap().ends_with("from the beginning"));
    assert_eq!(status.checkpoint, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_that_starts_before_the_newest_checkpoint_is_replaced_once() {
    let mut cluster = Cluster::running().await;
    let tell = |cluster: &Cluster, step| {
        let later = json!({"number": 2, "checkpoint": checkpoint(2, step)});
        agents(cluster, &json!({"later": later}));
    };
    tell(&cluster, 3);
    cluster
        .reconcile_until(|status| status.number() == Some(3))
        .await;
    let restored = message(&cluster.status()).unwrap().to_owned();
    // The agents find a newer one before they begin generation 3. This is no sign of an older status.
    tell(&cluster, 5);
    cluster
        .reconcile_until(|status| status.number() == Some(4))
        .await;
    let status = cluster.status();
    assert_eq!(message(&status), Some(restored.as_str()));
    let start = status.generation.unwrap().record.start.unwrap();
    assert_eq!(start.path, "gen-2/step-0000005");
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    assert_eq!(cluster.status().number(), Some(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_generations_and_checkpoints_are_not_believed() {
    let mut cluster = Cluster::running().await;
    let too_late =
        json!({"generation": u64::MAX, "later": {"number": 1u64 << 40, "checkpoint": null}});
    agents(&cluster, &too_late);
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    assert_eq!(cluster.status().number(), Some(1));
    assert_eq!(message(&cluster.status()), None);

    let mut forged = checkpoint(3, 4);
    forged["path"] = json!("../other/gen-3/step-0000004");
    let mut beyond = checkpoint(3, 4);
    beyond["samples"] = json!(1_000_000);
    for impossible in [forged, beyond] {
        let mut cluster = Cluster::running().await;
        agents(
            &cluster,
            &json!({"later": {"number": 3, "checkpoint": impossible}}),
        );
        cluster
            .reconcile_until(|status| status.number() == Some(4))
            .await;
        assert_eq!(cluster.status().checkpoint, None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_later_attempt_than_the_status_has_are_left_alone() {
    let mut cluster = Cluster::running().await;
    let mut later = serde_json::to_value(cluster.pod("x-0-1")).unwrap();
    // Without an address they are not polled.
    later["status"] = json!({});
    let mut earlier = later.clone();
    later["metadata"]["name"] = json!("x-0-3");
    later["metadata"]["uid"] = json!("later");
    earlier["metadata"]["name"] = json!("x-0-0");
    earlier["metadata"]["uid"] = json!("earlier");
    cluster.server.put("pods", later);
    cluster.server.put("pods", earlier);
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.status().attempts, 2);
    assert_eq!(cluster.server.names("pods"), ["x-0-1", "x-0-3", "x-1-2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn times_beyond_the_present_clock_are_limited() {
    let mut cluster = Cluster::running().await;
    let tomorrow = micro_time(now() + 86_400.0);
    let times = json!({
        "scaleUpPendingSince": tomorrow, "rescaleSince": tomorrow, "placementSince": tomorrow,
        "restartNotBefore": tomorrow,
    });
    let ended = json!({"jobGeneration": {"outcome": {"kind": "drained"}}});
    cluster
        .server
        .change("trainingjobs", "x", json!({"status": times}));
    cluster
        .server
        .change("trainingjobs", "x", json!({"status": ended}));
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    let latest = now() + 300.0;
    let since = [status.rescale_since, status.placement_since];
    for at in since
        .into_iter()
        .chain([status.restart_not_before])
        .flatten()
    {
        assert!(seconds(&at) <= latest, "{at:?}");
    }
    assert_eq!(status.phase, Phase::Placing);
}
