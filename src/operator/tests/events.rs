//! What `kubectl describe` shows of a job.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::operator::testing::Cluster;

/// The events of the job, once there are as many as this and all are `times` times written.
async fn events(cluster: &Cluster, count: usize, times: u64) -> Vec<String> {
    let server = &cluster.server;
    let begin = Instant::now();
    loop {
        let events: Vec<Value> = server
            .names("events")
            .iter()
            .map(|name| server.get("events", name).unwrap())
            .collect();
        let written = |event: &Value| event["series"]["count"].as_u64().unwrap_or(1);
        if events.len() == count && events.iter().map(written).sum::<u64>() == times {
            let text = |event: &Value, field: &str| event[field].as_str().unwrap().to_owned();
            let line = |event: &Value| {
                let [kind, reason, note] =
                    ["type", "reason", "note"].map(|field| text(event, field));
                format!("{kind} {reason}, {}: {note}", written(event))
            };
            let mut lines: Vec<String> = events.iter().map(line).collect();
            lines.sort();
            return lines;
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "{events:#?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_recipe_is_an_event() {
    let mut cluster = Cluster::new();
    cluster.edit(json!({"recipe": {"inline": "spec: ["}}));
    cluster.reconcile().await.unwrap();
    insta::assert_snapshot!(events(&cluster, 1, 1).await.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_config_map_is_an_event() {
    let mut cluster = Cluster::new();
    let from = json!({"inline": null, "configMap": {"name": "recipes", "key": "r.yaml"}});
    cluster.edit(json!({"recipe": from}));
    cluster.reconcile().await.unwrap();
    insta::assert_snapshot!(events(&cluster, 1, 1).await.join("\n"));
}

/// Events of one reason within six minutes are folded, and show the note of the first.
#[tokio::test(flavor = "multi_thread")]
async fn folded_events_have_one_note() {
    let mut cluster = Cluster::new();
    for (edit, (count, times)) in ["a: 1", "spec: [", "a: 1"]
        .iter()
        .zip([(1, 1), (2, 2), (2, 3)])
    {
        cluster.edit(json!({"recipe": {"inline": edit}}));
        cluster.reconcile().await.unwrap();
        let events = events(&cluster, count, times).await;
        if times == 3 {
            insta::assert_snapshot!(events.join("\n"));
        }
    }
}
