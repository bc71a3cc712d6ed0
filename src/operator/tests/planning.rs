//! A job that waits for its turn to plan, and one that cannot be planned.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::controller::Action;
use serde_json::json;

use super::lifecycle::{causes, checkpoint};
use crate::api::status::Phase;
use crate::lifecycle::placement::{Placement, PlacementAction};
use crate::lifecycle::{Outcome, RankAction, Reason};
use crate::operator::context::Reconciliation;
use crate::operator::planning::Planning;
use crate::operator::testing::{Cluster, NAMESPACE};

/// A running job, its controller just restarted, whose ranks are ready.
async fn restarted() -> Cluster {
    let mut cluster = Cluster::running().await;
    // The plan of the generation, and the feasible worlds, are in the status.
    cluster.reconcile().await.unwrap();
    cluster.restart_controller();
    cluster.ranks(|_| json!({"ready": true}));
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn the_survivors_of_a_loss_get_their_order_while_another_job_plans() {
    let mut cluster = restarted().await;
    let context = cluster.context.clone();
    let turn = context.turns.begin(NAMESPACE).ok().unwrap();
    cluster.server.remove("pods", "x-1-2");
    let lost = json!({"rank": 1, "message": "connection closed", "samples": 24, "whole": true});
    cluster.agent("x-0-1", json!({"generation": 1, "ranks": [{"lost": lost}]}));
    let again = cluster.reconcile().await.unwrap();
    assert_ne!(again, Action::await_change());
    let current = cluster.status().generation.unwrap();
    assert_eq!(current.after_loss.unwrap().commit, Some(0));

    let ended = json!({
        "generation": 1, "ranks": [{"lost": lost, "ending": {"code": 75}}], "committed": checkpoint(1, 3),
    });
    cluster.agent("x-0-1", ended);
    for _ in 0..5 {
        cluster.reconcile().await.unwrap();
    }
    let status = cluster.status();
    let outcome = status.generation.as_ref().unwrap().outcome.as_ref();
    assert!(matches!(outcome, Some(Outcome::Lost { .. })), "{outcome:?}");
    assert_eq!(status.checkpoint.as_ref().unwrap().samples, 24);
    assert!(status.rescale_since.is_some());
    assert_eq!(
        (status.number(), status.disruptions, status.attempts),
        (Some(1), 1, 2),
        "the next world waits for the turn"
    );
    assert_eq!(cluster.server.names("pods"), ["x-0-1"]);

    drop(turn);
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    let status = cluster.status();
    assert_eq!((status.restarts, status.disruptions), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_on_a_cordoned_node_are_drained_while_another_job_plans() {
    let mut cluster = restarted().await;
    let context = cluster.context.clone();
    let _turn = context.turns.begin(NAMESPACE).ok().unwrap();
    cluster.reconcile().await.unwrap();
    let before = cluster.status();
    assert_eq!(
        (before.phase, before.slots.len()),
        (Phase::Running, 2),
        "{}",
        before.message
    );
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(
        (status.phase, status.message.as_str()),
        (Phase::Draining, "node b is cordoned")
    );
    // Its reason may be an edit that is not planned yet.
    cluster.put_node("b", json!({}));
    cluster.reconcile().await.unwrap();
    assert!(cluster.status().generation.unwrap().drain);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_that_is_not_planned_yet_has_no_effect() {
    let mut cluster = restarted().await;
    let before = cluster.status();
    let context = cluster.context.clone();
    let _turn = context.turns.begin(NAMESPACE).ok().unwrap();
    cluster.edit(json!({"image": "newer", "nodes": 1}));
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    let status = cluster.status();
    assert_eq!(
        (&status.generation, &status.slots),
        (&before.generation, &before.slots)
    );
    assert_eq!(status.observed_generation, before.observed_generation);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_out_of_memory_error_waits_for_the_turn_to_plan() {
    let mut cluster = restarted().await;
    let context = cluster.context.clone();
    let turn = context.turns.begin(NAMESPACE).ok().unwrap();
    cluster.ranks(|_| json!({"out_of_memory": "2 GiB do not fit", "ending": {"code": 76}}));
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    assert_eq!(cluster.status().generation.unwrap().outcome, None);
    drop(turn);
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    assert_eq!(
        causes(cluster.status()),
        ["started", "out of memory: micro-batch 4 → 2"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_with_another_batch_is_kept_while_another_job_plans() {
    let mut cluster = Cluster::running().await;
    cluster.reconcile().await.unwrap();
    let context = cluster.context.clone();
    let _turn = context.turns.begin(NAMESPACE).ok().unwrap();
    let mut committed = checkpoint(1, 3);
    committed["batch"] = json!(16);
    let state = json!({"generation": 1, "ranks": [{"ready": true}], "committed": committed});
    cluster.agent("x-0-1", state);
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    assert_eq!(status.checkpoint.unwrap().batch, 16);
    assert_eq!(status.phase, Phase::Draining);
}

/// Number of turns in which a job's recipe was read or planned.
fn turns(cluster: &Cluster) -> usize {
    cluster.context.turns.begun.load(Ordering::Relaxed)
}

fn planned(cluster: &Cluster) -> Condition {
    let mut conditions = cluster.status().conditions.into_iter();
    conditions.find(|c| c.type_ == "Planned").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_edit_of_a_running_job_is_planned_once() {
    let mut cluster = Cluster::running().await;
    let before = cluster.status().generation;
    cluster.reconcile().await.unwrap();
    let missing = "accelerate launch --config_file missing.yaml train.py";
    let missing: Vec<&str> = missing.split(' ').collect();
    cluster.edit(json!({"trainer": {"command": missing}}));
    cluster.reconcile().await.unwrap();
    let condition = planned(&cluster);
    assert_eq!(condition.status, "False", "{}", condition.message);
    let first = turns(&cluster);
    for node in 0..10 {
        cluster.put_node(&format!("n{node}"), json!({}));
        cluster.reconcile().await.unwrap();
    }
    assert_eq!(turns(&cluster), first);
    assert_eq!(planned(&cluster), condition);
    assert_eq!(cluster.status().generation, before);
    // The next edit is planned again.
    cluster.edit(json!({"trainer": {"command": null}}));
    cluster.reconcile().await.unwrap();
    assert_eq!(planned(&cluster).status, "True");
    assert!(turns(&cluster) > first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_job_is_planned_once_for_each_edit() {
    let mut cluster = Cluster::new();
    // 3 ranks do not split 8 samples.
    cluster.edit(json!({"nodes": 3, "elasticity": {"minNodes": 3}}));
    cluster.reconcile().await.unwrap();
    let condition = planned(&cluster);
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        ("False", "PlanRefused")
    );
    let first = turns(&cluster);
    for node in 0..10 {
        cluster.put_node(&format!("n{node}"), json!({}));
        assert_eq!(cluster.reconcile().await.unwrap(), Action::await_change());
    }
    assert_eq!(turns(&cluster), first);
    assert_eq!(planned(&cluster), condition);
    // An edit may solve it, of the recipe too.
    let recipe = cluster.job().spec.recipe.inline.unwrap();
    let recipe = recipe.replace("\"global\":8", "\"global\":12");
    cluster.edit(json!({"recipe": {"inline": recipe}}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Running)
        .await;
    let record = cluster.status().generation.unwrap().record;
    assert_eq!(record.plan.global_batch_size, 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_planner_panics_says_so_and_keeps_its_generation() {
    let mut cluster = Cluster::running().await;
    cluster.reconcile().await.unwrap();
    let before = cluster.status().generation;
    panic_in_turns(&cluster);
    let mut committed = checkpoint(1, 3);
    committed["batch"] = json!(16);
    let state = json!({"generation": 1, "ranks": [{"ready": true}], "committed": committed});
    cluster.agent("x-0-1", state);
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    let status = cluster.status();
    let condition = planned(&cluster);
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        ("False", "PlanRefused")
    );
    insta::assert_snapshot!(condition.message, @"the planner failed on this recipe: please report it with the recipe; the controller's log has the place");
    assert_eq!((status.phase, status.generation), (Phase::Running, before));
    assert_eq!(status.checkpoint.unwrap().batch, 16);
    let first = turns(&cluster);
    cluster.reconcile().await.unwrap();
    assert_eq!(turns(&cluster), first, "the planner is not tried again");
}

/// Turns that panic from now on.
fn panic_in_turns(cluster: &Cluster) {
    cluster.context.turns.panics.store(true, Ordering::Relaxed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planner_that_panics_after_an_out_of_memory_error_ends_its_own_job_alone() {
    let mut cluster = Cluster::running().await;
    cluster.reconcile().await.unwrap();
    panic_in_turns(&cluster);
    cluster.ranks(|_| json!({"out_of_memory": "2 GiB do not fit", "ending": {"code": 76}}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Failed)
        .await;
    let current = cluster.status().generation.unwrap();
    let outcome = current.outcome.unwrap();
    assert!(
        matches!(outcome, Outcome::OutOfMemory { smaller: None, .. }),
        "{outcome:?}"
    );
    assert_eq!(planned(&cluster).status, "False");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planner_that_panics_on_the_published_world_publishes_nothing() {
    let mut cluster = Cluster::running().await;
    cluster.reconcile().await.unwrap();
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.reconcile().await.unwrap();
    panic_in_turns(&cluster);
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    let status = cluster.status();
    assert_eq!(status.number(), Some(1));
    assert_eq!(status.generation.unwrap().outcome, Some(Outcome::Drained));
    let condition = planned(&cluster);
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        ("False", "PlanRefused")
    );
    let first = turns(&cluster);
    cluster.reconcile().await.unwrap();
    assert_eq!(turns(&cluster), first, "the planner is not tried again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_world_is_published_in_the_turn_of_its_job() {
    let mut cluster = Cluster::running().await;
    cluster.reconcile().await.unwrap();
    let context = cluster.context.clone();
    let turn = context.turns.begin(NAMESPACE).ok().unwrap();
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.reconcile().await.unwrap();
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    let status = cluster.status();
    let current = status.generation.as_ref().unwrap();
    // What was observed is written.
    assert_eq!(
        (current.record.number, &current.outcome),
        (1, &Some(Outcome::Drained))
    );
    drop(turn);
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn free_nodes_that_no_plan_can_use_are_named() {
    let mut cluster = Cluster::running().await;
    cluster.put_node("c", json!({}));
    cluster.edit(json!({"nodes": 3}));
    cluster.reconcile().await.unwrap();
    let first = turns(&cluster);
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    let status = cluster.status();
    assert_eq!((status.phase, status.nodes), (Phase::Running, 2));
    // 3 ranks do not split 8 samples.
    let message = status.message;
    assert!(
        message.starts_with("skips 3 nodes: batch-divisible: "),
        "{message}"
    );
    assert_eq!(turns(&cluster), first, "the refusal is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_world_without_a_plan_is_not_published() {
    let cluster = Cluster::running().await;
    let placement = Placement {
        slots: Vec::new(),
        attempts: 0,
        scale_up_pending_since: None,
        placement_since: None,
        action: PlacementAction::Ranks(RankAction::Publish {
            world: Vec::new(),
            reason: Reason::Started,
            per_device_batch_size_limit: None,
        }),
    };
    let (job, status) = (&cluster.job(), cluster.status());
    let context = &cluster.context;
    let reconciliation = Reconciliation {
        job,
        context,
        now: 0.0,
    };
    let world = reconciliation.world(&status, &placement, &Planning::default());
    assert!(matches!(world, Ok(None)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_depends_on_the_world_is_planned_from_the_first_one() {
    let mut cluster = Cluster::new();
    // Each of two ranks takes 64 / 2 / 2 samples at a time; a recipe for one rank would take 32.
    let recipe = json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "small"},
        "spec": {
            "batch": {"global": 64, "accumulation": 2, "division": "floored"},
            "model": {"init": "random", "config": {
                "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
                "vocab_size": 64, "max_position_embeddings": 32}},
            "data": {"sequence_length": 32, "train": [{"path": "synthetic",
                "synthetic": {"vocabulary": 64, "branching": 4, "samples": 200}}]},
            "budget": {"samples": 640},
            "learning_rate": {"peak": 3.0e-3, "shape": "constant"},
        },
    });
    cluster.edit(json!({"recipe": {"inline": recipe.to_string()}}));
    cluster
        .reconcile_until(|status| status.generation.is_some())
        .await;
    let status = cluster.status();
    assert_eq!(status.recipe.unwrap().gpus, Some(2));
    assert_eq!(status.plan.unwrap().formula, "2 × 16 × 2 = 64");
    cluster.ranks(|_| json!({"ready": true}));
    // The pool shrinks, and the controller is restarted.
    cluster.put_node("b", json!({"unschedulable": true}));
    cluster.reconcile().await.unwrap();
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster.restart_controller();
    cluster.ranks(|_| json!({"ending": {"code": 143}}));
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    assert_eq!(cluster.status().plan.unwrap().formula, "1 × 16 × 4 = 64");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_priority_class_that_is_not_allowed_is_refused_before_any_pod_exists() {
    for (class, allowed) in [("system-node-critical", false), ("batch", true)] {
        let mut cluster = Cluster::new();
        cluster.edit(json!({"podTemplate": {"spec": {"priorityClassName": class}}}));
        cluster.reconcile().await.unwrap();
        let status = cluster.status();
        let refused = status
            .message
            .contains("spec.podTemplate has the priority class");
        assert_eq!(
            (refused, status.phase != Phase::Pending),
            (!allowed, allowed),
            "{}",
            status.message
        );
        assert_eq!(cluster.server.names("pods").is_empty(), !allowed);
    }
}

/// What each pod would refuse of the recipe alone is refused before there is one.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_pod_would_refuse_of_a_recipe_is_refused_before_any_pod_exists() {
    let inline = Cluster::new().job().spec.recipe.inline.unwrap();
    let mut recipe: serde_json::Value = serde_json::from_str(&inline).unwrap();
    recipe["spec"]["model"]["config"]["num_attention_heads"] = json!(3);
    let indivisible = recipe.to_string();
    let resumes: Vec<&str> = "python train.py {per_device_batch_size} {resume_args}"
        .split(' ')
        .collect();
    for (edit, expected) in [
        (json!({"recipe": {"inline": indivisible}}), "model-shape"),
        (
            json!({"trainer": {"command": resumes}}),
            "`{resume_args}`: the resume arguments of a trainer",
        ),
    ] {
        let mut cluster = Cluster::new();
        cluster.edit(edit);
        cluster.reconcile().await.unwrap();
        let condition = planned(&cluster);
        assert_eq!(condition.status, "False", "{}", condition.message);
        assert!(
            condition.message.contains(expected),
            "{}",
            condition.message
        );
        assert!(cluster.server.names("pods").is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_job_whose_priority_class_was_unlisted_keeps_its_pods_and_gets_no_others() {
    let mut cluster = Cluster::new();
    cluster.edit(json!({"podTemplate": {"spec": {"priorityClassName": "batch"}}}));
    cluster
        .reconcile_until(|status| status.generation.is_some())
        .await;
    cluster.restart_controller();
    let context = Arc::get_mut(&mut cluster.context).unwrap();
    context.priority_classes = Some(Vec::new());
    cluster.ranks(|_| json!({"ready": true}));
    cluster.reconcile().await.unwrap();
    assert_eq!(planned(&cluster).status, "False");
    assert_eq!(cluster.server.names("pods"), ["x-0-1", "x-1-2"]);
    assert_eq!(cluster.status().phase, Phase::Running);
    for pod in ["x-0-1", "x-1-2"] {
        cluster.server.remove("pods", pod);
    }
    for _ in 0..5 {
        cluster.reconcile().await.unwrap();
    }
    let status = cluster.status();
    assert!(cluster.server.names("pods").is_empty());
    assert_eq!(status.phase, Phase::Waiting);
    insta::assert_snapshot!(status.message, @"spec.podTemplate has the priority class batch, whose pods preempt those of others: remove it, or let the cluster's administrator add it to the chart's admissionPolicy.priorityClasses");
    // It is listed again.
    cluster.restart_controller();
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pod_is_made_from_a_refused_edit() {
    let mut cluster = Cluster::running().await;
    let missing: Vec<&str> = "accelerate launch --config_file missing.yaml train.py"
        .split(' ')
        .collect();
    cluster.edit(json!({"image": "other", "trainer": {"command": missing}}));
    cluster.reconcile().await.unwrap();
    assert_eq!(planned(&cluster).status, "False");
    cluster.server.remove("pods", "x-1-2");
    let lost = json!({"rank": 1, "message": "connection closed", "samples": 24, "whole": true});
    let ended = json!({
        "generation": 1, "ranks": [{"lost": lost, "ending": {"code": 75}}], "committed": checkpoint(1, 3),
    });
    cluster.agent("x-0-1", ended);
    for _ in 0..5 {
        cluster.reconcile().await.unwrap();
    }
    assert_eq!(cluster.server.names("pods"), ["x-0-1"]);
    // Once the edit is corrected, the new image counts.
    cluster.edit(json!({"trainer": {"command": null}}));
    cluster
        .reconcile_until(|status| status.number() == Some(2))
        .await;
    let image = |pod: &str| cluster.pod(pod).spec.unwrap().containers[0].image.clone();
    for pod in cluster.server.names("pods") {
        assert_eq!(image(&pod).as_deref(), Some("other"), "{pod}");
    }
}
