//! Forged objects: a person who may write one job must not stop the controller of all.

use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::api::guarded::GuardedJob;
use crate::api::status::Phase;
use crate::operator::error::ReconcileError;
use crate::operator::testing::{Cluster, NAMESPACE};
use crate::util::allocations;
use crate::util::random::Random;

const JOBS: &str = "trainingjobs";

/// Values for a place whose schema admits everything.
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

/// Writes values that the schema of the CRD admits, at its bounds.
struct Forger(Random);

impl Forger {
    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        let at = self.0.below(from.len() as u64);
        from[at as usize].clone()
    }

    fn value(&mut self, schema: &Value) -> Value {
        if schema["nullable"] == true && self.0.below(8) == 0 {
            return Value::Null;
        }
        if let Some(values) = schema["enum"].as_array() {
            return self.pick(values);
        }
        let most = |key: &str| schema[key].as_u64().unwrap_or(u64::MAX);
        match schema["type"].as_str() {
            Some("object") if schema["properties"].is_object() => {
                let required: Vec<&Value> = schema["required"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .collect();
                let mut object = serde_json::Map::new();
                for (name, inner) in schema["properties"].as_object().unwrap() {
                    if required.contains(&&json!(name)) || self.0.below(2) == 0 {
                        object.insert(name.clone(), self.value(inner));
                    }
                }
                object.into()
            }
            Some("object") if schema["additionalProperties"].is_object() => {
                let count = self.pick(&[0, 1, most("maxProperties").min(64)]);
                let inner = &schema["additionalProperties"];
                let entries = (0..count).map(|n| (format!("ü/{n}"), self.value(inner)));
                Value::Object(entries.collect())
            }
            Some("array") => {
                let count = self.pick(&[0, 1, 2, most("maxItems").min(64)]);
                (0..count).map(|_| self.value(&schema["items"])).collect()
            }
            Some("integer") => {
                let least = schema["minimum"].as_i64().unwrap_or(i64::MIN);
                let most = schema["maximum"].as_i64().unwrap_or(i64::MAX);
                let inside = [
                    least,
                    least.max(0),
                    least.max(1),
                    most.min(7),
                    most.min(1 << 53),
                    most,
                ];
                json!(self.pick(&inside).clamp(least, most))
            }
            Some("number") => json!(self.pick(&[0.0, -1.0, 0.5, 5e-324, f64::MAX, f64::MIN])),
            Some("boolean") => json!(self.0.below(2) == 0),
            Some("string") if schema["format"] == "date-time" => {
                let times = [
                    "0000-01-01T00:00:00Z",
                    "2262-04-12T00:00:00.000001Z",
                    "9999-12-31T23:59:59.999999Z",
                ];
                json!(self.pick(&times))
            }
            Some("string") => {
                let odd = ["", "a", "é", "\u{0}\u{1b}[31m\u{202e}", "-", "..", "1e999"];
                let most = most("maxLength").min(65_536) as usize;
                let (odd, times) = (self.pick(&odd), self.pick(&[1, 40, most]));
                json!(odd.repeat(times).chars().take(most).collect::<String>())
            }
            _ => self.pick(&values()),
        }
    }
}

/// All places below a schema, the optional ones too, each with its schema. A list is seen at its first item.
fn places(schema: &Value, at: &str, found: &mut Vec<(String, Value)>) {
    found.push((at.to_owned(), schema.clone()));
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        places(inner, &format!("{at}/{name}"), found);
    }
    if schema["items"].is_object() {
        places(&schema["items"], &format!("{at}/0"), found);
    }
}

/// Puts a value at a place, with the objects and lists on the way to it.
fn put(object: &mut Value, place: &str, value: Value) {
    let mut at = object;
    for step in place.split('/').skip(1) {
        if step == "0" {
            if at.as_array().is_none_or(Vec::is_empty) {
                *at = json!([null]);
            }
            at = &mut at[0];
        } else {
            if !at.is_object() {
                *at = json!({});
            }
            at = &mut at[step];
        }
    }
    *at = value;
}

/// Pointers to everything in a value.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
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

/// The answer of the agent of rank 0.
fn answer() -> Value {
    json!({
        "generation": 1, "ranks": [{"ready": true}], "budget": 80, "seconds_left": 3.0,
        "step": {
            "generation": 1, "step": 4, "samples": 32, "batch": 8, "world": 2, "loss": 2.5, "tokens": 256,
            "learning_rate": 1e-3, "gradient_norm": 1.0, "seconds": 0.5, "time": 1.0,
        },
        "committed": super::checkpoint(1, 3),
    })
}

/// A job and its pods as the API server has them while two ranks train.
struct Training {
    job: Value,
    pods: Vec<Value>,
}

impl Training {
    async fn begin() -> Training {
        let mut cluster = Cluster::running().await;
        cluster.agent("x-0-1", answer());
        cluster.reconcile().await.unwrap();
        let server = &cluster.server;
        let names = server.names("pods");
        Training {
            job: server.get(JOBS, "x").unwrap(),
            pods: names
                .iter()
                .map(|name| server.get("pods", name).unwrap())
                .collect(),
        }
    }

    /// Reconciles a forged job, whose ranks train, in a new controller.
    async fn reconcile(&self, job: &Value) -> Reconciled {
        let decoded: GuardedJob = serde_json::from_value(job.clone()).unwrap();
        if decoded.decoded.is_err() {
            return Reconciled::Unreadable;
        }
        let mut cluster = Cluster::new();
        cluster.server.put(JOBS, job.clone());
        for pod in &self.pods {
            cluster.server.put("pods", pod.clone());
        }
        cluster.agent("x-0-1", answer());
        cluster.agent(
            "x-1-2",
            json!({"generation": 1, "ranks": [{"ready": true}]}),
        );
        for _ in 0..3 {
            if let Err(ReconcileError::Panicked(words)) = cluster.reconcile().await {
                return Reconciled::Panicked(words);
            }
            let Some(job) = cluster.server.get(JOBS, "x") else {
                return Reconciled::Changed;
            };
            let now: GuardedJob = serde_json::from_value(job).unwrap();
            let Ok(now) = now.decoded else {
                return Reconciled::Unreadable;
            };
            let status = now.status.unwrap_or_default();
            if status.phase != Phase::Running || status.number() != Some(1) {
                return Reconciled::Changed;
            }
        }
        Reconciled::Running
    }
}

enum Reconciled {
    Running,
    /// The forged object says something else.
    Changed,
    Unreadable,
    Panicked(String),
}

/// A job as the API server has it while two ranks train.
fn running_job() -> Value {
    Runtime::new().unwrap().block_on(Training::begin()).job
}

/// Most bytes that a reconciliation of a forged job may hold, with the API server of the test.
const MOST: usize = 32 << 20;

#[test]
fn no_value_in_a_job_makes_the_controller_panic() {
    let runtime = Runtime::new().unwrap();
    let training = runtime.block_on(Training::begin());
    let crd = serde_json::to_value(crate::api::crd()).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    let mut known = Vec::new();
    places(&schema["spec"], "/spec", &mut known);
    places(&schema["status"], "/status", &mut known);
    assert!(known.len() > 150, "{}", known.len());
    // The schema admits everything in the record.
    let (record, mut inside) = ("/status/jobGeneration/record", Vec::new());
    pointers(training.job.pointer(record).unwrap(), record, &mut inside);
    let (mut counted, mut most) = ([0; 3], 0);
    for seed in 0..1000 {
        let mut forger = Forger(Random::seeded(seed));
        let mut forged = training.job.clone();
        for _ in 0..forger.pick(&[1, 1, 1, 2]) {
            let (place, value) = if forger.0.below(4) == 0 {
                (forger.pick(&inside), forger.pick(&values()))
            } else {
                let (place, schema) = forger.pick(&known);
                (place, forger.value(&schema))
            };
            put(&mut forged, &place, value);
        }
        let edit = forged["metadata"]["generation"].as_i64().unwrap() + 1;
        forged["metadata"]["generation"] = json!(edit);
        let (reconciled, held) =
            allocations::most(|| runtime.block_on(training.reconcile(&forged)));
        match reconciled {
            Reconciled::Running => counted[0] += 1,
            Reconciled::Changed => counted[1] += 1,
            Reconciled::Unreadable => counted[2] += 1,
            Reconciled::Panicked(words) => panic!("seed {seed}: {words} of {forged}"),
        }
        assert!(held < MOST, "seed {seed}: {held} bytes of {forged}");
        most = held.max(most);
    }
    println!("running, changed, unreadable: {counted:?}; most bytes: {most}");
    // The forged jobs reach the code behind their checks.
    let all: usize = counted.iter().sum();
    assert!(counted[0] * 4 > all && counted[1] * 20 > all, "{counted:?}");
}

#[test]
fn a_status_that_no_controller_writes_is_unreadable() {
    let job = running_job();
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
        error("/status/nodes", json!(u32::MAX)),
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
    let mut job = running_job();
    job["spec"]["gpusPerNode"] = json!(0);
    let decoded: GuardedJob = serde_json::from_value(job).unwrap();
    assert_eq!(
        decoded.decoded.unwrap_err().error,
        "spec.gpusPerNode is 0, which the schema of the TrainingJob excludes; apply the CRD of this release"
    );
}
