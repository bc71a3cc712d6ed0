//! Forged objects: a person who may write one job must not stop the controller of all.

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::api::guarded::GuardedJob;
use crate::operator::error::ReconcileError;
use crate::operator::testing::{Cluster, NAMESPACE};

const JOBS: &str = "trainingjobs";

/// Values that a forger tries.
fn values() -> Vec<Value> {
    vec![
        json!(0),
        json!(1),
        json!(-1),
        json!(7),
        json!(u32::MAX),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(1e308),
        json!(""),
        json!("9999-12-31T23:59:59.999999Z"),
        json!("-009999-01-02T01:59:59Z"),
        json!("é".repeat(5000)),
        json!(null),
        json!([]),
        json!({}),
        json!(true),
    ]
}

/// Pointers to everything in a value.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    if !at.is_empty() {
        found.push(at.to_owned());
    }
    match value {
        Value::Object(fields) => {
            for (name, inner) in fields {
                let name = name.replace('~', "~0").replace('/', "~1");
                pointers(inner, &format!("{at}/{name}"), found);
            }
        }
        Value::Array(items) => {
            for (index, inner) in items.iter().enumerate() {
                pointers(inner, &format!("{at}/{index}"), found);
            }
        }
        _ => {}
    }
}

/// A job as the API server has it while two ranks train.
async fn running() -> Value {
    let mut cluster = Cluster::running().await;
    cluster.agent(
        "x-0-1",
        json!({
            "generation": 1, "ranks": [{"ready": true}], "budget": 80, "seconds_left": 3.0,
            "step": {
                "generation": 1, "step": 4, "samples": 32, "batch": 8, "world": 2, "loss": 2.5, "tokens": 256,
                "learning_rate": 1e-3, "gradient_norm": 1.0, "seconds": 0.5, "time": 1.0,
            },
            "committed": super::checkpoint(1, 3),
        }),
    );
    cluster.reconcile().await.unwrap();
    cluster.server.get(JOBS, "x").unwrap()
}

/// Reconciles a job that the API server has. Returns the message of a panic.
async fn panics(job: &Value) -> Option<String> {
    let decoded: GuardedJob = serde_json::from_value(job.clone()).unwrap();
    decoded.decoded.ok()?;
    let mut cluster = Cluster::new();
    cluster.server.put(JOBS, job.clone());
    for _ in 0..3 {
        if let Err(ReconcileError::Panicked(words)) = cluster.reconcile().await {
            return Some(words);
        }
        let now: GuardedJob = serde_json::from_value(cluster.server.get(JOBS, "x")?).unwrap();
        now.decoded.ok()?;
    }
    None
}

/// A runtime, and a job as the API server has it while two ranks train.
fn with_running_job() -> (Runtime, Value) {
    let runtime = Runtime::new().unwrap();
    let job = runtime.block_on(running());
    (runtime, job)
}

#[test]
fn no_value_in_a_job_makes_the_controller_panic() {
    let (runtime, job) = with_running_job();
    let mut places = Vec::new();
    pointers(&job["status"], "/status", &mut places);
    pointers(&job["spec"], "/spec", &mut places);
    let values = values();
    let change = (any::<Index>(), any::<Index>());
    let config = ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(changes in proptest::collection::vec(change, 1..4))| {
        let mut forged = job.clone();
        for (place, value) in changes {
            let place = place.get(&places);
            if let Some(found) = forged.pointer_mut(place) {
                *found = value.get(&values).clone();
            }
        }
        let words = runtime.block_on(panics(&forged));
        prop_assert!(words.is_none(), "{words:?} of {forged}");
    });
}

#[test]
fn a_status_that_no_controller_writes_is_unreadable() {
    let (_, job) = with_running_job();
    let record = "/status/jobGeneration/record";
    let error = |place: &str, value: Value| {
        let mut forged = job.clone();
        *forged.pointer_mut(place).unwrap() = value;
        let decoded: GuardedJob = serde_json::from_value(forged).unwrap();
        decoded.decoded.unwrap_err().error
    };
    let at = |place: &str| format!("{record}/{place}");
    let errors = [
        error(&at("members/0/ranks"), json!(u32::MAX)),
        error(&at("members/0/ranks"), json!(2)),
        error(&at("plan/per_device_batch_size"), json!(0)),
        error(&at("plan/global_batch_size"), json!(9)),
        error(&at("plan/world_size"), json!(4)),
        error(&at("number"), json!(0)),
        error("/status/attempts", json!(u32::MAX)),
        error("/status/plan/worldSize", json!(0)),
        error("/status/checkpoint/batch", json!(0)),
        error("/status/progress/samples", json!(u64::MAX)),
    ];
    insta::assert_snapshot!(errors.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_the_condition_of_its_job() {
    let mut cluster = Cluster::running().await;
    cluster
        .context
        .panics
        .store(true, std::sync::atomic::Ordering::Relaxed);
    let error = cluster.reconcile().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "the reconciliation panicked: as a test says"
    );
    // Its own write leads to the next reconciliation, which must not write again.
    let writes = |cluster: &Cluster| {
        let requests = cluster.server.requests(JOBS);
        requests
            .iter()
            .filter(|line| line.starts_with("PATCH"))
            .count()
    };
    let before = writes(&cluster);
    cluster.reconcile().await.unwrap_err();
    assert_eq!(writes(&cluster), before);
    let job = cluster.server.get(JOBS, "x").unwrap();
    assert_eq!(job["metadata"]["namespace"], NAMESPACE);
    let conditions = job["status"]["conditions"].as_array().unwrap();
    let readable = conditions
        .iter()
        .find(|condition| condition["type"] == "Readable");
    assert_eq!(
        readable.unwrap()["message"],
        "this controller cannot handle the job: the reconciliation panicked: as a test says; correct its spec, or delete \
         and apply it again"
    );
    // The next one finds the defect gone.
    cluster
        .context
        .panics
        .store(false, std::sync::atomic::Ordering::Relaxed);
    cluster.reconcile().await.unwrap();
    let job = cluster.server.get(JOBS, "x").unwrap();
    let conditions = job["status"]["conditions"].as_array().unwrap();
    let readable = conditions
        .iter()
        .find(|condition| condition["type"] == "Readable");
    assert!(
        readable.is_none_or(|readable| readable["status"] == "True"),
        "{job:#}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_that_the_api_server_refuses_is_an_event() {
    let mut cluster = Cluster::new();
    let answer = "etcdserver: request is too large";
    cluster.server.refuse_kind(JOBS, 500, answer);
    let error = cluster.reconcile().await.unwrap_err();
    let said = error.to_string();
    let expected = format!("the API server refuses the status of the job: {answer}");
    assert!(said.starts_with(&expected), "{said}");
    cluster.reconcile_or_pause().await;
    let start = std::time::Instant::now();
    while cluster.server.requests("events").is_empty() {
        assert!(start.elapsed() < std::time::Duration::from_secs(10));
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    // Once the status is accepted, the job continues.
    cluster.server.accept_kind(JOBS);
    cluster
        .reconcile_until(|status| status.generation.is_some())
        .await;
}

/// A recipe is kept once: the status of a job has it only if it came from elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_status_repeats_no_recipe() {
    let cluster = Cluster::running().await;
    let kept = cluster.status().recipe.unwrap();
    assert_eq!((kept.text.as_str(), kept.files.len()), ("", 0));
    assert_eq!(kept.hash.len(), 32);

    let mut cluster = Cluster::new();
    let inline = cluster.job().spec.recipe.inline.unwrap();
    let from = json!({"inline": null, "configMap": {"name": "recipes", "key": "r.yaml"}});
    cluster.edit(json!({"recipe": from}));
    let server = cluster.server.clone();
    let put = |text: &str| {
        let map = json!({"metadata": {"name": "recipes"}, "data": {"r.yaml": text}});
        server.put("configmaps", map);
    };
    put(&(inline.clone() + "\n# " + &"x".repeat(64 * 1024)));
    cluster.reconcile().await.unwrap();
    assert!(
        cluster
            .status()
            .message
            .contains("of which the status keeps at most 64 KiB"),
        "{}",
        cluster.status().message
    );
    put(&inline);
    cluster.edit(json!({"nodes": 1}));
    cluster
        .reconcile_until(|status| status.generation.is_some())
        .await;
    assert_eq!(cluster.status().recipe.unwrap().text, inline);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_recipe_of_a_planned_job_changes_nothing() {
    let mut cluster = Cluster::running().await;
    cluster.reconcile().await.unwrap();
    let before = cluster.status().generation;
    // Only an API server without the rule of the CRD takes it.
    let recipe = cluster.job().spec.recipe.inline.unwrap();
    cluster.edit(json!({"recipe": {"inline": recipe + " "}}));
    cluster.restart_controller();
    cluster.reconcile().await.unwrap();
    let status = cluster.status();
    let mut conditions = status.conditions.iter();
    let planned = conditions.find(|c| c.type_ == "Planned").unwrap();
    assert_eq!(
        (planned.status.as_str(), planned.reason.as_str()),
        ("False", "PlanRefused")
    );
    assert!(
        planned.message.contains("restore it, or create a new"),
        "{}",
        planned.message
    );
    assert_eq!(status.generation, before);
}

#[test]
fn a_job_without_gpus_is_unreadable() {
    let (_runtime, mut job) = with_running_job();
    job["spec"]["gpusPerNode"] = json!(0);
    let decoded: GuardedJob = serde_json::from_value(job).unwrap();
    assert_eq!(
        decoded.decoded.unwrap_err().error,
        "spec.gpusPerNode is 0, which the schema of the TrainingJob excludes; apply the CRD of this release"
    );
}
