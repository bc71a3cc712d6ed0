//! A job that cannot be planned.

use std::sync::atomic::Ordering;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::controller::Action;
use serde_json::json;

use crate::api::status::Phase;
use crate::operator::testing::Cluster;

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
