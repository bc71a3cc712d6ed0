//! Those who reach a job's pods and do not have its key.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::json;

use super::refused::condition;
use super::support::{Job, create, kubectl, output_text, poll, recipe, running, try_kubectl};

#[test]
fn agents_answer_strangers_nothing_but_health_and_metrics() {
    let job = Job::apply("strangers", &recipe(960_000), json!({}));
    let status = job.wait_training_on(3);
    let pod = &status["jobGeneration"]["record"]["members"][0]["pod"];
    let (name, address) = (pod["name"].as_str().unwrap(), pod["ip"].as_str().unwrap());
    let asked = |port: u16, path: &str| {
        let path = format!("/api/v1/namespaces/default/pods/{name}:{port}/proxy{path}");
        try_kubectl(&["get", "--raw", &path], "")
    };
    for path in [
        "/state",
        "/state?after=0",
        "/generation",
        "/events?generation=1",
    ] {
        let answer = asked(8471, path);
        assert!(!answer.status.success(), "{path}");
        let text = output_text(&answer);
        // What kubectl makes of status 401.
        assert!(text.contains("must be logged in"), "{path}: {text}");
    }
    let metrics = asked(8472, "/metrics");
    assert!(metrics.status.success(), "{}", output_text(&metrics));
    assert!(!asked(8472, "/state").status.success());

    // Half-open connections to the agent and to rank 0's port.
    let master = status["jobGeneration"]["record"]["master"]["port"]
        .as_u64()
        .unwrap();
    let mut strangers = Vec::new();
    for port in [8471, u16::try_from(master).unwrap()] {
        for _ in 0..300 {
            let Ok(mut stream) = TcpStream::connect((address, port)) else {
                // Rank 0 listens only until all ranks have joined.
                break;
            };
            stream.write_all(b"GET /state HT").unwrap();
            strangers.push(stream);
        }
    }
    assert!(strangers.len() >= 300, "{}", strangers.len());
    let after = job.status()["progress"]["samples"].as_u64();
    job.wait("progress", |status| {
        status["progress"]["samples"].as_u64() > after
    });
    let ended = strangers[0].set_read_timeout(Some(Duration::from_secs(60)));
    ended.unwrap();
    let mut byte = [0];
    assert!(
        !matches!(strangers[0].read(&mut byte), Ok(1)),
        "it is closed"
    );
    let status = job.status();
    assert_eq!(status["jobGeneration"]["record"]["number"], 1, "{status:#}");
    job.settle(96);
}

#[test]
fn the_controller_may_create_secrets_and_not_read_them() {
    let controller = "--as=system:serviceaccount:evenkeel-system:evenkeel";
    let may = |verb: &str| {
        let asked = try_kubectl(&["auth", "can-i", verb, "secrets", controller], "");
        asked.status.success()
    };
    assert!(may("create"));
    for verb in ["get", "list", "watch", "update", "patch", "delete"] {
        assert!(!may(verb), "{verb}");
    }
    let job = Job::apply("key", &recipe(9600), json!({}));
    job.wait_training_on(3);
    let uid = kubectl(&["get", "tj", "key", "-o", "jsonpath={.metadata.uid}"]);
    let name = format!("evenkeel-{uid}");
    let immutable = kubectl(&["get", "secret", &name, "-o", "jsonpath={.immutable}"]);
    assert_eq!(immutable, "true");
    job.finish(96);
    job.delete_whole();
}

#[test]
fn a_secret_that_another_person_made_is_named_and_can_be_deleted() {
    let job = Job::apply("beforehand", &recipe(9600), json!({"suspend": true}));
    job.wait("its suspension", |status| status["phase"] == "Suspended");
    let uid = kubectl(&["get", "tj", "beforehand", "-o", "jsonpath={.metadata.uid}"]);
    let name = format!("evenkeel-{uid}");
    // It may exist already.
    kubectl(&["delete", "secret", &name, "--ignore-not-found"]);
    create(&json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name},
        "stringData": {"key": "5".repeat(64)},
    }));
    job.patch(json!({"suspend": false}));
    let expected = format!("the Secret {name} is not the one that the controller made");
    job.wait("the condition", |status| {
        let ready = condition(status, "PodsReady")["message"].to_string();
        ready.contains(&expected)
    });
    kubectl(&["delete", "secret", &name]);
    for pod in job.pods().keys() {
        kubectl(&["delete", "pod", pod, "--wait=false"]);
    }
    job.finish(96);
}

#[test]
fn a_job_deleted_as_an_orphan_leaves_no_process_running() {
    let job = Job::apply("orphan", &recipe(960_000), json!({}));
    job.wait_training_on(3);
    let pods = job.pods();
    kubectl(&["delete", "tj", "orphan", "--cascade=orphan"]);
    // The pods are no longer owned by a job, and exit by themselves.
    let ranks = || running("evenkeel (rank|agent) .*/orphan-[0-9a-f-]*");
    let none = || ranks().is_empty().then_some(());
    poll("the end of all ranks and agents", none, || {
        format!("{:?}", ranks())
    });
    let names: Vec<&str> = pods.keys().map(String::as_str).collect();
    let mut delete = vec!["delete", "pod", "--ignore-not-found"];
    delete.extend(names);
    kubectl(&delete);
    let kinds = "services,serviceaccounts,roles,rolebindings,networkpolicies,secrets";
    kubectl(&["delete", kinds, "-l", "evenkeel.dev/job=orphan"]);
}
