//! A job from its first pods to its end, and what disturbs it.

use std::sync::Arc;

use kube::runtime::controller::Action;
use serde_json::{Value, json};

use crate::api::status::{Phase, TrainingJobStatus};
use crate::lifecycle::files;
use crate::lifecycle::rank_status::NOTICE;
use crate::operator::error::ReconcileError;
use crate::operator::reconcile::reconcile;
use crate::operator::testing::Cluster;
use crate::telemetry::now;
use crate::util::time::micro_time;

/// The step record of a trainer after `step` steps of 8 samples.
fn step(generation: u64, step: u64) -> Value {
    json!({
        "generation": generation, "step": step, "samples": 8 * step, "batch": 8, "world": 2, "loss": 2.5,
        "tokens": 256, "learning_rate": 1e-3, "gradient_norm": 1.0, "seconds": 0.5, "time": 1.0,
    })
}

/// A checkpoint that a rank of a generation has committed after `step` steps.
pub fn checkpoint(generation: u64, step: u64) -> Value {
    json!({
        "path": files::checkpoint_path(generation, step), "step": step, "samples": 8 * step, "batch": 8,
        "checksum": "0".repeat(32),
    })
}

/// The causes of the job's generations.
pub fn causes(status: TrainingJobStatus) -> Vec<String> {
    let changes = status.history.into_iter();
    changes.map(|change| change.message).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_runs_from_its_first_pods_to_its_end() {
    let mut cluster = Cluster::running().await;
    let status = cluster.status();
    let record = status.generation.unwrap().record;
    assert_eq!((status.phase, record.number), (Phase::Running, 1));
    let members = record
        .members
        .iter()
        .map(|member| member.pod.clone().unwrap());
    let members: Vec<_> = members.map(|pod| (pod.name, pod.node, pod.ip)).collect();
    let member = |pod: &str, node: &str, ip: &str| (pod.to_owned(), node.to_owned(), ip.to_owned());
    let expected = [
        member("x-0-1", "a", "10.0.0.97"),
        member("x-1-2", "b", "10.0.0.98"),
    ];
    assert_eq!(members, expected);
    assert_eq!(
        (record.plan.facts.world_size, record.plan.global_batch_size),
        (2, 8)
    );

    let at_work = json!({
        "generation": 1, "ranks": [{"ready": true}], "step": step(1, 4), "budget": 80, "seconds_left": 3.0,
        "started": 10.0, "ready": 11.0, "first_step": 12.0,
    });
    cluster.agent("x-0-1", at_work.clone());
    cluster.reconcile().await.unwrap();
    let progress = cluster.status().progress.unwrap();
    assert_eq!(
        (progress.step, progress.samples, progress.batch),
        (4, 32, 8)
    );
    assert_eq!(
        (progress.share.as_str(), progress.loss.as_str()),
        ("40 %", "2.5000")
    );
    assert_eq!(
        (progress.tokens_per_second, progress.time_left.as_str()),
        (512, "3s")
    );

    cluster.ranks(|_| json!({"ending": {"code": 0}}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Complete)
        .await;
    let status = cluster.status();
    assert!(status.completion_time.is_some() && status.rescale_since.is_none());
    let pods = cluster.server.names("pods");
    assert_eq!(cluster.reconcile().await.unwrap(), Action::await_change());
    assert_eq!(
        cluster.server.names("pods"),
        pods,
        "its agents exit by themselves"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_pods_still_prepare_does_not_run_yet() {
    let mut cluster = Cluster::running().await;
    let phase = |cluster: &Cluster| {
        let status = cluster.status();
        let ready = status.conditions.iter();
        let ready = ready.filter(|condition| condition.type_ == "PodsReady");
        let ready: Vec<String> = ready.map(|condition| condition.reason.clone()).collect();
        (status.phase, status.message, ready.join(" "))
    };
    let away =
        json!({"reason": "BucketUnreachable", "message": "no answer", "deterministic": false});
    let started = json!({"generation": 1, "ranks": [{}], "started": 10.0});
    cluster.agent("x-0-1", started.clone());
    cluster.agent("x-1-2", json!({"generation": 1, "problem": away}));
    cluster.reconcile().await.unwrap();
    let (found, message, reason) = phase(&cluster);
    assert_eq!(
        (found, reason.as_str()),
        (Phase::Placing, "BucketUnreachable")
    );
    assert!(message.contains("no answer"), "{message}");
    cluster.agent("x-1-2", started);
    cluster.reconcile().await.unwrap();
    assert_eq!(
        phase(&cluster),
        (Phase::Running, String::new(), "Training".into())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_on_a_cordoned_node_commit_and_the_others_continue() {
    let mut cluster = Cluster::running().await;
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(
        (status.phase, status.message.as_str()),
        (Phase::Draining, "node b is cordoned")
    );
    assert!(status.generation.unwrap().drain && status.rescale_since.is_some());
    assert_eq!(cluster.server.names("pods").len(), 2, "the ranks still run");

    // Uncordoned in time.
    cluster.put_node("b", json!({}));
    cluster.reconcile().await.unwrap();
    assert!(!cluster.status().generation.unwrap().drain);

    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.reconcile().await.unwrap();
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    let drained = json!({"generation": 1, "ranks": [{"ending": {"code": 143}}], "committed": checkpoint(1, 3)});
    cluster.agent("x-0-1", drained);
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    let status = cluster.status();
    let record = status.generation.unwrap().record;
    assert_eq!(
        record.start.map(|start| (start.step, start.samples)),
        Some((3, 24))
    );
    assert_eq!(
        (record.members.len(), record.plan.global_batch_size),
        (1, 8),
        "the batch is kept"
    );
    assert_eq!((status.restarts, status.disruptions), (0, 0));
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.server.names("pods"), ["x-0-1"]);

    // The node returns: the job grows after its ranks have committed.
    cluster.put_node("b", json!({}));
    cluster.ranks(|_| json!({"ready": true}));
    cluster
        .reconcile_until(|status| status.generation.as_ref().is_some_and(|c| c.drain))
        .await;
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster.reconcile_until(|status| status.nodes == 2).await;
    assert_eq!(
        causes(cluster.status()),
        [
            "started",
            "resized 2 → 1: node b is cordoned",
            "resized 1 → 2"
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_survivor_commits_after_the_loss_of_a_pod_and_no_failure_is_counted() {
    let mut cluster = Cluster::running().await;
    cluster.server.remove("pods", "x-1-2");
    let lost = json!({"rank": 1, "message": "connection closed", "samples": 24, "whole": true});
    cluster.agent("x-0-1", json!({"generation": 1, "ranks": [{"lost": lost}]}));
    cluster.reconcile().await.unwrap();
    let current = cluster.status().generation.unwrap();
    assert_eq!(current.after_loss.unwrap().commit, Some(0));
    assert_eq!(current.outcome, None, "the survivor still commits");

    let ended = json!({
        "generation": 1, "ranks": [{"lost": lost, "ending": {"code": 75}}], "committed": checkpoint(1, 3),
    });
    cluster.agent("x-0-1", ended);
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    let status = cluster.status();
    let record = status.generation.unwrap().record;
    assert_eq!((record.number, record.start.unwrap().samples), (2, 24));
    assert_eq!((status.restarts, status.disruptions), (0, 1));
    let names = record
        .members
        .iter()
        .map(|member| member.pod.clone().unwrap().name);
    assert_eq!(
        names.collect::<Vec<_>>(),
        ["x-0-1", "x-1-3"],
        "a name is used once"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_does_not_notice_the_loss_of_its_peer_is_given_up() {
    let mut cluster = Cluster::running().await;
    let trained = |rank: Value| json!({"generation": 1, "ranks": [rank], "first_step": 2.0});
    cluster.agent("x-0-1", trained(json!({"ready": true})));
    cluster.agent("x-1-2", trained(json!({"ready": true})));
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.status().rescale_since, None);

    cluster.agent("x-1-2", trained(json!({"ending": {"signal": 9}})));
    cluster.reconcile().await.unwrap();
    let since = cluster.status().rescale_since;
    assert!(since.is_some());
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(status.rescale_since, since, "the time runs on");
    assert_eq!(status.generation.unwrap().after_loss, None);

    let noticed = micro_time(now() - NOTICE.as_secs_f64() - 1.0);
    let past = json!({"status": {"rescaleSince": noticed}});
    cluster.server.change("trainingjobs", "x", past);
    cluster.reconcile().await.unwrap();
    assert!(cluster.status().generation.unwrap().after_loss.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_fails_is_restarted_and_a_deterministic_failure_ends_the_job() {
    let mut cluster = Cluster::running().await;
    let failed = |deterministic: bool| json!({"failed": ["loss is NaN", deterministic], "ending": {"code": 1}});
    let peer = json!({"lost": {"rank": 0, "message": "closed", "samples": 0, "whole": true}, "ending": {"code": 75}});
    cluster.ranks(|rank| {
        if rank == 0 {
            failed(false)
        } else {
            peer.clone()
        }
    });
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(status.restarts, 1);
    assert!(status.restart_not_before.is_some() && status.generation.unwrap().outcome.is_some());
    // The pause is over.
    let past = json!({"status": {"restartNotBefore": "2026-01-01T00:00:00.000000Z"}});
    cluster.server.change("trainingjobs", "x", past);
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;

    let state = json!({"generation": 2, "ranks": [failed(true)], "log_tail": "Traceback"});
    cluster.agent("x-0-1", state);
    cluster.agent("x-1-2", json!({"generation": 2, "ranks": [peer]}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Failed)
        .await;
    let status = cluster.status();
    assert!(status.message.contains("loss is NaN"), "{}", status.message);
    assert_eq!(status.log_tail, "Traceback");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_out_of_memory_error_halves_the_micro_batch_and_keeps_the_global_batch() {
    let mut cluster = Cluster::running().await;
    let before = cluster.status().generation.unwrap().record.plan;
    let exhausted = json!({"out_of_memory": "2 GiB do not fit", "ending": {"code": 76}});
    cluster.ranks(|_| exhausted.clone());
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    let after = cluster.status().generation.unwrap().record.plan;
    assert_eq!(
        (before.per_device_batch_size, after.per_device_batch_size),
        (4, 2)
    );
    assert_eq!((before.global_batch_size, after.global_batch_size), (8, 8));
    assert_eq!(
        causes(cluster.status()),
        ["started", "out of memory: micro-batch 4 → 2"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_job_has_no_pods_and_continues_later() {
    let mut cluster = Cluster::running().await;
    cluster.edit(json!({"suspend": true}));
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.status().phase, Phase::Draining);
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Suspended)
        .await;
    cluster.reconcile().await.unwrap();
    assert_eq!(cluster.server.names("pods"), [] as [&str; 0]);
    cluster.edit(json!({"suspend": false}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Running)
        .await;
    assert_eq!(cluster.status().generation.unwrap().record.number, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_of_the_image_replaces_the_pods_between_generations() {
    let mut cluster = Cluster::running().await;
    cluster.edit(json!({"image": "newer"}));
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(status.phase, Phase::Draining);
    assert!(
        status.message.contains("made before the job's image"),
        "{}",
        status.message
    );
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    for pod in cluster.server.names("pods") {
        let spec = cluster.pod(&pod).spec.unwrap();
        assert_eq!(spec.containers[0].image.as_deref(), Some("newer"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_object_is_made_or_deleted_before_the_status_is_written() {
    let mut cluster = Cluster::new();
    cluster.server.refuse_writes("trainingjobs", "x");
    for _ in 0..20 {
        // The first ones may wait for the planner.
        let _ = cluster.reconcile().await;
    }
    assert!(cluster.reconcile().await.is_err());
    for kind in ["pods", "serviceaccounts", "networkpolicies", "services"] {
        assert_eq!(cluster.server.names(kind), [] as [&str; 0], "{kind}");
    }

    let mut cluster = Cluster::running().await;
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster.edit(json!({"suspend": true}));
    cluster.server.refuse_writes("trainingjobs", "x");
    for _ in 0..5 {
        assert!(cluster.reconcile().await.is_err());
    }
    assert_eq!(cluster.server.names("pods").len(), 2);
    cluster.server.accept_writes("trainingjobs", "x");
    cluster
        .reconcile_until(|status| status.phase == Phase::Suspended)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_controller_continues_from_the_status() {
    let mut cluster = Cluster::running().await;
    let before = cluster.status();
    cluster.restart_controller();
    for pod in ["x-0-1", "x-1-2"] {
        cluster.agent(pod, json!({"generation": 1, "ranks": [{"ready": true}]}));
    }
    for _ in 0..20 {
        cluster.reconcile().await.unwrap();
    }
    let after = cluster.status();
    assert_eq!(after.generation, before.generation);
    assert_eq!(
        (after.attempts, after.slots),
        (before.attempts, before.slots)
    );
    assert_eq!(cluster.server.names("pods").len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_deleted_counts_as_lost_and_a_small_pool_as_wait() {
    let mut cluster = Cluster::running().await;
    cluster.edit(json!({"elasticity": {"minNodes": 2}}));
    cluster.remove_node("b");
    let lost = json!({"rank": 1, "message": "connection closed", "samples": 0, "whole": true});
    cluster.agent(
        "x-0-1",
        json!({"generation": 1, "ranks": [{"lost": lost, "ending": {"code": 75}}]}),
    );
    cluster
        .reconcile_until(|status| status.phase == Phase::Waiting)
        .await;
    let status = cluster.status();
    assert_eq!((status.disruptions, status.restarts), (1, 0));
    cluster.reconcile().await.unwrap();
    assert_eq!(
        cluster.server.names("pods"),
        [] as [&str; 0],
        "a waiting job holds no devices"
    );
    cluster.put_node("c", json!({}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Running)
        .await;
    assert_eq!(cluster.status().nodes, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recipe_that_cannot_be_read_gets_no_pods_and_says_why() {
    let mut cluster = Cluster::new();
    cluster.edit(json!({"recipe": {"inline": "kind: Recipe"}}));
    let planned =
        |status: &TrainingJobStatus| status.conditions.iter().any(|c| c.type_ == "Planned");
    cluster.reconcile_until(planned).await;
    let status = cluster.status();
    let condition = status
        .conditions
        .iter()
        .find(|c| c.type_ == "Planned")
        .unwrap();
    assert_eq!(
        (condition.status.as_str(), status.phase),
        ("False", Phase::Pending)
    );
    assert_eq!(status.message, condition.message);
    assert_eq!(cluster.server.names("pods"), [] as [&str; 0]);
    let before = cluster.server.requests("trainingjobs").len();
    assert_eq!(cluster.reconcile().await.unwrap(), Action::await_change());
    assert_eq!(
        cluster.server.requests("trainingjobs").len(),
        before,
        "an equal status is not written"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_waits_for_its_config_map() {
    let mut cluster = Cluster::new();
    let inline = cluster.job().spec.recipe.inline.unwrap();
    cluster.edit(
        json!({"recipe": {"inline": null, "configMap": {"name": "recipes", "key": "r.yaml"}}}),
    );
    let missing = |status: &TrainingJobStatus| status.message.contains("recipes");
    cluster.reconcile_until(missing).await;
    let message = cluster.status().message;
    assert!(
        message.contains("does not exist in namespace n"),
        "{message}"
    );
    assert_ne!(cluster.reconcile().await.unwrap(), Action::await_change());
    let server = cluster.server.clone();
    let put = |text: &str| {
        let map = json!({"metadata": {"name": "recipes"}, "data": {"r.yaml": text}});
        server.put("configmaps", map);
    };
    // A refused recipe is read again, since the controller does not watch ConfigMaps.
    put("a: 1");
    let again = Action::requeue(std::time::Duration::from_secs(60));
    for _ in 0..2 {
        assert_eq!(cluster.reconcile().await.unwrap(), again);
        assert_eq!(cluster.status().phase, Phase::Pending);
    }
    put(&inline);
    cluster
        .reconcile_until(|status| status.phase == Phase::Running)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_that_cannot_be_planned_leaves_the_running_generation_alone() {
    let mut cluster = Cluster::running().await;
    let before = cluster.status().generation;
    let missing = json!([
        "accelerate",
        "launch",
        "--config_file",
        "missing.yaml",
        "train.py"
    ]);
    cluster.edit(json!({"trainer": {"command": missing}}));
    for _ in 0..20 {
        cluster.reconcile().await.unwrap();
    }
    let status = cluster.status();
    let condition = status
        .conditions
        .iter()
        .find(|c| c.type_ == "Planned")
        .unwrap();
    assert_eq!(
        (condition.status.as_str(), status.phase),
        ("False", Phase::Running),
        "{status:?}"
    );
    assert_eq!(status.generation, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_is_an_error_that_repeats_the_reconciliation() {
    let mut cluster = Cluster::running().await;
    let stale = Arc::new(cluster.job());
    cluster.put_node("b", json!({"unschedulable": true}));
    // Another controller's write.
    cluster.server.change(
        "trainingjobs",
        "x",
        json!({"metadata": {"labels": {"a": "b"}}}),
    );
    cluster.observed();
    let error = reconcile(stale, cluster.context.clone()).await.unwrap_err();
    let is_conflict =
        matches!(&error, ReconcileError::Api(kube::Error::Api(status)) if status.is_conflict());
    assert!(is_conflict, "{error}");
    assert!(!cluster.status().generation.unwrap().drain);
}
